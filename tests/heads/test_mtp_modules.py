"""MTP modules in turn: what our engines draft is what the published equations draft, and text stays the target's."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.heads.kinds import find_kind
from specexport.heads.trace import causal_states
from specexport_runtime import SamplingParams
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.drafters import head
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models import tiny_turns
from tests.support.models.head_bundles import Watch, build_module, opened
from tests.support.models.loading import load_module
from tests.support.models.tiny_modules import LAYERS
from tests.support.references.drafted import PROMPTS, accepted, check_drafts_of


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


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize(("family", "own_lm_heads"), [("deepseek", False), ("mimo-v2-flash", True)])
def test_a_bundle_drafts_what_the_modules_draft(family: str, own_lm_heads: bool, tmp_path: Path) -> None:
    modules = tiny_turns.make(family, tmp_path / "t", own_lm_heads=own_lm_heads)
    entry = build_module(tmp_path / "t", tmp_path / "b", check=False)["head"]
    assert (entry.draft_head.kind, entry.draft_head.num_modules) == ("mtp-modules", 3)
    drafts_are_wanted(modules, tmp_path / "b")


def drafts_are_wanted(modules: Any, bundle: Path, **options: Any) -> None:
    """In ragged batches, for every K, and for more tokens than there are modules."""
    limit = load_manifest(bundle).vocabulary.size
    with opened(bundle, **options) as engine:
        for lookahead in (1, 2, 3, 5):
            check_drafts_of(engine, partial(tiny_turns.draft, modules), lookahead, limit, least=20)


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("knowing") / "t"
    return tiny_turns.make("mimo-v2", folder, seed=5, scale=0.02), folder


@pytest.fixture(scope="module")
def knowing(partly: tuple[Any, Path]) -> tuple[Any, Path]:
    """Their bundle: what was accepted is read again by the modules that lacked it."""
    modules, folder = partly
    build_module(folder, folder.parent / "b")
    return modules, folder.parent / "b"


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}])
def test_accepted_tokens_are_read_by_all_modules(knowing: tuple[Any, Path], options: dict[str, Any]) -> None:
    modules, bundle = knowing
    assert 0.2 < accepted(bundle, PROMPTS) < 0.99
    drafts_are_wanted(modules, bundle, **options)


@pytest.mark.whole
@pytest.mark.bundle
def test_a_conversation_goes_on_with_the_drafts_of_the_equations(knowing, monkeypatch):
    """Behind reused texts, and where features had to be read before a draft."""
    monkeypatch.setattr(head, "MAX_HELD", 6)
    modules, bundle = knowing
    limit, params = load_manifest(bundle).vocabulary.size, SamplingParams(max_tokens=8, ignore_eos=True)
    watch = Watch()
    with opened(bundle, 2) as engine:
        engine.add_observer(watch)
        histories, turns = [list(range(5, 30)), [9, 8, 7] * 8], []
        for turn in range(4):
            found = engine.generate(histories, params, drafter="head", num_speculative_tokens=3)
            if turn:
                assert all(each.stats.cached_tokens > 16 for each in found)
            turns.append((histories, found))
            if turn < 2:
                histories = [[*old, *new.token_ids, 40 + turn] for old, new in zip(histories, found, strict=True)]
            else:  # another ending, after fewer tokens than the modules have entries
                histories = [[*old[:22], 99, 98] for old in histories]
        drafted = list(watch.rounds)
        for texts, found in turns:
            plain = engine.generate(texts, params, drafter="none", remember=False)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(len(draft) for _, draft in drafted) > 50
    for before, draft in drafted:
        assert draft == tiny_turns.draft(modules, before, len(draft), limit)


def without(folder: Path, copied: Path, *gone: str, **values: Any) -> Path:
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
def test_modules_that_are_not_whole_are_refused(gone, values, kind, message, partly, tmp_path):
    folder = without(partly[1], tmp_path / "t", *gone, **values)
    with pytest.raises(kind, match=message) as caught:
        load_module(folder, LAYERS)
    assert caught.value.exit_code == 2


def test_the_probe_tries_modules_that_read_the_target(partly: tuple[Any, Path]) -> None:
    _, loaded = load_module(partly[1], LAYERS)
    readings = find_kind(loaded.config).readings(loaded.config, LAYERS)
    changes = [each.change for each in readings]
    assert len(set(changes)) == 16
    assert changes[0] == ""
    assert "the target's hidden state for each module" in changes
