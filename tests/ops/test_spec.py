"""One declaration, and every form of the op in its order."""

import inspect

import pytest

from specexport.ops import UNPADDED_ATTENTION as SPEC
from specexport.ops.onnx_op import build_schema, build_translation


def test_torch_op_takes_the_declared_arguments_in_the_declared_order() -> None:
    import torch

    from specexport.ops import torch_ops

    schema = torch.ops.specexport.unpadded_attention.default._schema
    assert tuple(argument.name for argument in schema.arguments) == SPEC.argument_names
    assert tuple(inspect.signature(torch_ops._unpadded_attention).parameters) == SPEC.argument_names
    assert tuple(inspect.signature(build_translation()).parameters) == SPEC.argument_names
    assert len(schema.returns) == len(SPEC.outputs)


def test_onnx_schema_follows_the_declaration() -> None:
    schema = build_schema()
    assert [item.name for item in schema.inputs] == [item.name for item in SPEC.inputs]
    assert [item.name for item in schema.outputs] == [item.name for item in SPEC.outputs]
    assert set(schema.attributes) == {item.name for item in SPEC.attributes}
    assert {name for name, attribute in schema.attributes.items() if attribute.required} == {
        item.name for item in SPEC.attributes if item.default is None
    }


@pytest.mark.parametrize("sinks", [False, True])
def test_fake_op_has_the_shapes_of_the_real_one(sinks: bool) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from specexport.ops.torch_ops import unpadded_attention

    def arguments() -> list[object]:
        shapes = [(3, 4 * 8), (3, 2 * 8), (3, 2 * 6), (1, 1, 2, 5, 8), (1, 1, 2, 5, 6)]
        step = [torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)]
        ends = [torch.zeros(1, 1).long(), torch.full((1, 1), 3), torch.zeros(1, 1, dtype=torch.int32)]
        rest = [*ends, torch.zeros(1, 1, 3).long(), torch.zeros(3).long()]
        floats = [torch.randn(shape) for shape in shapes]
        return [*floats, *step, *rest, torch.zeros(4) if sinks else None, None, 4, 2, 1.0, -1, 0.0, 1]

    real = unpadded_attention(*arguments())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = unpadded_attention(*arguments())
    assert (
        [tuple(x.shape) for x in fake] == [tuple(x.shape) for x in real] == [(3, 24), (1, 1, 2, 5, 8), (1, 1, 2, 5, 6)]
    )
