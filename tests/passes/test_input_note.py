"""What was measured of inputs decides how layers are rounded: 8 bits for some, weighed errors in 4 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specexport.backends import ort
from specexport.channel_ranges import ChannelRanges
from specexport.checkpoint.loaded import Checkpoint
from specexport.passes import block_make
from specexport.passes.block_make import quantize_by_extremes, search_blocks
from specexport.passes.input_note import InputNotePass, find_input_ranges
from specexport.passes.pipeline import default_passes, quantizing_passes, run_passes
from specexport.passes.quantize_sites import match_linear_site
from specexport.trace.calibrate import measure_activation_ranges
from tests.support.models.tiny_models import ARCHITECTURES, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.lowered import lower_ort_cpu
from tests.support.references.sessions import session_of

DEPTH, WIDTH, TOKENS = 96, 40, 64
PIECES = [np.array(ids, np.int64) for ids in ([3, 4, 5, 9, 11, 7, 60, 61], [250, 62, 61, 60, 7, 11, 9, 5])]


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ranges_of(inputs: np.ndarray, first: np.ndarray | None = None) -> ChannelRanges:
    """Of tokens [T, K]; ``first`` are first tokens, as large as the others if none are given."""
    size, everything = np.abs(inputs), inputs if first is None else np.concatenate([inputs, first])
    largest = size.max(axis=0)
    found = largest if first is None else np.abs(first).max(axis=0)
    return ChannelRanges(largest, found, np.square(everything).mean(axis=0))


def layer(weight: np.ndarray, kind: str | None, ranges: ChannelRanges | None) -> Any:
    """A session of a linear layer and of another that nothing is known of, the graph, and the changes of each pass."""
    signature = f"(float[T, {DEPTH}] x) => (float[T, {WIDTH}] y, float[T, 4] z)"
    text = f"""<ir_version: 10, opset_import: ["": 23]> g {signature} {{
        y = MatMul (x, weight) z = MatMul (x, other)
    }}"""
    tensors = [ir.tensor(weight, name="weight"), ir.tensor(numbers(99, DEPTH, 4), name="other")]
    model = ir.from_onnx_text(text, initializers=tensors)
    report = {}
    noting = [] if ranges is None else [InputNotePass({"weight": ranges})]
    for item in [*noting, *([] if kind is None else quantizing_passes(kind, "ort-cpu"))]:
        item(model)
        report[item.name] = item.changes
    return session_of(model), model, report


def product(session: Any, inputs: np.ndarray) -> np.ndarray:
    return session.run(["y"], {"x": inputs})[0]


def massive(seed: int) -> np.ndarray:
    """First tokens [1, K] with channel 5 a thousand times as large."""
    first = numbers(seed, 1, DEPTH)
    first[:, 5] = 1000
    return first


def test_massive_activations_lose_less_in_8_bits() -> None:
    weight, first = numbers(0, DEPTH, WIDTH), massive(2)
    ranges = ranges_of(numbers(1, TOKENS, DEPTH), first)
    assert ranges.massive
    old, new = (layer(weight, "int4", known) for known in (ranges_of(numbers(1, TOKENS, DEPTH)), ranges))
    formats = [[node.attributes["format"].as_string() for node in model.graph] for _, model, _ in (old, new)]
    assert formats == [["group4_32_f16_zero"] * 2, ["int8", "group4_32_f16_zero"]]
    exact = first @ weight
    errors = [np.linalg.norm(product(session, first) - exact) for session, *_ in (old, new)]
    assert errors[1] < 0.3 * errors[0]


def test_searched_blocks_lose_no_more_than_extremes_in_any_block() -> None:
    values = numbers(9, 24, 5, 32)
    values[::3, :, 7] *= 6
    values[1], values[:, 2, 3] = 0, 0
    importance = np.exp(2 * numbers(10, 5, 32))
    losses = []
    for codes, scales, zeros in (quantize_by_extremes(values), search_blocks(values, importance)):
        assert codes.max() <= 15
        assert zeros.max() <= 15
        found = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
        assert (found[values == 0] == 0).all()
        losses.append((np.square(found - values) * importance).sum(axis=2))
    assert (losses[1] <= losses[0] * 1.0001 + 1e-6).all()
    assert losses[1].sum() < 0.75 * losses[0].sum()


def test_a_searched_block_spares_what_inputs_make_large() -> None:
    values, importance = numbers(11, 200, 1, 32), np.ones((1, 32), np.float32)
    importance[0, 4] = 1e4
    errors = []
    for codes, scales, zeros in (quantize_by_extremes(values), search_blocks(values, importance)):
        found = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
        errors.append(float(np.square(found - values)[..., 4].mean()))
    assert errors[1] < 0.2 * errors[0]


def test_blocks_of_inputs_that_texts_left_at_zero_are_rounded_all_the_same() -> None:
    values = numbers(12, 8, 2, 32)
    codes, scales, zeros = search_blocks(values, np.zeros((2, 32), np.float32))
    found = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
    assert np.linalg.norm(found - values) < 0.1 * np.linalg.norm(values)


def test_notes_follow_their_weights_through_packing() -> None:
    model = make_model(*ARCHITECTURES["llama"])
    ranges = measured(model)
    traced = trace_of(model)
    passes = default_passes("float32", pack=True, quantize="int4", ranges=ranges)
    kept = [item for item in passes if item.name != "int4-quantize"]
    report = dict(run_passes(traced.ir_model, kept))
    sites = [site for node in traced.ir_model.graph if (site := match_linear_site(node)) is not None]
    assert report["input-note"] == 15
    assert len(sites) == 9, "q, k and v are one layer, gate and up another"
    for site in sites:
        inputs = find_input_ranges(site)
        assert inputs is not None
        assert inputs.squares.shape == (site.depth,)
        assert any(inputs is each for each in ranges.values())


def test_a_weight_is_searched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    searched = []
    monkeypatch.setattr(block_make, "search_blocks", lambda *given: searched.append(1) or search_blocks(*given))
    model = make_model(*ARCHITECTURES["llama"])
    ranges = measured(model)
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes("float32", quantize="int4", ranges=ranges))
    lower_ort_cpu(traced.ir_model)
    assert not searched, "before it is written"
    ort.write_onnx(traced.ir_model, tmp_path)
    blocks = [node for node in traced.ir_model.graph if node.op_type == "BlockLinear"]
    assert len(searched) == sum(node.attributes["format"].as_string() != "int8" for node in blocks)


def measured(model: Any) -> dict[str, ChannelRanges]:
    checkpoint = Checkpoint(**dict.fromkeys(Checkpoint.__dataclass_fields__) | {"model": model})
    return measure_activation_ranges(checkpoint, PIECES)


def test_ranges_are_those_of_the_model() -> None:
    """The largest of every token but the first, of first tokens, and the mean square of all."""
    model, seen = make_model(*ARCHITECTURES["llama"]), []
    watched = model.model.layers[1].mlp.down_proj
    hook = watched.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for piece in PIECES:
            model(torch.from_numpy(piece)[None])
    hook.remove()
    ranges = measured(model)
    found = ranges["model.model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found.largest, torch.cat([each[1:] for each in seen]).abs().amax(0).numpy())
    np.testing.assert_allclose(found.squares, torch.cat(seen).square().mean(0).numpy(), rtol=1e-4)
    np.testing.assert_allclose(found.first, torch.stack([each[0] for each in seen]).abs().amax(0).numpy(), rtol=1e-5)
    matrices = {name for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name}
    assert set(ranges) == {f"model.{name}" for name in matrices}


def test_a_weight_of_two_names_is_under_both() -> None:
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} <= set(measured(tiny_model("llama_tied")))
