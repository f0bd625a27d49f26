"""The demo pair: small enough to ship, two models that fit each other, reproducible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAIR = Path(__file__).parents[2] / "examples" / "demo_pair"
SNIPPET = '''
def split_header(line):
    """Return the name and the value of a header line."""
    if not isinstance(line, str):
        raise TypeError("line must be a string")
    name, sep, value = line.partition(":")
    if not sep:
        raise ValueError("no separator in %r" % line)
    return name.strip().lower(), value.strip()
'''


def load(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def loss(folder: Path, text: str) -> float:
    model, tokenizer = load(folder)
    ids = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def test_tokenizers_are_identical_and_match_the_configs():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (PAIR / "target" / name).read_bytes() == (PAIR / "draft" / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(PAIR / "target")
    for role in ("target", "draft"):
        config = transformers.AutoConfig.from_pretrained(PAIR / role)
        assert config.architectures == ["LlamaForCausalLM"]
        assert config.vocab_size == len(tokenizer) == 4096
        assert config.bos_token_id == config.eos_token_id == tokenizer.eos_token_id == 0


def test_tokenizer_restores_text_and_keeps_indentation_whole():
    tokenizer = transformers.AutoTokenizer.from_pretrained(PAIR / "target")
    text = "if x:\n        y =  1\t# é €\r\n\n\n    return\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    for depth in (4, 8, 12, 16):
        assert len(tokenizer("\n" + " " * depth).input_ids) == 1


def test_names_no_machine():
    for path in PAIR.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "_name_or_path" not in text
        assert "/root" not in text
        assert "/home" not in text
        assert "/tmp" not in text.replace('"/tmp', "")  # a token may be spelled so


def test_target_is_better_than_draft():
    assert loss(PAIR / "target", SNIPPET) < loss(PAIR / "draft", SNIPPET) < 5.0


def test_prompts_fit_the_models():
    tokenizer = transformers.AutoTokenizer.from_pretrained(PAIR / "target")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len({p["id"] for p in prompts}) == len(prompts) >= 20
    assert all(0 < len(tokenizer(p["prompt"]).input_ids) <= 128 for p in prompts)


@pytest.mark.slow
@pytest.mark.whole
def test_training_script_makes_a_loadable_pair(tmp_path):
    small = ["64", "1", "1", "1", "64"]
    command = [sys.executable, str(PAIR / "train.py"), "--out", str(tmp_path), "--vocab", "512"]
    command += ["--target", *small, "--draft", *small, "--max-files", "8"]
    command += ["--tokens", "8192", "--batch-tokens", "4096", "--minutes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["tokens"] == 8192
    for role in ("target", "draft"):
        assert loss(tmp_path / role, SNIPPET) < 7.0


@pytest.mark.slow
@pytest.mark.whole
def test_distillation_script_makes_a_draft_that_fits(demo_bundle, tmp_path):
    command = [sys.executable, str(PAIR / "distill.py"), str(PAIR), "--teacher", str(demo_bundle)]
    command += ["--out", str(tmp_path), "--snippets", "6", "--minutes", "0.02", "--threads", "1", "--rows", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    draft = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.config.vocab_size == transformers.AutoConfig.from_pretrained(PAIR / "target").vocab_size
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (PAIR / "draft" / "tokenizer.json").read_bytes()
    assert loss(tmp_path / "draft", SNIPPET) < 5.0  # it went on from the trained draft
