"""The prompts of the recipes for draft heads: the same for a seed, of three kinds, and none that is measured with."""

import ast
import asyncio
import json
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest

from specexport.bench.prompts import read_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "heads" / "prompts.py"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(Path(asyncio.__file__).parent))

    def call(each: int, seed: int) -> Path:
        path = tmp_path / f"{each}-{seed}.jsonl"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "-o", str(path), "--each", str(each), "--seed", str(seed)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return path

    return call


def test_a_seed_gives_the_same_prompts_of_each_kind(run) -> None:
    path = run(30, 5)
    written = path.read_text()
    assert run(30, 5).read_text() == written != run(30, 6).read_text()
    prompts = [json.loads(line) for line in written.splitlines()]
    assert [prompt["domain"] for prompt in prompts[:3]] == ["code", "math", "chat"]
    texts = {prompt["prompt"] for prompt in prompts}
    assert len(texts) == len(prompts) == len(read_prompts([path])) == 90
    for prompt in prompts:
        if prompt["domain"] == "code":
            ast.parse(prompt["prompt"])
        assert "{" not in prompt["prompt"] or prompt["domain"] == "code"
    assert not texts & {prompt.text for prompt in read_prompts([])}


def test_more_than_there_are_is_told(run) -> None:
    with pytest.raises(SystemExit, match=r"there are only [0-9]+ prompts of kind code"):
        run(900, 0)
