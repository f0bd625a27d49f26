"""Embeddings in int8: one scale a token of the vocabulary, one table with a tied LM head."""

from functools import partial

import onnx_ir as ir

from specexport.onnx_emit import Emitter, Together, lazy_weight
from specexport.passes.base import CountingPass, constant_of, sizes_of
from specexport.passes.quantize_int8 import int8_name, quantized_rows
from specexport_runtime.abi import INPUT_IDS

_FLOAT = ir.DataType.FLOAT
# Between the graph's token ids and the lookup; a draft head that fills blocks has entries without a token.
_ID_STEPS = {"Cast", "Clip", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


class EmbeddingQuantizePass(CountingPass):
    """Look tokens up in an int8 table and make the rows that were found float32.

    Symmetric, one scale a row of the table: ``largest |w| / 127``. These are also the scales that an int8 LM head has
    for its output channels, so a tied head and its embedding are the same integers, and one table serves both. The
    head's product wants it as [H, V]; the lookup then takes columns, which costs a cache miss an element and is little
    beside a step. What a row gives depends on its token alone, so nothing changes with the width of a step. Tables that
    are not read by the step's token ids (learned positions) stay float32. Counts the lookups.

    The pass runs after :class:`~specexport.passes.quantize_int8.Int8QuantizePass`, if that runs at all.
    """

    name = "embedding-quantize"
    reason = "memory: an embedding is up to two thirds of a small model, and a step reads a few of its rows"

    def rewrite(self, model: ir.Model) -> int:
        """Replace every lookup by token id."""
        lookups = [node for node in model.graph if is_lookup(node)]
        for node in lookups:
            _replace(model.graph, node)
        return len(lookups)


def is_lookup(node: ir.Node) -> bool:
    """Whether a node looks the step's tokens up in a float table."""
    if node.domain != "" or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    table, ids = constant_of(node.inputs[0]), node.inputs[1]
    if table is None or len(table.shape) != 2 or table.dtype != _FLOAT:
        return False
    while ids is not None and (producer := ids.producer()) is not None and producer.op_type in _ID_STEPS:
        ids = producer.inputs[0]
    return ids is not None and ids.is_graph_input() and ids.name == INPUT_IDS.name


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    table, ids = node.inputs[0], node.inputs[1]
    tensor = constant_of(table)
    assert tensor is not None  # noqa: S101 - a lookup
    num_tokens, width = sizes_of(tensor)
    emit, old = Emitter(graph), node.outputs[0]
    shape = None if old.shape is None else list(old.shape)
    rows = None if shape is None else [*shape[:-1], 1]
    name = int8_name(str(tensor.name))
    head = graph.initializers.get(name)
    scales = graph.initializers.get(f"{name}_scale")
    tied = head is not None and scales is not None and list(head.shape or ()) == [width, num_tokens]
    if tied and ids is not None and ids.shape is not None:
        columns = emit.op("Gather", head, ids, axis=1)  # [H, …]
        found = emit.op("Transpose", columns, shape=shape, perm=[*range(1, len(ids.shape) + 1), 0])
    else:
        made = Together(partial(quantized_rows, tensor))
        head = lazy_weight(graph, f"{name}_rows", ir.DataType.INT8, [num_tokens, width], partial(made.part, 0))
        scales = lazy_weight(graph, f"{name}_rows_scale", _FLOAT, [num_tokens], partial(made.part, 1))
        found = emit.op("Gather", head, ids, shape=shape, axis=0)
    found = emit.op("Cast", found, dtype=_FLOAT, shape=shape, to=_FLOAT)
    scale = emit.op("Unsqueeze", emit.op("Gather", scales, ids, axis=0), emit.const([-1]), shape=rows)
    emit.replace(node, [emit.op("Mul", found, scale, shape=shape)])
