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
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from specexport.checkpoint import source
from specexport.cli import main
from specexport.compile import model, pipeline
from specexport.disk import tree_size
from specexport.progress import ProgressEvent
from specexport.run import child, estimate
from specexport.run.bundles import list_cached_bundles, resolve_checkpoint_path
from specexport.run.kept import OTHERS
from specexport_runtime import SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import InvalidRequestError, SpecexportError, VocabularyMismatchError
from tests.support.cases.refusals import RunCli, line_of
from tests.support.fakes.child_work import fail, kill_itself
from tests.support.fakes.kept_builds import CopiedBuild
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model

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


def real(*args: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own; says which heavy packages it has loaded."""
    code = (
        "import atexit, sys; from specexport.cli import main\n"
        "atexit.register(lambda: print(*{'torch', 'transformers', 'onnx'} & set(sys.modules), file=sys.stderr))\n"
        "main(prog_name='specexport')"
    )
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


@pytest.mark.slow
def test_from_a_file_to_a_text(cache: Path, tmp_path: Path) -> None:
    """Nothing is stood in for: a GGUF file, a build in a process of its own, a text by its chat template."""
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    file = tmp_path / "tiny.gguf"
    write_gguf(make_model("Qwen2", GROUPED), file, stated={"tokenizer.chat_template": template})
    options = ("--max-tokens", 8, "--temperature", 0.5, "--seed", 1)
    first = real("run", file, "hello", "--system", "Be brief.", *options)
    assert first.returncode == 0, first.stderr
    begin, end, loaded = first.stderr.split("\n", 2)
    assert begin.startswith("building tiny ")
    assert end.startswith("built tiny ")
    assert not loaded.strip(), "what the build loads is gone with its process"
    second = real("run", file, "--system", "Be brief.", *options, input="hello")
    assert (second.stdout, second.stderr.strip()) == (first.stdout, "")
    (bundle,) = (path for path in cache.glob("bundles/*/tiny"))
    prompt = "<system> Be brief.\n<user> hello\n"
    plain = real("generate", bundle, prompt, *options)
    assert plain.stdout == first.stdout
    assert not (cache / "engines").exists(), "each weight lies on the disk once"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert re.fullmatch(r"building model from \S+ MB, which takes about \d+ s", begin)
    assert re.fullmatch(r"built model in \d+ s", end)
    assert not second.stderr
    assert builds.count == 1
    assert [path.name for path in (cache / "bundles").iterdir()] == [list_cached_bundles()[0].folder.name], (
        "no lock stays"
    )
    os.utime(list_cached_bundles()[0].folder / "built.json", (0, 0))
    run()
    assert list_cached_bundles()[0].last_used > 0


def test_a_prompt_comes_from_standard_input_too(run_cli, builds, target) -> None:
    args = ["run", str(target), "--max-tokens", "4"]
    assert CliRunner().invoke(main, args, input="def f(").stdout == run_cli(*args, "def f(").stdout


def test_without_a_prompt_a_terminal_has_a_conversation(builds, target, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(InvalidRequestError, match="model has no chat template"):
        main.main(["run", str(target)], standalone_mode=False)


def test_a_bundle_runs_as_it_is(run_cli, refuse_cli, builds, tiny_bundle) -> None:
    assert run_cli("run", tiny_bundle, "def f(", "--max-tokens", 4).exit_code == 0
    assert "--draft was given, and" in refuse_cli("run", tiny_bundle, "text", "--draft", "other")
    assert builds.count == 0


def test_options_are_checked_before_anything_is_built(run, refuse_cli, builds, target) -> None:
    assert "temperature" in refuse_cli("run", target, "text", "--temperature", -1)
    assert "no prompt" not in refuse_cli("run", target, "text", "--threads", 0)
    assert builds.count == 0
    result = run("--system", "Be brief.")
    assert result.exit_code == 2
    assert "plain text has no place for it" in result.stderr, "which only the built model can say"


def test_drafts_options_and_long_contexts_have_bundles_of_their_own(run, builds, tiny_pair) -> None:
    for options in ([], ["--draft", tiny_pair.draft], ["--quantize", "int8"], ["--max-model-len", 9999]):
        run(*options)
    assert builds.count == len(list_cached_bundles()) == 4
    run("--max-model-len", 64)
    assert builds.count == 4, "a shorter one is a matter of the load"


def test_a_changed_file_is_seen(run, builds, target) -> None:
    run()
    change(target / "config.json")
    said = run().stderr.splitlines()
    assert said[0] == f"{target} has changed: model is built again, unless all contents are the same"
    assert not run().stderr
    (target / "chat_template.jinja").write_text("{{ messages }}")
    assert "has changed" in run().stderr, "another file beside it"
    assert builds.count == 3


def test_a_hub_id_is_fetched_once(run_cli, builds, target, cache, monkeypatch, tmp_path) -> None:
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "_fetch", lambda *args: asked.append(args) or target)
    for _ in range(2):
        assert run_cli("run", "org/tiny", "def f(", "--max-tokens", 4).exit_code == 0
    assert len(asked) == builds.count == 1
    (kept,) = list_cached_bundles()
    assert (kept.wanted.target, kept.bundle.name) == ("org/tiny", "tiny")
    shutil.rmtree(target)
    assert "org/tiny: gone" in run_cli("run", "org/tiny", "def f(", "--max-tokens", 4).stderr


def test_without_the_compiler_a_line_says_what_to_install(refuse_cli, target, cache, monkeypatch) -> None:
    monkeypatch.setattr(model, "_NEEDED", ("no_such_module",))
    for command in ("run", "serve", "generate"):
        line = refuse_cli(command, target, *(["text"] if command != "serve" else []))
        assert "building needs no_such_module" in line
        assert "export" in line.partition("Fix: ")[2]
    assert "there is no folder other" in refuse_cli("run", "other", "text")


def test_a_changed_file_that_cannot_be_built_is_refused_and_the_old_bundle_stays(run, builds, target) -> None:
    run()
    change(target / "config.json")
    builds.error = VocabularyMismatchError("no such vocabulary.", "give another.")
    for _ in range(2):
        result = run()
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == "error: no such vocabulary. Fix: give another."
    assert load_manifest(list_cached_bundles()[0].bundle)


def test_a_bundle_outlives_its_checkpoint(run, builds, target) -> None:
    text = run().stdout
    shutil.rmtree(target)
    result = run()
    assert result.stdout == text
    assert result.stderr == f"{target}: gone, and this runs what was built from it\n"
    assert builds.count == 1


def test_what_is_damaged_in_the_cache_is_built_again(run, builds) -> None:
    run()
    (list_cached_bundles()[0].bundle / "target" / "model.onnx").unlink()
    assert "the bundle in the cache is damaged: model is built again" in run().stderr
    (list_cached_bundles()[0].folder / "built.json").write_text("{")
    assert run().exit_code == 0
    assert builds.count == 3
    weights = list_cached_bundles()[0].bundle / "target" / "model.onnx.data"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert "Fix: `specexport remove model`, then run it again." in run().stderr, "of its size, as it was written"


def test_a_wrong_draft_leaves_nothing(run, builds, refuse_cli, target, cache, tiny_bundle) -> None:
    assert "there is no such folder" in refuse_cli("run", target, "text", "--draft", "/no/draft")
    assert "is a bundle, and a draft is" in refuse_cli("run", target, "text", "--draft", tiny_bundle)
    builds.error = VocabularyMismatchError("no such vocabulary.", "give another.")
    assert run("--draft", target).exit_code == 2
    assert is_clear(cache)


def test_a_full_disk_leaves_nothing_and_names_the_cache(run, builds, cache) -> None:
    builds.error = OSError(errno.ENOSPC, "No space left on device")
    result = run()
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: the disk of {cache} is full: ")
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
    assert "error: checkpoint nothing.gguf: there is" in refuse_cli("run", "nothing.gguf", "text"), "as it was typed"
    assert resolve_checkpoint_path("org/model") == str(tmp_path / "org" / "model")
    assert resolve_checkpoint_path("org/other") == "org/other"
    assert "there is no such folder or file" in refuse_cli("run", "./org/other", "text"), "no hub id"
    assert "it is empty" in refuse_cli("run", "", "text")
    assert resolve_checkpoint_path("other.gguf") == str(tmp_path / "other.gguf")


def test_other_commands_take_checkpoints_too(run, run_cli, builds, target, monkeypatch) -> None:
    from specexport_runtime.cli import serve

    served = []
    fake = SimpleNamespace(
        SpecEngine=SimpleNamespace(load=print),
        run_server=lambda load, config: served.append((load.args[0], config)) or 0,
    )
    monkeypatch.setattr(serve, "_import_run", lambda: fake)
    assert run_cli("serve", target).exit_code == 0
    assert run_cli("generate", target, "def f(", "--max-tokens", 4).stdout == run().stdout
    ((bundle, config),) = served
    assert bundle == list_cached_bundles()[0].bundle
    assert config.model_name == "model"
    assert "no chat template" in line_of(run_cli("chat", target))
    assert builds.count == 1


def test_list_and_remove(run, run_cli, refuse_cli, builds, target, tiny_pair, cache, tmp_path) -> None:
    assert "bundles: 0" in run_cli("list").stdout
    run()
    kept = list_cached_bundles()[0]
    shown = run_cli("list").stdout
    for word in ("model", target, f"{tree_size(kept.folder) / 1e6:.1f} MB", time.strftime("%Y-%m-%d")):
        assert str(word) in shown
    assert "did you mean model?" in refuse_cli("remove", "modell")
    assert "not clear" in refuse_cli("remove")
    for days in ("-1", "nan"):
        assert "no number of days" in refuse_cli("remove", f"--unused-for={days}")
    run("--draft", tiny_pair.draft)
    names = re.findall(r"model@[0-9a-f]{4}", run_cli("list").stdout)
    assert len(set(names)) == 2
    assert f"removed {names[0]}" in run_cli("remove", names[0]).stdout
    os.utime(list_cached_bundles()[0].folder / "built.json", (0, time.time() - 3 * 86400))
    run_cli("remove", "--unused-for", 4)
    assert len(list_cached_bundles()) == 1
    run_cli("remove", "--unused-for", 2)
    assert not list_cached_bundles()
    run()
    (cache / "engines").mkdir()
    (cache / "mine").mkdir()
    assert "removed engines" in run_cli("remove", "--all").stdout
    assert is_clear(cache)
    assert {path.name for path in cache.iterdir()} == {"bundles", "mine"}, "what is not ours stays"


def test_a_name_is_listed_as_it_is(run_cli, builds, target, tmp_path) -> None:
    for name in ("n[red]x", "n[/x]"):
        shutil.copytree(target, tmp_path / name)
        assert run_cli("run", tmp_path / name, "def f(", "--max-tokens", 1).exit_code == 0
        assert name in run_cli("list").stdout


def test_every_kind_of_data_in_the_cache_is_listed() -> None:
    named = set()
    for package in ("specexport", "runtime/specexport_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            named |= set(
                re.findall(r'(?:cache_folder\(|^(?:RECORD_)?KIND = )"([a-z-]+)"', path.read_text(), re.MULTILINE)
            )
    assert named - {"bundles"} == set(OTHERS) - {"engines"}


def test_what_runs_goes_on_when_it_is_removed(run, run_cli, builds, cache) -> None:
    run()
    with SpecEngine.load(list_cached_bundles()[0].bundle) as engine:
        before = engine.generate("def f(")[0].token_ids
        run_cli("remove", "model")
        assert is_clear(cache)
        assert engine.generate("def f(")[0].token_ids == before


class Processes:
    """Processes that want the same bundle."""

    def __init__(self, builds: CopiedBuild, target: Path) -> None:
        self.builds, self.target = builds, target
        self.begun: list[subprocess.Popen[str]] = []

    def begin(self) -> subprocess.Popen[str]:
        code = "import sys; from tests.support.fakes.kept_builds import build_as_told; build_as_told(*sys.argv[1:])"
        told = [str(each) for each in (self.builds.source, self.builds.work, self.target)]
        self.begun.append(
            subprocess.Popen([sys.executable, "-c", code, *told], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        )
        return self.begun[-1]

    def until(self, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < end
            assert all(each.returncode is None for each in self.begun)
            time.sleep(0.01)


@pytest.fixture
def processes(builds: CopiedBuild, target: Path, cache: Path) -> Iterator[Processes]:
    made = Processes(builds, target)
    builds.hold.touch()
    yield made
    builds.hold.unlink(missing_ok=True)
    for each in made.begun:
        with each:
            each.kill()


def waits(process: subprocess.Popen[str]) -> bool:
    assert process.stderr is not None
    return process.stderr.readline() == "model is being built by another process: waiting for it\n"


def test_the_second_of_two_waits_and_takes_what_the_first_built(processes, builds, refuse_cli, cache) -> None:
    first = processes.begin()
    processes.until(lambda: builds.count)
    second = processes.begin()
    assert waits(second)
    builds.hold.unlink()
    assert not second.communicate()[1]
    assert "built model" in first.communicate()[1]
    assert first.returncode == second.returncode == 0
    assert builds.count == 1
    assert os.listdir(cache / "bundles") == [list_cached_bundles()[0].folder.name]


def test_the_second_builds_when_the_first_is_killed(processes, builds, run_cli, cache) -> None:
    first = processes.begin()
    processes.until(lambda: builds.count)
    second = processes.begin()
    assert waits(second)
    run_cli("list")  # what is being built is no leftover
    first.send_signal(signal.SIGKILL)
    processes.until(lambda: builds.count == 2)
    builds.hold.unlink()
    assert "built model" in second.communicate()[1]
    kept = list_cached_bundles()[0]
    assert os.listdir(kept.folder.parent) == [kept.folder.name]
    assert sorted(os.listdir(kept.folder)) == ["built.json", "model"], "what the first wrote is gone"
    assert not (kept.bundle / "half").exists()


def test_what_a_killed_build_left_goes_with_the_next_command(processes, builds, run_cli, cache) -> None:
    first = processes.begin()
    processes.until(lambda: builds.count)
    first.kill()
    first.wait()
    assert list(cache.rglob("half"))
    run_cli("list")
    assert is_clear(cache)


def test_what_is_being_built_again_is_not_removed(processes, run, builds, refuse_cli, target) -> None:
    builds.hold.unlink()
    run()
    builds.hold.touch()
    change(target / "config.json")
    processes.begin()
    processes.until(lambda: builds.count == 2)
    assert "being built just now" in refuse_cli("remove", "model")
    assert list_cached_bundles()


def test_errors_come_out_of_the_child_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(VocabularyMismatchError, match="none") as raised:
        child.call_in_child(fail, VocabularyMismatchError("none.", "give one."))
    assert raised.value.hint == "give one."
    assert not capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        child.call_in_child(fail, ZeroDivisionError("a defect"))
    assert ended.value.code == 1
    assert "ZeroDivisionError: a defect" in capfd.readouterr().err
    with pytest.raises(SpecexportError, match="signal 9"):
        child.call_in_child(kill_itself)


def test_the_child_ends_with_its_parent_and_clears_away(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = "import sys; from tests.support.fakes.child_work import begin_waiting; begin_waiting(sys.argv[1])"
    for sent in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, "-c", code, str(begun)], cwd=ROOT) as parent:
            while not begun.exists():
                assert parent.poll() is None
                time.sleep(0.01)
            parent.send_signal(sent)
        end = time.monotonic() + 60
        while begun.read_text() != "cleared":
            assert time.monotonic() < end
            time.sleep(0.01)
        begun.unlink()


def test_an_estimate_falls_and_never_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(estimate.time, "monotonic", lambda: now[0])
    made = estimate.TimeEstimate({"target": 10**9, "draft": 10**8})
    whole = made.seconds_left()
    stages = [(role, stage) for role in ("target", "draft") for stage in estimate.SECONDS]
    left = []
    for role, stage in [("", "plan"), *stages, ("", "bundle")]:
        made.on_event(ProgressEvent(stage, role, 0, 0))
        left.append(made.seconds_left())
        fixed, each_gb = estimate.SECONDS.get(stage, (4.0, 0.0))
        now[0] += 2 * (fixed + each_gb * (1.0 if role == "target" else 0.1))  # half as fast as the table says
    assert whole < max(left) < 2 * whole, "it learns that this machine is slow"
    assert left[-1] < left[len(left) // 2] < max(left)
    assert min(left) > 0
    before = made.seconds_left()
    now[0] += 1000
    assert made.seconds_left() > before, "a stage that does not end"
    assert estimate.describe_seconds(0.1) == "a few seconds"
    assert estimate.describe_seconds(41) == "about 45 s"
    assert estimate.describe_seconds(200) == "about 3 min"


def test_a_terminal_has_one_line_that_goes_away() -> None:
    stream = Terminal()
    with estimate.show_estimate(stream, "a-model-" + "x" * 200, {"target": 10**9}) as progress:
        progress(ProgressEvent("trace", "target", 1, 9, "a message"))
    assert "building a-model" in stream.getvalue()
    assert max(map(len, re.split(r"[\r\n]|\x1b\[\??[0-9]*[a-zA-Z]", stream.getvalue()))) <= 80
    assert "a message" not in stream.getvalue()
    assert stream.getvalue().count("\n") <= 1
