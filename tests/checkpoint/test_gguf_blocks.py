"""Each format's integers, scales and offsets are worth what the ``gguf`` package makes of the same bytes."""

import gguf
import numpy as np
import pytest

from specexport.checkpoint import gguf_rows
from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.passes.block_weight import join
from tests.support.models.tiny_gguf import DEPTH, WIDTH, make_weight

ROUNDING = 1e-6


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_format(kind: str) -> None:
    weight, wanted = make_weight(kind)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (FORMATS[kind].num_values, FORMATS[kind].num_bytes)
    assert np.abs(wanted).max() > 0.05
    error = np.abs(weight.floats() - wanted).max()
    if weight.form.has_offsets:  # a float32 sum, in another order
        assert error <= ROUNDING * np.abs(wanted).max()
    else:
        assert error == 0
    rows = np.array([17, 3])
    np.testing.assert_array_equal(weight.floats(rows), weight.floats()[rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_floats_have_the_bits_that_gguf_gives_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, number = FORMATS[kind], gguf.GGMLQuantizationType[kind]
    stored = np.random.default_rng(20).integers(0, 256, (37, 40 * found.num_bytes), np.uint8)
    stored[(stored & 0x7C) == 0x7C] ^= 4  # any two of them are a finite float16
    monkeypatch.setattr(gguf_rows, "_PROVEN", 1)
    monkeypatch.setattr(gguf_rows, "_AT_ONCE", 7 * found.num_values)  # parts that end within a row
    wanted = gguf.dequantize(stored, number)
    monkeypatch.setattr(gguf, "dequantize", lambda rows, _: {1: wanted[:1, : found.num_values]}[len(rows)])
    values = gguf_rows.decode(stored, number)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_a_wrong_reading_gives_way_to_that_of_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = np.random.default_rng(20).integers(0, 100, (15, 40 * FORMATS["Q8_0"].num_bytes), np.uint8)
    right = FORMATS["Q8_0"]
    wrong = right._replace(decode=lambda rows: (rows[:, 2:] + np.uint8(127), right.decode(rows)[1]))
    monkeypatch.setitem(FORMATS, "Q8_0", wrong)
    wanted = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(gguf_rows.decode(stored, gguf.GGMLQuantizationType.Q8_0), wanted)
    monkeypatch.setattr(gguf_rows, "_PROVEN", 0)
    monkeypatch.setattr(gguf, "dequantize", lambda rows, _: np.empty((len(rows), 0), np.float32))
    assert (gguf_rows.decode(stored, gguf.GGMLQuantizationType.Q8_0) != wanted).any(), "nothing else would notice"


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_fit_and_lie_around_the_zero(kind: str) -> None:
    weight, _ = make_weight(kind)
    form = weight.form
    codes, scales, offsets, _ = weight.read(np.arange(WIDTH))
    assert codes.max() < 1 << form.bits
    assert abs(float(codes.mean()) - form.zero) <= (1 << form.bits) / 25
    assert scales.shape == (WIDTH, DEPTH // form.block)
    assert (None if offsets is None else offsets.shape) == (scales.shape if form.has_offsets else None)


@pytest.mark.parametrize("kind", FORMATS)
def test_scales_are_made_of_what_is_stored(kind: str) -> None:
    weight, _ = make_weight(kind)
    spread = weight.spread
    assert spread is not None
    _, read_scales, read_offsets, stored = weight.read(np.arange(WIDTH))
    assert stored is not None
    wide = {
        name: np.repeat(part.astype(np.float32), spread.values // weight.form.block, axis=1)
        if name in ("d", "dmin")
        else part
        for name, part in stored._asdict().items()
        if part is not None
    }
    assert wide.keys() == {
        *("d", *(["sub_scales"] if spread.sub_scales else [])),
        *(["dmin"] if weight.form.has_offsets else []),
        *(["mins"] if spread.mins else []),
    }
    scales = wide["d"] * wide.get("sub_scales", 1)
    np.testing.assert_array_equal(scales, read_scales)
    if weight.form.has_offsets:
        offsets = np.float32(spread.shift) * scales + wide["dmin"] * wide.get("mins", 1)
        np.testing.assert_array_equal(offsets, read_offsets)


def test_weights_of_one_form_and_other_scales_are_joined_in_float() -> None:
    (first, one), (second, two) = make_weight("Q4_K", 8, seed=1), make_weight("Q4_1", 16, seed=2)
    joined = join([first, second])
    assert joined.spread is None
    np.testing.assert_allclose(joined.floats(), np.concatenate([one, two]), atol=1e-6)


def test_weights_are_joined_and_rows_taken() -> None:
    (first, one), (second, two) = make_weight("Q4_K", 8, seed=1), make_weight("Q4_K", 16, seed=2)
    joined, wanted = join([first, second]), np.concatenate([one, two])
    assert joined.shape == (24, DEPTH)
    assert joined.spread == first.spread
    np.testing.assert_allclose(joined.floats(), wanted, atol=1e-6)
    mixed = np.array([20, 1, 9, 0, 23])
    np.testing.assert_array_equal(joined.floats(mixed), joined.floats()[mixed])
    order = np.array([20, 1, 9])
    np.testing.assert_allclose(second.take(order - 1).floats(np.array([2, 1])), two[[8, 0]], atol=1e-6)
    assert first.take(np.array([0, 1])).stored_bytes == first.stored_bytes // 4
