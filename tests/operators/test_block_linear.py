"""Products and lookups of packed weights: every format with all kernels against float64, bits against bits."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from specexport.passes.block_format import pack_float, packed_shape
from tests.support.cases import linear_cases as cases
from tests.support.cases.chance import many, seed
from tests.support.cases.operator_cases import assert_cases_pass

KERNELS = [pytest.param("portable", marks=pytest.mark.whole), "avx2", "avxvnni", "avx512vnni", "amx", "neon_dot"]


@pytest.mark.fuzz
@pytest.mark.parametrize("kernels", KERNELS)
def test_products_and_lookups_are_those_of_numpy_and_bits_are_the_same_in_any_company(
    library: Path, kernels: str
) -> None:
    """In every format, and in shapes that are drawn."""
    assert_cases_pass(library, kernels, str(seed(37)), str(many(12)))


def test_the_check_finds_a_wrong_weight(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, n: int, k: int, generator: np.random.Generator) -> np.ndarray:
        weight = right(name, n, k, generator)
        weight[0, -1] ^= 16
        return weight

    right, kept = cases.packed, cases.reference
    monkeypatch.setattr(cases, "packed", wrong)
    monkeypatch.setattr(
        cases,
        "reference",
        lambda name, weight, n, k, x: kept(name, right(name, n, k, np.random.default_rng(3)), n, k, x),
    )
    with pytest.raises(AssertionError, match="error"):
        cases.assert_right(str(library), "int4", 16, 64, np.random.default_rng(3))


@pytest.mark.parametrize(
    ("name", "n", "k", "count"), [("bf16", 20, 9000, 700), ("int4", 16, 64, 5000), ("q4_k", 200, 512, 300)]
)
def test_many_rows_have_the_bits_of_one(library: Path, name: str, n: int, k: int, count: int) -> None:
    generator = np.random.default_rng(count)
    weight, x = cases.packed(name, n, k, generator), generator.standard_normal((count, k)).astype(np.float32)
    runs = [
        cases.session(
            str(library), [cases.linear(name, n, k)], {"x": (TensorProto.FLOAT, 2)}, {"w": weight}, ["y"], each
        )
        for each in (1, 2)
    ]
    whole = runs[0].run(None, {"x": x})[0]
    assert runs[1].run(None, {"x": x})[0].tobytes() == whole.tobytes()
    for row in (0, 7, 8, 255, 256, count - 1):
        assert runs[1].run(None, {"x": x[row : row + 1]})[0].tobytes() == whole[row : row + 1].tobytes()
    wanted = cases.reference(name, weight, n, k, x[-9:])
    assert np.abs(whole[-9:] - wanted).max() <= cases.TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["int8", "q4_k", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(16, 0), (0, 32), (0, 0)])
def test_nothing_to_add_up(library: Path, name: str, n: int, k: int) -> None:
    weight, bias = np.zeros(packed_shape(name, n, k), np.uint8), np.arange(n, dtype=np.float32)
    node = cases.linear(name, n, k, ("x", "w", "b"))
    made = cases.session(str(library), [node], {"x": (TensorProto.FLOAT, 2)}, {"w": weight, "b": bias}, ["y"])
    result = made.run(None, {"x": np.ones((3, k), np.float32)})[0]
    np.testing.assert_array_equal(result, np.broadcast_to(bias, (3, n)))
    assert made.run(None, {"x": np.ones((0, k), np.float32)})[0].shape == (0, n)


@pytest.mark.parametrize("name", ["int4", "q4_k", "q6_k"])
def test_tiny_activations_count_as_zeros_and_huge_ones_do_not_overflow(library: Path, name: str) -> None:
    weight = cases.packed(name, 16, 64, np.random.default_rng(0))
    made = cases.session(
        str(library), [cases.linear(name, 16, 64)], {"x": (TensorProto.FLOAT, 2)}, {"w": weight}, ["y"]
    )
    x = np.zeros((2, 64), np.float32)
    x[0, 5], x[1, 5] = 1e-42, 3e37
    result = made.run(None, {"x": x})[0]
    np.testing.assert_array_equal(result[0], 0)
    assert np.isfinite(result[1]).all()
    assert np.abs(result[1]).max() > 1e33


def test_bad_inputs_are_errors_of_one_line(library: Path) -> None:
    weight = pack_float("bf16", np.ones((20, 40), np.float32), 20, 40)
    floats, ids = {"x": (TensorProto.FLOAT, 2)}, {"ids": (TensorProto.INT64, 1)}

    def make(name: str, n: int, k: int, weight: np.ndarray = weight) -> ort.InferenceSession:
        return cases.session(str(library), [cases.linear(name, n, k)], floats, {"w": weight}, ["y"])

    with pytest.raises(Exception, match="no block format 'int7'"):
        make("int7", 20, 40)
    with pytest.raises(Exception, match="no block format 'group4_48_f16'"):
        make("group4_48_f16", 20, 40)
    for n, k, cut in ((33, 40, weight), (20, 41, weight), (20, 40, weight[:, :-64]), (20, 40, weight[:1])):
        with pytest.raises(Exception, match=r"weight has the shape \[\d+, \d+\], which must be \[\d+, \d+\]"):
            make("bf16", n, k, cut)
    made = make("bf16", 20, 40)
    with pytest.raises(Exception, match=r"x has the shape \[2, 39\], which must be \[\.\.\., 40\]"):
        made.run(None, {"x": np.ones((2, 39), np.float32)})
    bias = cases.session(
        str(library), [cases.linear("bf16", 20, 40, ("x", "w", "b"))], floats,
        {"w": weight, "b": np.ones(19, np.float32)}, ["y"],
    )  # fmt: skip
    with pytest.raises(Exception, match=r"bias has the shape \[19\], which must be \[20\]"):
        bias.run(None, {"x": np.ones((2, 40), np.float32)})
    table = cases.session(str(library), [cases.embedding("bf16", 20, 40)], ids, {"w": weight}, ["rows"])
    for bad in (20, -1):
        with pytest.raises(Exception, match=f"id {bad} is outside the table, which has 20 rows"):
            table.run(None, {"ids": np.array([3, bad])})
    assert table.run(None, {"ids": np.zeros(0, np.int64)})[0].shape == (0, 40)
