"""The prompts of the recipes for draft heads: the same for a seed, of three kinds, and none that is measured with."""

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specexport.bench.prompts import read_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "heads" / "prompts.py"


@pytest.fixture(scope="module")
def made() -> Any:
    return runpy.run_path(str(SCRIPT))["make_prompts"]


def test_a_seed_gives_the_same_prompts_of_each_kind(made: Any, tmp_path: Path) -> None:
    prompts = made(30, 5)
    assert [prompt["domain"] for prompt in prompts[:3]] == ["code", "math", "chat"]
    texts = {prompt["prompt"] for prompt in prompts}
    assert len(texts) == len(prompts) == 90
    for prompt in prompts:
        if prompt["domain"] == "code":
            ast.parse(prompt["prompt"])
        assert "{" not in prompt["prompt"] or prompt["domain"] == "code"
    assert not texts & {prompt.text for prompt in read_prompts([])}
    path = tmp_path / "p.jsonl"
    subprocess.run([sys.executable, str(SCRIPT), "-o", str(path), "--each", "30", "--seed", "5"], check=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == prompts
    assert len(read_prompts([path])) == 90


def test_more_than_there_are_is_told(made: Any) -> None:
    with pytest.raises(SystemExit, match="there are only 800 prompts of kind chat"):
        made(900, 0)
