"""Which CUDA kernels ONNX Runtime has, by a table that ``tools/cuda_kernels.py`` reads out of its wheel."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

TABLE = Path(__file__).with_name("cuda_kernels.txt")


def check_kernels(ir_model: "ir.Model") -> None:
    """Refuse a graph with an operator that has no CUDA kernel: UnsupportedModelError names it."""
    missing = sorted(set(missing_kernels(ir_model)))
    if missing:
        raise UnsupportedModelError(
            f"onnxruntime-gpu has no CUDA kernel for {', '.join(missing)}.", "build for backend ort-cpu."
        )


def missing_kernels(ir_model: "ir.Model") -> Iterator[str]:
    """Operators that ONNX Runtime has no CUDA kernel for, with the version that the graph's opset means."""
    for node in ir_model.graph.all_nodes():
        versions = _kernels().get(f"{node.domain}:{node.op_type}", [])
        since = _since(node.op_type, node.domain, ir_model.opset_imports[node.domain])
        # As ONNX Runtime decides: a kernel without a last version is for the version alone that it begins with.
        if not any(since == first or first <= since <= last for first, last in versions):
            yield f"{node.domain or 'ai.onnx'}.{node.op_type} ({since})"


@cache
def _kernels() -> dict[str, list[tuple[int, int]]]:
    """First and last versions of each operator's kernels; the last is 0 where there is none."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        name, versions, *_ = line.split(" ")
        first, last = versions.split("-")
        found.setdefault(name, []).append((int(first), int(last or 0)))
    return found


@cache
def _since(operator: str, domain: str, opset: int) -> int:
    """The version of an operator that an opset means; 1 for those that ONNX does not know."""
    import onnx

    known = onnx.defs.has(operator, domain=domain)
    return int(onnx.defs.get_schema(operator, opset, domain).since_version) if known else 1
