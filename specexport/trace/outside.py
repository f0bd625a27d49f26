"""Models whose attention modules do not ask transformers' attention interface: each core is answered by class."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Core = Callable[..., Tensor]
"""Called with (module, q, k, v, mask, scaling=…, slopes=…), tensors [1, heads, T, D]; gives [1, T, heads, D].

A module that masks what its tokens must not see itself, beside the model's mask, says so with ``own_window``: entries
that a token sees, itself included; -1 for all.
"""


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al. 2022, section 3): a geometric sequence, thinned for other than powers of two."""
    count = 1 << (num_heads - 1).bit_length()
    slopes: list[float] = [2 ** (-8 * i / count) for i in range(1, count + 1)]
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _bloom(
    core: Core, module: Any, hidden_states: Tensor, residual: Tensor, *, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    slopes = torch.tensor(alibi_slopes(module.num_heads))
    mixed = core(module, q, k, v, attention_mask, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(mixed.flatten(2)) + residual, None


def _mpt(
    core: Core, module: Any, hidden_states: Tensor, *, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    slopes = torch.tensor(alibi_slopes(module.n_heads))
    mixed = core(module, q, k, v, attention_mask, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(mixed.flatten(2)), None


def _falcon(
    core: Core,
    module: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = module._split_heads(module.query_key_value(hidden_states))
    if module.new_decoder_architecture:  # it repeats keys and values for each query head
        k, v = (x[:, :, :: module.num_heads // module.num_kv_heads] for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    mixed = core(module, q, k, v, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(mixed.flatten(2)), None


def _scores(
    core: Core, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``_attn`` of GPT-J and CodeGen, after the rotary embedding."""
    q, k = query.to(value.dtype), key.to(value.dtype)
    return core(module, q, k, value, attention_mask, scaling=1 / module.scale_attn).transpose(1, 2), None


def _gpt_neo(
    core: Core, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else -1
    return core(module, query, key, value, attention_mask, scaling=1.0, own_window=window).transpose(1, 2), None


def _gpt_neox_japanese(
    core: Core, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    return core(module, query, key, value, attention_mask, scaling=1 / module.norm_factor).transpose(1, 2), None


def _gpt(
    core: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, *_: Any
) -> list[Tensor]:
    """The keys are turned, for the product."""
    scaling = v.shape[-1] ** -0.5 if module.scale else 1.0
    return [core(module, q, k.transpose(2, 3), v, attention_mask, scaling=scaling, own_window=-1).transpose(1, 2)]


def _bert(
    core: Core,
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,  # RoFormer's
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (
        layer(hidden_states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
        for layer in (module.query, module.key, module.value)
    )
    if sinusoidal_pos is not None:
        turned = (q, k, v) if module.rotary_value else (q, k)
        q, k, v = (*module.apply_rotary_position_embeddings(sinusoidal_pos, *turned), v)[:3]
    mixed = core(module, q, k, v, attention_mask, scaling=module.attention_head_size**-0.5)
    return mixed.flatten(2), None


def _bart(
    core: Core, module: Any, hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
) -> tuple[Tensor, None]:
    q, k, v = (
        layer(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    mixed = core(module, q, k, v, attention_mask, scaling=module.scaling)
    return module.out_proj(mixed.flatten(2)), None


def _sinusoids(_: Core, module: Any, position_ids: Tensor, *__: Any) -> Tensor:
    """XGLM's table, which is made larger where a text is longer than any that the model supports."""
    found: Tensor = module.weights[position_ids + module.offset]
    return found


_FAMILIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _scores),
    "CodeGenAttention": ("_attn", _scores),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "Attention": ("_attn", _gpt),
    "RemBertSelfAttention": ("forward", _bert),
    "RoFormerSelfAttention": ("forward", _bert),
    "MegatronBertSelfAttention": ("forward", _bert),
    "GitSelfAttention": ("forward", _bert),
    "XGLMAttention": ("forward", _bart),
    "MvpAttention": ("forward", _bart),
    "TrOCRAttention": ("forward", _bart),
    "XGLMSinusoidalPositionalEmbedding": ("forward", _sinusoids),
}
"""Class of an attention module to the method that is replaced, and what stands for it."""


def _find_outside_modules(model: Any) -> list[Any]:
    return [
        module
        for module in model.modules()
        if type(module).__module__.startswith("transformers.models.")
        and hasattr(module, _FAMILIES.get(type(module).__name__, ("",))[0])
    ]


def is_outside(model: Any) -> bool:
    """Whether the model's attention is answered here, and not by the attention interface."""
    return bool(_find_outside_modules(model))


@contextmanager
def outside_hook(model: Any, core: Core) -> Iterator[None]:
    """Within the block, ``core`` answers the attention of such a model; afterwards its own methods are back."""
    modules = _find_outside_modules(model)
    for module in modules:
        method, stand_in = _FAMILIES[type(module).__name__]
        setattr(module, method, partial(stand_in, core, module))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _FAMILIES[type(module).__name__][0])
