"""From a draft head in torch to a packed ONNX graph, by the same way that a target goes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from specexport.heads.modules import DraftHead, compute_rotation
from specexport.trace.attention import AttentionContext, LayerCall, ScoreTerms, attention_hook, unpadded_attention
from specexport.trace.experts import make_experts_traceable
from specexport.trace.export import TracedModel, trace_step
from specexport.trace.layers import get_hidden_state
from specexport_runtime.abi import LOGITS, NEXT_FEATURES, STEP_INPUTS, TOKEN_FEATURES, LayerGeometry


class HeadStep(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A head as the contract sees it: packed tokens, features and caches in; logits, next features and caches out."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.model = head

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step. Inputs: the step inputs, the features, then k and v cache of each layer."""
        _, _, _, *step = inputs[: len(STEP_INPUTS)]
        features, *caches = inputs[len(STEP_INPUTS) :]

        def answer(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> Tensor:
            pair = slice(2 * call.index, 2 * call.index + 2)
            old_k, old_v = caches[pair]
            output, *caches[pair] = unpadded_attention(call, q, k, v, (old_k, old_v), tuple(step), terms)
            return output

        state = self.states(AttentionContext(answer, causal_only=False), features, inputs[: len(STEP_INPUTS)])
        logits, handed_on = self.read(state[0], features, inputs[: len(STEP_INPUTS)])
        return (logits, handed_on.float(), *caches)

    def states(self, context: AttentionContext, features: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """See :func:`run_layers`; ``step`` are the step inputs."""
        return run_layers(self.model, context, step[0], step[1], features)

    def read(self, state: Tensor, features: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Logits and what is handed on, of the state [T, H] after the layers; ``features`` [T, E] were fed."""
        return self.model.read(state.index_select(0, step[2]))


def run_layers(
    head: DraftHead, context: AttentionContext, input_ids: Tensor, positions: Tensor, features: Tensor, *more: Tensor
) -> Tensor:
    """The hidden state [1, T, H] after a head's layers; ``more`` is what a kind's ``states`` reads besides."""
    given = features[None].to(head.dtype)
    if head.body is None:  # nothing but heads
        return given
    rotary = compute_rotation(head.body, given, positions[None])

    def run(module: Any, hidden: Tensor) -> Tensor:
        return get_hidden_state(module(hidden_states=hidden, position_embeddings=rotary, attention_mask=None))

    with attention_hook(head.body, context):
        return head.states(input_ids, given, run, *more)


def causal_step(head: Any, input_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, N] and what is handed on [T, E], by attention as transformers has it; nothing is packed."""
    state = causal_states(head, input_ids, features)
    with torch.no_grad():
        logits, handed_on = head.read(state)
    return logits, handed_on


def causal_states(head: Any, input_ids: Tensor, features: Tensor) -> Tensor:
    """The hidden state [T, H] after a head's layers over one sequence; see :func:`causal_step`."""
    if head.body is None:
        return features
    width = len(input_ids)
    behind = torch.arange(width)[:, None] - torch.arange(width)
    rotary = compute_rotation(head.body, features, torch.arange(width)[None])

    def run(module: Any, hidden: Tensor) -> Tensor:
        window = getattr(getattr(module, "self_attn", module), "sliding_window", None) or width
        seen = (behind >= 0) & (behind < window)
        mask = torch.zeros(width, width).masked_fill(~seen, float("-inf"))[None, None]
        return get_hidden_state(module(hidden_states=hidden, position_embeddings=rotary, attention_mask=mask))

    with torch.no_grad():
        state: Tensor = head.states(input_ids, features[None], run)[0]
    return state


def record_attention_calls(head: DraftHead) -> tuple[LayerCall, ...]:
    """What each attention layer of a head asks for, in layer order."""
    if head.body is None:
        return ()

    def answer(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> Tensor:  # noqa: ARG001
        return q.new_zeros(q.shape[0], call.num_heads * call.geometry.v_dim)

    context = AttentionContext(answer, causal_only=False)
    tokens = torch.arange(3)
    with torch.no_grad(), make_experts_traceable(head.body, grouped=False):
        run_layers(head, context, tokens, tokens, torch.zeros(3, head.head_config.feature_size))
    return tuple(context.calls)


def trace_layers(
    head: Any,
    step: Callable[[Any], HeadStep] = HeadStep,
    *,
    fixed_sizes: bool = False,  # noqa: ARG001 - no size depends on a value
    group_experts: bool = False,
) -> TracedModel:
    """Trace a head (eval mode); ``step`` makes of it what the contract sees, see ``kinds.trace_head``."""
    calls = record_attention_calls(head)
    with nullcontext() if head.body is None else make_experts_traceable(head.body, grouped=group_experts):
        ir_model = trace_head_step(step(head), [call.geometry for call in calls])
    return TracedModel(ir_model, tuple(call.geometry for call in calls))


def trace_head_step(step: Any, caches: Sequence[LayerGeometry], **options: Any) -> Any:
    """The graph of what the contract sees of a head, ``step.model``: step inputs, features and ``caches`` in."""
    head = step.model
    return trace_step(
        step.eval(),
        head.dtype,
        caches,
        [*STEP_INPUTS, TOKEN_FEATURES],
        [LOGITS, NEXT_FEATURES],
        {"E": head.head_config.feature_size},
        **options,
    )
