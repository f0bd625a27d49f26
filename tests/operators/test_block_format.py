"""Packed weights hold what the checkpoint means, in no more bytes than it has."""

import ml_dtypes
import numpy as np
import pytest

from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.passes.block_format import (
    FLOATS,
    choose_format,
    pack,
    pack_float,
    packed_shape,
    unpack,
)
from specexport.passes.block_weight import BlockForm, Blocks, BlockWeight, join
from tests.support.cases.linear_cases import CODES, random_weight
from tests.support.models.tiny_gguf import make_weight
from tests.support.references.block_arithmetic import quantize_activations, reference

NAMES = {"Q4_0": "int4", "Q4_1": "int4_offset", "Q5_0": "int5", "Q5_1": "int5_offset", "Q8_0": "int8"}
WIDER = {"Q2_K": 0.2, "Q3_K": 0.04}
"""Formats that are wider than the file by more than 3 %: their 4-bit scales are bytes here."""


@pytest.mark.parametrize("kind", FORMATS)
def test_a_kept_weight_has_the_values_of_the_file_and_its_size(kind: str) -> None:
    weight, wanted = make_weight(kind, width=32)
    name = choose_format(weight)
    assert name == NAMES.get(kind, kind.lower())
    packed = pack(name, weight)
    assert packed.shape == packed_shape(name, *weight.shape)
    assert packed.shape[1] % 64 == 0
    np.testing.assert_array_equal(unpack(name, packed, *weight.shape), wanted)
    assert packed.nbytes <= weight.stored_bytes * (1 + WIDER.get(kind, 0.03))
    weight, wanted = make_weight(kind, width=21)
    values = unpack(name, pack(name, weight), 32, weight.shape[1])
    np.testing.assert_array_equal(values[:21], wanted)
    assert (values[21:] * 0 == 0).all(), "rows of a tile that are missing are zeros"


@pytest.mark.parametrize("name", CODES)
def test_values_are_those_of_the_blocks(name: str) -> None:
    for n, k in ((33, 2048), (16, 1100), (5, 7)):
        weight = random_weight(name, n, k, np.random.default_rng([n, k]))
        blocks = weight.read(np.arange(n))
        scales, offsets = (
            None if part is None else np.repeat(part.astype(np.float64), weight.form.block, 1)[:, :k]
            for part in (blocks.scales, blocks.offsets)
        )
        assert scales is not None
        if name.endswith("_zero"):
            wanted = (blocks.codes.astype(np.float64) - weight.form.zero) * scales + offsets
        else:
            zero = 0 if offsets is not None else weight.form.zero
            plain = blocks.codes.astype(np.float64) - (16 * 7 if name == "int5_offset" else 0)
            plain = plain - {"q2_k": 6, "q5_k": 112}.get(name, 0)
            wanted = (plain - zero) * scales + (0 if offsets is None else offsets)
        got = unpack(name, pack(name, weight), n, k)
        assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_several_kinds_below_one_another() -> None:
    first, second = make_weight("Q5_0", width=16)[0], make_weight("Q8_0", width=16)[0]
    both = join([first, second])
    assert choose_format(both) == "group8_32_f16"
    np.testing.assert_array_equal(unpack("group8_32_f16", pack("group8_32_f16", both), 32, 512), both.floats())
    mixed = join([make_weight("Q5_K", width=16)[0], make_weight("Q5_1", width=16)[0]])
    name = choose_format(mixed)
    assert name == "group8_32_f32_offset"
    np.testing.assert_allclose(unpack(name, pack(name, mixed), 32, 512), mixed.floats(), atol=1e-6)


def grouped(bits: int, block: int, scale: np.dtype, *, zeros: bool) -> BlockWeight:
    generator, middle = np.random.default_rng(bits + block), 1 << (bits - 1)
    codes = generator.integers(0, 1 << bits, (40, 256), dtype=np.uint8)
    scales = generator.uniform(0.001, 0.1, (40, 256 // block)).astype(scale).astype(np.float32)
    points = generator.integers(0, 1 << bits, scales.shape)
    offsets = scales * (middle - points).astype(np.float32) if zeros else None

    def read(rows: np.ndarray) -> Blocks:
        return Blocks(codes[rows], scales[rows], None if offsets is None else offsets[rows])

    return BlockWeight("GPTQ", BlockForm(bits, block, zeros), (40, 256), 0, read)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("scale", "word"), [(np.float16, "f16"), (ml_dtypes.bfloat16, "f16"), (np.float32, "f32")])
def test_groups_are_held_exactly(bits: int, zeros: bool, scale: np.dtype, word: str) -> None:
    for block in (16, 32, 128):
        weight = grouped(bits, block, scale, zeros=zeros)
        name = choose_format(weight)
        assert name == f"group{bits}_{block}_{word}{'_zero' if zeros else ''}"
        got = unpack(name, pack(name, weight), 40, 256)
        np.testing.assert_allclose(got, weight.floats(), rtol=0, atol=1e-5 if zeros else 0)  # sums of floats


def test_a_weight_that_a_format_cannot_hold_is_refused() -> None:
    weight = make_weight("Q4_K")[0]
    for name in ("int4", "q6_k", "group4_64_f16"):
        with pytest.raises(ValueError, match=f"{name} cannot hold Q4_K"):
            pack(name, weight)
    with pytest.raises(ValueError, match="none of float16"):
        pack("group4_32_f16", grouped(4, 32, np.dtype(np.float32), zeros=False))
    with pytest.raises(ValueError, match="no block format 'int3'"):
        packed_shape("int3", 1, 1)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_in_chunks_of_any_size(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((50, 37)).astype(np.float32)
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[name]
    wanted = values.astype(dtype)
    whole = pack_float(name, values, 50, 37)
    np.testing.assert_array_equal(unpack(name, whole, 50, 37), wanted.astype(np.float32))
    for sizes in ([1, 20, 29], [16, 34], [49, 1], [0, 50]):
        parts = np.split(wanted, np.cumsum(sizes)[:-1])
        np.testing.assert_array_equal(pack_float(name, iter(parts), 50, 37), whole)
    for wrong in (values[:49], np.concatenate([values, values]), values[:, 1:]):
        with pytest.raises(ValueError, match="was expected"):
            pack_float(name, wrong, 50, 37)


def test_rounding_to_bfloat16_keeps_nan_and_infinity() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 3.3895314e38, -0.0, 1.00390625, 1.01171875]], np.float32)
    packed = pack_float("bf16", values, 1, 7)
    np.testing.assert_array_equal(unpack("bf16", packed, 1, 7), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_activations_are_rounded_a_token_and_block() -> None:
    x = np.zeros((3, 40), np.float32)
    x[0, 0], x[0, 1], x[0, 39], x[1, 3], x[2, 0] = 127, 2.5, -4, np.nan, 1e-40
    codes, scales = quantize_activations(x)
    assert codes.shape == (3, 64)
    assert codes[0, [0, 1, 39]].tolist() == [127, 2, -127]
    assert scales[0].tolist() == [1.0, np.float32(4) / np.float32(127)]
    assert np.isnan(scales[1, 0])
    assert scales[1, 1] == scales[2, 0] == 0
    weight = make_weight("Q8_0", width=16)[0].take(np.arange(16))
    codes, scales = quantize_activations(x, "q4_k")
    assert codes.shape == (3, 256)
    assert codes[0, [0, 1, 39]].tolist() == [127, 2, -64]  # in steps of 1 and of 1 / 16
    assert scales[0, :3].tolist() == [np.float32(1 / 16) * 16, np.float32(1 / 16), np.float32(1 / 16)]
    assert np.isnan(scales[1]).all()
    assert (scales[2] == 0).all()
    product = reference("int8", pack("int8", weight), 16, 512, np.ones((1, 512), np.float32))
    np.testing.assert_allclose(product[0], weight.floats().sum(axis=1), rtol=1e-4)
