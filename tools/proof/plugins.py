"""The plugin nodes of a lowered graph: our Triton kernels, launched with the tiles that a plugin embeds."""
# mypy: disable-error-code="no-any-unimported"

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from specexport.kernels.launch import launch, read_capability
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import TileConfig
from specexport.plugin.naming import plugin_spec
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    from torch import Tensor


def find_plugin(op: str) -> KernelSpec | None:
    """The kernel after an operator's name; None if it is no plugin of ours."""
    try:
        return plugin_spec(op)
    except CheckFailedError:
        return None


@cache
def embedded_tiles(spec: KernelSpec, sm: int, new_tokens: int) -> TileConfig:
    """The tiles that an engine would run for rows of ``new_tokens``; see ``PluginKernels.tactic_for``."""
    return replace(spec, new_tokens=new_tokens).tiles(sm, small=True)


def run_plugin(spec: KernelSpec, inputs: "list[Tensor]", new_tokens: int) -> "list[Tensor]":
    """Launch a kernel on a node's inputs, in the order of its signature; returns the node's outputs.

    Caches are [B, H, L, D] as in the graph, and are written in place: an output that aliases an input is that tensor.
    Tiles are chosen by ``new_tokens`` of a row.
    """
    import torch

    signature = spec.signature
    given = {item.name: tensor.contiguous() for item, tensor in zip(signature.inputs, inputs, strict=True)}
    for name in ("k_cache", "v_cache"):
        if name in given:
            given[name] = given[name].unsqueeze(1)
    first = given[signature.inputs[0].name]
    sizes = {"T": first.shape[signature.ints[0].axis], "Hq": spec.num_heads, "Dv": spec.v_head_size}
    sizes |= {"S": spec.num_splits, "Hq*Dv": spec.num_heads * spec.v_head_size}
    for item in signature.outputs:
        if item.aliases:
            given[item.name] = given[item.aliases]
            continue
        shape = [sizes[word] if isinstance(word, str) else word for word in item.shape]
        dtype = torch.float32 if item.dtype == "float32" else getattr(torch, spec.dtype)
        given[item.name] = first.new_empty(shape, dtype=dtype)
    launch(spec, given, embedded_tiles(spec, read_capability(first), new_tokens))
    return [given[item.name].squeeze(1) if item.aliases else given[item.name] for item in signature.outputs]
