"""A tiny target and draft, and one bundle of them: made once a session and only read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specexport.cli import main
from specexport.compile.pipeline import build_bundle
from tests.support.cases.refusals import content_of, line_of
from tests.support.cases.shared import made_once
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import make_llama, save_checkpoint


@pytest.fixture(scope="session")
def tiny_pair(session_dir: Path) -> TinyPair:
    pair = TinyPair(session_dir / "tiny-pair")

    def make() -> None:
        save_checkpoint(make_llama(0), pair.target)
        save_checkpoint(make_llama(1, hidden_size=32, num_hidden_layers=1, vocab_size=300), pair.draft)

    made_once(pair.target.parent, make)
    return pair


@pytest.fixture(scope="session")
def tiny_bundle(session_dir: Path, tiny_pair: TinyPair) -> Path:
    """A bundle of the tiny pair; its engines are in the session's cache too."""
    return _build_once(session_dir / "tiny-bundle", tiny_pair)


@pytest.fixture(scope="session")
def gated_bundle(session_dir: Path, tiny_pair: TinyPair) -> Path:
    """A bundle of the tiny pair whose target can draft with its own layers."""
    return _build_once(session_dir / "gated-bundle", tiny_pair, self_draft=True)


def _build_once(folder: Path, pair: TinyPair, **values: object) -> Path:
    return made_once(folder, lambda: build_bundle(pair.recipe(folder, **values)))


@pytest.fixture
def run_cli() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def refuse_cli(run_cli: Callable[..., Result], tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused: exit code 2, one line, no traceback; returns the line."""

    def refuse(*args: object, exit_code: int = 2) -> str:
        before = content_of(tmp_path)
        line = line_of(run_cli(*args), exit_code=exit_code)
        assert content_of(tmp_path) == before, "something was left behind"
        return line

    return refuse
