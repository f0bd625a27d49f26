"""Tiny graphs with quantized weights, and how far their logits are from the float ones."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specexport.passes.pipeline import default_passes, run_passes
from tests.support.models.tiny_models import make_llama
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine


def add_weight(model: ir.Model, name: str, data: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(data, name=name))
    value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(data.dtype)), ir.Shape(data.shape)
    model.graph.initializers[name] = value
    return value


def products(**sizes: tuple[int, int]) -> ir.Model:
    """A graph of one matrix product [T, K] x [K, N] for each name of a weight and its (K, N)."""
    inputs = ", ".join(f"float[T, {depth}] {name}_in" for name, (depth, _) in sizes.items())
    outputs = ", ".join(f"float[T, {width}] {name}_out" for name, (_, width) in sizes.items())
    nodes = " ".join(f"{name}_out = MatMul ({name}_in, {name})" for name in sizes)
    random = np.random.default_rng(0)
    weights = [ir.tensor(random.normal(size=size).astype(np.float32), name=name) for name, size in sizes.items()]
    text = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    return ir.from_onnx_text(text, initializers=weights)


def rounded_model(rounding: Callable[[np.ndarray], np.ndarray], depths: Sequence[int] = (64, 96)) -> Any:
    """The tiny Llama with each linear weight [N, K] of these depths K as ``rounding`` makes it."""
    model = deepcopy(tiny_model("llama"))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features in depths:
            found = rounding(module.weight.detach().numpy())
            module.weight = torch.nn.Parameter(torch.tensor(found), requires_grad=False)
    return model


PROMPTS = [[3, 4, 5, 9, 11, 7], [6, 8, 2]]
VERIFY = [[7, 12, 13, 250, 300], [8, 9]]


def build(name: str, folder: Path, quantize: str | None, **changes: Any) -> tuple[Any, Any, dict[str, int]]:
    """Compile an architecture; returns the graph after the passes, its layers and what each pass changed."""
    from specexport.backends.ort import write_onnx
    from tests.support.references.lowered import lower_ort_cpu

    traced = trace_of(tiny_model(name))
    report = dict(
        run_passes(traced.ir_model, default_passes("float32", quantize=quantize, **({"own_operators": True} | changes)))
    )
    passed = traced.ir_model.clone()
    lower_ort_cpu(traced.ir_model)
    write_onnx(traced.ir_model, folder)
    return passed, traced.layers, report


def verify_logits(folder: Path, layers: Any, rows: Sequence[int]) -> np.ndarray:
    """Logits of a verify step of these sequences, after a prefill of each alone."""
    engine = Engine(folder, layers, num_rows=len(rows), capacity=24)
    for at, row in enumerate(rows):
        engine.step([PROMPTS[row]], [0], first_row=at)
    return engine.step([VERIFY[row] for row in rows], [len(PROMPTS[row]) for row in rows])


def worst_row(found: np.ndarray, reference: np.ndarray) -> float:
    return float((np.linalg.norm(found - reference, axis=1) / np.linalg.norm(reference, axis=1)).max())


MAKERS = {"llama_tied": lambda: make_llama(tie_word_embeddings=True)}
"""What has its name from an architecture, and less than it: no biases."""
