"""A small draft's graph for steps of one token a row, in a bundle: which models get it, and that builds check it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from pairs import TinyPair, own_logits

from specexport.backends import ort_cpu as cpu_build
from specexport.build.check import check_engine, check_sequences
from specexport.build.pipeline import build_bundle
from specexport_runtime.bundle.manifest import ModelEntry, load_manifest
from specexport_runtime.errors import CheckFailedError


def test_only_the_draft_has_it_over_its_own_weights(tiny_bundle: Path) -> None:
    manifest = load_manifest(tiny_bundle)
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert (target.one_token_path, target.one_token_inputs) == (None, ())
    assert draft.one_token_path == "draft/model.one_token.onnx"
    # Its head size has no fused rotation, so that positions are read.
    assert draft.one_token_inputs == ("input_ids", "positions", "kv_lens", "row_totals")
    assert manifest.files[draft.one_token_path].size < 50_000, "its weights are the engine's"
    assert ModelEntry.from_json(json.loads(json.dumps(dataclasses.asdict(draft)))) == draft


@pytest.mark.parametrize("why", ["not fused", "not small"])
def test_others_do_not_have_it(why: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "not small":
        monkeypatch.setattr(cpu_build, "SMALL_DRAFT_PARAMETERS", 1000)
    build_bundle(tiny_pair.recipe(tmp_path / "bundle", fuse=why != "not fused", check=False), use_cache=False)
    draft = load_manifest(tmp_path / "bundle").models["draft"]
    assert draft.one_token_path is None
    assert not (tmp_path / "bundle" / "draft" / "model.one_token.onnx").exists()


@pytest.mark.parametrize("spoil", ["scale", "rows"])
def test_the_build_checks_it(spoil: str, tiny_bundle: Path, tmp_path: Path) -> None:
    import onnx

    entry = load_manifest(tiny_bundle).models["draft"]
    shutil.copytree(tiny_bundle / "draft", tmp_path / "draft")
    sequences = check_sequences(entry.vocab_size)
    references = own_logits(tmp_path, entry, sequences)
    assert check_engine(tmp_path, entry, sequences, references).max_abs_error < 1e-4
    path = tmp_path / str(entry.one_token_path)
    graph = onnx.load(path, load_external_data=False)
    for node in graph.graph.node:
        if node.op_type == "GroupQueryAttention" and spoil == "scale":
            next(item for item in node.attribute if item.name == "scale").f *= 1.5
        if node.op_type == "GroupQueryAttention" and spoil == "rows":
            node.input[5] = "row_totals"  # each row writes behind its place
    onnx.save(graph, path)
    with pytest.raises(CheckFailedError, match="one-token graph differs from eager"):
        check_engine(tmp_path, entry, sequences, references)
