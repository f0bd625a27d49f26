"""Products beside layers: wherever a layer's inputs and outputs were multiplied, joined and gated before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.backends.ort import write_onnx
from specexport.checkpoint.lora import find_adapter
from specexport.checkpoint.lora_fit import low_ranks, read_adapter
from specexport.lowering.low_rank import expand_adapters
from specexport.passes.low_rank import MARK, LowRankMarkPass
from specexport.passes.pipeline import default_passes, run_passes
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_lora import ALL, apply_adapter, save_adapter
from tests.support.models.tiny_models import ARCHITECTURES, make_model
from tests.support.references.engine_harness import pack
from tests.support.references.lowered import lower_ort_cpu
from tests.support.references.sessions import session_of

TOKENS = [5, 9, 200, 31, 7, 310, 2]
SOME = ("q_proj", "v_proj", "up_proj")


def run(folder: Path, ids: list[int]) -> np.ndarray:
    session = session_of(folder / "model.onnx")
    feeds = pack([TOKENS], [0]) | {"adapter_ids": np.array(ids, np.int64)}
    caches = {
        value.name: np.zeros((1, 1, value.shape[2], 16, value.shape[4]), np.float32)
        for value in session.get_inputs()
        if "cache" in value.name
    }
    wanted = {value.name for value in session.get_inputs()}
    return session.run(["logits"], {name: array for name, array in (feeds | caches).items() if name in wanted})[0]


@pytest.mark.parametrize(
    ("name", "pack_layers"),
    [("llama", True), ("llama", False), ("llama_tied", True), ("gpt2", True), ("mixtral", True)],
)
def test_the_products_are_those_of_the_factors(name, pack_layers, traced, tmp_path):
    ir_model = traced(name)
    model = _model_of(name)
    targets = {"gpt2": ["c_attn", "c_proj"], "mixtral": ["q_proj", "o_proj"]}.get(name, ALL)
    some = {"gpt2": ["c_fc"], "mixtral": ["v_proj"]}.get(name, SOME)
    folders = [
        save_adapter(model, tmp_path / "a", targets=targets, seed=1),
        save_adapter(model, tmp_path / "b", targets=some, seed=2, r=2),
    ]
    adapters = [low_ranks(read_adapter(find_adapter(folder.name, str(folder)), model)) for folder in folders]
    report = dict(run_passes(ir_model, default_passes("float32", pack=pack_layers, adapters=adapters)))
    assert report["low-rank-mark"]
    lower_ort_cpu(ir_model)
    assert expand_adapters(ir_model, adapters) == report["low-rank-mark"]
    assert not any(node.op_type == MARK for node in ir_model.graph.all_nodes())
    write_onnx(ir_model, tmp_path / "engine")
    for number, folder in enumerate((None, *folders)):
        with torch.no_grad():
            changed = _model_of(name) if folder is None else apply_adapter(_model_of(name), folder)
            wanted = changed(torch.tensor([TOKENS])).logits[0].numpy()
        found = run(tmp_path / "engine", [number] * len(TOKENS))
        assert abs(found - wanted).max() < 1e-4 * max(1.0, abs(wanted).max()), number


def _model_of(name: str) -> Any:
    from tests.support.models.quantized import MAKERS

    return MAKERS[name]() if name in MAKERS else make_model(*ARCHITECTURES[name])


def test_a_layer_that_is_not_there_is_refused(traced: Callable[[str], Any], tmp_path: Path) -> None:
    model = _model_of("llama")
    folder = save_adapter(model, tmp_path / "a", targets=["lm_head"])
    adapter = low_ranks(read_adapter(find_adapter("a", str(folder)), model))
    passes = default_passes("float32", adapters=[adapter])
    with pytest.raises(UnsupportedModelError, match="lm_head is no layer that requests can choose an adapter for"):
        run_passes(traced("llama"), passes)


def test_nothing_is_marked_without_adapters(traced: Callable[[str], Any]) -> None:
    ir_model = traced("llama")
    assert LowRankMarkPass([]).rewrite(ir_model) == 0
    assert expand_adapters(ir_model, []) == 0
    assert "adapter_ids" not in {value.name for value in ir_model.graph.inputs}
