"""Packed weights at aligned places of their file, which ONNX Runtime leaves undone.

ONNX Runtime 1.31 puts what is longer than 1 MB at a page of the file, and anything shorter right behind what came
before. A packed ``MatMulNBits`` weight is codes, block sums and scales in one buffer; where each begins follows from
the *address* of the buffer, rounded up to 32 and 64 bytes, and its length is no multiple of those. So behind a packed
weight a short one begins at an odd address, and the kernel looks for its scales some bytes beside where they were
written: logits are wrong, most of them NaN. Nothing checks it.

Here such buffers are copied to an aligned place at the end of the file, and the graph is told. No setting of ONNX
Runtime does this. Imports protobuf, which onnxruntime needs itself, when a file is made.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

ALIGNMENT = 64
"""Bytes: how ONNX Runtime's own buffers are aligned, and the most that a kernel rounds an address up to."""
_PACKED_KEY = "prepacked"
_FIELDS: dict[str, list[tuple[str, int, str | None, bool]]] = {
    "Model": [("graph", 7, "Graph", False)],
    "Graph": [("node", 1, "Node", True), ("initializer", 5, "Tensor", True)],
    "Node": [("attribute", 5, "Attribute", True)],
    "Attribute": [("g", 6, "Graph", False)],
    "Tensor": [("external_data", 13, "Entry", True)],
    "Entry": [("key", 1, None, False), ("value", 2, None, False)],
}
"""Of ONNX's schema what leads to external data: field, number, message (None: a string), whether it repeats.

Parsing keeps what is not named here.
"""


def align_packed(graph: Path, data: Path) -> int:
    """Move the packed weights of an optimized graph that lie at odd addresses.

    Args:
        graph: the graph file that ONNX Runtime wrote.
        data: its file of weights, packed ones included.

    Returns:
        buffers that were moved.
    """
    model = _model_class().FromString(graph.read_bytes())
    moved = 0
    with data.open("r+b") as file:
        for entry in _packed_entries(model.graph):
            # key|offset;length;checksum|offset;length;checksum…, one for each buffer of the weight
            key, *buffers = entry.value.split("|")
            for i, buffer in enumerate(buffers):
                offset, length, checksum = buffer.split(";")
                if int(offset) % ALIGNMENT:
                    buffers[i] = f"{_copy_to_end(file, int(offset), int(length))};{length};{checksum}"
                    moved += 1
            entry.value = "|".join([key, *buffers])
    if moved:
        graph.write_bytes(model.SerializeToString())
    return moved


def _copy_to_end(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    content = file.read(length)
    if len(content) != length:
        raise ValueError(f"packed weights of {length} bytes at {offset} reach beyond the end of their file")
    end = -(-file.seek(0, 2) // ALIGNMENT) * ALIGNMENT
    file.seek(end)
    file.write(content)
    return end


def _packed_entries(graph: Any) -> Iterator[Any]:
    """External-data entries that name packed weights, those of subgraphs included."""
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith(_PACKED_KEY):
                yield entry
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _packed_entries(attribute.g)


def _model_class() -> Any:
    """A protobuf message class that reads and writes a model's :data:`_FIELDS`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    schema = descriptor_pb2.FileDescriptorProto(name="external_data.proto", package="specexport", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = schema.message_type.add(name=name)
        for field_name, number, kind, repeats in fields:
            message.field.add(
                name=field_name,
                number=number,
                type=field.TYPE_STRING if kind is None else field.TYPE_MESSAGE,
                type_name=None if kind is None else f".specexport.{kind}",
                label=field.LABEL_REPEATED if repeats else field.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("specexport.Model"))
