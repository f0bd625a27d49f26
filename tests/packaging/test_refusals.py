"""Every command refuses what it cannot do in one line with a mend and exit code 2, and leaves nothing behind."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport.cli import COMMANDS, main
from tests.support.cases.refusals import content_of, line_of

NOTHING = "{folder}/nothing"
REQUIRED = {
    "build": [NOTHING, "-o", "{folder}/out", "-q"], "verify": [NOTHING], "inspect": [NOTHING],
    "generate": [NOTHING, "text"], "chat": [NOTHING], "serve": [NOTHING], "demo": [],
    "bench": [NOTHING, "--prompts", "{folder}/p.jsonl"],
    "train-draft": [NOTHING, "-o", "{folder}/out", "--prompts", "{folder}/p.jsonl", "-q"], "explain": [NOTHING, "text"],
    "run": [NOTHING, "text"], "list": [], "remove": ["name"],
    "debug": [NOTHING, "--graph", "padded", "-q"], "simulate": [], "doctor": [],
}  # fmt: skip
"""What each command must be given, with a folder or file that is not there."""


def refused(folder: Path, name: str, *more: str) -> str:
    before = content_of(folder)
    line = line_of(CliRunner().invoke(main, [name, *(each.format(folder=folder) for each in REQUIRED[name]), *more]))
    assert content_of(folder) == before, "something was left behind"
    return line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1 w2"}\n' * 16)
    return tmp_path


def test_every_command_is_tried() -> None:
    assert REQUIRED.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", REQUIRED)
def test_an_option_or_a_bundle_that_there_is_not(folder: Path, name: str) -> None:
    assert "--nonsense" in refused(folder, name, "--nonsense")
    # The server listens before it reads, and what training has done may go on: their own tests have them.
    if NOTHING in REQUIRED[name] and name not in ("serve", "train-draft"):
        assert "nothing" in refused(folder, name)
        if name != "build":
            (folder / "nothing").mkdir()
            assert "not a bundle" in refused(folder, name)
            (folder / "nothing" / "manifest.json").write_text("[]")
            assert "manifest.json" in refused(folder, name)
