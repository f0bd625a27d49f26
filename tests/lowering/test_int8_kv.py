"""KV caches in int8: entries are the float ones rounded, and no token's result depends on its step's width."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specexport.backends.ort import write_onnx, write_padded_onnx
from specexport.channel_ranges import CacheRange
from specexport.lowering.fuse import fuse_rotary
from specexport.lowering.ort_cpu import use_int8_caches
from specexport.passes.pipeline import default_passes, run_passes
from specexport.trace.calibrate import cache_ranges
from tests.support.models.tiny_models import make_llama
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import INT8_POISON, Engine, make_checkpoint
from tests.support.references.lowered import lower_ort_cpu

TEXTS = np.random.default_rng(7).integers(3, 200, (3, 90))
ARCHITECTURES = ["llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "phi", "mistral"]
"""Rotation in the kernel and before it, none, windows, caps, sinks, part of a head rotated."""


class Lowered(NamedTuple):
    folder: Path
    layers: Any
    ranges: list[CacheRange]

    def engine(self, num_rows: int = 1, capacity: int = 96, graph: str = "model.onnx") -> Engine:
        return Engine(self.folder, self.layers, num_rows, capacity, graph=graph)


def ranges_of(model: Any, pieces: Sequence[np.ndarray] = TEXTS, max_len: int = 90) -> list[CacheRange]:
    return cache_ranges(make_checkpoint(model), pieces, max_len=max_len)


def lower(model: Any, folder: Path, ranges: list[CacheRange] | None, quantize: str | None = None) -> Lowered:
    traced = trace_of(model, group_experts=True)  # as the walk over all architectures has it
    run_passes(traced.ir_model, default_passes("float32", quantize=quantize, own_operators=True))
    graph, padded = traced.ir_model, traced.ir_model.clone()
    fuse_rotary(graph, 128)
    for each in (graph, padded) if ranges is not None else ():
        use_int8_caches(each, ranges)
    lower_ort_cpu(graph)
    lower_ort_cpu(padded, padded_kv=True)
    write_onnx(graph, folder)
    write_padded_onnx(padded, folder)
    return Lowered(folder, traced.layers, ranges or [])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_entries_are_the_float_ones_rounded(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    plain, packed = lower(model, tmp_path / "a", None), lower(model, tmp_path / "b", ranges_of(model))
    steps = [([TEXTS[0][:40], TEXTS[1][:31]], [0, 0]), ([TEXTS[0][40:41], TEXTS[1][31:36]], [40, 31])]
    engines = plain.engine(2), packed.engine(2)
    for tokens, pasts in steps:
        wanted, found = (engine.step([ids.tolist() for ids in tokens], pasts) for engine in engines)
        assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    for kind, largest in zip("kv", packed.ranges[0], strict=True):  # of the first layer: what it reads is the same
        floats, codes = (engine.caches[f"{kind}_cache.0"] for engine in engines)
        scale = largest.reshape(floats.shape[2], 1, -1) / 127
        for row, count in enumerate((41, 36)):
            entry, code = floats[row, 0, :, :count], codes[row, 0, :, :count].astype(np.float32)
            assert np.abs(code * scale - entry).max() <= (scale * 0.501).max()
            assert (np.abs(code * scale - entry) <= scale * 0.501).all()
            assert (codes[row, 0, :, count:] == INT8_POISON).all()


@pytest.mark.one_of_kind
@pytest.mark.parametrize("head_dim", [16, 12, 160])
def test_no_result_depends_on_the_width_of_a_step(head_dim: int, tmp_path: Path) -> None:
    model = make_llama(head_dim=head_dim)
    lowered = lower(model, tmp_path, ranges_of(model), quantize="int8")
    ids = TEXTS[0].tolist()
    found = []
    for width in (90, 1, 2, 3, 7):
        engine = lowered.engine()
        parts = [engine.step([ids[at : at + width]], [at]) for at in range(0, 90, width)]
        found.append((np.concatenate(parts), engine.caches))
    for logits, caches in found[1:]:
        np.testing.assert_array_equal(logits, found[0][0])
        for name, cache in caches.items():
            np.testing.assert_array_equal(cache[..., :90, :], found[0][1][name][..., :90, :])


def test_the_padded_graph_agrees(tmp_path: Path) -> None:
    model = tiny_model("llama")
    lowered = lower(model, tmp_path, ranges_of(model), quantize="int8")
    texts = [ids.tolist() for ids in TEXTS[:2]]
    alone = [lowered.engine().step([ids], [0]) for ids in texts]
    padded = lowered.engine(2, graph="model.padded.onnx")
    held = [[*range(20)], [*range(12)] + [-1] * 8]
    padded.step([texts[0][:20], texts[1][:12]], [0, 0], held=[[], []])
    # Entries past the shorter row's own are padding: whatever lies there, in 8 bits too.
    logits = padded.step([texts[0][20:24], texts[1][12:16]], [20, 20], held=held)
    wanted = np.concatenate([alone[0][20:24], alone[1][12:16]])
    assert np.abs(logits - wanted).max() < 0.02 * np.abs(wanted).max()


def test_ranges_are_those_of_the_models_own_cache() -> None:
    import torch
    from transformers import DynamicCache

    model = tiny_model("gemma3")
    pieces = [TEXTS[0][:40], TEXTS[1][:25]]
    found = ranges_of(model, pieces, max_len=200)
    caches = []
    for ids, start in zip(pieces, (0, 160), strict=True):
        cache = DynamicCache()
        tokens = torch.from_numpy(ids)[None]
        with torch.no_grad():
            model(input_ids=tokens, position_ids=torch.arange(len(ids))[None] + start, past_key_values=cache)
        caches.append(cache)
    for layer, each in enumerate(found):
        for kind, values in zip(("keys", "values"), each, strict=True):
            wanted = [getattr(cache.layers[layer], kind)[0].abs().amax(1).flatten().numpy() for cache in caches]
            np.testing.assert_allclose(values, np.maximum(*wanted), rtol=1e-4, atol=1e-6)


def test_a_quiet_channel_divides_by_no_zero(tmp_path: Path) -> None:
    model = make_llama()
    ranges = [CacheRange(each.keys * 0, each.values * (np.arange(len(each.values)) % 2)) for each in ranges_of(model)]
    logits = lower(model, tmp_path, ranges).engine().step([TEXTS[0].tolist()], [0])
    assert np.isfinite(logits).all()
