"""Fixtures that every test folder may use, and the summary of what tests measured."""

import fcntl
import os
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chance
import hypothesis
import pytest
from tiny_models import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
DEMO_PAIR = ROOT / "examples" / "demo_pair"

chance.load_profile()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``: the workers of pytest-xdist are separate processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole session, shared by all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _isolated_environment(session_dir: Path) -> Iterator[None]:
    """Caches of this session only, and no model hub: a test must not depend on what a machine did before."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DIR", "GB"):
            patch.delenv(f"SPECEXPORT_CACHE_{name}", raising=False)
        for name in ("PREPACKED", "VERIFY_HASHES"):
            patch.delenv(f"SPECEXPORT_{name}", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(session_dir / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
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
    """The demo pair's bundle for ``ort-cpu``, built once a session. Read only: copy it to change it."""
    from specexport.build.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = session_dir / "demo-bundle"
    with locked(session_dir / "demo-bundle.lock"):
        if not folder.is_dir():
            recipe = BuildRecipe(target=str(demo_pair / "target"), draft=str(demo_pair / "draft"), output=str(folder))
            build_bundle(recipe)
    return folder


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads it
def pytest_configure(config: pytest.Config) -> None:
    """One variable gives all of chance another seed: hypothesis's, and those of ``chance.seed``."""
    if chance.FUZZ_SEED is not None and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(chance.FUZZ_SEED)


def pytest_report_header() -> str | None:
    return None if chance.FUZZ_SEED is None else f"fuzz: seed {chance.FUZZ_SEED}, {chance.MORE} times the examples"


def _parameters(item: pytest.Item) -> list[object]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects, and pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks that tests need not have in their files, and their order.

    Property tests draw their inputs. Tests of one tiny model go to one worker, which traces it once. Long tests first:
    at the end no worker should wait for another one's.
    """
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("fuzz")
        models = {value for value in _parameters(item) if isinstance(value, str) and value in ARCHITECTURES}
        if models and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"model {min(models)}"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to repeat what a random seed broke, and what tests recorded as ``measured: …``: no pass or fail."""
    if chance.FUZZ_SEED is not None and (failed := terminalreporter.getreports("failed")):
        terminalreporter.section("again, with the same seed")
        for report in failed:
            terminalreporter.write_line(f"make fuzz SEED={chance.FUZZ_SEED} PYTEST_ARGS='{report.nodeid}'")
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
