"""Limits that engines do not fix: a recipe's become the bundle's defaults, a load may say otherwise."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specexport_runtime import SpecEngine
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.costs.learned import RoundSeconds
from specexport_runtime.engine_options import OPTIONS, EngineOptions, make_options
from specexport_runtime.executors import operators


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """The demo bundle as if its recipe had named both limits."""
    folder = tmp_path / "bundle"
    shutil.copytree(demo_bundle, folder)
    data = vars(load_manifest(demo_bundle)) | {"max_num_seqs": 3, "max_num_tokens": 40}
    Manifest(**data).write(folder)
    return folder


@pytest.mark.parametrize(("given", "limits"), [({}, (3, 40)), ({"max_num_batched_tokens": 33}, (2, 33))])
def test_the_bundles_limits_are_the_defaults_and_a_load_may_say_otherwise(bundle: Path, given, limits) -> None:
    options = EngineOptions(num_threads=1, spin=False, **({"max_num_seqs": 2} if given else {}))
    engine = SpecEngine.load(bundle, options, **given)
    assert (engine.current_load().max_num_seqs, engine._loop.decoder.scheduler.max_num_batched_tokens) == limits
    engine.close()


def test_what_was_learned_last_is_kept_when_an_engine_is_closed(demo_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path))
    engine = SpecEngine.load(demo_bundle, num_threads=1, spin=False)
    assert engine.learned_costs is not None
    for ratio in (3.0, 9.0):  # the second change follows at once
        for i in range(300):
            drafts = {"draft-model": (0.4, 0.4 * ratio)}
            engine.learned_costs.observe(RoundSeconds(1, i % 3, lambda d: 1.0 + 0.1 * d, 1.0 + 0.1 * (i % 3), drafts))
        assert engine.learned_costs.adopt()
    engine.close()
    again = SpecEngine.load(demo_bundle, num_threads=1, spin=False)
    assert again.learned_costs is not None
    assert again.learned_costs.draft_ratio("draft-model", 1) == pytest.approx(9.0, rel=0.2)
    again.close()
    monkeypatch.setattr(operators, "build", lambda: "another arithmetic")
    other = SpecEngine.load(demo_bundle, num_threads=1, spin=False)
    assert other.learned_costs is not None
    assert other.learned_costs.draft_ratio("draft-model", 1) == 1.0
    other.close()


def test_without_limits_there_are_eight_rows(demo_bundle: Path) -> None:
    assert load_bundle(demo_bundle).max_num_seqs == load_manifest(demo_bundle).default_num_seqs == 8


def test_an_unknown_option_is_an_error_that_suggests() -> None:
    with pytest.raises(TypeError, match="no engine option 'max_num_seq'; did you mean 'max_num_seqs'"):
        make_options(None, {"max_num_seq": 1})
    assert make_options(EngineOptions(spin=False), {"unpad_kv": False}) == EngineOptions(spin=False, unpad_kv=False)
    assert "adaptive" in OPTIONS


@pytest.mark.parametrize("seen", [True, False])
def test_an_option_that_changes_nothing_any_more_is_told_and_let_be(seen, demo_bundle, monkeypatch):
    monkeypatch.setattr("specexport_runtime.cli.gone.sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: seen)))
    with pytest.warns(FutureWarning, match="prepacked changes nothing any more .*: leave it out"):
        assert make_options(None, {"prepacked": False, "spin": False}) == EngineOptions(spin=False)
    command = ["generate", str(demo_bundle), "def f():", "--max-tokens", "2", "--threads", "1", "--no-prepacked"]
    result = CliRunner().invoke(runtime_cli, command)
    assert result.exit_code == 0
    warning = "warning: --no-prepacked changes nothing any more (weights are packed in the bundle"
    assert result.stderr.startswith(warning) == seen
    assert seen or not result.stderr
    assert "prepacked" not in result.stdout + CliRunner().invoke(runtime_cli, ["generate", "--help"]).stdout
