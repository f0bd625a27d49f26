"""Growing a target: the same function at first, layers that can be left out, a run that goes on where it stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.tensor([[5, 300, 17, 999, 42, 7, 256, 31]])


@pytest.fixture
def scripts(monkeypatch):
    import importlib

    for name in ("demo_pair", "deep_target"):
        monkeypatch.syspath_prepend(EXAMPLES / name)
    return importlib.import_module("deepen"), importlib.import_module("skippable")


def make_target(layers=3):
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_growing_changes_nothing_and_copies_can_be_left_out(scripts):
    deepen, skippable = scripts
    old = make_target()
    grown = deepen.grow(old, "oiio").eval()
    expected = old(TOKENS).logits
    assert grown.config.num_hidden_layers == 7  # o i i o, o i i
    assert torch.equal(grown(TOKENS).logits, expected)
    every = skippable.Kept.every(7)
    whole = skippable.run_blocks(grown, TOKENS, every, similarity=True)
    torch.testing.assert_close(whole.logits, expected)
    new = [1, 2, 5, 6]
    assert (whole.similarity[new] > 0.9999).all()
    kept = skippable.Kept(*([i not in new for i in range(7)] for _ in range(2)))
    torch.testing.assert_close(skippable.run_blocks(grown, TOKENS, kept).logits, expected)
    kept.mlp[0] = False
    assert not torch.allclose(skippable.run_blocks(grown, TOKENS, kept).logits, expected, atol=1e-4)
    with pytest.raises(ValueError, match="--pattern"):
        deepen.grow(old, "io")


def test_thinned_models_follow_the_rules_or_chance_and_keep_the_first_layer(scripts):
    deepen, skippable = scripts
    similarity = torch.tensor([0.5, 0.99, 0.9, 0.99, 0.9, 0.99])
    generator = torch.Generator().manual_seed(0)
    drawn = {tuple(map(tuple, deepen.thinned(similarity, generator))) for _ in range(60)}
    ruled = skippable.choose_blocks(similarity, 0.985, 2, 2)
    assert tuple(map(tuple, ruled)) in drawn
    assert tuple(ruled.attention) == (True, False, True, False, True, True)
    assert all(attention[0] and mlp[0] for attention, mlp in drawn)
    assert len(drawn) > 10


@pytest.mark.slow
@pytest.mark.whole
def test_a_short_run_trains_saves_and_goes_on(tmp_path):
    target = tmp_path / "target"
    make_target().save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((EXAMPLES / "demo_pair" / "target" / name).read_bytes())
    command = [sys.executable, EXAMPLES / "deep_target" / "deepen.py", "--target", target, "--out", tmp_path / "deep"]
    command += ["--max-files", "2", "--length", "32", "--rows", "2", "--heldout-rows", "2", "--minutes", "5"]

    def run(*more):
        done = subprocess.run([*map(str, command), *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "deep" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    first = run("--tokens", "256")
    assert [row.get("tokens") for row in first] == [None, 256]
    assert first[0]["layers"] == 10  # o i i i o i, o i i i
    assert first[0]["every 2"]["agreement"] == 1.0  # nothing is lost before training
    again = run("--tokens", "512", "--resume")
    assert [row.get("tokens") for row in again[len(first) :]] == [None, 512]
    assert again[2]["loss"] == pytest.approx(first[1]["loss"], abs=1e-4)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep", dtype=torch.float32)
    assert saved.config.num_hidden_layers == 10
    assert torch.isfinite(saved(TOKENS).logits).all()
    assert any(p.abs().max() > 0 for n, p in saved.named_parameters() if "layers.1.mlp.down_proj" in n)
