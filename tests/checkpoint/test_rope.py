"""Rotary tables that depend on the length are those that unmodified transformers takes for the longest sequence."""

from pathlib import Path

import numpy as np
import pytest

from specexport.checkpoint.lengths import FixedRope, freeze_length
from specexport.checkpoint.load import load_checkpoint
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import UnsupportedModelError
from tests.support.cases import chance
from tests.support.models.tiny_models import BASE, BY_LENGTH, GROUPED, VOCAB, make_model, save_checkpoint
from tests.support.references.engine_harness import Engine, build, make_checkpoint

ORIGINAL = 32
TOLERANCE = 1e-4


def draw(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(chance.seed(11))
    return [random.integers(3, VOCAB, length).tolist() for length in lengths]


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("name", "max_len"), [("phi3_longrope", ORIGINAL), *((name, 48) for name in BY_LENGTH)])
def test_engine_has_the_angles_that_transformers_takes_for_the_longest_sequence(name, max_len, tmp_path):
    sequences = draw(max_len, 33 if max_len > ORIGINAL and "longrope" in name else max_len)
    wanted = compute_reference_logits(make_checkpoint(make_model(*BY_LENGTH[name])), sequences)  # unmodified
    checkpoint = make_checkpoint(make_model(*BY_LENGTH[name]))
    freeze_length(checkpoint, max_len)
    _, layers, _ = build(checkpoint.model, tmp_path)
    engine = Engine(tmp_path, layers, num_rows=2, capacity=max_len + 1)
    # A row that crosses the border, in ragged steps of which none is as long as the sequence.
    pasts = [0, 0]
    for ends in ((20, 30), (31, 32), tuple(map(len, sequences))):
        new = [ids[past:end] for ids, past, end in zip(sequences, pasts, ends, strict=True)]
        if all(new):
            found = engine.step(new, pasts)
            rows = [logits[past:end] for logits, past, end in zip(wanted, pasts, ends, strict=True)]
            assert np.abs(found - np.concatenate(rows)).max() < TOLERANCE
            pasts = list(ends)


def test_a_short_text_under_the_long_table_is_not_what_transformers_gives() -> None:
    """This is what docs/build.md says; and the test above would notice the wrong table."""
    (sequence,) = sequences = draw(20)
    (plain,) = compute_reference_logits(make_checkpoint(make_model(*BY_LENGTH["phi3_longrope"])), sequences)
    checkpoint = make_checkpoint(make_model(*BY_LENGTH["phi3_longrope"]))
    freeze_length(checkpoint, 48)
    (held,) = compute_reference_logits(checkpoint, [sequence])
    assert np.abs(held - plain).max() > 0.01
    np.testing.assert_array_equal(held, compute_reference_logits(checkpoint, [sequence, *draw(48)])[0])


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("name", "max_len", "text"),
    [
        ("phi3_longrope", 32, "longrope: the short factors"),
        ("phi3_longrope", 33, "longrope: the long factors"),
        ("llama_dynamic", 32, "dynamic: not stretched"),
        ("llama_dynamic", 64, "dynamic: stretched for 64 tokens"),
        ("gemma3_dynamic", 64, "dynamic of full_attention layers: stretched for 64 tokens"),
    ],
)
def test_what_was_held_is_said(name: str, max_len: int, text: str) -> None:
    checkpoint = make_checkpoint(make_model(*BY_LENGTH[name]))
    freeze_length(checkpoint, max_len)
    assert checkpoint.rope == FixedRope(max_len, text)


def test_other_models_are_left_alone() -> None:
    checkpoint = make_checkpoint(make_model("Llama", GROUPED))
    freeze_length(checkpoint, 64)
    assert checkpoint.rope is None


def test_a_module_that_goes_by_the_length_on_its_own_is_refused() -> None:
    """PhiMoE scales its angles by length, beside what transformers does for all."""
    rope = BY_LENGTH["phi3_longrope"][1]["rope_parameters"] | {
        **{"short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": ORIGINAL}
    }
    model = make_model("Phimoe", BASE | {"num_key_value_heads": 2, "num_local_experts": 2, "rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="in a way of its own"):
        freeze_length(make_checkpoint(model), 48)


def test_limits_come_from_the_tables(tmp_path: Path) -> None:
    for name, limits in (("phi3_longrope", (256, 32)), ("llama_dynamic", (128, 32))):
        checkpoint = load_checkpoint(str(save_checkpoint(make_model(*BY_LENGTH[name]), tmp_path / name)))
        assert (checkpoint.max_positions, checkpoint.plain_positions) == limits


def test_a_rope_type_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("Llama", GROUPED), tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "spiral"'))
    with pytest.raises(UnsupportedModelError, match="no rope type 'spiral'"):
        load_checkpoint(str(folder))
