"""Fixtures that every test folder may use, and the summary of what tests measured."""

import asyncio
import gc
import inspect
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.cases import chance
from tests.support.cases.lanes import keep_lanes, skip_when_late
from tests.support.cases.shared import changed_since, made_once
from tests.support.models import tiny_traces
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS
from tests.support.models.tiny_traces import share_exports

ROOT = Path(__file__).resolve().parents[1]
DEMO_PAIR = ROOT / "examples" / "demo_pair"
BUNDLES = {"demo_bundle", "tiny_bundle", "rtx_bundle"}

chance.load_profile()


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Most tests are about what is done with what torch exports of a model, and share it."""
    skip_when_late(item)
    share_exports(item.get_closest_marker("exports") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _isolated_environment(session_dir: Path) -> Iterator[None]:
    """Caches of this session only, and no model hub: a test must not depend on what a machine did before.

    What torch exports of tiny models is kept for the next run over the same sources.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECEXPORT_CACHE_DIR", raising=False)
        patch.delenv("SPECEXPORT_VERIFY_HASHES", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(session_dir / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        tiny_traces.folder = tiny_traces.exports_of()
        yield


@pytest.fixture(autouse=True)
def _warnings_anew() -> None:
    """What is said once a process is said once a test."""
    from specexport_runtime import user_cache

    user_cache._warned.clear()


@pytest.fixture(autouse=True)
def _repeatable_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """A request without a seed of its own gets one that the test's name decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", random.Random(f"{chance.seed(0)} {request.node.name}").getrandbits)
        yield


@pytest.fixture(scope="session")
def demo_pair() -> Path:
    """Folder of the demo pair's checkpoints: ``target`` and ``draft``."""
    return DEMO_PAIR


@pytest.fixture(scope="session")
def demo_bundle(session_dir: Path, demo_pair: Path) -> Path:
    """The demo pair's bundle for ``ort-cpu``, made once a session.

    Its target can draft with its own layers, so that one bundle has every drafter.
    """
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = session_dir / "demo-bundle"
    target, draft = str(demo_pair / "target"), str(demo_pair / "draft")
    recipe = BuildRecipe(target=target, draft=draft, output=str(folder), self_draft=True)
    return made_once(folder, lambda: build_bundle(recipe))


def pytest_collection_finish() -> None:
    """What test files import stays: Python need not look for garbage in it, nor after every 700 new objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What all tests share is still what it was; asked once, when all workers are done."""
    factory = getattr(session.config, "_tmp_path_factory", None)
    if factory is None or hasattr(session.config, "workerinput") or factory._basetemp is None:
        return
    if changed := changed_since(factory._basetemp):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: tests changed what they share: {', '.join(changed)}")  # noqa: T201 - the run's result


def pytest_unconfigure() -> None:
    gc.unfreeze()  # modules that count their objects at the end would call these leaked


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads it
def pytest_configure(config: pytest.Config) -> None:
    """One variable gives all of chance another seed: hypothesis's, and those of ``chance.seed``."""
    if chance.FUZZ_SEED is not None and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(chance.FUZZ_SEED)


def pytest_report_header() -> str | None:
    return None if chance.FUZZ_SEED is None else f"fuzz: seed {chance.FUZZ_SEED}, {chance.MORE} times the examples"


def _group_of(item: pytest.Item) -> str | None:
    """What a test shares with others: a tiny model, which is traced once in a process, or fixtures of its file."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    models = {value for value in parameters if isinstance(value, str) and value in ARCHITECTURES | HYBRIDS}
    if models:
        return f"model {min(models)}"
    fixtures = getattr(item, "_fixtureinfo", None)
    made = [found[-1].scope for found in fixtures.name2fixturedefs.values()] if fixtures else []
    return item.nodeid.partition("::")[0] if "module" in made else None


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid if mark is None else str(mark.args[0])


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects, and pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks that tests need not have in their files, and their order.

    Property tests draw their inputs; some tests need a bundle that is really built. Tests that share what takes long to
    make go to one worker, and what takes longest comes first: at the end no worker should wait for another one.
    """
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("fuzz")
        if BUNDLES & set(getattr(item, "fixturenames", ())):
            item.add_marker("bundle")
        if item.get_closest_marker("xdist_group") is None and (group := _group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    keep_lanes(items, ARCHITECTURES.keys() | HYBRIDS.keys())
    slow = {_group(item) for item in items if item.get_closest_marker("slow")}
    waiting = {_group(item) for item in items if "demo_bundle" in getattr(item, "fixturenames", ())}
    # One worker builds the demo bundle at once. The other one has something else to do until it is there.
    builder = next((group for item in items if (group := _group(item)) in slow & waiting), None)

    def rank(item: pytest.Item) -> int:
        group = _group(item)
        if group == builder:
            return 0
        if group in slow:
            return 2 if group in waiting else 1
        return 3 if group != item.nodeid else 4

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to repeat what a random seed broke, and what tests recorded as ``measured: …``: no pass or fail."""
    if chance.FUZZ_SEED is not None and (failed := terminalreporter.getreports("failed")):
        terminalreporter.section("again, with the same seed")
        for report in failed:
            name, _, group = report.nodeid.rpartition("@")  # pytest-xdist writes the group after the name
            name = report.nodeid if "]" in group else name or report.nodeid
            terminalreporter.write_line(f"make fuzz SEED={chance.FUZZ_SEED} PYTEST_ARGS='{name}'")
    lines = [
        f"{name.removeprefix('measured: ')}: {value}"
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name.startswith("measured: ")
    ]
    if lines:
        terminalreporter.section("measured, not asserted")
        for line in sorted(set(lines)):
            terminalreporter.write_line(line)
