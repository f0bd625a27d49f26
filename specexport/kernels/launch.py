"""Launchers on torch tensors, for tests and GPU checks; they check arguments: measure them in a CUDA graph."""
# mypy: disable-error-code="no-any-unimported"

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specexport.kernels.ragged_attention import combine_splits as combine_splits_kernel
from specexport.kernels.ragged_attention import kv_append as kv_append_kernel
from specexport.kernels.ragged_attention import ragged_attention as ragged_attention_kernel
from specexport.kernels.signatures import Signature
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import TileConfig
from specexport_runtime.errors import UserInputError

if TYPE_CHECKING:
    from torch import Tensor

KERNELS: dict[str, Any] = {
    "kv_append": kv_append_kernel,
    "ragged_attention": ragged_attention_kernel,
    "combine_splits": combine_splits_kernel,
}
"""The Triton functions by kernel name."""

INTERPRETED_SM = 90
"""Architecture whose tile sizes are used for tensors that are on no GPU."""


def dtype_name(tensor: "Tensor") -> str:
    """Name of a tensor's element type in numpy, such as ``"bfloat16"``."""
    return str(tensor.dtype).removeprefix("torch.")


def check_tensors(spec: KernelSpec, tensors: "dict[str, Tensor]") -> dict[str, int]:
    """Sizes by dimension word, from tensors that are checked against each other; UserInputError if one does not fit."""
    signature = spec.signature
    heads, kv_heads, d, dv = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    sizes = {"Hq": heads, "H": kv_heads, "D": d, "Dv": dv, "S": spec.num_splits}
    sizes |= {"Hq*D": heads * d, "H*D": kv_heads * d, "H*Dv": kv_heads * dv, "Hq*Dv": heads * dv}
    if "kv_lens" in tensors:
        sizes["B+1"] = len(tensors["kv_lens"]) + 1
    for item in (*signature.inputs, *signature.outputs):
        tensor = tensors[item.name]
        dtype = spec.dtype if item.dtype == "model" else item.dtype
        shape = tuple(tensor.shape)
        fits = len(shape) == len(item.shape)
        for word, size in zip(item.shape, shape, strict=False):
            fits &= size == (sizes.setdefault(word, size) if isinstance(word, str) else word)
        if not fits or dtype_name(tensor) != dtype or not tensor.is_contiguous():
            wanted = ", ".join(f"{word}={sizes[word]}" if word in sizes else str(word) for word in item.shape)
            raise UserInputError(
                f"{spec.kernel} got {item.name} {shape} {dtype_name(tensor)}.",
                hint=f"Pass a contiguous [{wanted}] tensor of {dtype}.",
            )
    return {word: size for word, size in sizes.items() if isinstance(word, str)}


def launch(spec: KernelSpec, tensors: "dict[str, Tensor]", tiles: TileConfig | None = None) -> None:
    """Run a kernel on all of ``spec.signature``, by name; ``tiles`` None takes the tuning table's."""
    check_tensors(spec, tensors)
    signature: Signature = spec.signature
    tiles = tiles or spec.tiles(read_capability(tensors[signature.inputs[0].name]))
    ints = {item.name: tensors[item.source].shape[item.axis] for item in signature.ints}
    grid = spec.grid(tiles, ints["num_tokens"], ints.get("num_seqs", 0))
    if not all(grid):
        return
    kernel = KERNELS[spec.kernel]
    arguments = dict.fromkeys(kernel.arg_names) | tensors | ints | spec.constants(tiles)
    kernel[grid](**arguments, num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True)


def read_capability(tensor: "Tensor") -> int:
    """Compute capability of a tensor's device times ten; ``INTERPRETED_SM`` if it is no GPU."""
    if not tensor.is_cuda:
        return INTERPRETED_SM
    import torch

    major, minor = torch.cuda.get_device_capability(tensor.device)
    return int(10 * major + minor)


def kv_append(
    k: "Tensor", v: "Tensor", k_cache: "Tensor", v_cache: "Tensor", kv_lens: "Tensor", cu_new_tokens: "Tensor"
) -> None:
    """Write packed keys [T, H*D] and values [T, H*Dv] into the caches [B, 1, H, L, D] and [B, 1, H, L, Dv], in place.

    Token ``j`` of row ``b`` goes to entry ``kv_lens[b] + j`` (int32 [B, 1]); tokens from ``cu_new_tokens[B]`` (int32
    [B+1]) on go nowhere.
    """
    heads = k_cache.shape[2]
    spec = KernelSpec(
        kernel="kv_append", dtype=dtype_name(k), num_heads=heads, kv_num_heads=heads,
        head_size=k_cache.shape[-1], v_head_size=v_cache.shape[-1],
    )  # fmt: skip
    inputs = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": kv_lens}
    launch(spec, inputs | {"cu_new_tokens": cu_new_tokens, "k_cache_out": k_cache, "v_cache_out": v_cache})


def ragged_attention(
    q: "Tensor",
    k_cache: "Tensor",  # [B, 1, H, L, D]
    v_cache: "Tensor",  # [B, 1, H, L, Dv]
    kv_lens: "Tensor",  # int32 [B, 1], entries before the step
    cu_new_tokens: "Tensor",  # int32 [B+1]
    *,
    tree_mask: "Tensor | None" = None,  # int64 [T], see ``KernelSpec.tree``
    sinks: "Tensor | None" = None,  # [Hq], see ``KernelSpec.sinks``
    scale: float,
    window: int = -1,
    softcap: float = 0.0,
    num_splits: int = 1,  # above 1 ``combine_splits`` runs too
    new_tokens: int = 1,
    tiles: TileConfig | None = None,  # None for the tuning table's
) -> "Tensor":
    """Attend with packed queries [T, Hq*D] to caches that hold the step's entries; [T, Hq*Dv], 0 for padding."""
    import torch

    head_size, tokens = k_cache.shape[-1], q.shape[0]
    spec = KernelSpec(
        kernel="ragged_attention", dtype=dtype_name(q),
        num_heads=q.shape[1] // head_size, kv_num_heads=k_cache.shape[2],
        head_size=head_size, v_head_size=v_cache.shape[-1], scale=scale, window=window, softcap=softcap,
        tree=tree_mask is not None, sinks=sinks is not None, num_splits=num_splits, new_tokens=new_tokens,
    )  # fmt: skip
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": kv_lens, "cu_new_tokens": cu_new_tokens,
        "tree_mask": tree_mask, "sinks": sinks,
    }  # fmt: skip
    output = q.new_empty((tokens, spec.num_heads * spec.v_head_size))
    if num_splits == 1:
        launch(spec, tensors | {"output": output}, tiles)
        return output
    shape = (num_splits, tokens, spec.num_heads)
    partial = {
        "partial_acc": q.new_empty((*shape, spec.v_head_size), dtype=torch.float32),
        "partial_stats": q.new_empty((*shape, 2), dtype=torch.float32),
    }
    launch(spec, tensors | partial, tiles)
    launch(replace(spec, kernel="combine_splits", tree=False, sinks=False), partial | {"output": output})
    return output
