"""Torch's attention for a verify step, in every way that may be the fastest.

Torch gets its favourite layout: rows of one length, caches exactly as long as they are, masks made beforehand. Every
way is checked against the float32 result before it counts.
"""
# mypy: disable-error-code="no-any-unimported"

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], "Tensor"]
Make = Callable[[Mapping[str, "Tensor"]], Call]


def ways() -> dict[str, Make]:
    """Makers of calls by name; each call returns [tokens, Hq*D]."""
    from torch.nn.attention import SDPBackend

    found: dict[str, Make] = {}
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        name = backend.name.lower().removesuffix("_attention")
        found[f"sdpa {name}, mask, enable_gqa"] = _sdpa(backend, "mask")
        found[f"sdpa {name}, queries of a group stacked"] = _sdpa(backend, "stacked")
        found[f"sdpa {name}, causal_lower_right"] = _sdpa(backend, "bias")
    found["varlen_attn"] = _varlen
    return found


def _shapes(tensors: Mapping[str, "Tensor"]) -> tuple[int, int, int, int]:
    """B, H, group and entries of each row."""
    caches, rows = tensors["k_cache"], len(tensors["kv_lens"])
    new = int(tensors["cu_new_tokens"][1])
    group = tensors["q"].shape[1] // caches.shape[-1] // caches.shape[2]
    return rows, caches.shape[2], group, int(tensors["kv_lens"][0, 0]) + new


def _parts(tensors: Mapping[str, "Tensor"]) -> "tuple[Tensor, Tensor, Tensor]":
    """Queries [B, Hq, n, D], keys and values [B, H, entries, D], contiguous."""
    rows, _, _, entries = _shapes(tensors)
    size = tensors["k_cache"].shape[-1]
    used = int(tensors["cu_new_tokens"][-1])
    q = tensors["q"][:used].view(rows, used // rows, -1, size).transpose(1, 2).contiguous()
    k, v = (tensors[name][:, 0, :, :entries].contiguous() for name in ("k_cache", "v_cache"))
    return q, k, v


def _packed(output: "Tensor") -> "Tensor":
    """[B, Hq, n, D] to [B*n, Hq*D]."""
    rows, heads, new, size = output.shape
    return output.transpose(1, 2).reshape(rows * new, heads * size)


def _sdpa(backend: Any, form: str) -> Make:
    def make(tensors: Mapping[str, "Tensor"]) -> Call:
        import torch
        from torch.nn.attention import sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        rows, kv_heads, group, entries = _shapes(tensors)
        q, k, v = _parts(tensors)
        new, size = q.shape[2], q.shape[3]
        mask: Any = torch.ones(new, entries, dtype=torch.bool, device=q.device).tril(entries - new)
        if form == "bias":
            mask = causal_lower_right(new, entries)
        if form == "stacked":  # the heads of a group as more queries of one head: keys and values are read once
            q = q.view(rows, kv_heads, group * new, size)
            mask = mask.repeat(group, 1)

        def run() -> "Tensor":
            with sdpa_kernel(backend):
                output = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=form != "stacked")
            return _packed(output.view(rows, kv_heads * group, new, size))

        return run

    return make


def _varlen(tensors: Mapping[str, "Tensor"]) -> Call:
    import inspect

    import torch
    from torch.nn.attention.varlen import varlen_attn

    # Causal from the last entry backwards; releases spell it differently.
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        options["enable_gqa"] = True
    rows, kv_heads, group, entries = _shapes(tensors)
    q, k, v = _parts(tensors)
    new, size = q.shape[2], q.shape[3]
    packed_q = q.transpose(1, 2).reshape(rows * new, kv_heads * group, size)
    packed_k, packed_v = (part.transpose(1, 2).reshape(rows * entries, kv_heads, size) for part in (k, v))
    ends = [torch.arange(rows + 1, dtype=torch.int32, device=q.device) * count for count in (new, entries)]

    def run() -> "Tensor":
        output: Tensor = varlen_attn(packed_q, packed_k, packed_v, *ends, new, entries, **options)
        return output.reshape(rows * new, -1)

    return run
