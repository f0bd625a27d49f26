"""Experts with packed weights: against float64 in every format, bits against bits, and what is refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.cases import experts_cases as cases
from tests.support.cases import linear_cases
from tests.support.cases.chance import many, seed
from tests.support.cases.experts_cases import Layer
from tests.support.cases.linear_cases import ALL
from tests.support.cases.operator_cases import assert_cases_pass

KERNELS = [pytest.param("portable", marks=pytest.mark.whole), "avx2", "avxvnni", "avx512vnni", "neon_dot"]
LAYERS = [
    Layer("int8", "int8", 6, 2, 64, 96),
    Layer("group4_32_f16_zero", "int8", 5, 3, 96, 48, 1, 1.702, 1.0, 1.5, True),
    Layer("q4_k", "q6_k", 4, 4, 256, 40),
    Layer("bf16", "bf16", 16, 8, 100, 33, biased=True),  # no multiple of a tile, nor of a block
    Layer("f16", "f32", 5, 3, 50, 70, cases.EACH, 1e6),
    Layer("int4", "int4_offset", 3, 1, 1100, 20, limit=0.25),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.gate_up}-{layer.down}")
def test_experts_are_those_of_numpy_and_have_the_same_bits_in_any_company(library: Path, layer: Layer) -> None:
    cases.assert_right(str(library), layer, np.random.default_rng(31))


@pytest.mark.parametrize("name", ALL)
def test_every_format(library: Path, name: str) -> None:
    cases.assert_right(str(library), Layer(name, name, 3, 2, 40, 24), np.random.default_rng(32))


@pytest.mark.fuzz
@pytest.mark.parametrize("kernels", KERNELS)
def test_drawn_layers(library: Path, kernels: str) -> None:
    assert_cases_pass(library, kernels, str(seed(38)), str(many(6)), module="tests.support.cases.experts_cases")


def test_the_check_finds_experts_that_are_taken_for_each_other(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(layer: Layer, weights: cases.Arrays, step: cases.Arrays) -> np.ndarray:
        return right(layer, weights, step | {"expert_ids": (step["expert_ids"] + 1) % layer.num_experts})

    right = cases.wanted
    monkeypatch.setattr(cases, "wanted", turned)
    with pytest.raises(AssertionError, match="int8"):
        cases.assert_right(str(library), LAYERS[0], np.random.default_rng(31))


def test_a_prompt_that_is_worked_on_in_pieces_has_the_same_bits(library: Path) -> None:
    generator = np.random.default_rng(33)
    layer = Layer("int4", "int4", 2, 8, 4096, 16)
    run = cases.session(str(library), layer, cases.weights_of(layer, generator)).run
    step = cases.step_of(layer, 200, generator)  # 8 * 200 pairs of more than 48 KB each
    whole = run(None, step)[0]
    for rows in (slice(3), slice(140, 150), slice(199, 200)):
        assert run(None, {name: array[rows] for name, array in step.items()})[0].tobytes() == whole[rows].tobytes()


def test_no_tokens_and_no_experts(library: Path) -> None:
    layer, generator = LAYERS[0], np.random.default_rng(34)
    run = cases.session(str(library), layer, cases.weights_of(layer, generator)).run
    empty = {name: array[:0] for name, array in cases.step_of(layer, 1, generator).items()}
    assert run(None, empty)[0].shape == (0, 64)
    step = cases.step_of(layer, 3, generator)
    none = run(None, {name: array if name == "x" else array[:, :0] for name, array in step.items()})[0]
    np.testing.assert_array_equal(none, np.zeros((3, 64)))


def test_a_nan_stays_in_its_token(library: Path) -> None:
    layer, generator = LAYERS[0], np.random.default_rng(35)
    run = cases.session(str(library), layer, cases.weights_of(layer, generator)).run
    step = cases.step_of(layer, 9, generator)
    clean = run(None, step)[0]
    step["x"][4, 7] = np.nan
    step["x"][5, 9] = np.inf
    step["expert_weights"][7, 1] = np.nan
    found = run(None, step)[0]
    assert not np.isfinite(found[[4, 5, 7]]).any()
    rest = [0, 1, 2, 3, 6, 8]
    assert found[rest].tobytes() == clean[rest].tobytes()


def test_a_router_of_nan_chooses_experts_that_there_are(library: Path) -> None:
    """What it says of a token is NaN, and stays with that token."""
    layer, generator = LAYERS[0], np.random.default_rng(39)
    weights = cases.weights_of(layer, generator)
    layers = cases.model_of(layer, weights).graph
    choose = helper.make_node("TopK", ["scores", "count"], ["expert_weights", "expert_ids"])
    given = {"x": (TensorProto.FLOAT, 2), "scores": (TensorProto.FLOAT, 2)}
    count = {"count": np.array([layer.per_token])}
    run = linear_cases.session(str(library), [choose, *layers.node], given, weights | count, ["y"]).run
    scores = generator.standard_normal((9, layer.num_experts)).astype(np.float32)
    step = {"x": cases.step_of(layer, 9, generator)["x"], "scores": scores}
    clean = run(None, step)[0]
    scores[3] = np.nan
    scores[6, 2] = np.nan
    found = run(None, step)[0]
    assert np.isnan(found[3]).all()
    rest = [0, 1, 2, 4, 5, 7, 8]
    assert found[rest].tobytes() == clean[rest].tobytes()


def test_a_weight_file_that_is_cut_short_or_missing_is_an_error(library: Path, tmp_path: Path) -> None:
    model = cases.model_of(LAYERS[0], cases.weights_of(LAYERS[0], np.random.default_rng(40)))
    path, data = tmp_path / "model.onnx", tmp_path / "weights"
    onnx.save_model(model, path, save_as_external_data=True, location=data.name, size_threshold=0)
    assert linear_cases.opened(str(library), str(path))
    whole = data.read_bytes()
    for left in (len(whole) - 1, 64, 0):
        data.write_bytes(whole[:left])
        with pytest.raises(Exception, match=r"(?i)weights|external"):
            linear_cases.opened(str(library), str(path))
    data.unlink()
    with pytest.raises(Exception, match=r"(?i)weights|external"):
        linear_cases.opened(str(library), str(path))


def test_bad_inputs_are_errors_of_one_line(library: Path) -> None:
    layer, generator = LAYERS[1], np.random.default_rng(36)
    weights = cases.weights_of(layer, generator)
    step = cases.step_of(layer, 4, generator)
    run = cases.session(str(library), layer, weights).run
    for bad in (5, -1, 1 << 40):
        ids = step["expert_ids"].copy()
        ids[2, 1] = bad
        with pytest.raises(Exception, match=f"token 2 has the expert {bad}, and there are 5"):
            run(None, step | {"expert_ids": ids})
    shapes = {
        "x": (np.ones((4, 95), np.float32), r"x has the shape \[4, 95\], which must be \[..., 96\]"),
        "expert_ids": (np.ones((3, 3), np.int64), r"expert_ids has the shape \[3, 3\], which must be \[4, 3\]"),
        "expert_weights": (np.ones((4, 2), np.float32), r"expert_weights has the shape \[4, 2\].* \[4, 3\]"),
    }
    for name, (array, message) in shapes.items():
        with pytest.raises(Exception, match=message):
            run(None, step | {name: array})
    for name in weights:
        cut = cases.session(str(library), layer, weights | {name: weights[name][:-1]})
        with pytest.raises(Exception, match=rf"{name} has the shape .*which must be \["):
            cut.run(None, step)
    for changed, message in (
        ({"gate_up": "int7"}, "no block format 'int7'"),
        ({"interleaved": 3}, "interleaved is 3, and must be from 0 to 2"),
        ({"width": 0}, "I is 0, and must be from 1 to "),
    ):
        with pytest.raises(Exception, match=message):
            cases.session(str(library), layer._replace(**changed), weights)  # type: ignore[arg-type]
