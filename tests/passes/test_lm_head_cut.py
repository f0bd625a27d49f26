"""A cut LM head gives the kept tokens' logits of the whole one, and nothing else of the graph changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.passes.lm_head_cut import LmHeadCutPass
from specexport.passes.pipeline import default_passes, run_passes
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_models import VOCAB, make_llama
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import Engine

IDS = np.array([0, 1, 2, 5, 17, 90, 91, 200, 318, 319], np.int32)
PROMPT = [[3, 250, 17, 9], [6, 8]]


def logits_of(model: Any, folder: Path, **changes: Any) -> tuple[np.ndarray, dict[str, int], ir.Model]:
    """Logits of one step, what each pass changed, and the graph after the passes."""
    from specexport.backends.ort import write_onnx
    from tests.support.references.lowered import lower_ort_cpu

    traced = trace_of(model)
    report = dict(run_passes(traced.ir_model, default_passes("float32", own_operators=True, **changes)))
    passed = traced.ir_model.clone()
    lower_ort_cpu(traced.ir_model)
    write_onnx(traced.ir_model, folder)
    return Engine(folder, traced.layers, num_rows=2, capacity=8).step(PROMPT, [0, 0]), report, passed


# Tied (with a scale after the head), tied, untied; with a bias; with a softcap.
@pytest.mark.parametrize(("name", "changed"), [("cohere2", 1), ("llama_tied", 1), ("llama", 1), ("phi", 2)])
def test_the_logits_are_those_of_the_kept_tokens(name: str, changed: int, tmp_path: Path) -> None:
    check(tiny_model(name), changed, tmp_path)


def test_a_softcap_stays_behind_the_head(tmp_path: Path) -> None:
    check(tiny_model("gemma2"), 1, tmp_path)  # without the cap the logits would be others


def check(model: Any, changed: int, folder: Path) -> None:
    whole, _, _ = logits_of(model, folder / "whole")
    cut, report, graph = logits_of(model, folder / "cut", head_ids=IDS)
    assert report["lm-head-cut"] == changed
    assert cut.shape == (6, len(IDS))
    np.testing.assert_array_equal(cut, whole[:, IDS])
    assert np.abs(cut - whole[:, IDS + 1 - 2 * (IDS == VOCAB - 1)]).max() > 1e-2, "any rows would pass"
    heights = [node.attributes["N"].as_int() for node in graph.graph if "N" in node.attributes]
    assert heights.count(VOCAB) == 1, "the embedding stays whole, and the whole head is gone"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_head_is_quantized_after_it_is_cut(quantize: str, tmp_path: Path) -> None:
    """A row of the head is quantized by itself: what stays is the same to the last bit."""
    model = make_llama(tie_word_embeddings=True)
    whole, all_of_it, _ = logits_of(model, tmp_path / "whole", quantize=quantize)
    cut, report, _ = logits_of(model, tmp_path / "cut", quantize=quantize, head_ids=IDS)
    assert report[f"{quantize}-quantize"] == all_of_it[f"{quantize}-quantize"]
    np.testing.assert_array_equal(cut, whole[:, IDS])


def test_logits_that_no_linear_layer_gives_are_refused(traced: Callable[[str], ir.Model]) -> None:
    model = traced("llama")
    logits = next(value for value in model.graph.outputs if value.name == LOGITS.name)
    softmax = ir.Node("", "Softmax", [logits], num_outputs=1)
    model.graph.append(softmax)
    model.graph.outputs[model.graph.outputs.index(logits)] = softmax.outputs[0]
    logits.name, softmax.outputs[0].name = "raw", LOGITS.name
    with pytest.raises(UnsupportedModelError, match="LM head cannot be cut"):
        LmHeadCutPass(IDS)(model)
