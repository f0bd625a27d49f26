"""One probe forward: which layers call attention, how, with which cache sizes, and which keep a state."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.ops.spec import LINEAR_ATTENTION
from specexport.trace.attention import HOOK_NAME, AttentionContext, LayerCall, ScoreTerms, attention_hook
from specexport.trace.quirks import logit_rows
from specexport.trace.recurrence import RecurrenceCall, RecurrenceContext, check_functions, recurrence_hook
from specexport.trace.refuse import HINT, check_layers, check_states, refuse
from specexport_runtime.errors import UnsupportedModelError

_PROBE_TOKENS = 3
_FAR = 10_000_019
"""A position after every window."""


class ModelCalls(NamedTuple):
    """The calls of attention and of recurrences, in the order of the forward pass."""

    attention: tuple[LayerCall, ...]
    recurrences: tuple[RecurrenceCall, ...] = ()  # of layers that keep a state


def probe_layers(model: Any) -> ModelCalls:
    """What each layer of a model in eval mode asks for, in order; UnsupportedModelError if that cannot be seen."""
    recorder = _MaskRecorder()

    def answer(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> Tensor:  # noqa: ARG001
        return q.new_zeros(q.shape[0], call.num_heads * call.geometry.v_dim)

    def recurs(call: RecurrenceCall, inputs: tuple[Tensor | None, ...]) -> Tensor:
        values = inputs[2 if call.kind == LINEAR_ATTENTION.name else 0]
        assert values is not None  # noqa: S101
        return torch.zeros_like(values)

    context, states = AttentionContext(answer, on_mask=recorder.note), RecurrenceContext(recurs)
    tokens = torch.arange(_PROBE_TOKENS)[None]
    try:
        check_functions(model)
        with (
            torch.no_grad(),
            attention_hook(model, context),
            recurrence_hook(model, states),
            recorder.installed(),
            logit_rows(model, torch.tensor([1])) as asked,
        ):
            model(input_ids=tokens, position_ids=tokens, use_cache=False, **asked)
    except UnsupportedModelError as error:
        raise refuse(model, error.message.rstrip("."), error.hint or HINT) from error
    except Exception as error:
        raise refuse(model, f"its forward pass fails on packed tokens ({type(error).__name__}: {error})") from error
    check_layers(model, [call.layer for call in context.calls], recurs=bool(states.calls))
    check_states(model, states.calls)
    try:
        calls = [replace(call, window=recorder.window(call)) for call in context.calls]
        for call in calls:
            recorder.check(model, call)
    except IndexError as error:  # of a rule that looks a position up in the probe's few tokens
        raise refuse(model, "its attention mask depends on more than positions") from error
    return ModelCalls(tuple(calls), tuple(states.calls))


class _MaskRecorder:
    """Remembers which mask rule transformers would use for each layer, without building large masks."""

    def __init__(self) -> None:
        self._built: list[tuple[Tensor, Any]] = []
        self._rules: dict[int, Any] = {}

    def installed(self) -> Any:
        """A context in which transformers' mask building is recorded for the hook's attention name."""
        from contextlib import contextmanager

        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

        def build(*, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
            mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
            self._built.append((mask, mask_function))
            return mask

        @contextmanager
        def registered() -> Any:
            type(MASKS).register(HOOK_NAME, build)
            try:
                yield
            finally:
                type(MASKS)._global_mapping.pop(HOOK_NAME)

        return registered()

    def note(self, index: int, mask: Tensor | None) -> None:
        """A call received ``mask``."""
        self._rules[index] = next((rule for built, rule in self._built if built is mask), None)

    def window(self, call: LayerCall) -> int:
        """The window of a call, -1 for none: the mask's where the layer announces another, as in eager attention."""
        rule = self._rules[call.index]
        if rule is None or _is_visible(rule, _FAR, 0):
            return call.window if call.own_mask else -1
        if (
            call.window > 0
            and _is_visible(rule, _FAR, _FAR - call.window + 1)
            and not _is_visible(rule, _FAR, _FAR - call.window)
        ):
            return call.window
        return bisect_left(
            range(_FAR), True, key=lambda back: not _is_visible(rule, _FAR, _FAR - back)
        )  # checked below

    def check(self, model: Any, call: LayerCall) -> None:
        """Compare the recorded rule with causal-in-a-window at the places where they could differ."""
        rule = self._rules[call.index]
        if rule is None and call.own_mask:
            return
        if rule is None:
            raise refuse(model, f"the mask of layer {call.layer} is not built by transformers' mask functions")
        edge = call.window if call.window > 0 else 4096
        points = sorted({0, 1, 2, 7, edge - 1, edge, edge + 1, 2 * edge, 2 * edge + 1, _FAR})
        for query in points:
            near = {query - edge - 1, query - edge, query - edge + 1, query - 1, query, query + 1, 0, query // 2}
            for key in sorted(k for k in near if k >= 0):
                seen = key <= query and (call.window < 0 or call.own_mask or key > query - call.window)
                if _is_visible(rule, query, key) != seen:
                    kind = f"a window of {call.window}" if call.window > 0 else "causal"
                    raise refuse(model, f"layer {call.layer} masks position {key} from {query} unlike {kind}")


def _is_visible(rule: Any, query: int, key: int) -> bool:
    zero = torch.tensor(0)
    return bool(rule(zero, zero, torch.tensor(query), torch.tensor(key)))
