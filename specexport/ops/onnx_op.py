"""The ONNX form of ``UnpaddedAttention``: its schema, and the exporter's translation from the torch op.

Imports onnx and onnxscript inside the functions.
"""

import inspect
from collections.abc import Callable
from typing import Any

from specexport.ops.spec import UNPADDED_ATTENTION, OpSpec

_TYPES = {
    "model": (["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "dtype of the model"),
    "float32": (["tensor(float)"], "states"),
    "int32": (["tensor(int32)"], "lengths"),
    "int64": (["tensor(int64)"], "indices"),
}
_KINDS = {"int": int, "float": float}


def build_schema(spec: OpSpec = UNPADDED_ATTENTION) -> Any:
    """The operator's ``onnx.defs.OpSchema``."""
    import onnx

    schema = onnx.defs.OpSchema
    option = schema.FormalParameterOption

    def parameter(item: Any) -> Any:
        kind = option.Optional if item.optional else option.Single
        return schema.FormalParameter(item.name, item.dtype, param_option=kind)

    def attribute(item: Any) -> Any:
        if item.default is None:
            return schema.Attribute(item.name, getattr(schema.AttrType, item.kind.upper()))
        return schema.Attribute(item.name, onnx.helper.make_attribute(item.name, item.default))

    used = {item.dtype for item in (*spec.inputs, *spec.outputs)}
    return schema(
        spec.name,
        spec.domain,
        spec.version,
        inputs=[parameter(item) for item in spec.inputs],
        outputs=[parameter(item) for item in spec.outputs],
        type_constraints=[(kind, *_TYPES[kind]) for kind in _TYPES if kind in used],
        attributes=[attribute(item) for item in spec.attributes],
    )


def register_schema(spec: OpSpec = UNPADDED_ATTENTION) -> None:
    """Register the schema with onnx, once: without it the exporter does not know that the op has three outputs."""
    import onnx

    if not onnx.defs.has(spec.name, spec.domain):
        onnx.defs.register_schema(build_schema(spec))


def build_translation(spec: OpSpec = UNPADDED_ATTENTION) -> Callable[..., Any]:
    """A function with the torch op's arguments that emits the ONNX node, for ``custom_translation_table``.

    The exporter reads the function's signature: annotated parameters become attributes, the others inputs.
    """
    from onnxscript import values

    opset = values.Opset(spec.domain, spec.version)

    def translate(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(spec.argument_names, arguments, strict=False)) | named
        inputs = [given.get(item.name) for item in spec.inputs]
        return getattr(opset, spec.name)(*inputs, **{item.name: given[item.name] for item in spec.attributes})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(item.name, kind) for item in spec.inputs]
    parameters += [inspect.Parameter(item.name, kind, annotation=_KINDS[item.kind]) for item in spec.attributes]
    signature: Any = inspect.Signature(parameters)
    translate.__signature__ = signature  # type: ignore[attr-defined]
    translate.__annotations__ = {item.name: _KINDS[item.kind] for item in spec.attributes}
    return translate
