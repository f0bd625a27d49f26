"""Targets with features and draft heads as engines, really built by TensorRT-RTX: no GPU is needed for that."""

from pathlib import Path
from typing import Any

import pytest

from specexport.backends.trt import TrtPlan, write_trt_engines
from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe, list_contract_rows
from specexport.recipe import make_recipe
from specexport_runtime.abi import FEATURES, NEXT_FEATURES, TOKEN_FEATURES, WANT_FEATURES
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.models.gpu_heads import lower_trt, read_head, trace_own
from tests.support.models.tiny_dflash import DIALECTS as BLOCKS
from tests.support.models.tiny_heads import DIALECTS, HIDDEN, LAYER, tensors, write
from tests.support.models.tiny_models import make_llama, save_checkpoint

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")


@pytest.mark.whole
def test_a_bundle_with_a_head_has_engines_of_both(tmp_path: Path) -> None:
    layers_of_target = 2
    target = make_llama(seed=3, num_hidden_layers=layers_of_target, hidden_size=HIDDEN)
    write(tmp_path / "head", {**LAYER, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, tensors())
    values = {
        "target": str(save_checkpoint(target, tmp_path / "target")), "head": str(tmp_path / "head"), "check": False,
        "output": str(tmp_path / "b"), "backend": "tensorrt-rtx", "sm": ["89"], "lookahead": 3, "max_num_seqs": 2,
        "max_num_tokens": 16, "max_model_len": 60,
    }  # fmt: skip
    build_bundle(make_recipe(values), use_cache=False)
    manifest = load_manifest(tmp_path / "b")
    check_files(tmp_path / "b", manifest.files)
    given, head = manifest.models["target"], manifest.models["head"]
    assert given.engine.feature_size == head.engine.feature_size == HIDDEN
    assert WANT_FEATURES.name not in given.engine.inputs, "there is no gate: features are computed in every step"
    assert FEATURES in list_contract_rows(given)
    assert {TOKEN_FEATURES, NEXT_FEATURES} <= set(list_contract_rows(head))
    assert [profile.name for profile in head.engine.limits.profiles] == [
        "decode 1x1", "decode 2x1", "catch-up 1x4", "catch-up 2x4", "prefill 16, up to 2 rows",
    ]  # fmt: skip
    assert [profile.num_logit_rows for profile in head.engine.limits.profiles[:4]] == [1, 2, 1, 2], (
        "one row of logits each"
    )
    for entry, layers in ((given, layers_of_target), (head, 1)):
        (engine,) = entry.engine.files
        assert len(engine.report.aliased) == 2 * layers, "every cache is updated in place"
        for row in engine.report.profiles:
            assert (row.fused_attention, row.kv_copy_bytes, row.float32_matmuls) == (layers, 0, ())
    assert "catch-up 2x4" in "\n".join(describe(manifest))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "layers"),
    [(DIALECTS["medusa"], 0), (DIALECTS["peagle"], 2), (BLOCKS["sliding"], 3)],
    ids=["medusa", "peagle", "dflash"],
)
def test_engines_of_other_heads(make: Any, layers: int, target: Any, tmp_path: Path) -> None:
    """One profile for a draft in one step; attention that looks ahead is fused as the other is."""
    _, loaded = read_head(make, tmp_path / "head", target)
    lowered = lower_trt(trace_own(loaded, dtype="float16"), loaded.config, lookahead=3, folds=True)
    kinds = [profile.kind for profile in lowered.profiles]
    assert set(kinds) == {"draft", "prefill"}
    assert lowered.profiles[0].num_logit_rows == 3
    plan = TrtPlan("tensorrt-rtx", ("89",), lowered.profiles, lowered.layers, lowered.capacity, HIDDEN)
    (engine,) = write_trt_engines(lowered.ir_model, plan, tmp_path / "e", note=lambda _: None, names=lowered.inputs)
    report = engine.report
    assert len(report.aliased) == 2 * layers
    assert [row.fused_attention for row in report.profiles] == [layers] * len(kinds)
    assert [row.kv_copy_bytes for row in report.profiles] == [0] * len(kinds)
