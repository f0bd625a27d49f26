"""Plugin definitions for ``tensorrt.plugin``: what TensorRT asks of a plugin while it builds an engine.

A definition describes the outputs, gives the one combination of types with tiles for the profile at hand, and hands
over the kernel with its grid and int32 arguments. All derive from ``specexport.kernels.signatures``.

TensorRT reads the functions' signatures and wants classes as annotations, so signatures are made here.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import Any

from specexport.kernels.compile import CompiledKernel, compile_kernel
from specexport.kernels.signatures import TensorArgument
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import TileConfig, attention_tiles
from specexport.plugin.naming import NAMESPACE, graph_shape, plugin_spec
from specexport_runtime.errors import CheckFailedError, IncompatibleError

MAX_SHARED_BYTES = 48 * 1024
"""Shared memory that every launcher gives a kernel. Whether TensorRT opts in to more is not documented."""

_QUERIES = (16, 32, 64, 128)  # a tile holds tokens times the query heads that share a KV head
_COMPILED_AS = {86: 80, 87: 80}  # PTX for 8.0 runs on all 8.x; no newer one is known to be as portable
DEFAULT_TACTIC = 0  # TensorRT's number for "there is one way only"; custom ones are positive

_NEEDED = ("register", "autotune", "aot_impl", "KernelLaunchParams", "SymIntExprs")
_TYPE_NAMES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}
_DATA_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}

_KERNELS: "dict[str, PluginKernels]" = {}
"""Kernels by plugin name, those of the latest registration: TensorRT keeps a definition for the life of the process."""


@dataclass(frozen=True)
class PluginKernels:
    """What one plugin embeds."""

    spec: KernelSpec
    by_tactic: dict[int, CompiledKernel]  # by TensorRT's tactic number; that of attention is the queries of a tile

    @property
    def tactics(self) -> list[int]:
        """Custom tactics, in ascending order; empty where there is one kernel only."""
        return sorted(tactic for tactic in self.by_tactic if tactic != DEFAULT_TACTIC)

    def tactic_for(self, num_tokens: int, num_seqs: int) -> int:
        """The tactic for a profile's optimum of T tokens and B rows: the smallest tile that holds a row's queries."""
        queries = -(-num_tokens // max(num_seqs, 1)) * self.spec.group
        tactics = self.tactics or [DEFAULT_TACTIC]
        return next((tactic for tactic in tactics if tactic >= queries), tactics[-1])


def tile_options(spec: KernelSpec, sm: int) -> dict[int, TileConfig]:
    """Tile sizes by tactic number, all within ``MAX_SHARED_BYTES``; UserInputError for an unknown ``sm``."""
    if spec.kernel != "ragged_attention":
        return {DEFAULT_TACTIC: spec.tiles(sm, small=True)}
    size = max(spec.head_size, spec.v_head_size)
    options = {tiles.block_m: tiles for tiles in (attention_tiles(sm, size, n, small=True) for n in _QUERIES)}
    return options if len(options) > 1 else {DEFAULT_TACTIC: next(iter(options.values()))}


def kernel_architecture(sm: int) -> int:
    """The architecture that kernels for ``sm`` are compiled for: itself, or an older one whose PTX it runs."""
    return _COMPILED_AS.get(sm, sm)


@cache
def compile_plugin(spec: KernelSpec, sm: int) -> PluginKernels:
    """Compile every kernel of a plugin for an architecture; CheckFailedError if one cannot be embedded."""
    options = tile_options(spec, sm)
    return PluginKernels(spec, {tactic: compile_kernel(spec, sm, tiles=tiles) for tactic, tiles in options.items()})


def register_plugins(names: Iterable[str], sm: str | int) -> None:
    """Compile the kernels of plugins and register the plugins with TensorRT. Call it before the graph is parsed.

    The kernels of the last call count. CheckFailedError if a name is none of ours, or its kernel cannot be embedded;
    IncompatibleError if this TensorRT cannot embed kernels.
    """
    target = kernel_architecture(int(sm))
    compiled = {name: compile_plugin(plugin_spec(name), target) for name in dict.fromkeys(names)}
    if not compiled:
        return
    for name, kernels in compiled.items():
        _check_shared_memory(name, kernels)
    import tensorrt as trt
    import tensorrt.plugin as trtp

    if absent := [part for part in _NEEDED if not hasattr(trtp, part)]:
        raise IncompatibleError(
            f"TensorRT {trt.__version__} cannot embed compiled kernels: its plugin module has no {absent[0]}.",
            "use TensorRT 11, or build it without `--lowering plugin`.",
        )
    for name, kernels in compiled.items():
        known = name in _KERNELS and hasattr(getattr(trtp.op, NAMESPACE, None), name)
        _KERNELS[name] = kernels
        if not known:
            _register_plugin(trt, trtp, name)


def _check_shared_memory(name: str, kernels: PluginKernels) -> None:
    most = max(kernel.shared_bytes for kernel in kernels.by_tactic.values())
    if most > MAX_SHARED_BYTES:
        raise CheckFailedError(f"plugin {name} needs {most} bytes of shared memory, a launch has {MAX_SHARED_BYTES}.")


def _register_plugin(trt: Any, trtp: Any, name: str) -> None:
    """Register the three functions of one plugin."""
    plugin_id = f"{NAMESPACE}::{name}"
    signature = _KERNELS[name].spec.signature
    inputs = [item.name for item in signature.inputs]
    one_each = (trtp.TensorDesc,) * len(signature.outputs)
    kernel_type = str | bytes
    returns = tuple[kernel_type, kernel_type, trtp.KernelLaunchParams, trtp.SymIntExprs]
    described = _annotate(_describe, trt, trtp, name, inputs, (), GenericAlias(tuple, one_each))
    tuned = _annotate(_tune, trt, trtp, name, inputs, ("outputs",), list[trtp.AutoTuneCombination])
    embedded = _annotate(_embed, trt, trtp, name, inputs, ("outputs", "tactic"), returns)
    trtp.register(plugin_id)(described)
    trtp.autotune(plugin_id)(tuned)
    trtp.aot_impl(plugin_id)(embedded)


def _annotate(
    function: Callable[..., Any],
    trt: Any,
    trtp: Any,
    name: str,
    inputs: Sequence[str],
    more: Sequence[str],
    returns: Any,
) -> Callable[..., Any]:
    """``function`` for one plugin, with the signature that TensorRT reads: tensors by name, then ``more``."""
    annotations = dict.fromkeys(inputs, trtp.TensorDesc) | dict.fromkeys(more, inspect.Parameter.empty)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def callback(*arguments: Any) -> Any:
        return function(trt, trtp, _KERNELS[name], *arguments)

    callback.__name__ = callback.__qualname__ = f"{function.__name__.strip('_')}_{name}"
    parameters = [inspect.Parameter(key, kind, annotation=value) for key, value in annotations.items()]
    callback.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return callback


def _describe(trt: Any, trtp: Any, kernels: PluginKernels, *inputs: Any) -> tuple[Any, ...]:
    """Types, shapes and aliases of the outputs."""
    spec = kernels.spec
    signature = spec.signature
    _check_types(trt, kernels, inputs)
    by_name = {item.name: given for item, given in zip(signature.inputs, inputs, strict=True)}
    sizes = {"Hq": spec.num_heads, "D": spec.head_size, "Dv": spec.v_head_size, "S": spec.num_splits}
    sizes |= {"H": spec.kv_num_heads, "Hq*Dv": spec.num_heads * spec.v_head_size}
    sizes |= {"T": inputs[0].shape_expr[graph_shape(signature.inputs[0]).index("T")]}
    outputs = []
    for item in signature.outputs:
        if item.aliases:
            outputs.append(by_name[item.aliases].aliased())
        else:
            shape = tuple(sizes[word] if isinstance(word, str) else word for word in graph_shape(item))
            outputs.append(trtp.from_shape_expr(shape, dtype=_data_type(trt, kernels, item)))
    return tuple(outputs)


def _tune(trt: Any, trtp: Any, kernels: PluginKernels, *arguments: Any) -> list[Any]:
    """One combination of types and one tactic: TensorRT would try several on memory that holds no step."""
    inputs, _ = arguments[:-1], arguments[-1]
    signature = kernels.spec.signature
    _check_types(trt, kernels, inputs)
    tensors = (*signature.inputs, *signature.outputs)
    types = ", ".join(_TYPE_NAMES[kernels.spec.dtype if item.dtype == "model" else item.dtype] for item in tensors)
    combination = trtp.AutoTuneCombination(types, "LINEAR")
    if kernels.tactics:
        sizes = {item.name: _get_optimum_shape(given) for item, given in zip(signature.inputs, inputs, strict=True)}
        combination.tactics([kernels.tactic_for(sizes["q"][0], sizes["kv_lens"][0])])
    return [combination]


def _embed(trt: Any, trtp: Any, kernels: PluginKernels, *arguments: Any) -> tuple[Any, ...]:
    """Name, PTX, launch parameters and int32 arguments of the kernel for a tactic."""
    *inputs, _, tactic = arguments
    signature = kernels.spec.signature
    _check_types(trt, kernels, inputs)
    kernel = kernels.by_tactic[tactic]
    items = {item.name: (item, given) for item, given in zip(signature.inputs, inputs, strict=True)}
    ints = {}
    for scalar in signature.ints:
        item, given = items[scalar.source]
        ints[scalar.name] = given.shape_expr[graph_shape(item).index(item.shape[scalar.axis])]
    params = trtp.KernelLaunchParams()
    grid = kernels.spec.grid(kernel.tiles, ints["num_tokens"], ints.get("num_seqs", 0))
    params.grid_x, params.grid_y, params.grid_z = grid
    params.block_x = 32 * kernel.num_warps
    params.shared_mem = kernel.shared_bytes
    return kernel.name, kernel.ptx, params, trtp.SymIntExprs.from_tuple([trtp.SymInt32(size) for size in ints.values()])


def _check_types(trt: Any, kernels: PluginKernels, inputs: Sequence[Any]) -> None:
    """Refuse inputs of other types than the kernel was compiled for: KeyError of the first such type."""
    for item, given in zip(kernels.spec.signature.inputs, inputs, strict=True):
        if given.dtype != _data_type(trt, kernels, item):
            raise KeyError(given.dtype)


def _data_type(trt: Any, kernels: PluginKernels, item: TensorArgument) -> Any:
    return getattr(trt.DataType, _DATA_TYPES[kernels.spec.dtype if item.dtype == "model" else item.dtype])


def _get_optimum_shape(given: Any) -> tuple[int, ...]:
    """Shape of an input at the profile's optimum."""
    shape = given.shape
    return tuple(shape.opt) if shape.is_dynamic else tuple(shape)
