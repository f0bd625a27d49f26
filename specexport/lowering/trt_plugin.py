"""Lowering ``plugin`` for TensorRT: each attention becomes ops of the unpadded-KV plugin, on packed tokens.

::

    kv_append(k, v, k_cache, v_cache, kv_lens, cu_new_tokens) -> k_cache_out, v_cache_out      (in place)
    ragged_attention(q, k_cache_out, v_cache_out, kv_lens, cu_new_tokens[, sinks]) -> output   (one split)
    ragged_attention(…) -> partial_acc, partial_stats;  combine_splits(partial_acc, partial_stats) -> output

A node's operator name is the plugin's name, which holds everything its kernel is compiled for
(``specexport.plugin.naming``). TensorRT's parser looks up a registered plugin by that name and by the attributes
``plugin_namespace`` and ``plugin_version``; ``aot`` makes it take the embedded kernel and no Python callback
(``FallbackPluginImporter`` and ``createPlugin`` of onnx-tensorrt). Nothing is padded, so the graph has no tile inputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specexport.kernels.signatures import MODEL_DTYPES
from specexport.kernels.spec import KernelSpec
from specexport.lowering.common import add_token_ids, drop_unused_step_inputs, replace_value, require_causal
from specexport.lowering.trt_native import read_attention
from specexport.lowering.trt_step import Attention
from specexport.onnx_emit import Emitter
from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import attention_nodes
from specexport.plugin.naming import NAMESPACE, graph_shape, plugin_name
from specexport_runtime.errors import UnsupportedModelError, UserInputError

if TYPE_CHECKING:
    import onnx_ir as ir

SPLIT_ENTRIES = 1024
"""A split has at least this many entries in the longest row: its partial sum is written and read once more."""

MOST_SPLITS = 8
"""The partial sums of a step are this many times as large as float32 queries, in prefill too."""

PLUGIN_VERSION = "1"  # tensorrt.plugin registers every plugin under this version


def choose_num_splits(kv_capacity: int, window: int) -> int:
    """Splits of a layer. One number for all profiles of an engine: it is the size of an output."""
    seen = min(kv_capacity, window) if window > 0 else kv_capacity
    return max(1, min(MOST_SPLITS, seen // SPLIT_ENTRIES))


def lower_trt_plugin(ir_model: "ir.Model", *, kv_capacity: int, num_splits: int | None = None) -> tuple[str, ...]:
    """Replace each ``UnpaddedAttention`` by a plugin, whose name is given, fix caches, add ``token_ids``."""
    names = replace_attention(ir_model, kv_capacity=kv_capacity, num_splits=num_splits)
    add_token_ids(ir_model)
    drop_unused_step_inputs(ir_model)
    return names


def replace_attention(ir_model: "ir.Model", *, kv_capacity: int, num_splits: int | None = None) -> tuple[str, ...]:
    """The attention part of ``lower_trt_plugin``, for graphs without logits; same arguments, result and errors."""
    nodes = list(attention_nodes(ir_model))
    layers = [read_attention(node, index) for index, node in enumerate(nodes)]
    specs = [_attention_spec(layer, index, kv_capacity, num_splits) for index, layer in enumerate(layers)]
    for node in nodes:
        require_causal(node, "the attention plugin")
    for index, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        _lower_layer(ir_model, layer, spec, index, kv_capacity)
    return tuple(map(plugin_name, specs))


def _attention_spec(layer: Attention, index: int, kv_capacity: int, num_splits: int | None) -> KernelSpec:
    """The attention kernel of a layer; UnsupportedModelError names the layer and the reason if there is none."""
    dtype = layer.dtype.name.lower()
    if dtype not in MODEL_DTYPES:
        raise UnsupportedModelError(
            f"attention layer {index} is {layer.dtype.name}; the attention plugin computes float16 and bfloat16.",
            "build with `dtype: float16`, or without `--lowering plugin`.",
        )
    splits = choose_num_splits(kv_capacity, layer.window) if num_splits is None else num_splits
    try:
        return KernelSpec(
            kernel="ragged_attention", dtype=dtype,
            num_heads=layer.num_heads, kv_num_heads=layer.kv_heads, head_size=layer.k_dim, v_head_size=layer.v_dim,
            scale=layer.scale, window=layer.window, softcap=layer.softcap,
            sinks="sinks" in layer.tensors, num_splits=splits,
        )  # fmt: skip
    except UserInputError as error:
        raise UnsupportedModelError(
            f"attention layer {index}: {error.message}", "build it without `--lowering plugin`."
        ) from error


def _lower_layer(ir_model: "ir.Model", layer: Attention, spec: KernelSpec, index: int, kv_capacity: int) -> None:
    import onnx_ir as ir

    append = replace(_without_attention_options(spec, "kv_append"), num_heads=spec.kv_num_heads)
    sizes = {"Hq": spec.num_heads, "D": spec.head_size, "Dv": spec.v_head_size, "S": spec.num_splits}
    sizes |= {"H": spec.kv_num_heads, "L": kv_capacity, "Hq*Dv": spec.num_heads * spec.v_head_size}
    known = dict(layer.tensors)
    emit = Emitter(ir_model.graph)
    for cache, size in (("k_cache", layer.k_dim), ("v_cache", layer.v_dim)):
        known[cache].shape = ir.Shape([DIM_NAMES["B"], layer.kv_heads, kv_capacity, size])
    if "sinks" in known and known["sinks"].dtype != layer.dtype:
        known["sinks"] = emit.op(
            "Cast", known["sinks"], to=int(layer.dtype), dtype=layer.dtype, name=f"attention.{index}.sinks"
        )
    for kernel in (
        append,
        spec,
        *([_without_attention_options(spec, "combine_splits")] if spec.num_splits > 1 else []),
    ):
        made = _emit_plugin(emit, kernel, known, sizes, layer.dtype, f"attention.{index}.{kernel.kernel}")
        known |= dict(zip(_outputs(kernel), made, strict=True))
        known |= {name: known[f"{name}_out"] for name in ("k_cache", "v_cache")}  # what follows reads the new entries
    emit.place(before=layer.node)
    for old, name in zip(layer.node.outputs, ("output", "k_cache_out", "v_cache_out"), strict=True):
        replace_value(ir_model, old, known[name])
    ir_model.graph.remove(layer.node, safe=True)


def _without_attention_options(spec: KernelSpec, kernel: str) -> KernelSpec:
    """Another kernel of the same layer, without what only attention depends on: layers then share its plugin."""
    splits = spec.num_splits if kernel == "combine_splits" else 1
    return replace(spec, kernel=kernel, scale=1.0, window=-1, softcap=0.0, sinks=False, num_splits=splits)


def _outputs(spec: KernelSpec) -> list[str]:
    return [item.name for item in spec.signature.outputs]


def _emit_plugin(
    emit: Emitter,
    spec: KernelSpec,
    known: "dict[str, ir.Value]",
    sizes: dict[str, int],
    dtype: "ir.DataType",
    name: str,
) -> "Sequence[ir.Value]":
    """The node of one plugin: inputs by the names of the kernel's signature; returns outputs with types and shapes."""
    import onnx_ir as ir

    signature = spec.signature
    inputs = [known[item.name] for item in signature.inputs]
    attributes = {"plugin_namespace": NAMESPACE, "plugin_version": PLUGIN_VERSION, "aot": 1}
    made = emit.node(plugin_name(spec), inputs, attributes, outputs=len(signature.outputs), name=name).outputs
    for item, value in zip(signature.outputs, made, strict=True):
        value.name = f"{name}.{item.name}"
        value.type = ir.TensorType(dtype if item.dtype == "model" else ir.DataType.FLOAT)
        words = (sizes.get(word, word) if isinstance(word, str) else word for word in graph_shape(item))
        value.shape = ir.Shape([DIM_NAMES[word] if isinstance(word, str) else word for word in words])
    return made
