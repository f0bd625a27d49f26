"""Training a head for a tiny target: what it learns is accepted, and bad input is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import resolve_source
from specexport.compile.pipeline import build_bundle
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import open_head, read_config
from specexport.heads.probe import check_probe, probe_head
from specexport.recipe import BuildRecipe
from specexport.train import run
from specexport.train.head import count_ids, draft_size, new_config
from specexport.train.options import TrainOptions
from specexport.train.run import train_draft
from specexport.train.store import Example, FeatureStore, batches
from specexport_runtime import SamplingParams
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError, InvalidRequestError, OutputExistsError, UnsupportedModelError
from tests.support.models.head_bundles import build_module, opened
from tests.support.models.loading import load_head, tables_of
from tests.support.models.tiny_models import HYBRIDS, calm, make_llama, make_model, save_checkpoint
from tests.support.models.training import LAYERS, options
from tests.support.references.drafted import accepted


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trained") / "head"
    result = train_draft(options(target, prompts, bundle, folder, batches=150, rate=0.01))
    return folder, result


TEXTS = [f"{i} and {i * i} are {chr(65 + i % 26)}" for i in range(1, 9)]  # of a random target nothing else is known


def test_an_output_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("again")
    (tmp_path / "again").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "head"):
        with pytest.raises(OutputExistsError, match=r"(loop|again) is a link that leads to itself"):
            run._check_output(path, "eagle3")


@pytest.mark.bundle
def test_what_was_learned_is_accepted(target: Path, trained: Any, tmp_path: Path) -> None:
    """Acceptance, not only equality: a head that learned nothing, or is read wrongly, drafts what is refused."""
    folder, result = trained
    assert result.curve[-1]["rates"][0] > 0.4
    assert result.curve[-1]["length"] > 1 + result.curve[0]["rates"][0] / 2
    build_module(target, tmp_path / "b", head=str(folder), max_model_len=128, check=False)
    assert accepted(tmp_path / "b", TEXTS) > 0.3


@pytest.mark.whole
@pytest.mark.bundle
def test_a_head_learns_from_a_target_whose_layers_keep_a_state(prompts: Path, tmp_path: Path) -> None:
    """And no draft is made of its layers, which is told before the texts."""
    hybrid, bundle = save_checkpoint(calm(make_model(*HYBRIDS["qwen3_5"]), 0.1), tmp_path / "t"), tmp_path / "texts"
    build_bundle(BuildRecipe(target=str(hybrid), output=str(bundle), max_model_len=128, check=False))
    result = train_draft(options(hybrid, prompts, bundle, tmp_path / "head", batches=150, rate=0.01))
    assert result.curve[-1]["rates"][0] > 0.2 > result.curve[0]["rates"][0]
    build_module(hybrid, tmp_path / "b", head=str(tmp_path / "head"), max_model_len=128, check=False)
    assert accepted(tmp_path / "b", TEXTS) > 0.1
    with pytest.raises(UnsupportedModelError, match="of a target whose layers keep a state") as caught:
        train_draft(options(hybrid, prompts, bundle, tmp_path / "pruned", kind="pruned", keep_layers=2))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "pruned.work").exists()


@pytest.fixture(scope="module")
def pieces(bundle: Path) -> list[np.ndarray]:
    """What the target writes: a head that learned from such texts guesses there."""
    with opened(bundle) as engine:
        results = engine.generate(TEXTS, SamplingParams(max_tokens=48, ignore_eos=True), drafter="none")
        return [np.array([*engine.tokenizer.encode(t).ids, *r.token_ids]) for t, r in zip(TEXTS, results, strict=True)]


PLANTED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "halves": ([f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"], {}),
    "order": (["fc.weight"], {}),
    "layer up": ([], {"eagle_aux_hidden_state_layer_ids": [3, 4]}),
    "layer down": ([], {"eagle_aux_hidden_state_layer_ids": [1, 2]}),
    "residual": ([], {"norm_before_residual": True}),
    "output": ([], {"norm_output": True}),
}
"""By name: weights whose halves change places, and other values of the configuration."""


def edited(folder: Path, copied: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **values: Any) -> Path:
    shutil.copytree(folder, copied)
    stored = load_file(copied / "model.safetensors")
    save_file({name: change(name, value) for name, value in stored.items()}, copied / "model.safetensors")
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return copied


def probe(target: Path, folder: Path, pieces: list[np.ndarray]) -> Any:
    model: Any = load_checkpoint(str(target), dtype="float32").model
    files = open_head(resolve_source(str(folder), None))
    config = read_config(files, TargetFacts(LAYERS, 64, 320))
    return probe_head(model, load_head(files, config, tables_of(model)), pieces, LAYERS)


@pytest.mark.bundle
@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_found_or_cost_little(error, target, trained, pieces, tmp_path):
    good = probe(target, trained[0], pieces)
    assert good.reading.change == ""
    assert good.rate > 0.4
    names, values = PLANTED[error]

    def turn(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.cat(value.chunk(2, dim=1)[::-1], dim=1) if name in names else value

    found = probe(target, edited(trained[0], tmp_path / "h", turn, **values), pieces)
    wanted, got = (sum(each.rates[each.reading.change]) for each in (good, found))
    # It is read as it was made, or as good as that: an error may cost nothing, and then there is nothing to find.
    assert got > 0.8 * wanted, found.rates
    if error in ("halves", "order"):
        assert found.reading.change


@pytest.mark.bundle
def test_a_head_of_noise_is_refused(target: Path, trained: Any, pieces: list[np.ndarray], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(name: str, value: torch.Tensor) -> torch.Tensor:
        return value if name in ("d2t", "t2d") else torch.randn(value.shape, generator=generator)

    edited(trained[0], tmp_path / "h", noise)
    with pytest.raises(CheckpointError, match="it was made for another target, or its files say"):
        check_probe(probe(target, tmp_path / "h", pieces), "h")


@pytest.mark.bundle
def test_what_would_be_spoiled_is_refused(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        train_draft(options(target, prompts, bundle, tmp_path / "full"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    other = save_checkpoint(make_llama(seed=12, num_hidden_layers=LAYERS), tmp_path / "other")
    with pytest.raises(InvalidRequestError, match="was not built from"):
        train_draft(options(other, prompts, bundle, tmp_path / "a"))


@pytest.mark.bundle
def test_an_mtp_module_learns_too_and_is_taken_back(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    result = train_draft(
        options(target, prompts, bundle, folder, kind="mtp", batches=120, rate=0.01, draft_vocab_size=200)
    )
    assert result.curve[-1]["rates"][0] > 0.4
    files = open_head(resolve_source(str(folder), None))
    config = read_config(files, TargetFacts(LAYERS, 64, 320))
    assert (config.kind, config.taps, config.draft_vocab_size) == ("mtp", (AFTER_NORM,), 200)
    assert (config.feature_first, config.norm_output, config.source_format) == (False, True, "speculators")
    build_module(target, tmp_path / "b", head=str(folder), max_model_len=128, check=False)
    assert accepted(tmp_path / "b", TEXTS) > 0.25


@pytest.mark.bundle
def test_the_head_is_in_the_format_of_speculators(target, prompts, bundle, tmp_path, saves_often):
    told = train_draft(options(target, prompts, bundle, tmp_path / "head", draft_vocab_size=100)).to_json()
    assert told["peak_memory_bytes"] > 1 << 26
    assert told["tokens_per_second"] > 0
    files = open_head(resolve_source(str(tmp_path / "head"), None))
    config = read_config(files, TargetFacts(LAYERS, 64, 320))
    assert (config.source_format, config.taps, config.draft_vocab_size) == ("speculators", (2, 3), 100)
    assert "embed_tokens.weight" not in files.shapes
    modes = {(tmp_path / "head" / name).stat().st_mode & 0o777 for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # who may read the one may read the other
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| on held-out texts: tokens a round" in card
    assert "--kind eagle3 --max-tokens 24 --temperature 0.7 --draft-vocab-size 100 --batches 12" in card
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
        ({"hours": 0.0}, "hours is 0"),
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
    writer = FeatureStore(tmp_path, "these").writer()
    writer.add([Example(torch.arange(n), torch.ones(n, 2, 4, dtype=torch.bfloat16)) for n in (5, 9)])
    writer.flush()
    (tmp_path / ".states-00001.tmp-1.safetensors").write_bytes(b"half")
    store = FeatureStore(tmp_path, "these")
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

    config = new_config("eagle3", Config(), 1000, 100)
    assert config.taps == (2, 9, 15)
    assert config.layer_config["num_attention_heads"] == 8
    assert config.layer_config["intermediate_size"] == 2048
