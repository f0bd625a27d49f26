"""Output in encodings that lack letters: they are escaped, and JSON stays what it says."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from specexport_runtime.cli.any_text import escape_unencodable_output
from specexport_runtime.cli.command import generate
from specexport_runtime.cli.errors import SuggestingGroup
from specexport_runtime.errors import BundleError
from tests.support.cases.any_text import assert_texts_are_utf8

TEXT = "é 日本 😀 \ud800"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", b"\xe9 \\u65e5\\u672c \\U0001f600 \\ud800"),
        ("cp1252", "strict", b"\xe9 \\u65e5\\u672c \\U0001f600 \\ud800"),
        ("utf-8", "strict", "é 日本 😀 ".encode() + b"\\ud800"),
        ("utf-8", "surrogateescape", "é 日本 😀 ".encode() + b"\\ud800"),
        ("ascii", "strict", "é 日本 😀 ".encode() + b"\\ud800"),
        ("ANSI_X3.4-1968", "surrogateescape", "é 日本 😀 ".encode() + b"\\ud800"),
        ("latin-1", "replace", b"\xe9 ?? ? ?"),
    ],
)
def test_every_command_takes_any_text(encoding, errors, written, monkeypatch):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)

    @click.group(cls=SuggestingGroup)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        click.echo(TEXT)
        sys.stdout.write(TEXT + "\n")
        raise BundleError(TEXT)

    with pytest.raises(SystemExit):
        group.main(["fail"])
    for stream in streams.values():
        stream.flush()
    assert streams["stdout"].buffer.getvalue() == (written + b"\n") * 2
    assert streams["stderr"].buffer.getvalue() == b"error: " + written + b".\n"


def test_without_streams_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", kept := io.StringIO())
    escape_unencodable_output()
    assert (sys.stdout, sys.stderr) == (None, kept)
    assert kept.write(TEXT) == len(TEXT)


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("folder") / "bündel 日本"))


def run(*arguments: str | bytes | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "specexport_runtime", *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )


@pytest.mark.parametrize("environment", [C_LOCALE, {"PYTHONIOENCODING": "latin-1"}], ids=["C", "latin-1"])
def test_texts_and_folders_in_other_letters(environment: dict[str, str], bundle: Path) -> None:
    prompt = "é 日本 😀"
    done = run("generate", bundle, prompt, "--choice", "日", "--max-tokens", "4", "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    record = json.loads(done.stdout)
    assert (record["prompt"], record["text"]) == (prompt, "日")


def test_texts_of_the_command_line_are_utf8_whatever_the_locale() -> None:
    """An option that is no path, file or name takes its text as the prompt does."""
    assert_texts_are_utf8(generate)


def test_a_folder_or_a_prompt_that_is_no_utf8_is_refused(bundle: Path, tmp_path: Path) -> None:
    strange = os.fsencode(tmp_path) + b"/b\xff"
    shutil.copytree(bundle, os.fsdecode(strange))
    for folder, prompt, said in (
        (strange, "x", b"name that is not UTF-8"),
        (bundle, b"\xff", b"the prompt is no text"),
    ):
        done = run("generate", folder, prompt, "--max-tokens", "1", **C_LOCALE)
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: ")
        assert done.stderr.count(b"\n") == 1
        assert said in done.stderr
