"""The hook for layers that keep a state: what transformers hands to kernels is answered by our ops.

Every model of transformers computes its recurrences in functions of its module, which a kernel package may stand in
for. They have the same names and arguments in all models. Within the hook, these names stand for ours, by function and
not by model. What a module writes out itself instead is answered by its class. States and step inputs travel in a
context, as they do for attention.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specexport.ops.torch_ops  # noqa: F401 - registers the torch ops
from specexport.ops.spec import CAUSAL_CONV, LINEAR_ATTENTION
from specexport_runtime.abi import StateGeometry
from specexport_runtime.errors import UnsupportedModelError


@dataclass(frozen=True)
class RecurrenceCall:
    """What one recurrence asks for."""

    index: int  # in the order of the forward pass
    kind: str  # name of the operator
    geometry: StateGeometry  # of its state
    attributes: tuple[int | float, ...]  # of the operator, in its declared order


Answer = Callable[[RecurrenceCall, tuple[Tensor | None, ...]], Tensor]
"""From a call and the operator's inputs before its state, packed, to the output [T, width]."""


class RecurrenceContext:
    """Answers the recurrences of one forward pass."""

    def __init__(self, answer: Answer) -> None:
        self.calls: list[RecurrenceCall] = []
        self._answer = answer

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, scale: float
    ) -> Tensor:
        """One call of linear attention, whose output float32 [T, H, Dv] has the factor ``scale``.

        q is [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv], decay [T, H] or [T, H, Dk], and beta [T, H].
        """
        heads = k.shape[1]
        parts = [None if x is None else x.float().reshape(x.shape[0], -1) for x in (q, k, v, decay, beta)]
        width = sum(int(part.shape[1]) for part in parts if part is not None)
        geometry = StateGeometry((heads, int(k.shape[2]), int(v.shape[2])), width)
        output = self._call(LINEAR_ATTENTION.name, geometry, (int(q.shape[1]), heads, scale), tuple(parts))
        return output.view(output.shape[0], heads, -1)

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """One call of a convolution: x [T, C], weight [C, W], bias [C] or None; returns [T, C], float32."""
        channels, taps = weight.shape
        geometry = StateGeometry((int(taps) - 1, int(channels)), int(channels))
        inputs = (x.float(), weight[:, None].float(), None if bias is None else bias.float())
        return self._call(CAUSAL_CONV.name, geometry, (int(silu),), inputs)

    def _call(
        self, kind: str, geometry: StateGeometry, attributes: tuple[int | float, ...], inputs: tuple[Tensor | None, ...]
    ) -> Tensor:
        call = RecurrenceCall(len(self.calls), kind, geometry, attributes)
        self.calls.append(call)
        return self._answer(call, inputs)


_contexts: list[RecurrenceContext] = []


def _convolve(
    _: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **__: Any
) -> Tensor:
    """``causal_conv1d_fn``: [1, C, T] to [1, C, T]."""
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModelError(f"a convolution has the activation {activation}.", "use a model with silu.")
    output = _contexts[-1].causal_conv(hidden_states[0].T, weight, bias, silu=activation is not None)
    return output.T[None].to(hidden_states.dtype)


def _delta_rule(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[Tensor, None]:
    """``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention``: [1, T, heads, size] each."""
    q, k, v = (x[0].float() for x in (query, key, value))
    scale = q.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        q, k = module.l2norm(q, dim=-1, eps=1e-6), module.l2norm(k, dim=-1, eps=1e-6)
    if k.shape[1] != v.shape[1]:
        k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    output = _contexts[-1].linear_attention(q, k, v, g[0].float(), beta[0].float(), scale)
    return output[None].to(query.dtype), None


def _state_space(
    _: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - names of the function that this stands for
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *__: Any,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **named: Any,
) -> Tensor:
    """``mamba2_chunk_scan``: x [1, T, H, Dv], dt [1, T, H], A [H], B and C [1, T, groups, Dk]."""
    if named.get("z") is not None:
        raise UnsupportedModelError("a state space is gated inside its kernel.", "use another model.")
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = torch.nn.functional.softplus(steps) if dt_softplus else steps
    steps = steps.clamp(min=dt_limit[0], max=dt_limit[1])[0].float()
    x, keys = hidden_states[0].float(), B[0].float()
    keys = keys.repeat_interleave(x.shape[1] // keys.shape[1], 1)
    output = _contexts[-1].linear_attention(C[0], keys, x * steps[..., None], steps * A.float(), None, 1.0)
    if D is not None:
        output = output + D[:, None] * x
    return output[None]


def _selective(
    _: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - names of the function that this stands for
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **__: Any,
) -> Tensor:
    """``mamba_selective_scan``: x and dt [1, C, T], A [C, N], B and C [1, N, T]; a head has one channel."""
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = (torch.nn.functional.softplus(steps) if delta_softplus else steps)[0].T.float()
    x, channels = hidden_states[0].T, hidden_states.shape[1]
    keys = B[0].T.float()[:, None].expand(-1, channels, -1)
    values, queries = (steps * x.float())[..., None], C[0].T.float()[:, None]
    output = _contexts[-1].linear_attention(queries, keys, values, steps[..., None] * A.float(), None, 1.0)[..., 0]
    if D is not None:
        output = output + x * D
    output = output.T[None]
    return output if z is None else output * torch.nn.functional.silu(z)


_HOOKS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
}

_ANOTHER_VERSION = "install the version of transformers that specexport asks for, or report this model."


def check_functions(model: Any) -> None:
    """Refuse (``UnsupportedModelError``) functions of transformers that take other arguments than their hooks do."""
    for module, name in _find_hooked_functions(model):
        taken, expected = _parameters(vars(module)[name]), _parameters(_HOOKS[name], skip=1)
        if taken is not None and expected is not None and not taken.can_serve(expected):
            from transformers import __version__

            raise UnsupportedModelError(
                f"{name} of {module.__name__} takes {', '.join(taken.all)}, and not {', '.join(expected.all)}; "
                f"transformers is {__version__}.",
                _ANOTHER_VERSION,
            )


class _Parameters(NamedTuple):
    """Names of what a function takes: by position, and in any way."""

    by_position: tuple[str, ...]
    all: tuple[str, ...]

    def can_serve(self, expected: "_Parameters") -> bool:
        """Whether a call of such a function is understood by one that takes ``expected``."""
        begins = self.by_position[: len(expected.by_position)] == expected.by_position
        return begins and set(expected.all) <= set(self.all)


def _parameters(function: Any, skip: int = 0) -> _Parameters | None:
    """What a function takes, without its first ``skip``; None where it does not tell."""
    try:
        found = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):  # compiled code
        return None
    named = [each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    by_position = [each.name for each in named if each.kind is not each.KEYWORD_ONLY]
    return _Parameters(tuple(by_position), tuple(each.name for each in named))


def _find_hooked_functions(model: Any) -> list[tuple[Any, str]]:
    """Modules of a model, and the functions that they have of those with a hook."""
    modules = [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]
    return [(module, name) for module in modules for name in _HOOKS if name in vars(module)]


def _lightning(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """MiniMax's lightning attention: a decay that each head has for good, and nothing else."""
    del position_embeddings, attention_mask
    heads = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(-1, (module.num_attention_heads, -1))
    q, k, v = heads.chunk(3, dim=-1)
    decay = -module.slope_rate.flatten().float().expand(q.shape[0], -1)
    mixed = _contexts[-1].linear_attention(q, k, v, decay, None, 1.0)
    mixed = module.norm(mixed.flatten(1)[None].to(hidden_states.dtype))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * mixed), None


def _gated_unit(
    _: Any, hidden_states: Tensor, recurrent_gate: Tensor, *__: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """The scan of an RG-LRU (De et al. 2024, section 2.4): a head has one channel and one decay."""
    x, ones = hidden_states[0].float()[..., None], hidden_states.new_ones(hidden_states.shape[1], 1, 1)
    decay = recurrent_gate[0].float().clamp(min=torch.finfo(torch.float32).tiny).log()
    output = _contexts[-1].linear_attention(ones, ones.expand_as(x), x, decay, None, 1.0)
    return output[..., 0][None].to(hidden_states.dtype), named.get("recurrent_states")


def _convolve_padded(module: Any, x: Tensor) -> Tensor:
    """A convolution whose last outputs are cut off: [1, C, T] to [1, C, T]."""
    return _convolve(module, x, module.weight[:, 0], module.bias)


_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "MiniMaxLightningAttention": ("forward", _lightning),
    "RecurrentGemmaRglru": ("_rnn_scan", _gated_unit),
}
"""Class of a module to the method that is replaced, and what stands for it."""


def _find_written_out(model: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for module in model.modules():
        if type(module).__module__.startswith("transformers.models.") and type(module).__name__ in _METHODS:
            yield module, *_METHODS[type(module).__name__]
        elif isinstance(module, torch.nn.Conv1d) and _is_causal(module):
            yield module, "forward", _convolve_padded


def _is_causal(conv: torch.nn.Conv1d) -> bool:
    """Whether each channel sees itself alone, and, once the outputs after the inputs are cut off, its past."""
    alone = conv.groups == conv.in_channels == conv.out_channels
    return alone and conv.padding == (conv.kernel_size[0] - 1,) and (conv.stride, conv.dilation) == ((1,), (1,))


@contextmanager
def recurrence_hook(model: Any, context: RecurrenceContext) -> Iterator[None]:
    """Within the block, ``context`` answers the model's recurrences; afterwards they are its own again."""
    before = [(module, name, vars(module)[name]) for module, name in _find_hooked_functions(model)]
    written_out = list(_find_written_out(model))

    def make_stand_in(module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: hook(module, *arguments, **named)

    _contexts.append(context)
    try:
        for module, name, _ in before:
            setattr(module, name, make_stand_in(module, _HOOKS[name]))
        for module, name, hook in written_out:
            setattr(module, name, make_stand_in(module, hook))
        yield
    finally:
        for module, name, _ in written_out:
            delattr(module, name)
        for module, name, own in before:
            setattr(module, name, own)
        _contexts.pop()


def call_recurrence_op(
    call: RecurrenceCall,
    inputs: tuple[Tensor | None, ...],
    states: tuple[Tensor, Tensor],  # state and pending entries
    state_steps: Tensor,  # [B, 4]
    step: tuple[Tensor, ...],  # cu_new_tokens, row_starts, pad_index, unpad_index
) -> tuple[Tensor, Tensor, Tensor]:
    """The custom op with the arguments in its declared order: output [T, width], and the two states."""
    spec = {LINEAR_ATTENTION.name: LINEAR_ATTENTION, CAUSAL_CONV.name: CAUSAL_CONV}[call.kind]
    op = getattr(torch.ops.specexport, spec.torch_name)
    result: tuple[Tensor, Tensor, Tensor] = op(*inputs, *states, state_steps, *step, *call.attributes)
    return result
