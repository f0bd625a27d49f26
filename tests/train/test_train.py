"""Training a head for a tiny target: what it learns is accepted, a killed run goes on, and bad input is told."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_llama, save_checkpoint

from specexport.build.pipeline import build_bundle
from specexport.frontend.source import resolve_source
from specexport.heads.files import open_head
from specexport.heads.read import read_config
from specexport.recipe import BuildRecipe
from specexport.train import run
from specexport.train.options import TrainOptions
from specexport.train.run import train_draft
from specexport.train.shape import count_ids, draft_size, new_config
from specexport.train.store import Example, FeatureStore, StoreWriter, batches
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError

LAYERS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_llama(seed=11, num_hidden_layers=LAYERS), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i} and {i * i} are {chr(65 + i % 26)}"}) for i in range(40)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    build_bundle(BuildRecipe(target=str(target), output=str(folder), max_model_len=128, check=False))
    return folder


def options(target: Path, prompts: Path, bundle: Path, output: Path, **changes: Any) -> TrainOptions:
    usual = {"max_tokens": 24, "batches": 12, "batch_tokens": 256, "threads": 1}
    return TrainOptions(str(target), output, (prompts,), bundle=bundle, **(usual | changes))


@pytest.fixture
def saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAVE_EVERY", 4)


@pytest.mark.bundle
def test_what_was_learned_is_accepted(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    """Acceptance, not only equality: a head that learned nothing, or is read wrongly, drafts what is refused."""
    result = train_draft(options(target, prompts, bundle, tmp_path / "head", batches=150, rate=0.01))
    assert result.curve[-1]["rates"][0] > 0.4
    assert result.curve[-1]["length"] > 1 + result.curve[0]["rates"][0] / 2
    build_bundle(
        BuildRecipe(
            target=str(target), head=str(tmp_path / "head"), output=str(tmp_path / "b"), max_model_len=128, check=False
        )
    )
    engine = SpecEngine.load(tmp_path / "b", num_threads=1, spin=False, adaptive=False)
    texts = [f"{i} and {i * i} are {chr(65 + i % 26)}" for i in range(1, 9)]  # of a random target nothing else is known
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = [result.token_ids for result in engine.generate(texts, params, drafter="none")]
    found = engine.generate(texts, params, drafter="head", num_speculative_tokens=3)
    assert [result.token_ids for result in found] == plain
    drafted, accepted = (sum(getattr(each.stats, key) for each in found) for key in ("drafted", "accepted"))
    engine.close()
    assert accepted / drafted > 0.3


_KILLED = """
import os, signal, sys
from pathlib import Path
from specexport.train import run
from specexport.train.loop import Trainer
from specexport.train.options import TrainOptions
run.SAVE_EVERY = 4
step = Trainer.step
def killed(self):
    if self.done == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
Trainer.step = killed
target, prompts, bundle, output = sys.argv[1:]
run.train_draft(TrainOptions(target, Path(output), (Path(prompts),), bundle=Path(bundle), max_tokens=24, batches=12,
                             batch_tokens=256, threads=1))
"""


@pytest.mark.bundle
def test_a_killed_run_goes_on_with_the_same_curve(
    target: Path, prompts: Path, bundle: Path, tmp_path: Path, saves_often: None
) -> None:
    whole = train_draft(options(target, prompts, bundle, tmp_path / "whole"))
    places = [str(target), str(prompts), str(bundle), str(tmp_path / "cut")]
    ended = subprocess.run([sys.executable, "-c", _KILLED, *places], check=False, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut").exists()
    notes: list[str] = []
    resumed = train_draft(
        options(target, prompts, bundle, tmp_path / "cut"), lambda event: notes.append(f"{event.stage} {event.message}")
    )
    assert [point["batch"] for point in resumed.curve] == [4, 8, 12]
    assert list(resumed.curve) == list(whole.curve)
    assert not any("texts" in note for note in notes if note.startswith("write ") and "of" in note)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.bundle
def test_the_head_is_in_the_format_of_speculators(
    target: Path, prompts: Path, bundle: Path, tmp_path: Path, saves_often: None
) -> None:
    train_draft(options(target, prompts, bundle, tmp_path / "head", draft_vocab_size=100))
    files = open_head(resolve_source(str(tmp_path / "head"), None))
    config = read_config(files, num_layers=LAYERS, target_hidden_size=64, vocab_size=320)
    assert (config.source_format, config.taps, config.draft_vocab_size) == ("speculators", (2, 3), 100)
    assert "embed_tokens.weight" not in files.shapes
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| on held-out texts: tokens a round" in card
    with pytest.raises(InvalidRequestError, match="was written with"):
        train_draft(options(target, prompts, bundle, tmp_path / "head", draft_vocab_size=100, batches=20))


def test_bad_options_are_told(tmp_path: Path, prompts: Path) -> None:
    def make(**values: Any) -> TrainOptions:
        return TrainOptions("t", tmp_path, values.pop("prompts", (prompts,)), **values)

    for values, message in (
        ({"prompts": ()}, "no prompts to train on"),
        ({"kind": "medusa"}, "kind is 'medusa'"),
        ({"steps": 9}, "steps is 9"),
        ({"rate": 0.0}, "rate is 0"),
        ({"temperature": 3.0}, "temperature is 3"),
        ({"max_states_gb": 0.0}, "max_states_gb is 0"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            make(**values)


@pytest.mark.bundle
def test_limits_are_told_before_the_work(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "one"}\n')
    with pytest.raises(InvalidRequestError, match="there are 1 prompts to train on"):
        train_draft(options(target, few, bundle, tmp_path / "a"))
    with pytest.raises(InvalidRequestError, match=r"hidden states of .* tokens take .* GB, and 1e-06 GB are allowed"):
        train_draft(options(target, prompts, bundle, tmp_path / "b", max_states_gb=1e-6))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"prompt": f"other {i}"}) for i in range(20)))
    with pytest.raises(InvalidRequestError, match="holds texts of other prompts or settings"):
        train_draft(options(target, other, bundle, tmp_path / "b"))


def test_files_that_were_not_finished_are_no_texts(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, 0)
    for n in (5, 9):
        writer.add(Example(torch.arange(n), torch.ones(n, 2, 4, dtype=torch.bfloat16)))
    writer.flush()
    (tmp_path / ".states-00001.tmp-1.safetensors").write_bytes(b"half")
    store = FeatureStore(tmp_path)
    assert (len(store), store.num_tokens, store.length(1)) == (2, 14, 9)
    assert store.read(1).tokens.tolist() == list(range(9))
    order = list(batches(store, [0, 1], 12, 8, seed=0))
    assert sorted(i for batch in order for i in batch) == [0, 1]
    assert order == list(batches(store, [0, 1], 12, 8, seed=0))


def test_the_vocabulary_is_counted_and_keeps_what_ends_a_text() -> None:
    ids = count_ids([[5, 5, 9, 9, 9, 7], [5]], 4, 100, keep=(2,))
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 5, 7, 9]
    assert draft_size(None, 1000) == 1000
    assert draft_size(None, 262_144) == 16_384
    assert draft_size(500, 300) == 300


def test_a_new_head_has_a_size_by_its_target() -> None:
    class Config:
        hidden_size, num_hidden_layers, max_position_embeddings = 640, 18, 1024

    config = new_config(Config(), 1000, 100)
    assert config.taps == (2, 9, 15)
    assert config.layer_config["num_attention_heads"] == 8
    assert config.layer_config["intermediate_size"] == 2048
