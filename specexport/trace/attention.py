"""The hook: transformers' attention interface, answered by ``UnpaddedAttention``.

transformers builds no mask for a name that is missing from its mask functions. Caches and step inputs travel in a
context beside the model, because not every model passes unknown keyword arguments on.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specexport.ops.torch_ops  # noqa: F401 - registers torch.ops.specexport.unpadded_attention
from specexport.checkpoint.lengths import has_full_selection
from specexport.trace.outside import is_outside, outside_hook
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.errors import UnsupportedModelError

HOOK_NAME = "specexport"
_IMPLEMENTATION = "_attn_implementation_internal"

# Tensors that some models pass along and that do not change the scores (or are read by name).
_KNOWN_TENSORS = {"s_aux", "slopes", "position_ids", "cache_position", "cos", "sin", "indices"}


class ScoreTerms(NamedTuple):
    """What attention reads besides queries, keys and values."""

    sinks: Tensor | None = None  # [num_heads]
    slopes: Tensor | None = None  # [num_heads]


@dataclass(frozen=True)
class LayerCall:
    """What one layer asks of attention."""

    index: int  # number of its caches: layers with attention are counted, in order
    geometry: LayerGeometry
    num_heads: int  # of queries
    scale: float  # factor on the scores
    window: int  # entries a token sees, itself included; -1 for all
    softcap: float  # 0 for off
    sinks: bool
    causal: bool = True
    layer: int = 0  # number of the decoder layer
    own_mask: bool = False  # the module masks what the window excludes itself, beside the model's mask


def _read_call(index: int, module: Any, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> LayerCall:
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer < 0:  # one block that several layers share
        layer = index
    scaling = named.get("scaling")
    window = named.get("own_window", named.get("sliding_window"))
    if window is None:
        window = getattr(module, "sliding_window", None)
    return LayerCall(
        index=index,
        geometry=LayerGeometry(k.shape[1], k.shape[3], v.shape[3]),
        num_heads=q.shape[1],
        scale=float(q.shape[3] ** -0.5 if scaling is None else scaling),
        window=int(window) if window else -1,
        softcap=float(named.get("softcap") or 0.0),
        sinks=named.get("s_aux") is not None,
        causal=bool(getattr(module, "is_causal", True)),
        layer=int(layer),
        own_mask="own_window" in named,
    )


Answer = Callable[[LayerCall, Tensor, Tensor, Tensor, ScoreTerms], Tensor]
"""From a call, q [T, num_heads*D], k [T, H*D], v [T, H*Dv] and terms, packed, to [T, num_heads*Dv]."""


class AttentionContext:
    """Answers the attention calls of one forward pass."""

    def __init__(
        self,
        answer: Answer,
        # Gets (number of the call, mask), and masks are not refused; for probing only
        on_mask: Callable[[int, Tensor | None], None] | None = None,
        *,
        causal_only: bool = True,  # refuse layers whose tokens see later ones; a draft head may have some
    ) -> None:
        self.calls: list[LayerCall] = []
        self.on_mask = on_mask
        self.causal_only = causal_only
        self.masks_unread = False
        self._answer = answer

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> Tensor:
        """One attention call, tensors as transformers passes them: [1, heads, T, D]. Returns [1, T, heads, Dv]."""
        call = _read_call(len(self.calls), module, q, k, v, named)
        self.calls.append(call)
        terms = ScoreTerms(named.get("s_aux"), named.get("slopes"))
        output = self._answer(call, _pack(q), _pack(k), _pack(v), terms)
        return output.view(1, output.shape[0], call.num_heads, call.geometry.v_dim)


def _pack(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[2], x.shape[1] * x.shape[3])


_contexts: list[AttentionContext] = []


def _answer_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    context = _contexts[-1]
    if context.on_mask is not None:
        context.on_mask(len(context.calls), attention_mask)
    elif attention_mask is not None and not context.masks_unread:
        raise UnsupportedModelError(
            f"{type(module).__name__} brings its own attention mask, which a packed step cannot keep.",
            "use a decoder with causal or sliding-window attention.",
        )
    if context.causal_only and not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not causal: its tokens see later ones.", "use a decoder-only language model."
        )
    odd = sorted(name for name, x in named.items() if isinstance(x, Tensor) and name not in _KNOWN_TENSORS)
    if odd:
        raise UnsupportedModelError(f"{type(module).__name__} gives attention extra tensors: {', '.join(odd)}.")
    return context(module, query, key, value, named), None


@contextmanager
def attention_hook(model: Any, context: AttentionContext) -> Iterator[None]:
    """Within the block, ``context`` answers the model's attention; afterwards the model's own attention is back."""
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK_NAME, _answer_attention)
    _contexts.append(context)
    try:
        if is_outside(model):
            hooked: AbstractContextManager[None] = _hook_outside_attention(model, context)
        else:
            hooked = use_attention_implementation(model, HOOK_NAME)
            context.masks_unread = has_full_selection(model)
        with hooked, _register_dummy_masks() if context.masks_unread and context.on_mask is None else nullcontext():
            yield
    finally:
        _contexts.pop()


@contextmanager
def use_attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Within the block, attention of the model and all its parts is ``name``; afterwards each has its own again."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = [(config, getattr(config, _IMPLEMENTATION, None)) for config in configs.values()]
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        for config, own in before:  # a part may not be able to do what the whole is set to
            setattr(config, _IMPLEMENTATION, own)


@contextmanager
def _hook_outside_attention(model: Any, context: AttentionContext) -> Iterator[None]:
    """The same for models that do not ask the interface. Some want a mask, whatever it holds."""

    def core(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **named: Any) -> Tensor:
        return _answer_attention(module, q, k, v, None if context.on_mask is None else mask, **named)[0]

    before = model.config._attn_implementation
    model.config._attn_implementation_internal = HOOK_NAME  # transformers would refuse
    try:
        with outside_hook(model, core), _register_dummy_masks() if context.on_mask is None else nullcontext():
            yield
    finally:
        model.config._attn_implementation_internal = before


@contextmanager
def _register_dummy_masks() -> Iterator[None]:
    """Within the block, masks are made for models that want one; the hook reads none."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    def build_dummy_mask(*, q_length: int, kv_length: int, **_: Any) -> Tensor:
        return torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)

    type(MASKS).register(HOOK_NAME, build_dummy_mask)
    try:
        yield
    finally:
        type(MASKS)._global_mapping.pop(HOOK_NAME, None)


def unpadded_attention(
    call: LayerCall,
    q: Tensor,  # [T, num_heads*D]
    k: Tensor | None,  # [T, H*D]; None for a layer that reads what another model has put into the caches
    v: Tensor | None,  # [T, H*Dv], or None likewise
    caches: tuple[Tensor, Tensor],  # keys and values, [B, 1, H, L, D] each
    step: tuple[Tensor, ...],  # kv_lens, cu_new_tokens, row_starts, row_ends, row_totals, pad_index, unpad_index
    terms: ScoreTerms,
) -> tuple[Tensor, Tensor, Tensor]:
    """The custom op with the arguments in its declared order: output [T, num_heads*Dv] and the two updated caches."""
    heads = (call.num_heads, call.geometry.kv_heads)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.specexport.unpadded_attention(
        q, k, v, *caches, *step, *terms, *heads, call.scale, call.window, call.softcap, int(call.causal)
    )
    return result
