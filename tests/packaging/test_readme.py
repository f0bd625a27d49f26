"""Every command of the documentation is run, in order, in a copy of the repository.

A fence that cannot be run says why in its first line: ```` ```bash no-test: the reason ````.
"""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from specexport_runtime import abi

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRACT = ROOT / "docs" / "contract.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w+)[ ]?(?P<note>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
BLOCK_SECONDS = 900  # ends what hangs
COMMAND = Path(sys.executable).with_name("specexport")
# Its commands are long measurements of models that are not in the repository; their options are still checked.
NOT_RUN = ROOT / "docs" / "benchmarks.md"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    note: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Environments, caches and built bundles; the recipes beside the bundles are copied."""
    if Path(folder) == ROOT / "engines":
        return set(names) - {"recipes"}
    return NOT_COPIED(folder, names)


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"], match["note"].strip(), match["body"])


def runnable(page: Path) -> list[Block]:
    if page == NOT_RUN:
        return []
    return [block for block in blocks_of(page) if block.language in {"bash", "python"} and not block.note]


def use_one_core() -> None:
    """Engines take a thread for each core. The other cores are other tests': threads that wait for theirs spin."""
    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def with_free_port(body: str) -> str:
    for port in set(re.findall(r"--port (\d+)", body)):
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            body = re.sub(rf"\b{port}\b", str(probe.getsockname()[1]), body)
    return body


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else ["python", "-c"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # The installed packages, not those that lie in the copy.
    environment = {**os.environ, "PATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [*command, with_free_port(block.body)], cwd=folder, env=environment, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL, timeout=BLOCK_SECONDS, preexec_fn=use_one_core,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_commands_run_as_written(page: Path, demo_bundle: Path, tmp_path: Path) -> None:
    # Waiting for `demo_bundle` puts the draft's engine into the session's cache, so that the README's build is quicker.
    folder = tmp_path / "specexport"
    shutil.copytree(ROOT, folder, ignore=not_copied)
    if page != README:  # the other pages start where the README ends
        shutil.copytree(demo_bundle, folder / "engines" / "demo")
    for block in runnable(page):
        result = run_block(block, folder)
        assert result.returncode == 0, (
            f"{block} failed:\n{block.body}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
        assert "Traceback" not in result.stderr, block


def test_the_readme_has_commands_to_run() -> None:
    assert {block.language for block in runnable(README)} == {"bash", "python"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_fence_that_is_not_run_says_why(page: Path) -> None:
    for block in blocks_of(page):
        if block.note:
            assert re.fullmatch(r"no-test: \S.{9,}", block.note), f"{block}: write `no-test: reason`"


def test_the_contract_table_is_the_compilers_own() -> None:
    assert abi.format_table() in CONTRACT.read_text(encoding="utf-8")


@functools.cache
def help_of(command: str) -> str:
    return subprocess.run([COMMAND, command, "--help"], capture_output=True, text=True, check=True).stdout


def test_documented_options_exist() -> None:
    """Every long option after a `specexport` command is one that the command's help lists."""
    for page in PAGES:
        for block in blocks_of(page):
            if block.language != "bash":
                continue
            for line in block.body.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\S*/)?specexport ([\w-]+)", line):
                    for option in re.findall(r"(?<=\s)--[a-z-]+", line):
                        assert option in help_of(match[1]), f"{block}: specexport {match[1]} has no {option}"
