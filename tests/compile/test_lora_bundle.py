"""Bundles with LoRA adapters, merged and chosen by request: each token's target is its own, and drafts stay drafts."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.compile.pipeline import build_bundle
from specexport.compile.plan import make_plan
from specexport.inspect import describe
from specexport.recipe import BuildRecipe, make_recipe
from specexport.verify.logits import check_neighbours
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckFailedError, CheckpointError, InvalidRequestError
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.layer_choice import LayerRules
from tests.support.cases.refusals import RunCli
from tests.support.fakes.rounds import check_every_round
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_lora import apply_adapter, save_adapter
from tests.support.models.tiny_models import make_llama
from tests.support.references.drafted import Odds

PROMPTS = ["abc abc abc abc ab", "the cat sat on the mat, the cat sat on", "to be or not to be"]
NAMES = (None, "sql", "poems")
RULES = LayerRules(threshold=None, period=2, keep_last=None)  # tiny models have two layers
WAYS: dict[str, dict[str, Any]] = {
    "draft-model": {"drafter": "draft-model"}, "self": {"drafter": "self", "layer_rules": RULES},
    "lookup": {"drafter": "lookup"}, "suffix": {"drafter": "suffix"}, "chained": {"drafter": "chained"},
    "auto": {"drafter": "auto"},
}  # fmt: skip
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> dict[str, Path]:
    """Two adapters of the tiny target, of all layers and of some of one; another worker of the suite has its own."""
    model, folder = make_llama(0), tmp_path_factory.mktemp("adapters")
    return {
        "sql": save_adapter(model, folder / "sql-lora", seed=1, strength=0.6),
        "poems": save_adapter(
            model, folder / "poems-lora", targets=["q_proj", "v_proj", "up_proj"], r=2, seed=2, layers_to_transform=[1]
        ),
    }


def asked(adapters: dict[str, Path], *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={adapters[name]}" for name in names or adapters)


@pytest.fixture(scope="module", params=["none", pytest.param("int8", marks=pytest.mark.whole)])
def bundle(request, tiny_pair, adapters, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("chosen") / request.param
    quantize = request.param
    build_bundle(
        tiny_pair.recipe(folder, quantize=quantize, draft_quantize=quantize, self_draft=True, lora=asked(adapters))
    )
    return folder


def load(folder: Path, **options: Any) -> SpecEngine:
    return SpecEngine.load(folder, **({"max_num_seqs": 8, "num_threads": 1, "spin": False} | options))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[SpecEngine]:
    with closing(load(bundle)) as loaded:
        check_every_round(loaded)
        yield loaded


def torch_logits(ids: list[int], folder: Path | None) -> np.ndarray:
    model = make_llama(0) if folder is None else apply_adapter(make_llama(0), folder)
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return found


def step(engine: SpecEngine, rows: list[tuple[list[int], int]]) -> np.ndarray:
    """Logits of all tokens of a step of the target: each row's tokens, and its adapter."""
    work = [RowWork(ids, len(ids), adapter=adapter) for ids, adapter in rows]
    found: np.ndarray = ModelRunner(engine.target).step(0, work).copy()
    return found


def test_each_row_computes_with_its_own_adapter(engine: SpecEngine, adapters: dict[str, Path]) -> None:
    """Float logits are those of plain torch; quantized ones as near as their base is to its own."""
    texts = [engine.encode(prompt) for prompt in PROMPTS]
    found = np.split(step(engine, list(zip(texts, (0, 1, 2), strict=True))), np.cumsum(list(map(len, texts)))[:-1])
    errors = []
    for ids, logits, name in zip(texts, found, NAMES, strict=True):
        wanted = torch_logits(ids, None if name is None else adapters[name])
        errors.append(float(abs(logits - wanted).max() / abs(wanted).max()))
    limit = 1e-4 if errors[0] < 1e-4 else 3 * errors[0]
    assert max(errors) < limit, errors
    assert abs(torch_logits(texts[0], None) - torch_logits(texts[0], adapters["poems"])).max() > 0.5


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_plain_text_at_every_lookahead(engine: SpecEngine, way: str) -> None:
    plain = {
        name: [result.token_ids for result in engine.generate(PROMPTS, PLAIN, speculation=False, lora=name)]
        for name in NAMES
    }
    assert len({str(texts) for texts in plain.values()}) == len(NAMES)
    drafted = 0
    for lookahead in (*range(1, 9), "auto"):
        handles = {
            name: [
                engine.submit(prompt, PLAIN, lora=name, num_speculative_tokens=lookahead, **WAYS[way])
                for prompt in PROMPTS
            ]
            for name in NAMES
        }
        for name, each in handles.items():
            results = [handle.result() for handle in each]
            assert [result.token_ids for result in results] == plain[name], (name, lookahead)
            drafted += sum(result.stats.drafted for result in results)
    assert drafted > 0


@pytest.mark.parametrize("way", ["draft-model", "self"])
def test_sampled_text_follows_the_adapted_target(bundle: Path, way: str) -> None:
    with closing(load(bundle, lora="sql")) as engine:
        odds = Odds(engine, engine.encode(PROMPTS[0]), SamplingParams(temperature=1.0, top_k=6))
        for name in ("sql", "poems"):
            assert odds.fit(engine, lora=name, num_speculative_tokens=3, **WAYS[way]) == (name == "sql")


def test_kept_texts_are_those_of_one_adapter(bundle: Path) -> None:
    """A request goes on from texts of its own adapter, and from no others, with the same bits."""
    params, long = replace(PLAIN, logprobs=1), PROMPTS[1] * 2
    with closing(load(bundle, enable_prefix_caching=False)) as engine:
        wanted = {name: engine.generate(long, params, lora=name)[0] for name in NAMES}
    with closing(load(bundle, max_num_seqs=4, prefix_rows=1)) as engine:
        check_every_round(engine)
        for turn in range(2):
            for name in NAMES:
                found = engine.generate(long, params, lora=name)[0]
                assert (found.token_ids, found.logprobs) == (wanted[name].token_ids, wanted[name].logprobs)
                assert bool(found.stats.cached_tokens) == (turn == 1), name
        assert engine.pin_prefix(long, lora="sql")
        assert not engine.unpin_prefix(long)
        assert engine.unpin_prefix(long, lora="sql")
        engine.check()


def test_files_are_those_of_one_adapter(bundle: Path, tmp_path: Path) -> None:
    """The default is one too: an engine with another finds nothing."""
    long, kept = PROMPTS[1] * 2, {"prefix_cache_dir": tmp_path / "kept"}
    with closing(load(bundle, max_num_seqs=4, **kept)) as engine:
        wanted = {name: engine.generate(long, PLAIN, lora=name)[0].token_ids for name in (None, "sql")}
    with closing(load(bundle, max_num_seqs=4, **kept)) as engine:
        for name in ("poems", "sql", None):
            found = engine.generate(long, PLAIN, lora=name)[0]
            assert bool(found.stats.cached_tokens) == (name != "poems"), name
            assert name == "poems" or found.token_ids == wanted[name]
    with closing(load(bundle, max_num_seqs=4, lora="sql", **kept)) as engine:
        assert engine.generate(long, PLAIN)[0].stats.cached_tokens == 0


def test_padded_rows_have_their_adapters_too_and_those_that_are_not_there_are_refused(bundle, engine):
    assert engine.adapters == ("sql", "poems")
    with pytest.raises(InvalidRequestError, match=r"'sqk' to choose.*did you mean 'sql'"):
        engine.submit(PROMPTS[0], lora="sqk")
    with pytest.raises(InvalidRequestError, match="'chess' to choose"):
        load(bundle, lora="chess")
    wanted = {name: engine.generate(PROMPTS[0], PLAIN, lora=name)[0].token_ids for name in NAMES}
    with closing(load(bundle, unpad_kv=False, unpad_input=False)) as padded:
        handles = {name: padded.submit(PROMPTS[0], PLAIN, lora=name, drafter="draft-model") for name in NAMES}
        assert {name: handle.result().token_ids for name, handle in handles.items()} == wanted


def test_what_a_bundle_says_of_its_adapters(bundle: Path, adapters: dict[str, Path], run_cli: RunCli) -> None:
    manifest = load_manifest(bundle)
    entry = manifest.models["target"]
    assert [(adapter.name, adapter.source, adapter.rank) for adapter in entry.adapters] == [
        ("sql", "sql-lora", 4),
        ("poems", "poems-lora", 2),
    ]
    lines = "\n".join(describe(manifest))
    sha = entry.adapters[0].sha256[:16]
    assert f"LoRA adapter sql from sql-lora (sha256 {sha}), rank 4: for requests that choose it" in lines
    assert "adapter_ids[T] int64" in lines
    assert str(adapters["sql"]) not in json.dumps(manifest.to_json())
    result = run_cli("generate", bundle, PROMPTS[0], "--max-tokens", 4, "--lora", "poems", "--json", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert run_cli("generate", bundle, PROMPTS[0], "--lora", "poem").exit_code == 2


def test_verify_compares_with_the_adapted_model(bundle, tiny_pair, adapters, run_cli):
    given = ("--checkpoint", tiny_pair.target, "--draft-checkpoint", tiny_pair.draft)
    few = ("--max-prompts", 2, "--max-tokens", 8, "--num-samples", 1000, "--threads", 1, "--no-record", "--json")
    result = run_cli("verify", bundle, *given, *few, "-q", "--lora", f"poems={adapters['poems']}")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["status"] == "passed"
    assert report["options"]["lora"] == "poems"
    wrong = run_cli("verify", bundle, *given, *few, "-q", "--lora", f"poems={adapters['sql']}")
    assert wrong.exit_code == 2
    assert "is not what this bundle was built with" in wrong.output


def test_a_merged_adapter_is_a_part_of_the_weights(tiny_pair, adapters, tmp_path, run_cli):
    folder, recipe = tmp_path / "merged", tmp_path / "recipe.toml"
    recipe.write_text(f'target = "{tiny_pair.target}"\nlora = ["sql=sql-lora"]\noutput = "{folder}"\nlookahead = 4\n')
    (tmp_path / "sql-lora").symlink_to(adapters["sql"])
    made = make_recipe({}, recipe)
    first, second = build_bundle(made), build_bundle(made)
    assert not first.up_to_date
    assert second.up_to_date
    entry = first.manifest.models["target"]
    assert [adapter.use for adapter in entry.adapters] == ["merged"]
    assert "adapter_ids" not in entry.engine.inputs
    assert "rank 4: merged into the weights" in "\n".join(describe(first.manifest))
    renamed = build_bundle(tiny_pair.recipe(tmp_path / "b", draft=None, lora=(("other", str(adapters["sql"])),)))
    assert renamed.reused == ("target",), "the engine of an adapter has no name"
    assert renamed.manifest.models["target"].adapters[0].name == "other"
    with closing(load(folder)) as engine:
        ids = engine.encode(PROMPTS[1])
        wanted = torch_logits(ids, adapters["sql"])
        found = ModelRunner(engine.target).step(0, [RowWork(ids, len(ids))])
        assert abs(found - wanted).max() < 1e-4 * abs(wanted).max()
        assert engine.adapters == ()
        with pytest.raises(InvalidRequestError, match="there is no LoRA adapter 'sql' to choose"):
            engine.submit(PROMPTS[0], lora="sql")
    few = ("--max-prompts", 1, "--max-tokens", 4, "--num-samples", 1000, "--threads", 1, "--no-record", "-q")
    given = ("verify", folder, "--checkpoint", tiny_pair.target, *few)
    told = run_cli(*given, "--lora", f"sql={adapters['sql']}", "--json")
    assert (told.exit_code, json.loads(told.stdout)["status"]) == (0, "passed")
    untold = run_cli(*given)
    assert untold.exit_code == 2
    assert "Fix: name it with --lora sql=FOLDER" in untold.output


def test_another_adapter_or_use_of_it_is_another_engine(tiny_pair: TinyPair, adapters: dict[str, Path]) -> None:
    def key(*names: str, **values: Any) -> str:
        recipe = tiny_pair.recipe(Path("out"), draft=None, lora=asked(adapters, *names) if names else (), **values)
        return make_plan(recipe).engine_keys["target"]

    chosen = key("sql", lora_mode="choose")
    assert len({key(), key("sql"), key("poems"), chosen, key("sql", "poems")}) == 5


def test_the_check_sees_the_wrong_adapter(tiny_pair, adapters, tmp_path, monkeypatch):
    from specexport.compile import lora

    bind = lora.bind_adapters

    def turned(*args: Any, **named: Any) -> Any:
        found = bind(*args, **named)
        return found._replace(products=found.products[::-1])

    monkeypatch.setattr("specexport.compile.model.bind_adapters", turned)
    with pytest.raises(CheckFailedError, match="engine with adapter sql differs from eager transformers"):
        build_bundle(tiny_pair.recipe(tmp_path / "out", draft=None, lora=asked(adapters)), use_cache=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.whole
def test_a_large_engine_is_checked_in_parts(tiny_pair, adapters, tmp_path, monkeypatch):
    from specexport.compile import check_parts

    monkeypatch.setattr(check_parts, "LARGE_BYTES", 1 << 10)
    monkeypatch.setattr(check_parts, "PART_BYTES", 1 << 16)
    values = {"draft": None, "lora": asked(adapters), "quantize": "int8"}
    result = build_bundle(tiny_pair.recipe(tmp_path / "out", **values), use_cache=False)
    assert result.checks["target"] is not None


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no folder": (("sql",), "lora has 'sql'"),
    "no name": (("=x",), "lora has '=x'"),
    "a path for a name": (("a/b={sql}",), "lora has 'a/b="),
    "twice": (("sql={sql}", "sql={poems}"), "lora gives sql twice"),
    "nothing there": (("sql=nowhere",), "there is no such folder"),
    "another model": (("sql={other}",), "does not fit the target"),
    "the bundle's name": (("out={sql}", "poems={poems}"), "has the name of the bundle"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_adapters_are_refused(what, tiny_pair, adapters, tmp_path, refuse_cli):
    flags, words = BAD[what]
    other = save_adapter(make_llama(1, hidden_size=32), tmp_path / "other")
    places = {name: str(folder) for name, folder in (adapters | {"other": other}).items()}
    each = [part for flag in flags for part in ("--lora", flag.format(**places))]
    assert words in refuse_cli("build", tiny_pair.target, "-o", tmp_path / "out", "-q", "--no-cache", *each)


@pytest.mark.whole
def test_kept_weights_take_adapters_beside_them(tmp_path: Path) -> None:
    """They stay the checkpoint's integers, so that nothing can be merged into them."""
    from tests.support.models.tiny_gguf import write_gguf
    from tests.support.models.tiny_models import GROUPED, make_model

    model = make_model("Qwen2", GROUPED | {"hidden_size": 256, "intermediate_size": 256})
    write_gguf(model, tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    folder = save_adapter(model, tmp_path / "a", targets=["q_proj", "o_proj", "gate_proj"], strength=0.5)
    values = {"target": str(tmp_path / "tiny.gguf"), "output": str(tmp_path / "out"), "lora": f"a={folder}"}
    with pytest.raises(CheckpointError, match="its weights stay the integers of the quantized checkpoint"):
        build_bundle(BuildRecipe(**values), use_cache=False)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    result = build_bundle(BuildRecipe(**values, lora_mode="choose"), use_cache=False)  # type: ignore[arg-type]
    assert result.manifest.models["target"].quantize == "keep"
    with closing(load(tmp_path / "out")) as engine:
        sequences = [engine.encode(prompt) for prompt in PROMPTS]
        engine.target.default_adapter = 1  # type: ignore[attr-defined]
        assert check_neighbours("target", engine.target, sequences, lookahead=8).passed
