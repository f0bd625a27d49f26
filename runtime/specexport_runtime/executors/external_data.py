"""Where a graph's weights lie, read and changed in its file without the onnx package.

ONNX Runtime refuses weights that lie outside the folder of their graph once links are resolved, and the hub's cache,
Nix and others keep each file as a link to somewhere else. The graph is then given in memory, with other names for its
weights, so that ONNX Runtime maps the files that the links lead to: nothing is copied. ``bundle.opened`` has checked
which links there are. Imports protobuf, which onnxruntime needs itself, when a graph is read.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.files import native_path
from specexport_runtime.bundle.opened import WEIGHTS

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""Where ONNX Runtime looks for the weights of a graph in memory."""
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


def read_session_model(path: Path, options: Any) -> str | bytes:
    """What an ``InferenceSession`` is made of: the graph's path, or its bytes where its weights are links elsewhere."""
    if all(file.resolve().parent == path.parent.resolve() for file in path.parent.glob(WEIGHTS)):
        return native_path(path)
    model = read_model(path)
    options.add_session_config_entry(FOLDER_KEY, native_path(follow_links(model, path.parent)))
    data: bytes = model.SerializeToString()
    return data


def follow_links(model: Any, folder: Path) -> Path:
    """Name a graph's weights after the files that the links in ``folder`` lead to; gives the root of these names."""
    files = {file.name: file.resolve() for file in folder.glob(WEIGHTS)}
    root = Path(os.path.commonpath([file.parent for file in files.values()])) if files else folder
    for entry in external_entries(model.graph):
        if entry.key == "location":
            if entry.value not in files:
                raise ValueError(f"weights in {entry.value!r}, which is no file of weights beside the graph")
            place = files[entry.value].relative_to(root)
            entry.value = native_path(place).replace(os.sep, "/")
    return root


def external_entries(graph: Any) -> Iterator[Any]:
    """What a graph says of external data, those of its subgraphs included."""
    for tensor in graph.initializer:
        yield from tensor.external_data
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from external_entries(attribute.g)


def read_model(path: Path) -> Any:
    """A graph's file as a protobuf message that knows :data:`_FIELDS`; ValueError if it is no such message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    schema = descriptor_pb2.FileDescriptorProto(name="external_data.proto", package="specexport", syntax="proto2")
    for name, fields in _FIELDS.items():
        entry = schema.message_type.add(name=name)
        for field_name, number, kind, repeats in fields:
            entry.field.add(
                name=field_name,
                number=number,
                type=field.TYPE_STRING if kind is None else field.TYPE_MESSAGE,
                type_name=None if kind is None else f".specexport.{kind}",
                label=field.LABEL_REPEATED if repeats else field.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("specexport.Model"))
    try:
        return kind.FromString(path.read_bytes())
    except message.DecodeError as error:
        raise ValueError(str(error)) from error
