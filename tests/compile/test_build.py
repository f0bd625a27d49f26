import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.checkpoint.load import load_checkpoint, round_weights
from specexport.compare import logit_scale
from specexport.compile import check
from specexport.compile.built import EngineCheck
from specexport.compile.cache import EngineCache
from specexport.compile.check import build_check_sequences, check_engine
from specexport.compile.part import STAGES
from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe
from specexport.progress import ProgressEvent
from specexport.rounding import LogitTolerance
from specexport.verify.checkpoint import EagerModel, eager_references, recorded_rounding
from specexport_runtime.bundle.entry import Gates
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckFailedError, CheckpointError, OutputExistsError
from specexport_runtime.packing.batch import ModelRunner
from tests.support.cases.refusals import Refuse, RunCli
from tests.support.models.pairs import TinyPair, own_logits
from tests.support.models.tiny_models import VOCAB, make_llama, save_checkpoint

NUM_TOKENS = 3 + 256  # of the tiny tokenizer: special tokens and bytes


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def states(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


def entries(cache: EngineCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def test_a_bundle_says_what_it_is_and_names_no_machine_path(tiny_pair, tiny_bundle, run_cli):
    manifest = load_manifest(tiny_bundle)
    check_files(tiny_bundle, manifest.files)
    assert list(manifest.models) == ["draft", "target"]
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert (target.vocab_size, draft.vocab_size) == (VOCAB, 300)
    assert (len(target.attention.layers), len(draft.attention.layers)) == (2, 1)
    assert (target.source.architecture, target.source.name, target.dtype) == ("LlamaForCausalLM", "target", "float32")
    assert (target.max_positions, manifest.max_model_len, manifest.lookahead) == (256, 256, 8)
    assert manifest.vocabulary.size == NUM_TOKENS, "padding rows of the LM heads must not be drafted"
    assert (manifest.vocabulary.bos_token_id, manifest.vocabulary.eos_token_ids) == (1, (2,))
    assert manifest.recipe["dtype"] == "float32"
    assert target.engine.gates == draft.engine.gates == Gates(), "nobody asked for gates"
    assert manifest.tools["torch"]
    on_disk = {path.relative_to(tiny_bundle).as_posix() for path in tiny_bundle.rglob("*") if path.is_file()}
    assert on_disk == {*manifest.files, "manifest.json"}
    assert {"target/model.onnx", "draft/model.onnx", "tokenizer.json"} <= on_disk
    for role, entry in manifest.models.items():
        assert entry.engine.padded.path == f"{role}/model.padded.onnx"
        own = {*entry.engine.inputs, "positions", "kv_positions"} - {"layer_mask", "want_similarity", "parents"}
        assert set(entry.engine.padded.inputs) >= own
        assert manifest.files[entry.engine.padded.path].size < 100_000, "its weights are the engine's"
    for name in ("manifest.json", "target/model.onnx", "draft/model.onnx"):
        for path in (tiny_pair.target, tiny_bundle, Path(__file__).parents[2], Path.home()):
            if len(path.parts) > 2:  # "/root" may be part of a word
                assert str(path).encode() not in (tiny_bundle / name).read_bytes(), f"{name} names {path}"
    args = ["build", tiny_pair.target, "--draft", tiny_pair.draft, "-o", tiny_bundle, "--json"]
    data = json.loads(run_cli(*args).stdout)
    assert (data["bundle"], data["up_to_date"], data["build_key"]) == (str(tiny_bundle), True, manifest.build_key)
    assert data["files"]["target/model.onnx"] == (tiny_bundle / "target" / "model.onnx").stat().st_size
    assert data["seconds"]["plan"] > 0
    assert data["peak_memory_bytes"] > 10**7


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_weights_alone_are_rounded(tiny_pair: TinyPair, tmp_path: Path, dtype: str, kind: str) -> None:
    notes: list[str] = []
    recipe = tiny_pair.recipe(tmp_path / "a", draft=None, dtype=dtype)
    result = build_bundle(recipe, use_cache=False, progress=lambda event: notes.append(event.message))
    assert any(f"weights are rounded to {dtype}" in note for note in notes)
    assert "weights, rounded to " + dtype in "\n".join(describe(result.manifest))
    entry = result.manifest.models["target"]
    assert (entry.dtype, entry.attention.cache_dtype, [name for name, *_ in entry.engine.weight_formats]) == (
        "float32",
        "float32",
        [kind],
    )
    ids = list(range(3, 40))
    found = own_logits(result.path, entry, [np.array(ids), np.array(ids)])[0]
    rounded = recorded_rounding(result.manifest, "target")
    errors = []
    for each in (rounded, None):
        (wanted,) = eager_references(EagerModel(str(tiny_pair.target), entry.dtype, rounded=each), [ids])
        errors.append(np.abs(found - wanted)[~np.isnan(found)].max() / logit_scale(wanted))
    assert errors[0] < 1e-5 < 1e-4 < errors[1]


def test_weights_too_large_for_float16_are_refused(tiny_pair: TinyPair) -> None:
    checkpoint = load_checkpoint(str(tiny_pair.target))
    checkpoint.model.model.norm.weight[2] = 1e5
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values that float16 cannot") as error:
        round_weights(checkpoint, "float16")
    assert "--dtype bfloat16" in error.value.hint


def test_a_target_has_gates_only_where_it_is_asked_to_draft_with_its_layers(
    tiny_bundle: Path, gated_bundle: Path, run_cli: RunCli, refuse_cli: Refuse
) -> None:
    plain, gated = (load_manifest(folder).models["target"] for folder in (tiny_bundle, gated_bundle))
    assert (len(plain.engine.gates.kinds), len(gated.engine.gates.kinds)) == (0, 4)
    assert dict(plain.engine.fused)["norm-fuse"] > 0, "without gates norms are joined with the additions before them"
    assert "norm-fuse" not in dict(gated.engine.fused)
    asked = ["generate", "one two", "--max-tokens", 4, "--drafter", "self"]
    assert "build it again with --self-draft" in refuse_cli(asked[0], tiny_bundle, *asked[1:])
    rules = ["--layer-period", 2, "--layer-keep-last", 0, "--layer-threshold", "off"]  # it has two layers
    assert run_cli(asked[0], gated_bundle, *asked[1:], *rules).exit_code == 0


def test_help_and_building_again_load_nothing_heavy(tiny_pair: TinyPair, tiny_bundle: Path) -> None:
    before = states(tiny_bundle)
    code = (
        "import sys\n"
        "from specexport.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not {'rich', 'tokenizers'} & set(sys.modules)\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'numpy.testing'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    args = ["build", tiny_pair.target, "--draft", tiny_pair.draft, "-o", tiny_bundle]
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is up to date" in done.stdout
    assert "nothing to do" in done.stdout
    assert states(tiny_bundle) == before


def test_another_recipe_takes_engines_from_the_cache_and_replaces_a_bundle_only_on_request(
    tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path
) -> None:
    out, events = tmp_path / "out", list[ProgressEvent]()
    result = build_bundle(tiny_pair.recipe(out, lookahead=3), progress=events.append)
    assert result.reused == ("target", "draft")
    assert not result.up_to_date
    assert result.manifest.lookahead == 3
    assert not any(event.stage in STAGES for event in events)
    assert events[-1].step == events[-1].num_steps
    check_files(out, load_manifest(out).files)
    first = load_manifest(tiny_bundle)
    assert result.manifest.files["target/model.onnx.data"] == first.files["target/model.onnx.data"]
    assert result.manifest.build_key != first.build_key
    assert result.max_abs_errors["target"] is not None
    before = states(out)
    with pytest.raises(OutputExistsError, match="lookahead is 3, asked for 4") as caught:
        build_bundle(tiny_pair.recipe(out, lookahead=4))
    assert "--force" in str(caught.value.hint)
    assert states(out) == before
    assert build_bundle(tiny_pair.recipe(out, lookahead=4), force=True).manifest == load_manifest(out)
    assert load_manifest(out).lookahead == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["target/model.onnx.data", "tokenizer.json", "manifest.json"])
def test_a_damaged_bundle_is_not_up_to_date(tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    recipe = tiny_pair.recipe(out)
    build_bundle(recipe)
    flip_byte(out / name)
    with pytest.raises(OutputExistsError):
        build_bundle(recipe)
    result = build_bundle(recipe, force=True)
    assert result.reused == ("target", "draft"), "an altered bundle must not damage the cache"
    check_files(out, load_manifest(out).files)


def test_changed_weights_are_another_engine_and_another_name_is_not(tiny_pair, tiny_bundle, tmp_path):
    shutil.copytree(tiny_pair.draft, tmp_path / "renamed")
    recipe = tiny_pair.recipe(tmp_path / "out", draft=str(tmp_path / "renamed"))
    same = build_bundle(recipe)
    assert same.reused == ("target", "draft")
    assert same.manifest.models["draft"].source.name == "renamed"
    flip_byte(tmp_path / "renamed" / "model.safetensors")
    result = build_bundle(recipe, force=True)
    assert result.reused == ("target",)
    first = load_manifest(tiny_bundle).models["draft"].source.sha256
    assert same.manifest.models["draft"].source.sha256 == first != result.manifest.models["draft"].source.sha256


def test_a_recipe_says_which_check_is_run(tiny_pair, tmp_path, run_cli):
    given = {None: "short", True: "short", False: "none", "full": "full", "none": "none"}
    for value, meant in given.items():
        assert tiny_pair.recipe(tmp_path, **({} if value is None else {"check": value})).check == meant
    for flags in (["--check", "long"], ["--recipe", str(tmp_path / "recipe.toml")]):
        (tmp_path / "recipe.toml").write_text("check = 3\n")
        result = run_cli("build", tiny_pair.target, "-o", tmp_path / "out", *flags)
        assert result.exit_code == 2
        assert "Fix: use one of: short, full, none." in result.stderr
    result = run_cli("build", tiny_pair.draft, "-o", tmp_path / "out", "--no-check", "--no-cache", "--json")
    assert json.loads(result.stdout)["checks"] == {"target": None}
    assert load_manifest(tmp_path / "out").recipe["check"] == "none"


def test_no_check_and_no_cache_leave_the_cache_alone(tiny_pair, tiny_bundle, tmp_path, monkeypatch):
    shutil.copytree(EngineCache().folder.parent, tmp_path / "cache")  # other workers write to the shared one
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    cache = EngineCache()
    before = entries(cache)
    recipe = tiny_pair.recipe(tmp_path / "out", target=str(tiny_pair.draft), draft=None, check=False)
    result = build_bundle(recipe, dump_passes=tmp_path / "dumps")
    assert result.max_abs_errors == {"target": None}
    assert list(result.manifest.models) == ["target"]
    assert not (tmp_path / "out" / "draft").exists()
    assert entries(cache) == before, "an engine that was not checked must not be kept"
    assert list((tmp_path / "dumps" / "target").iterdir()), "dumping passes builds anew"
    again = build_bundle(tiny_pair.recipe(tmp_path / "two", target=str(tiny_pair.draft), draft=None), use_cache=False)
    assert again.reused == ()
    assert entries(cache) == before
    assert again.manifest.files["target/model.onnx"] == result.manifest.files["target/model.onnx"], "reproducible"


@pytest.mark.parametrize("wrong", ["LlamaForCausalLM engine", "engine's padded-KV graph"])
def test_a_wrong_engine_fails_the_check_and_leaves_nothing(wrong, tiny_pair, tmp_path, monkeypatch):
    import onnx_ir as ir

    from specexport.backends import ort

    written = ort.write_padded_onnx

    def write(model: ir.Model, folder: Path) -> str:
        for node in model.graph:
            if node.op_type == "UnpaddedAttention":
                node.attributes["window"] = ir.AttrInt64("window", 3)
        return written(model, folder)

    if "padded" in wrong:
        monkeypatch.setattr(ort, "write_padded_onnx", write)
    else:
        monkeypatch.setattr(check, "logit_tolerance", lambda dtype, num_layers: LogitTolerance(0.0, 0.0))
    recipe = tiny_pair.recipe(tmp_path / "out", target=str(tiny_pair.draft), draft=None)
    with pytest.raises(CheckFailedError, match=f"{wrong} differs from eager transformers") as caught:
        build_bundle(recipe, use_cache=False)
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("sequence", "position", "wrong"), [(0, 0, 1.0), (0, 8, np.nan), (1, 2, np.nan), (1, 7, 1.0)])
def test_the_check_sees_every_position(tiny_bundle, full: bool, sequence: int, position: int, wrong: float) -> None:
    entry = load_manifest(tiny_bundle).models["draft"]
    sequences = build_check_sequences(entry.vocab_size)
    truth = own_logits(tiny_bundle, entry, sequences)
    assert check_engine(tiny_bundle, entry, sequences, truth, full=full).max_abs_error < 1e-5
    truth[sequence][position, 5] += np.float32(wrong)
    with pytest.raises(CheckFailedError, match=f"position {position} of check sequence {sequence}"):
        check_engine(tiny_bundle, entry, sequences, truth, full=full)


@pytest.mark.parametrize(
    ("role", "padded", "where"),
    [
        ("target", False, "LlamaForCausalLM engine, one token at a time,"),
        ("target", True, "engine's padded-KV graph, one token at a time,"),
        ("draft", False, "engine, one token at a time,"),
    ],
)
def test_the_full_check_sees_what_is_wrong_one_token_at_a_time_only(role, padded, where, tiny_bundle, monkeypatch):
    entry = load_manifest(tiny_bundle).models[role]
    sequences = build_check_sequences(entry.vocab_size)
    truth = own_logits(tiny_bundle, entry, sequences)
    right = ModelRunner.step

    def step(self, first_row, work, want="logits"):
        logits = right(self, first_row, work, want)
        narrow = all(len(row.tokens) == 1 for row in work) and self.unpad_kv != padded
        return logits + np.float32(0.1) * narrow

    monkeypatch.setattr(ModelRunner, "step", step)
    with pytest.raises(CheckFailedError, match=f"{where} differs from eager transformers by 0.1"):
        check_engine(tiny_bundle, entry, sequences, truth, full=True)
    check_engine(tiny_bundle, entry, sequences, truth)  # such steps are for ``--check full``


def test_a_recipe_file_builds_what_flags_build(tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path, run_cli) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'target = "{tiny_pair.target}"\ndraft = "{tiny_pair.draft}"\noutput = "out"\nlookahead = 5\n')
    result = run_cli("build", "--recipe", recipe, "--num-speculative-tokens", "6", "--name", "mine", "--json", "-q")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    manifest = load_manifest(tmp_path / "out")
    assert (manifest.lookahead, manifest.name) == (6, "mine")


@pytest.mark.one_of_kind
@pytest.mark.exports
@pytest.mark.parametrize("tied", [False, True])
def test_the_torch_weights_are_gone_before_the_check(tied, tiny_pair, tmp_path, monkeypatch):
    import torch

    addresses: set[int] = set()

    def load_and_note(*args: Any, **kwargs: Any) -> Any:
        checkpoint = load_checkpoint(*args, **kwargs)
        addresses.update(weight.data_ptr() for weight in checkpoint.model.parameters() if not weight.is_meta)
        assert addresses  # vectors are in memory, matrices in the checkpoint's files
        return checkpoint

    def no_weight_lives(*_args: object, full: bool) -> EngineCheck:
        assert not full
        kinds = (torch.Tensor, torch.nn.Parameter)
        alive = [tensor for tensor in gc.get_objects() if type(tensor) in kinds and tensor.data_ptr() in addresses]
        assert not alive, f"{len(alive)} weights are in memory beside the engine's"
        return EngineCheck(0.25)

    monkeypatch.setattr("specexport.checkpoint.load.load_checkpoint", load_and_note)
    monkeypatch.setattr("specexport.compile.model.check_engine", no_weight_lives)
    save_checkpoint(make_llama(2, num_hidden_layers=1, tie_word_embeddings=tied), tmp_path / "model")
    recipe = tiny_pair.recipe(tmp_path / "out", target=str(tmp_path / "model"), draft=None)
    assert build_bundle(recipe, use_cache=False).max_abs_errors == {"target": 0.25}
    assert addresses


def test_engines_that_were_measured_on_other_texts_are_not_reused(tiny_pair, tmp_path, monkeypatch):
    from specexport.compile import plan

    def keys(**values: str) -> Any:
        recipe = tiny_pair.recipe(tmp_path / "bundle", draft_quantize=None, draft_vocab_size=None, **values)
        return plan.make_plan(recipe).engine_keys

    before = keys(quantize="int4"), keys(), keys(quantize="int8")
    monkeypatch.setattr(plan, "read_counting_texts", lambda _: ("other texts",))
    after = keys(quantize="int4"), keys(), keys(quantize="int8")
    assert before[0]["target"] != after[0]["target"]
    assert before[0]["draft"] == after[0]["draft"], "it is not quantized"
    assert before[1:] == after[1:], "8 bits need no texts"
