"""``specexport simulate``: the closed form by hand and enumeration, the simulation, and the command."""

import importlib.util
import itertools
import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import special

from specexport.cli import main
from specexport.simulate import model
from specexport.simulate.model import Drafts, StepPrice, batch_padding, best_draft_length, expected_speedup
from specexport_runtime.errors import UserInputError
from tests.support.cases.refusals import line_of

FAST = ["simulate", "--accuracy", "0.5,0.8", "--batch-size", "1,4", "--samples", "500"]
LIMIT, SAMPLES = 4.5, 20000  # standard errors; a right formula exceeds it once in 150000 comparisons
MODELS = [Drafts(0.5, 7), Drafts(0.3, 1), Drafts(0.7, 7, hit_rate=0.4), Drafts(0.6, 5, 0.8, concentration=10.0)]


def test_values_worked_by_hand():
    # a = 1/2, n = 2, b = 2: E[A] = 1 + 1/2 + 1/4; E[max] = 1 + (1 - 1/4) + (1 - 9/16).
    assert batch_padding(0.5, 2, 2) == pytest.approx((1.75, 2.1875, 0.4375))
    assert batch_padding(0.5, 2, 2).ratio == pytest.approx(0.4375 / 1.75)
    # One certain and one hopeless sequence, n = 3: advances 4 and 1. Certain batches have no padding.
    assert model.mixed_padding([1.0, 0.0], 3) == pytest.approx((2.5, 4.0, 1.5))
    assert batch_padding(1.0, 64, 7, concentration=3.0) == (8.0, 8.0, 0.0)
    # A tiny accuracy keeps its precision, and the ends divide by nothing.
    assert batch_padding(1e-12, 2, 3).longest - 1 == pytest.approx(2e-12, rel=1e-3)
    with np.errstate(divide="raise", invalid="raise"):
        assert model.mixed_padding([0.0, 1.0, 1e-300], 12).longest == 13.0
    # 1 + a + ... + a^K (Leviathan et al. 2023, equation 1), to two places: free draft steps, free verify.
    for accuracy, draft_length, tokens in ((0.6, 2, 1.96), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert expected_speedup(accuracy, draft_length, StepPrice()).unpadded == pytest.approx(tokens, abs=0.005)
    # Draft steps at 1/4 of a target step: 1.5 / 1.25. With token cost 1/2 and b = 2 a plain step costs 2.
    assert expected_speedup(0.5, 1, StepPrice(cost_ratio=0.25)).unpadded == pytest.approx(1.2)
    half = expected_speedup(0.5, 1, StepPrice(token_cost=0.5), batch_size=2, hit_rate=0.5)
    assert half == pytest.approx((1.25 / 1.25, 1.25 / 1.375))


@pytest.mark.parametrize("hit_rate", [1.0, 0.3])
@pytest.mark.parametrize("mixed", [[0.5], [0.2, 0.9], [0.0, 1.0, 0.6]])
def test_equals_enumeration(mixed, hit_rate):
    rows = []
    for a in mixed:
        right = [hit_rate * a**k * (1 - a) for k in range(4)]
        rows.append([right[0] + 1 - hit_rate, *right[1:], hit_rate * a**4])
    mean = longest = 0.0
    for advances in itertools.product(range(5), repeat=len(rows)):
        chance = math.prod(row[x] for row, x in zip(rows, advances, strict=True))
        mean += chance * (1 + sum(advances) / len(rows))
        longest += chance * (1 + max(advances))
    assert model.mixed_padding(mixed, 4, hit_rate=hit_rate)[:2] == pytest.approx((mean, longest))


def test_moments_of_a_random_accuracy():
    expected = [special.beta(1.4 + k, 0.6) / special.beta(1.4, 0.6) for k in range(1, 5)]
    assert model.survival(0.7, 4, concentration=2.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("cost", "known"), [(StepPrice(0.1), None), (StepPrice(0.9), 0), (StepPrice(), 12)])
def test_best_draft_length_is_the_best(cost, known):
    speedups = {k: expected_speedup(0.8, k, cost, batch_size=4).unpadded for k in range(1, 13)}
    best = best_draft_length(0.8, cost, max_draft_length=12, batch_size=4)
    assert max(speedups.values()) == speedups[best] > 1 if best else max(speedups.values()) <= 1
    assert known in (None, best)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda bad=bad: batch_padding(bad, 2, 3) for bad in (1.01, -0.01, math.nan)),
        lambda: batch_padding(0.5, 2, 0),
        lambda: batch_padding(0.5, 10**9, 10**9),
        lambda: batch_padding(0.5, 2, 3, hit_rate=1.5),
        lambda: batch_padding(0.5, 2, 3, concentration=0.0),
        lambda: model.mixed_padding([], 3),
        lambda: expected_speedup(0.5, 3, StepPrice(-1.0)),
        lambda: best_draft_length(0.5, StepPrice(), max_draft_length=0),
        lambda: model.simulate_rounds(Drafts(0.5, 3), 0, samples=10, seed=0),
        lambda: model.simulate_generations(Drafts(0.5, 3), 2, max_new_tokens=0, samples=10, seed=0),
    ],
)
def test_what_is_out_of_range_is_refused(call):
    with pytest.raises(UserInputError) as caught:
        call()
    assert caught.value.hint


def within(estimate, expected):
    """Whether an estimate agrees with an expectation, as far as 20000 samples can tell."""
    error = max(estimate.standard_error, 1 / SAMPLES)  # an event too rare to be sampled leaves no spread
    return abs(estimate.mean - expected) <= LIMIT * error


@pytest.mark.parametrize("drafts", MODELS, ids=str)
def test_simulation_agrees_with_the_closed_form_and_not_with_wrong_ones(drafts, monkeypatch):
    def closed_form(drafts, batch_size=8):
        return batch_padding(drafts[0], batch_size, *drafts[1:2], hit_rate=drafts[2], concentration=drafts[3])

    monkeypatch.setattr(model, "MAX_DRAFT_TOKENS", 1 << 16)  # in several parts
    exact, found = closed_form(drafts), model.simulate_rounds(drafts, 8, samples=SAMPLES, seed=1)
    for name in ("accepted", "longest", "padding", "ratio"):
        assert within(found[name], getattr(exact, name)), name
    assert not within(found["longest"], closed_form(drafts, 7).longest)  # a sequence short
    assert not within(found["accepted"], 1 + (exact.accepted - 1) / drafts.accuracy)  # the first token taken for right
    for one_kind in (drafts._replace(hit_rate=1.0), drafts._replace(concentration=None)):
        assert one_kind == drafts or not within(found["ratio"], closed_form(one_kind).ratio)
    assert model.simulate_rounds(Drafts(0.5, 4), 3, samples=1, seed=0)["ratio"].standard_error is None


def test_a_generation_by_hand():
    """One sequence is always right and one never; n = 3, 8 tokens each, empty caches.

    In rounds 1 and 2 they advance by 4 and 1: 3 slots of padding each. Then the first is done, the second runs 6 rounds
    alone. A row of a round reads its cache and the step's 4 slots.
    """
    found = model.simulate_batches(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 8, 0, np.random.default_rng(0))
    padded = 2 * (0 + 4) + 2 * (4 + 4) + sum(length + 4 for length in range(8, 14))
    own = 2 * (0 + 4) + (4 + 4) + (1 + 4) + sum(length + 4 for length in range(2, 8))
    assert found[:, 0].tolist() == [8, 2 + 8, 3 + 3, padded, own]
    longer_prompt = model.simulate_batches(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 8, 100, np.random.default_rng(0))
    assert longer_prompt[:, 0].tolist() == [8, 10, 6, padded + 1000, own + 1000]
    # With 5 tokens each the first has one token left in round 2, and needs no more than the second: no padding there.
    shorter = model.simulate_batches(Drafts(0.5, 3), np.array([[1.0, 0.0]]), 5, 0, np.random.default_rng(0))
    assert shorter[:3, 0].tolist() == [5, 2 + 5, 3]
    alone = model.simulate_generations(Drafts(0.6, 4, concentration=2.0), 1, max_new_tokens=30, samples=50, seed=0)
    assert (alone["ratio"], alone["idle"], alone["cache_slots"]) == ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0))


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_json_record_is_complete_and_repeatable(tmp_path):
    options = ["--hit-rate", 0.6, "--token-cost", 0.05, "--cost-ratio", 0.01, "--max-new-tokens", 20, "--seed", 7]
    file, again = tmp_path / "one.json", tmp_path / "two.json"
    assert [run(*FAST, *options, "--json", each).exit_code for each in (file, again)] == [0, 0]
    assert file.read_bytes() == again.read_bytes()
    found = json.loads(file.read_text())
    assert (found["schema"], found["parameters"]["accuracies"]) == ("specexport.simulate/1", [0.5, 0.8])
    row, cost, exact = found["rows"][3], StepPrice(0.01, 0.05), batch_padding(0.8, 4, 7, hit_rate=0.6)
    assert row["exact"] == exact._asdict() | {"ratio": exact.ratio}
    assert row["speedup"] == expected_speedup(0.8, 7, cost, batch_size=4, hit_rate=0.6)._asdict()
    assert row["best_draft_length"] == best_draft_length(0.8, cost, max_draft_length=16, batch_size=4, hit_rate=0.6)
    assert set(row["generation"]) == {"rounds", "ratio", "idle", "cache_slots"}
    assert found["rows"][0]["deviations"] is None  # one sequence: no padding, no error


@pytest.mark.parametrize("installed", [True, False])
def test_a_plot_is_written_or_the_extra_is_named(tmp_path, monkeypatch, installed):
    find_spec = importlib.util.find_spec
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    file = tmp_path / "figure.png"
    result = run(*FAST, "--plot", file)
    assert file.read_bytes()[:5] == b"\x89PNG\r" if installed else ".[bench]" in line_of(result)
    assert file.exists() == installed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--accuracy", "1.5"], "not a probability"), (["--accuracy", "high"], "not a list of numbers"),
        (["--batch-size", "4,0"], "batch size is 0"), (["--generations", "0"], "number of generations is 0"),
        (["--seed", "-1"], "range"), (["--json", "missing/x.json"], "cannot be written"),
        (["--plot", "x.bmp"], "unknown image format"), (["--acuracy", "1"], "--accuracy"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_line_and_code_2(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in line_of(run("simulate", *arguments))
    assert not list(tmp_path.iterdir())


def test_the_model_fits_what_ems_sd_measured():
    """docs/ems-sd.md, "Against EMS-SD's measurements": tokens/s of the paper's table 2, speedups of its figure 1."""
    batch = np.array([1, 2, 4, 8, 16, 24])
    plain = np.array([79.44, 137.49, 257.37, 468.89, 774.59, 936.45])
    ems_sd = np.array([3.94, 3.50, 2.83, 2.17, 1.63, 1.41])
    slope, fixed = np.polyfit(batch, batch / plain, 1)
    cost = StepPrice(token_cost=slope / fixed)

    def error(point):
        speedups = [expected_speedup(point[0], 7, cost, batch_size=int(b), hit_rate=point[1]).unpadded for b in batch]
        return np.sum((np.array(speedups) / ems_sd - 1) ** 2)

    accuracy, hit_rate = min(itertools.product(np.arange(0.9, 0.97, 0.002), np.arange(0.65, 0.72, 0.002)), key=error)
    assert (round(accuracy, 3), round(hit_rate, 3), round(cost.token_cost, 4)) == (0.936, 0.682, 0.0401)
