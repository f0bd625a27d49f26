"""MTP modules in turn: what our engines draft is what the published equations draft, and text stays the target's."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.compile.pipeline import build_bundle
from specexport.heads.kinds import kind_of
from specexport.heads.trace import causal_states
from specexport.recipe import BuildRecipe
from specexport.verify.sampling import Setting, check_sampling
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.drafters import head
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.fakes.rounds import check_every_round
from tests.support.models import tiny_turns
from tests.support.models.loading import load_module
from tests.support.models.tiny_modules import LAYERS
from tests.support.references.acceptance import accepted
from tests.support.references.drafted import PROMPTS, check_drafts_of


@pytest.mark.one_of_kind
@pytest.mark.parametrize("family", ["deepseek", "glm", "mimo-v2", "mimo-v2-flash"])
@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_modules_compute_the_published_equations(family: str, own_lm_heads: bool, tmp_path: Path) -> None:
    modules = tiny_turns.make(family, tmp_path, own_lm_heads=own_lm_heads)
    _, loaded = load_module(tmp_path, LAYERS)
    config = loaded.config
    assert (config.kind, config.num_modules, config.taps) == ("mtp-modules", 3, (LAYERS,))
    assert config.shape.own_lm_heads == own_lm_heads
    tokens, features = [5, 6, 7, 200, 9, 10, 319], torch.randn(7, config.hidden_size)
    found, states = causal_states(loaded.head, torch.tensor(tokens), features), features
    for number in range(3):
        places = len(tokens) - number
        with torch.no_grad():
            wanted, states = tiny_turns.forward(modules, number, tokens[number:], states[:places])
            rows = torch.arange(places)
            logits, _ = loaded.head.guess(found, rows, torch.full_like(rows, number))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


def build(folder: Path, output: Path, **changes: Any) -> Any:
    usual = {"target": str(folder), "head": "mtp", "output": str(output), "max_model_len": 64}
    build_bundle(BuildRecipe(**(usual | changes)))
    return load_manifest(output).models["head"]


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize(("family", "own_lm_heads"), [("deepseek", False), ("mimo-v2", True)])
def test_a_bundle_drafts_what_the_modules_draft(family: str, own_lm_heads: bool, tmp_path: Path) -> None:
    modules = tiny_turns.make(family, tmp_path / "t", own_lm_heads=own_lm_heads)
    entry = build(tmp_path / "t", tmp_path / "b", check=False)
    assert (entry.draft_head.kind, entry.draft_head.num_modules) == ("mtp-modules", 3)
    drafts_are_wanted(modules, tmp_path / "b")


def drafts_are_wanted(modules: Any, bundle: Path, **options: Any) -> None:
    """In ragged batches, for every K, and for more tokens than there are modules."""
    limit = load_manifest(bundle).vocabulary.size
    with closing(SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3, **options)) as e:
        check_every_round(e)
        for lookahead in (1, 2, 3, 5):
            check_drafts_of(e, lambda *args: tiny_turns.draft(modules, *args), lookahead, limit, least=20)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Modules that are right in part: what was accepted is read again by the modules that lacked it."""
    folder = tmp_path_factory.mktemp("knowing")
    modules = tiny_turns.make("mimo-v2", folder / "t", seed=5, scale=0.02)
    build(folder / "t", folder / "b")
    return modules, folder / "b"


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}])
def test_accepted_tokens_are_read_by_all_modules(knowing: tuple[Any, Path], options: dict[str, Any]) -> None:
    modules, bundle = knowing
    assert 0.2 < accepted(bundle, PROMPTS) < 0.99
    drafts_are_wanted(modules, bundle, **options)


@pytest.mark.whole
@pytest.mark.bundle
def test_a_conversation_goes_on_with_the_drafts_of_the_equations(
    knowing: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind reused texts, and where features had to be read before a draft."""
    monkeypatch.setattr(head, "MAX_HELD", 6)
    modules, bundle = knowing
    limit, params = load_manifest(bundle).vocabulary.size, SamplingParams(max_tokens=8, ignore_eos=True)
    rounds: list[tuple[list[int], list[int]]] = []

    class Watch:
        def on_round(self, record: Any) -> None:
            for event in record.events:
                tokens = event.request.tokens
                rounds.append((tokens[: len(tokens) - len(event.tokens)], list(event.proposal.tokens)))

        def on_finish(self, _: Any) -> None: ...

    with closing(SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=2)) as engine:
        check_every_round(engine)
        engine.add_observer(Watch())
        histories, turns = [list(range(5, 30)), [9, 8, 7] * 8], []
        for turn in range(4):
            found = engine.generate(histories, params, drafter="head", num_speculative_tokens=3)
            if turn:
                assert all(each.stats.cached_tokens > 16 for each in found)
            turns.append((histories, found))
            if turn < 2:
                histories = [[*old, *new.token_ids, 40 + turn] for old, new in zip(histories, found, strict=True)]
            else:  # another ending, behind fewer tokens than the modules have entries
                histories = [[*old[:22], 99, 98] for old in histories]
        drafted = list(rounds)
        for texts, found in turns:
            plain = engine.generate(texts, params, drafter="none", remember=False)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        engine.check()
    assert sum(len(draft) for _, draft in drafted) > 50
    for before, draft in drafted:
        assert draft == tiny_turns.draft(modules, before, len(draft), limit)


@pytest.mark.whole
@pytest.mark.bundle
def test_an_int8_target_keeps_its_text_and_its_law(knowing: tuple[Any, Path], tmp_path: Path) -> None:
    """Greedy for K 1 to 8 in batches of one and of eight, `auto`, and by chi-square at two temperatures."""
    build(knowing[1].parent / "t", tmp_path / "b", quantize="int8")
    prompts = [*PROMPTS, *([7, 9 + i, 30 - i] for i in range(4))]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for size in (1, 8):
        options = {"num_threads": 1, "spin": False, "max_num_seqs": size}
        config = {"method": "mtp", "num_speculative_tokens": 3}
        with closing(SpecEngine.load(tmp_path / "b", speculative_config=config, **options)) as engine:
            plain = [result.token_ids for result in engine.generate(prompts, params, drafter="none")]
            for k in (1, 2, 3, 8):
                found = engine.generate(prompts, params, drafter="head", num_speculative_tokens=k)
                assert [result.token_ids for result in found] == plain, k
            found = engine.generate(prompts, params, drafter="auto", num_speculative_tokens="auto")
            assert [result.token_ids for result in found] == plain
            if size == 1:
                settings = [
                    Setting("mild", SamplingParams(temperature=0.8), 3),
                    Setting("hot", SamplingParams(temperature=1.0, top_k=8), 3),
                ]
                law = check_sampling(engine, PROMPTS, settings=settings, num_samples=2000, num_runs=300, num_contexts=1)
                assert law.passed, law


def without(folder: Path, copied: Path, *gone: str, **values: Any) -> Path:
    """A copy of a checkpoint without some tensors, and with other values in its configuration."""
    shutil.copytree(folder, copied)
    stored = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in stored.items() if not name.startswith(gone)} if gone else stored
    save_file(kept, copied / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | values
    (copied / "config.json").write_text(json.dumps(config))
    return copied


PLACE = "model.mtp.layers."


@pytest.mark.parametrize(
    ("gone", "values", "kind", "message"),
    [
        ([], {"num_nextn_predict_layers": 2}, CheckpointError, "holds 3 MTP modules, and its configuration counts 2"),
        ([f"{PLACE}2."], {}, CheckpointError, r"holds 2 MTP modules, .* counts 3 \(num_nextn_predict_layers\)"),
        ([f"{PLACE}1."], {}, CheckpointError, "holds 2 of 3 MTP modules: number 2 lacks its tensors"),
        ([f"{PLACE}0."], {}, CheckpointError, "holds 2 of 3 MTP modules: number 1 lacks its tensors"),
        ([f"{PLACE}1.eh_proj"], {}, CheckpointError, "lacks 1 tensors, for example more.1.fc.weight"),
        ([f"{PLACE}2.mlp.up_proj"], {}, CheckpointError, "lacks 1 tensors, for example layers.2.mlp.up_proj.weight"),
        (
            [f"{PLACE}{i}.{part}" for i in (1, 2) for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")],
            {},
            UnsupportedModelError,
            "its MTP module has 3 layers, and only modules of one decoder layer are read",
        ),
    ],
)
def test_modules_that_are_not_whole_are_refused(
    gone: list[str], values: dict[str, Any], kind: Any, message: str, knowing: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = without(knowing[1].parent / "t", tmp_path / "t", *gone, **values)
    with pytest.raises(kind, match=message) as caught:
        load_module(folder, LAYERS)
    assert caught.value.exit_code == 2


def test_the_probe_tries_modules_that_read_the_target(knowing: tuple[Any, Path]) -> None:
    _, loaded = load_module(knowing[1].parent / "t", LAYERS)
    readings = kind_of(loaded.config).readings(loaded.config, LAYERS)
    changes = [each.change for each in readings]
    assert len(set(changes)) == 16
    assert changes[0] == ""
    assert "the target's hidden state for each module" in changes
