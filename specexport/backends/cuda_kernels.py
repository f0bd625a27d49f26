"""Which CUDA kernels ONNX Runtime has, by a table that ``tools/cuda_kernels.py`` reads out of its wheel."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

TABLE = Path(__file__).with_name("cuda_kernels.txt")


class Kernels(NamedTuple):
    """An operator's kernels for a range of versions; ``last`` is 0 where the range has no end."""

    first: int
    last: int
    types: dict[str, list[str]]  # that a type parameter may be, of those that could be read


class OperatorSignature(NamedTuple):
    """The version of an operator that an opset means, and the type parameters of its inputs and outputs."""

    since: int
    inputs: list[str]
    outputs: list[str]


def check_kernels(ir_model: "ir.Model") -> None:
    """Refuse a graph with an operator that has no CUDA kernel for its types: UnsupportedModelError names both."""
    missing = ", ".join(sorted(set(find_missing_kernels(ir_model))))
    if missing:
        hint = (
            "build with another dtype, or for backend ort-cpu." if " of " in missing else "build for backend ort-cpu."
        )
        raise UnsupportedModelError(f"onnxruntime-gpu has no CUDA kernel for {missing}.", hint)


def find_missing_kernels(ir_model: "ir.Model") -> Iterator[str]:
    """Operators without a CUDA kernel, with the opset's version, or the types that its kernels do not take."""
    for node in ir_model.graph.all_nodes():
        since, inputs, outputs = _signature(node.op_type, node.domain, ir_model.opset_imports[node.domain])
        # As ONNX Runtime decides: a kernel without a last version is for the version alone that it begins with.
        found = [
            types
            for first, last, types in _load_kernels().get(f"{node.domain}:{node.op_type}", [])
            if since == first or first <= since <= last
        ]
        values = zip(
            (*_repeat_last(inputs, node.inputs), *_repeat_last(outputs, node.outputs)),
            (*node.inputs, *node.outputs),
            strict=True,
        )
        given = {(name, v.dtype.numpy().name) for name, v in values if v is not None and v.dtype is not None}
        refused = [{dtype for name, dtype in given if dtype not in types.get(name, [dtype])} for types in found]
        if all(refused):
            wrong = min(refused, key=len, default=set())
            what = f"{node.domain or 'ai.onnx'}.{node.op_type} ({since})"
            yield f"{what} of {', '.join(sorted(wrong))}" if wrong else what


def _repeat_last(names: list[str], values: Sequence[object]) -> list[str]:
    """A type parameter for each value; the last one is repeated."""
    return (names + (names[-1:] or [""]) * len(values))[: len(values)]


@cache
def _load_kernels() -> dict[str, list[Kernels]]:
    found: dict[str, list[Kernels]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        name, versions, *given = line.split(" ")
        first, last = versions.split("-")
        types = {parameter: names.split(",") for parameter, names in (each.split("=") for each in given)}
        found.setdefault(name, []).append(Kernels(int(first), int(last or 0), types))
    return found


@cache
def _signature(operator: str, domain: str, opset: int) -> OperatorSignature:
    """Of an operator of ONNX, or of ONNX Runtime, whose operators are all of version 1; others have no parameters."""
    import onnx

    if onnx.defs.has(operator, domain=domain):
        schema = onnx.defs.get_schema(operator, opset, domain)
        values = (schema.inputs, schema.outputs)
        return OperatorSignature(schema.since_version, *([each.type_str for each in some] for some in values))
    return OperatorSignature(1, *_runtime_parameters().get((domain, operator), ([], [])))


@cache
def _runtime_parameters() -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """Type parameters of inputs and outputs of ONNX Runtime's operators, by domain and name."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return {
        (schema.domain, schema.name): ([v.typeStr for v in schema.inputs], [v.typeStr for v in schema.outputs])
        for schema in state.get_all_operator_schema()
    }
