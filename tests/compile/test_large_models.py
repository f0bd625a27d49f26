"""Models that do not fit into memory: built from their files a weight at a time, and checked a part at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specexport.backends.ort import DATA_NAME
from specexport.compile import check, check_parts, part
from specexport.compile import model as build_model
from specexport.compile.check import build_check_sequences, build_text_sequences, check_engine
from specexport.compile.pipeline import BuildResult, build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckFailedError
from tests.support.models.pairs import TinyPair, own_logits
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_llama, make_model, save_checkpoint

WIDE = GROUPED | {"hidden_size": 256, "intermediate_size": 256}


def write_kept(folder: Path) -> Path:
    write_gguf(make_model("Qwen2", WIDE), folder / "tiny.gguf", kinds={"": "Q4_K"})
    return folder / "tiny.gguf"


def build(recipe: BuildRecipe, *, stream: bool) -> BuildResult:
    load = build_model.load_source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_model, "load_source", lambda recipe, source, **_: load(recipe, source, stream=stream))
        return build_bundle(recipe, use_cache=False)


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    "values",
    [
        {}, {"quantize": "int8"}, {"quantize": "int4", "fuse": False}, {"quantize": "int8", "draft_vocab_size": 200},
        {"quantize": "keep"},
    ],
    ids=lambda values: "-".join(map(str, values.values())) or "float32",
)  # fmt: skip
def test_weights_from_files_make_the_same_engine(values: dict[str, Any], tmp_path: Path, tiny_pair: TinyPair) -> None:
    given: dict[str, Any] = {"draft": None} | values
    if "draft_vocab_size" in values:
        del given["draft"]
    if "keep" in values.values():
        given["target"] = str(write_kept(tmp_path))
    results = [build(tiny_pair.recipe(tmp_path / str(stream), **given), stream=stream) for stream in (True, False)]
    data = [{name: file.sha256 for name, file in result.files.items() if "data" in name} for result in results]
    assert data[0] == data[1]
    assert data[0]


def test_a_checkpoint_that_changes_while_it_is_built_leaves_nothing(tmp_path, run_cli, monkeypatch):
    folder = save_checkpoint(make_llama(3), tmp_path / "changing")
    weights = folder / "model.safetensors"
    compile_model = part.compile_graph

    def change_and_compile(*args: Any, **named: Any) -> Any:
        weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
        return compile_model(*args, **named)

    monkeypatch.setattr(part, "compile_graph", change_and_compile)
    result = run_cli("build", folder, "-o", tmp_path / "out", "--no-cache")
    assert result.exit_code == 2
    assert "checkpoint changing changed while it was read (model.safetensors)." in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["changing"]


def make_parts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines count as large, and parts hold a layer or less."""
    monkeypatch.setattr(check_parts, "LARGE_BYTES", 0)
    monkeypatch.setattr(check_parts, "PART_BYTES", 20_000)


def sequences_of(bundle: Path, entry: ModelEntry) -> list[np.ndarray]:
    if entry.quantize is None:
        return build_check_sequences(entry.vocab_size)
    return build_text_sequences((bundle / "tokenizer.json").read_bytes(), entry.vocab_size, entry.max_positions)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "keep"])
@pytest.mark.parametrize("unpad_kv", [True, False])
def test_parts_compute_what_the_whole_engine_does(quantize, unpad_kv, tmp_path, tiny_pair, monkeypatch):
    bundle = tmp_path / "bundle"
    if quantize == "keep":  # scales are made of other constants: each part must have what its own are made of
        build_bundle(BuildRecipe(str(write_kept(tmp_path)), str(bundle)))
    else:
        build_bundle(tiny_pair.recipe(bundle, draft=None, quantize=quantize))
    entry = load_manifest(bundle).models["target"]
    sequences = sequences_of(bundle, entry)
    wanted = check.run_engine(bundle, entry, sequences, unpad_kv=unpad_kv, full=True)
    opened = []
    split = check_parts.split_graph
    monkeypatch.setattr(check_parts, "split_graph", lambda path: (opened.append(each) or each for each in split(path)))
    make_parts_small(monkeypatch)
    before = sorted(bundle.rglob("*"))
    found = check.run_engine(bundle, entry, sequences, unpad_kv=unpad_kv, full=True)
    assert sorted(bundle.rglob("*")) == before
    assert len(opened) > 3
    sizes = [sum(value.const_value.nbytes for value in each.model.graph.initializers.values()) for each in opened]
    assert max(sizes) < 0.6 * sum(sizes)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[:2] == theirs[:2]
        assert [place for place, _ in ours[2]] == [place for place, _ in theirs[2]]
        np.testing.assert_array_equal(*([row for _, row in rows] for *_, rows in (ours, theirs)))


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_damaged_weight_is_found_in_parts_too(quantize, tmp_path, tiny_pair, monkeypatch):
    make_parts_small(monkeypatch)
    bundle = tmp_path / "bundle"
    result = build_bundle(tiny_pair.recipe(bundle, draft=None, quantize=quantize), use_cache=False)
    assert result.checks["target"] is not None
    entry = load_manifest(bundle).models["target"]
    sequences = sequences_of(bundle, entry)
    references = own_logits(bundle, entry, sequences)
    check_engine(bundle, entry, sequences, references)
    data = bundle / "target" / DATA_NAME
    graph = onnx.load(bundle / "target" / "model.onnx", load_external_data=False).graph
    places = [
        {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        for tensor in graph.initializer
        if "down" in tensor.name
    ]
    place = max(places, key=lambda place: place.get("length", 0))
    content = bytearray(data.read_bytes())
    middle = place["offset"] + place["length"] // 2
    content[middle : middle + 1024] = bytes(1024)
    data.write_bytes(content)
    with pytest.raises(CheckFailedError, match=r"differs from|too far from"):
        check_engine(bundle, entry, sequences, references)
