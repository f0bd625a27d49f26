"""The model of docs/scaling.md against closed forms."""

import math
import sys
from pathlib import Path

import pytest

from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.costs.curves import CostCurves, StepCost

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scaling_model import Queue, Throughput, row_bytes, tokens_a_round


def test_tokens_of_a_round():
    assert tokens_a_round(0.5, 0) == 1
    assert tokens_a_round(0.5, 2) == 1.75
    assert tokens_a_round(1.0, 4) == 5


def test_the_queue_of_one_row_is_mm1():
    there, waiting = Queue((2.0,)).lengths(1.0)
    assert there == pytest.approx(1.0)
    assert waiting == pytest.approx(0.5)


def test_the_queue_of_equal_rows_is_mmc():
    rows, load = 4, 3.0  # each row finishes one request a second
    full = load**rows / math.factorial(rows) * rows / (rows - load)
    erlang_c = full / (sum(load**n / math.factorial(n) for n in range(rows)) + full)
    there, waited = Queue((1.0, 2.0, 3.0, 4.0)).seconds(load)
    assert waited == pytest.approx(erlang_c / (rows - load))
    assert there == pytest.approx(waited + 1.0)


def test_a_queue_that_grows_is_refused():
    with pytest.raises(ValueError, match="grows"):
        Queue((1.0, 2.0)).lengths(2.0)


def test_throughput_adds_up():
    target = StepCost(0.009, 0.001, row=0.0005)
    draft = StepCost(0.001, 0.0)
    model = Throughput(CostCurves(target, {"draft-model": draft}), 0.5, 0.0005, 0.0001, 5.0, 100.0)
    assert model.round_seconds(1, 0) == pytest.approx(0.0105 + 0.0005 + 0.0001)
    assert model.round_seconds(2, 4) == pytest.approx(0.020 + 4 * 0.001 + 0.0005 + 10 * 0.0001)
    seconds = 100 / tokens_a_round(0.5, 4) * model.round_seconds(2, 4) + 2 * 0.0145
    assert model.tokens_per_second(2, 4) == pytest.approx(200 / seconds)


def test_bytes_of_a_row_are_those_of_the_caches(demo_bundle):
    manifest = load_manifest(demo_bundle)
    entries = manifest.max_model_len + manifest.lookahead + 1
    target, draft = 8 * 2 * (64 + 64) * 4, 2 * 1 * (64 + 64) * 4
    assert row_bytes(manifest, manifest.max_model_len) == entries * (target + draft)
