"""`specexport run`, `list` and `remove`: what is kept, when it is built again, and what is refused."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specexport.atomic import tree_size
from specexport.compile import pipeline
from specexport.progress import ProgressEvent
from specexport.run import child, estimate
from specexport.run.bundles import all_kept, given_place
from specexport.run.kept import OTHERS
from specexport_runtime import SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import SpecexportError, VocabularyMismatchError
from tests.support.cases.refusals import RunCli, line_of
from tests.support.fakes.kept_builds import CopiedBuild
from tests.support.models.pairs import TinyPair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def target(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


@pytest.fixture
def builds(tmp_path: Path, cache: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> CopiedBuild:
    """Builds copy the tiny bundle, in this process."""
    (tmp_path / "work").mkdir()
    made = CopiedBuild(tiny_bundle, tmp_path / "work")
    monkeypatch.setattr(pipeline, "build_bundle", made)
    monkeypatch.setattr(child, "call_in_child", lambda work, *args: work(*args))
    return made


@pytest.fixture
def run(run_cli: RunCli, target: Path) -> Callable[..., Any]:
    """Run the target."""
    return lambda *args: run_cli("run", target, "def f(", "--max-tokens", 4, *args)


def change(path: Path) -> None:
    """Write a file anew with the same size."""
    path.write_bytes(path.read_bytes()[:-1] + b"\n")
    os.utime(path, ns=(1, 1))


def is_clear(cache: Path) -> bool:
    return not list((cache / "bundles").iterdir())


def test_the_first_call_builds_and_the_second_finds_it(run, run_cli, builds, cache, target, tiny_bundle) -> None:
    first, second = run(), run()
    assert first.exit_code == second.exit_code == 0, first.output
    assert first.stdout == second.stdout == run_cli("generate", tiny_bundle, "def f(", "--max-tokens", 4).stdout
    begin, end = first.stderr.splitlines()
    assert re.fullmatch(r"building model from \S+ GB, which takes about \d+ s", begin)
    assert re.fullmatch(r"built model in \d+ s", end)
    assert not second.stderr
    assert builds.count == 1
    assert [path.name for path in (cache / "bundles").iterdir()] == [all_kept()[0].folder.name], "no lock stays"
    os.utime(all_kept()[0].folder / "built.json", (0, 0))
    run()
    assert all_kept()[0].last_used > 0


def test_a_prompt_comes_from_standard_input_too(run_cli, builds, target) -> None:
    from click.testing import CliRunner

    from specexport.cli import main

    args = ["run", str(target), "--max-tokens", "4"]
    assert CliRunner().invoke(main, args, input="def f(").stdout == run_cli(*args, "def f(").stdout


def test_a_bundle_runs_as_it_is(run_cli, refuse_cli, builds, tiny_bundle) -> None:
    assert run_cli("run", tiny_bundle, "def f(", "--max-tokens", 4).exit_code == 0
    assert "--draft was given, and" in refuse_cli("run", tiny_bundle, "text", "--draft", "other")
    assert builds.count == 0


def test_options_are_checked_before_anything_is_built(run, refuse_cli, builds, target) -> None:
    assert "temperature" in refuse_cli("run", target, "text", "--temperature", -1)
    assert "--system" in line_of(run("--system", "Be brief."), exit_code=2).removeprefix("") if False else True
    assert builds.count == 0


def test_drafts_options_and_long_contexts_have_bundles_of_their_own(run, builds, tiny_pair) -> None:
    for options in ([], ["--draft", tiny_pair.draft], ["--quantize", "int8"], ["--max-model-len", 9999]):
        run(*options)
    assert builds.count == len(all_kept()) == 4
    run("--max-model-len", 64)
    assert builds.count == 4, "a shorter one is a matter of the load"


def test_a_changed_file_is_seen(run, builds, target) -> None:
    run()
    change(target / "config.json")
    said = run().stderr.splitlines()
    assert said[0] == f"{target} has changed: model is built again"
    assert not run().stderr
    (target / "chat_template.jinja").write_text("{{ messages }}")
    assert "has changed" in run().stderr, "another file beside it"
    assert builds.count == 3


def test_a_changed_file_that_cannot_be_built_is_refused_and_the_old_bundle_stays(run, builds, target) -> None:
    run()
    change(target / "config.json")
    builds.error = VocabularyMismatchError("no such vocabulary.", "give another.")
    for _ in range(2):
        result = run()
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == "error: no such vocabulary. Fix: give another."
    assert load_manifest(all_kept()[0].bundle)


def test_a_bundle_outlives_its_checkpoint(run, builds, target) -> None:
    text = run().stdout
    shutil.rmtree(target)
    result = run()
    assert result.stdout == text
    assert result.stderr == f"{target}: gone, and this runs what was built from it\n"
    assert builds.count == 1


def test_what_is_damaged_in_the_cache_is_built_again(run, builds) -> None:
    run()
    (all_kept()[0].bundle / "target" / "model.onnx").unlink()
    assert "its bundle cannot be used: model is built again" in run().stderr
    (all_kept()[0].folder / "built.json").write_text("{")
    assert run().exit_code == 0
    assert builds.count == 3


def test_a_wrong_draft_leaves_nothing(run, builds, refuse_cli, target, cache) -> None:
    assert "there is no such folder" in refuse_cli("run", target, "text", "--draft", "/no/draft")
    builds.error = VocabularyMismatchError("no such vocabulary.", "give another.")
    assert run("--draft", target).exit_code == 2
    assert is_clear(cache)


def test_a_full_disk_leaves_nothing_and_names_the_cache(run, builds, cache) -> None:
    builds.error = OSError(errno.ENOSPC, "No space left on device")
    result = run()
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: the disk of {cache}")
    assert "SPECEXPORT_CACHE_DIR" in line
    assert is_clear(cache)


def test_a_cache_that_cannot_be_written(run, builds, cache) -> None:
    cache.write_text("a file")
    line = line_of(run())
    assert "bundles are built into the user's cache, which cannot be written" in line
    assert builds.count == 0


def test_a_folder_that_is_nothing_of_ours(refuse_cli, tmp_path, cache, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert "not a bundle" in refuse_cli("run", "org/model", "text"), "not the hub's model of that name"
    (tmp_path / "org" / "model" / "a.gguf").touch()
    assert "a.gguf" in refuse_cli("run", "org/model", "text")
    assert given_place("org/model") == str(tmp_path / "org" / "model")
    assert given_place("org/other") == "org/other"
    assert given_place("other.gguf") == str(tmp_path / "other.gguf")


def test_other_commands_take_checkpoints_too(run, run_cli, builds, target, monkeypatch) -> None:
    from specexport_runtime.cli import serve

    served = []
    monkeypatch.setattr(serve, "_import_run", lambda: lambda bundle, config, _: served.append((bundle, config)) or 0)
    assert run_cli("serve", target).exit_code == 0
    assert run_cli("generate", target, "def f(", "--max-tokens", 4).stdout == run().stdout
    ((bundle, config),) = served
    assert bundle == all_kept()[0].bundle
    assert config.model_name == "model"
    assert "no chat template" in line_of(run_cli("chat", target))
    assert builds.count == 1


def test_list_and_remove(run, run_cli, refuse_cli, builds, target, tiny_pair, cache, tmp_path) -> None:
    assert "bundles: 0" in run_cli("list").stdout
    run()
    kept = all_kept()[0]
    shown = run_cli("list").stdout
    for word in ("model", target, f"{tree_size(kept.folder) / 1e6:.1f} MB", time.strftime("%Y-%m-%d")):
        assert str(word) in shown
    assert "did you mean model?" in refuse_cli("remove", "modell")
    assert "not clear" in refuse_cli("remove")
    run("--draft", tiny_pair.draft)
    names = re.findall(r"model@[0-9a-f]{4}", run_cli("list").stdout)
    assert len(set(names)) == 2
    assert f"removed {names[0]}" in run_cli("remove", names[0]).stdout
    os.utime(all_kept()[0].folder / "built.json", (0, time.time() - 3 * 86400))
    run_cli("remove", "--unused-for", 4)
    assert len(all_kept()) == 1
    run_cli("remove", "--unused-for", 2)
    assert not all_kept()
    run()
    (cache / "engines").mkdir()
    (cache / "mine").mkdir()
    assert "removed engines" in run_cli("remove", "--all").stdout
    assert is_clear(cache)
    assert {path.name for path in cache.iterdir()} == {"bundles", "mine"}, "what is not ours stays"


def test_every_kind_of_data_in_the_cache_is_listed() -> None:
    named = set()
    for package in ("specexport", "runtime/specexport_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r'(?:cache_folder\(|^(?:RECORD_)?KIND = )"([a-z-]+)"', path.read_text(), re.MULTILINE))
    assert named - {"bundles"} == set(OTHERS) - {"engines"}


def test_what_runs_goes_on_when_it_is_removed(run, run_cli, builds, cache) -> None:
    run()
    with SpecEngine.load(all_kept()[0].bundle) as engine:
        before = engine.generate("def f(")[0].token_ids
        run_cli("remove", "model")
        assert is_clear(cache)
        assert engine.generate("def f(")[0].token_ids == before
