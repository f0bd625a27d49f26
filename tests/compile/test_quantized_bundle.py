"""Bundles with weights or KV caches of few bits, end to end: built, checked, recorded, and as lossless as others."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.compile.check import (
    FULL_TEXT_LENS,
    TEXT_LENS,
    build_check_sequences,
    build_text_sequences,
    check_engine,
    compute_text_perplexity,
)
from specexport.compile.closeness import Closeness, measure_closeness
from specexport.compile.command import format_summary
from specexport.compile.pipeline import BuildResult, build_bundle
from specexport.inspect import describe, kv_bytes_per_token
from specexport.passes.block_format import _locate_panels, parse_layout
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.bundle.quant_kinds import KINDS
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.requests.layer_choice import LayerRules
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair, own_logits
from tests.support.models.tiny_models import ARCHITECTURES, make_model, save_checkpoint
from tests.support.references.drafted import check_text

PROMPTS = ["abc abc abc abc ab", "the cat sat on the mat, the cat sat on"]


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("name", "kind", "layers"), [("qwen3_moe", "none", 2), ("deepseek_v3", "int8", 1), ("gpt_oss", "int4", 2)]
)
def test_speculative_text_of_experts_is_plain_text(name, kind, layers, tmp_path, tiny_pair):
    (classes, config), gated = ARCHITECTURES[name], kind == "int8"
    checkpoint = save_checkpoint(make_model(classes, config), tmp_path / name)
    built = build_bundle(tiny_pair.recipe(tmp_path / "bundle", target=str(checkpoint), quantize=kind, self_draft=gated))
    experts = built.manifest.models["target"].parameters.experts
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    assert experts == (layers * 4 * 3 * config["hidden_size"] * width, config.get("num_experts_per_tok", 4), 4)
    ways: list[dict[str, Any]] = [{"drafter": "draft-model"}, {"drafter": "lookup"}]
    if gated:
        ways.append({"drafter": "self", "layer_rules": LayerRules(threshold=None, period=2, keep_last=None)})
    with closing(SpecEngine.load(tmp_path / "bundle", max_num_seqs=2, num_threads=1, spin=False)) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for way in ways:
            check_text(engine, PROMPTS, params, [None], **way)


INT4, INT8 = "group4_32_f16_zero", "int8"


class Weights:
    """The packed weights of an engine's graph and its subgraphs, to be damaged in place."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "model.onnx.data"
        graph = ir.load(folder / "model.onnx").graph
        nodes = [node for node in graph.all_nodes() if node.op_type == "BlockLinear"]
        self.found = {node.inputs[1].const_value: node.attributes for node in nodes}  # type: ignore[union-attr]

    def change(self, kind: str, change: Callable[[dict[str, np.ndarray]], None]) -> None:
        """Change ``codes``, ``scales`` and ``zeros`` of every panel of each weight of a format."""
        content = bytearray(self.data.read_bytes())
        changed = 0
        for tensor, told in self.found.items():
            if told["format"].as_string() != kind:
                continue
            start, (tiles, size) = int(tensor.offset), tensor.shape.numpy()
            packed = np.frombuffer(content, np.uint8, tiles * size, start).reshape(tiles, size)
            for _, inputs, at, arrays in _locate_panels(parse_layout(kind), told["K"].as_int()):
                parts = {"codes": packed[:, at : at + parse_layout(kind).bits * 64 * -(-inputs // 32)]}
                for name, (dtype, first, last, byte) in arrays.items():
                    parts[name] = packed[:, byte : byte + dtype.itemsize * (last - first) * 16].view(dtype)
                change(parts)
            changed += 1
        assert changed
        self.data.write_bytes(content)


def turned(name: str, by: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(parts: dict[str, np.ndarray]) -> None:
        parts[name][...] = np.roll(parts[name].reshape(-1), by).reshape(parts[name].shape)

    return change


def swap_codes(parts: dict[str, np.ndarray]) -> None:
    parts["codes"][...] = parts["codes"] >> 4 | parts["codes"] << 4


def leave_out_zeros(parts: dict[str, np.ndarray]) -> None:
    parts["zeros"][...] = 8


def enlarge_scales(parts: dict[str, np.ndarray]) -> None:
    parts["scales"][...] *= np.float16(1.5)


def exchange_scales(parts: dict[str, np.ndarray]) -> None:
    """The largest where the smallest was, and so on: neighbours are much alike in this model."""
    order = parts["scales"].argsort(axis=None)
    changed = np.empty_like(parts["scales"]).reshape(-1)
    changed[order] = parts["scales"].reshape(-1)[order[::-1]]
    parts["scales"][...] = changed.reshape(parts["scales"].shape)


def move_scales(parts: dict[str, np.ndarray]) -> None:
    parts["scales"].view(np.uint8)[...] = np.roll(parts["scales"].view(np.uint8), 1, axis=1)


def spoil_a_scale(parts: dict[str, np.ndarray]) -> None:
    parts["scales"][0, 0] = np.nan


INT4_DAMAGE = {
    "codes in the other order": (INT4, swap_codes), "zero points left out": (INT4, leave_out_zeros),
    "zero points of another block": (INT4, turned("zeros", 16)), "scales beside their place": (INT4, move_scales),
    "scales of other columns": (INT4, exchange_scales), "a scale that is no number": (INT4, spoil_a_scale),
}  # fmt: skip
INT8_DAMAGE = {
    "scales beside their place": (INT8, turned("scales", 1)),
    "scales half again as large": (INT8, enlarge_scales),
    "weights of other columns": (INT8, turned("codes", 4)),
}
DAMAGE = [("int4", *item) for item in INT4_DAMAGE.items()] + [("int8", *item) for item in INT8_DAMAGE.items()]


@pytest.fixture(scope="module")
def quantized(session_dir: Path, demo_pair: Path) -> Callable[[str], tuple[BuildResult, list[np.ndarray]]]:
    """Builds the demo target, int8 or int4, with the check on; once for this module."""
    made: dict[str, tuple[BuildResult, list[np.ndarray]]] = {}

    def build(kind: str) -> tuple[BuildResult, list[np.ndarray]]:
        if kind not in made:
            from specexport.checkpoint.load import load_checkpoint
            from specexport.trace.check import compute_reference_logits

            folder = session_dir / f"demo-{kind}-checked"
            recipe = BuildRecipe(target=str(demo_pair / "target"), output=str(folder), quantize=kind)
            result = build_bundle(recipe, force=True)
            checkpoint = load_checkpoint(str(demo_pair / "target"), dtype="float32")
            sequences = build_text_sequences(checkpoint.tokenizer_json, checkpoint.vocab_size, full=True)
            assert [len(ids) for ids in sequences] == list(FULL_TEXT_LENS)
            made[kind] = result, compute_reference_logits(checkpoint, [ids.tolist() for ids in sequences])
        return made[kind]

    return build


def cut_to(references: list[np.ndarray], sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The logits of the first tokens: attention is causal."""
    return [logits[: len(ids)] for logits, ids in zip(references, sequences, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most_lost"), [("int8", 0.002), pytest.param("int4", 0.03, marks=pytest.mark.whole)])
def test_a_good_engine_is_close(kind, most_lost, quantized):
    result, _ = quantized(kind)
    check = result.checks["target"]
    assert check is not None
    assert check.agreement is None or check.agreement >= (1.0 if kind == "int8" else 0.95)
    assert check.lost is not None
    assert 0 < check.lost < most_lost, "far inside the limits, which are made for worse models"
    assert check.divergence is not None
    assert 0 < check.divergence < 5 * most_lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "damage"),
    [
        pytest.param(*each, marks=[pytest.mark.whole] if each[0] == "int4" else [], id=f"{each[0]}-{each[1]}")
        for each in DAMAGE
    ],
)
def test_a_broken_engine_fails(kind, name, damage, quantized, tmp_path):
    result, references = quantized(kind)
    entry = result.manifest.models["target"]
    shutil.copytree(result.path / "target", tmp_path / "target")
    content = (result.path / "tokenizer.json").read_bytes()
    both = {full: build_text_sequences(content, entry.vocab_size, full=full) for full in (False, True)}
    for full, sequences in both.items():
        check_engine(tmp_path, entry, sequences, cut_to(references, sequences), full=full)
    Weights(tmp_path / "target").change(*damage)
    for full, sequences in both.items():
        with pytest.raises(CheckFailedError, match=f"{kind} engine is too far from eager transformers: its"):
            check_engine(tmp_path, entry, sequences, cut_to(references, sequences), full=full)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_of_other_positions_fail_for_an_untrained_model_too(kind, tmp_path, tiny_pair):
    folder = tmp_path / "bundle"
    result = build_bundle(tiny_pair.recipe(folder, quantize=kind, draft_quantize="int8"))
    assert {role: each.quantize for role, each in result.manifest.models.items()} == {"target": kind, "draft": "int8"}
    assert result.checks["target"] is not None
    entry = result.manifest.models["target"]
    assert dict(entry.passes)[f"{kind}-quantize"] > 0
    sequences = build_check_sequences(entry.vocab_size)
    found = own_logits(folder, entry, sequences)
    check = check_engine(folder, entry, sequences, found)
    assert check.lost is not None
    assert check.lost < 1e-3
    # Other logits of a text's first token are no loss (attention rests there); of any other token they are.
    for position, passes in ((0, True), (1, False)):
        odd = [logits.copy() for logits in found]
        for logits in odd:
            logits[position] = -20 * logits[position]
        if passes:
            assert check_engine(folder, entry, sequences, odd)[1:] == check[1:]
        else:
            with pytest.raises(CheckFailedError, match=f"{kind} engine is too far from eager transformers"):
                check_engine(folder, entry, sequences, odd)
    shifted = [np.roll(logits, 1, axis=0) for logits in found]
    not_a_number = [np.where(logits == logits.max(), np.nan, logits) for logits in found]
    for wrong in (shifted, not_a_number):
        with pytest.raises(CheckFailedError, match=f"{kind} engine is too far from eager transformers"):
            check_engine(folder, entry, sequences, wrong)


def test_what_is_lost_does_not_depend_on_how_much_a_model_knows() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(60, 500)).astype(np.float32)
    noise = generator.normal(size=logits.shape).astype(np.float32)
    for size in (0.01, 0.1, 3):  # from an untrained model's logits to a trained one's
        reference = logits * np.float32(size)
        same = measure_closeness(reference, reference)
        assert (same.divergence, same.lost) == (0, 0)
        slight = measure_closeness(reference + noise * np.float32(0.1 * size), reference)
        assert 0.002 < slight.lost < 0.03
        mean = np.broadcast_to(np.log(np.exp(reference).mean(axis=0)), reference.shape)
        assert 0.5 < measure_closeness(mean, reference).lost < 1.5
        assert measure_closeness(np.roll(reference, 1, axis=0), reference).lost > 1.2
        assert measure_closeness(reference + np.float32(100), reference).lost == pytest.approx(0, abs=1e-4)


def test_best_tokens_are_compared_where_the_float_model_has_one() -> None:
    reference = np.zeros((60, 10), np.float32)
    reference[:30, 3] = 1.0  # decided: e times as likely as the others
    found = reference.copy()
    found[30:, 7] = 1e-3  # a tie is broken: no disagreement
    assert measure_closeness(found, reference).agreement == 1
    found[:6, 5] = 1.5
    assert measure_closeness(found, reference).agreement == pytest.approx(0.8)
    reference[19:, 3] = 0.0
    assert measure_closeness(found, reference).agreement is None, "19 positions are too few"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_no_number_is_never_close_and_both_limits_count(kind: str) -> None:
    reference = np.eye(30, dtype=np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        found = reference.copy()
        found[7, 7] = bad
        assert measure_closeness(found, reference).obstacle(kind) is not None
    assert measure_closeness(reference, reference).obstacle(kind) is None
    least, most = KINDS[kind].limits.agreement, KINDS[kind].limits.lost
    assert Closeness(least, 0.1, most).obstacle(kind) is None
    assert Closeness(None, 0.1, most).obstacle(kind) is None
    assert "best token" in str(Closeness(least - 0.01, 0.1, most).obstacle(kind))
    assert "diverge by 0.1 nats" in str(Closeness(1.0, 0.1, most * 1.01).obstacle(kind))


def test_the_texts_are_read_in_the_models_own_tokens(demo_pair: Path) -> None:
    from tokenizers import Tokenizer

    content = (demo_pair / "target" / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_buffer(content)
    sequences = build_text_sequences(content, tokenizer.get_vocab_size())
    assert tokenizer.decode(sequences[0].tolist()).startswith("def read_settings(path):")
    assert [len(ids) for ids in build_text_sequences(content, 40)] == list(TEXT_LENS)
    assert max(max(ids) for ids in build_text_sequences(content, 40)) < 40, "any tokens where the texts do not fit"


def test_the_perplexity_is_that_of_torch_and_chance_is_said(demo_pair, quantized):
    import torch

    content = (demo_pair / "target" / "tokenizer.json").read_bytes()
    result, references = quantized("int8")
    sequences = build_text_sequences(content, 4096)
    references = cut_to(references, sequences)
    losses = [
        torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]), torch.from_numpy(ids[1:]), reduction="none")
        for ids, logits in zip(sequences, references, strict=True)
    ]
    wanted = float(torch.cat(losses).mean().exp())
    assert wanted < 4096 / 8, "the demo's target knows something of these texts"
    found = result.checks["target"]
    assert found is not None
    assert found.perplexity == pytest.approx(wanted, rel=1e-4)
    assert "warning" not in format_summary(result)
    chance = replace(result, checks={"target": found._replace(perplexity=4000.0)})
    assert "warning: on text the target's perplexity is 4e+03, of 4096 tokens: that is chance." in format_summary(
        chance
    )
    assert compute_text_perplexity(content, build_text_sequences(content, 40), references) is None, (
        "any tokens are no text"
    )


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", ["int8", None])
def test_caches_are_int8_whatever_the_weights_are(tiny_pair, tiny_bundle, tmp_path, quantize):
    result = build_bundle(tiny_pair.recipe(tmp_path / "a", quantize=quantize, kv_cache_dtype="int8"))
    manifest, plain = load_manifest(tmp_path / "a"), load_manifest(tiny_bundle)
    for role, entry in manifest.models.items():
        assert (entry.attention.cache_dtype, entry.dtype) == ("int8", "float32")
        assert 4 * kv_bytes_per_token(entry) == kv_bytes_per_token(plain.models[role])
        check = result.checks[role]
        assert check is not None
        assert check.lost is not None
        assert 0 < check.lost < 0.02, "compared on a text"
    assert manifest.models["target"].approximation == (quantize or "int8 KV cache")
    assert any("KV cache: int8" in line for line in describe(manifest))
    sizes = []
    for folder in (tmp_path / "a", tiny_bundle):
        bundle = load_bundle(folder, max_num_seqs=2, max_model_len=64)
        executor = open_executor(bundle, "target", num_threads=1, spin=False)
        assert isinstance(executor, OrtExecutor)
        sizes.append(executor.kv_bytes)
        executor.close()
    assert 4 * sizes[0] == sizes[1]


CODE = ["def add(a, b):\n", "class Queue:\n    def __init__(self):\n"]


@pytest.mark.whole
def test_a_bundle_says_what_was_quantized(tmp_path: Path, tiny_pair: TinyPair, run_cli: RunCli) -> None:
    build_bundle(tiny_pair.recipe(tmp_path / "one", backend="ort-cuda", quantize="int4"))
    manifest = load_manifest(tmp_path / "one")
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert (target.quantize, draft.quantize, draft.engine.packed_bytes) == ("int4", None, None)
    assert dict(target.passes)["int4-fused"] == 9, "joined layers count once"
    assert target.engine.packed_bytes is not None
    stored, before = target.engine.packed_bytes
    # 4 bits and a 16-bit scale for 32 of them, of 16 bits.
    assert stored == pytest.approx(before * 4.5 / 16)
    (line,) = [line for line in describe(manifest) if "quantized:" in line]
    assert line.endswith("in float16, 0.281 of it")
    assert run_cli("inspect", tmp_path / "one").exit_code == 0
    other = build_bundle(tiny_pair.recipe(tmp_path / "two", backend="ort-cuda", quantize="int4", draft_quantize="int4"))
    assert other.reused == ("target",), "the draft is quantized apart"
    recipe = tiny_pair.recipe(
        tmp_path / "three", backend="ort-cuda", quantize="int4", quantize_lm_head=False, draft=None, self_draft=True
    )
    again = build_bundle(recipe)
    assert again.reused == (), "an LM head that stays is another engine"
    gated = again.manifest.models["target"]
    assert dict(gated.passes)["int4-fused"] == 8
    assert gated.engine.gates.kinds
    assert gated.engine.packed_bytes is not None
    assert 0 < gated.engine.packed_bytes[0] < stored, "layers that can be switched off are counted too"


@pytest.mark.whole
@pytest.mark.slow
def test_an_int4_draft_is_accepted_nearly_as_often(tmp_path, demo_pair, demo_bundle, monkeypatch):
    """The codes of ort-cuda in float32 on a CPU, which has the same operator: what a draft loses by them."""
    backends = KINDS["int4"].backends
    monkeypatch.setitem(backends, "ort-cpu", backends["ort-cuda"])
    pair = {role: str(demo_pair / role) for role in ("target", "draft")}
    recipe = BuildRecipe(**pair, output=str(tmp_path / "int4"), draft_quantize="int4")
    made = build_bundle(recipe, use_cache=False)  # the key of an engine does not tell patched backends apart
    assert dict(made.manifest.models["draft"].passes)["int4-fused"] > 0
    rates, texts = [], []
    for folder in (demo_bundle, made.path):
        engine = SpecEngine.load(folder, max_num_seqs=2, num_threads=1, spin=False)
        results = engine.generate(CODE, SamplingParams(max_tokens=64, ignore_eos=True), drafter="draft-model")
        engine.close()
        rates.append(sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results))
        texts.append([list(result.token_ids) for result in results])
    assert texts[0] == texts[1], "the target decides"
    assert rates[1] > 0.8 * rates[0] > 0.2
