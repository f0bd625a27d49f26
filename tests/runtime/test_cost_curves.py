"""What steps cost by their sizes, and what the user's cache has of that."""

import json
import logging
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime import user_cache
from specexport_runtime.costs import curves as cost_curves
from specexport_runtime.costs.curves import CostCurves, LayerShares, StepCost, load_costs
from specexport_runtime.costs.learned import LearnedCosts, RoundSeconds
from specexport_runtime.lookahead.memory import DrafterMemory

COST = StepCost(
    reading=1.0, token=0.2, fixed=0.1, hidden=0.5, unchosen=0.4, unchosen_share=0.5, row=0.05, row_token=0.01, kv=0.01,
    kv_token=0.001,
)  # fmt: skip
SECONDS = st.just(0.0) | st.floats(1e-9, 1e4)
SHARES = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("tokens", "rows", "entries", "seconds"),
    [
        (1, 1, 0, 0.1 + 0.8 + 0.02 + 0.05 + 0.01),  # half of the experts are read, and a tenth of the product is felt
        (2, 1, 0, 0.1 + 0.9 + 0.04 + 0.05 + 0.02),
        (6, 2, 0, 0.1 + (1 - 0.4 / 64) + 1.2 - 0.5 * (1 - 0.4 / 64) + 0.1 + 0.06),
        (1, 1, 100, 0.98 + 100 * 0.011),
        (4, 2, 100, 0.1 + 0.975 + 0.8 - 0.5 * 0.975 + 0.1 + 0.04 + 100 * 0.012),
    ],
)
def test_a_step_is_the_sum_of_its_parts(tokens, rows, entries, seconds):
    assert COST.seconds(tokens, rows, entries) == pytest.approx(seconds)


@given(
    st.builds(
        StepCost, SECONDS, SECONDS, SECONDS, SHARES, row=SECONDS, row_token=SECONDS, kv=SECONDS, kv_token=SECONDS
    ),
    SHARES,
    SHARES,
    st.integers(1, 50),
    st.integers(0, 400),
    st.integers(0, 50),
    st.integers(0, 5000),
)
def test_never_falls_with_tokens_or_entries(cost, experts, share, rows, tokens, more, entries):
    cost = replace(cost, unchosen=experts * cost.reading, unchosen_share=share)
    few = cost.seconds(rows + tokens, rows, entries)
    assert 0 <= few < math.inf
    assert cost.seconds(rows + tokens + more, rows, entries) >= few * (1 - 1e-9)
    assert cost.seconds(rows + tokens, rows, entries + more) >= few


CURVES = CostCurves(
    StepCost(8.0, 2.0, kv=0.01), {"draft-model": StepCost(0.9, 0.1)}, LayerShares(4, mixer=0.05, mlp=0.15)
)


@pytest.mark.parametrize(
    ("mixers", "mlps", "seconds"), [(0, 0, 11.0), (4, 4, 2.0), (4, 0, 8.0), (0, 4, 5.0), (2, 0, 9.5), (1, 2, 7.25)]
)
def test_a_draft_of_some_layers_is_priced_by_its_parts(mixers, mlps, seconds):
    assert CURVES.self_draft_seconds(mixers, mlps, 1, 1, 100) == pytest.approx(seconds)
    assert CostCurves(CURVES.target).self_draft_seconds(mixers, mlps, 1, 1, 100) == pytest.approx(11.0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(user_cache.ROOT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_warned", set())
    return tmp_path / "cache"


def load(prior=CURVES, *, cache=True, **other):
    return load_costs(prior, {"bundle": "b", "kernels": "avx2", "threads": None} | other, cache=cache)


def promised(drafted):
    return 1.0 + 0.1 * drafted


def teach(learned):
    for i in range(12):
        drafted = i % 3
        learned.observe(RoundSeconds(1, drafted, promised, promised(drafted), {"draft-model": (0.4, 1.2)}))
    assert learned.adopt()


def ratio(**options):
    return load(**options).learned.draft_ratio("draft-model", 1)


def test_what_was_learned_stays_for_the_same_bundle_run_alike(cache, monkeypatch):
    first = load()
    assert first.curves == CURVES
    assert first.learned.level(1) is None  # promised seconds are no time
    teach(first.learned)
    assert ratio() == pytest.approx(3.0)
    others = [{"bundle": "c"}, {"kernels": "avx512vnni"}, {"threads": 1}, {"cuda_graphs": False}]
    others.append({"prior": replace(CURVES, target=COST)})  # what was learned mends another promise
    assert all(ratio(**other) == 1.0 for other in others)
    monkeypatch.setattr(cost_curves, "machine_key", lambda: "another")
    assert ratio() == 1.0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', "foreign"])
def test_a_damaged_file_is_replaced(cache, content):
    teach(load().learned)
    (path,) = (cache / "costs").iterdir()
    if content == "foreign":  # a file that was copied to another's name
        data = json.loads(path.read_text())
        data["key"]["threads"] = 9
        content = json.dumps(data)
    path.write_text(content)
    found = load()
    assert found.learned.draft_ratio("draft-model", 1) == 1.0
    teach(found.learned)
    assert ratio() == pytest.approx(3.0)


def test_no_cache_is_no_obstacle(cache, caplog):
    cache.write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        teach(load().learned)
        teach(load().learned)
    assert len(caplog.records) == 1
    teach(load(cache=False).learned)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "learned",
    [None, [], {"target/drafts": 3}, {"target/drafts": {"x": 1.0}}, {"target/drafts": {"1": 1e9}}, {"a": {"1": None}}],
)
def test_damaged_ratios_are_forgotten(learned):
    assert LearnedCosts({"ratios": learned}).extra_ratio(1) == LearnedCosts(learned).extra_ratio(1) == 1.0


GOOD = {"account": -3.0, "tests": [4.0, 0.0], "fails": [1.0, 0.0]}


@pytest.mark.parametrize(
    "changed",
    [{"account": None}, {"account": math.nan}, {"account": math.inf}, {"tests": [4.0]}, {"tests": [0.5, 0.0]},
     {"fails": [-1.0, 0.0]}, {"fails": [math.nan, 0.0]}, {"fails": [[1.0], [0.0]]}],
)  # fmt: skip
def test_what_is_damaged_of_a_drafters_memory_is_forgotten(changed):
    memory = DrafterMemory(2, kept=GOOD)
    assert (memory.account.balance, memory.shared.tests, memory.shared.fails) == tuple(GOOD.values())
    assert json.loads(json.dumps(memory.to_json())) == GOOD
    memory.shared.tests, memory.shared.fails = [16.0, 0.0], [4.0, 0.0]
    assert memory.to_json() == GOOD | {"tests": [8.0, 0.0], "fails": [2.0, 0.0]}  # eight tests at most
    for kept in (GOOD | changed, None, [], "x", {}):
        assert DrafterMemory(2, kept=kept).to_json() == DrafterMemory(2).to_json()
