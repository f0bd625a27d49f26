"""Cost curves: interpolation, fitting, measuring without a trace, and the user's cache."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime import user_cache
from specexport_runtime.costs import curves as cost_curves
from specexport_runtime.costs.curves import CostCurves, GateCost, load_costs, measure_costs
from specexport_runtime.costs.learned import LearnedCosts, RoundSeconds
from specexport_runtime.costs.measure import MAX_NOISE, measure_step_cost, row_counts_up_to, widths_up_to
from specexport_runtime.costs.step_cost import KvPair, RowCurve, StepCost, StepSize, clean_times, fit_kv_seconds
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner

COST = StepCost((RowCurve(1, (1, 2, 5), (1.0, 1.5, 3.0)), RowCurve(5, (1, 5), (2.0, 10.0))), 0.01, 0.001)
SECONDS = st.just(0.0) | st.floats(1e-9, 1e4)  # what a clock can give: it counts nanoseconds


@st.composite
def step_costs(draw):
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted))
    curves = []
    for count in rows:
        widths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5, unique=True).map(sorted))
        seconds = draw(st.lists(SECONDS, min_size=len(widths), max_size=len(widths)).map(sorted))
        curves.append(RowCurve(count, tuple(widths), tuple(seconds)))
    return StepCost(tuple(curves), draw(SECONDS), draw(SECONDS), draw(SECONDS))


@pytest.mark.parametrize(
    ("tokens", "rows", "entries", "seconds"),
    [
        (1, 1, 0, 1.0),
        (5, 1, 0, 3.0),
        (3, 1, 0, 2.0),  # between widths 2 and 5
        (8, 1, 0, 4.5),  # beyond the last width, by the last two
        (5, 5, 0, 2.0),
        (15, 5, 0, 6.0),
        (3, 3, 0, 1.5),  # one token a row, half-way between 1 and 5 rows
        (15, 3, 0, 6.5),
        (2, 5, 0, 2.0),  # rows that sit the step out
        (20, 10, 0, 8.0),  # more rows than measured: two batches of five
        (1, 1, 100, 1.0 + 100 * 0.011),
        (25, 5, 100, 10.0 + 100 * (0.01 + 0.005)),
    ],
)
def test_between_and_beyond_what_was_measured(tokens, rows, entries, seconds):
    for _ in range(2):  # computed, then remembered
        assert COST.seconds(tokens, rows, entries) == pytest.approx(seconds)


@given(step_costs(), st.integers(1, 50), st.integers(0, 400), st.integers(0, 50), st.integers(0, 5000))
def test_never_falls_with_tokens_or_entries(cost, rows, tokens, more, entries):
    few = cost.seconds(rows + tokens, rows, entries)
    assert 0 <= few < math.inf
    assert cost.seconds(rows + tokens + more, rows, entries) >= few * (1 - 1e-9)
    assert cost.seconds(rows + tokens, rows, entries + more) >= few


@given(step_costs())
def test_measured_points_are_met_and_json_is_exact(cost):
    for curve in cost.curves:
        for width, seconds in zip(curve.widths, curve.seconds, strict=True):
            assert cost.seconds(width * curve.num_rows, curve.num_rows) == pytest.approx(seconds)
    assert StepCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


SIZES = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda pair: StepSize(*pair))


@given(st.dictionaries(SIZES, SECONDS, min_size=1, max_size=12))
def test_clean_times_never_fall_and_never_rise_above_what_was_measured(times):
    made = clean_times(times)
    assert all(made[size] <= times[size] for size in times)
    for small in made:
        for large in made:
            if small.num_rows <= large.num_rows and small.width <= large.width:
                assert made[small] <= made[large]
    assert clean_times(made) == pytest.approx(made, rel=1e-12)


@given(st.dictionaries(SIZES, st.floats(1, 5), min_size=2, max_size=12))
def test_true_times_stay_as_they_are(disturbed):
    law = {size: 1.0 + 0.1 * size.num_rows * size.width for size in disturbed}
    assert clean_times(law) == law
    made = clean_times({size: law[size] * disturbed[size] for size in law})
    assert all(made[size] >= law[size] for size in law)


def test_a_disturbed_step_is_cut_to_what_others_prove():
    times = {StepSize(1, 1): 2.0, StepSize(1, 3): 99.0, StepSize(1, 5): 9.0, StepSize(2, 2): 1.5, StepSize(4, 5): 80.0}
    assert clean_times(times) == {
        StepSize(1, 1): 1.5,  # two rows of two tokens took less
        StepSize(1, 3): 3.0,  # two of those
        StepSize(1, 5): 4.5,
        StepSize(2, 2): 1.5,
        StepSize(4, 5): 9.0,
    }


@pytest.mark.parametrize(("each", "token"), [(2e-6, 3e-7), (0.0, 1e-6), (5e-6, 0.0)])
def test_kv_terms_are_found_again(each, token):
    pairs = [KvPair(w, e, e * (each + token * w)) for w, e in ((1, 100), (9, 100), (1, 800))]
    assert fit_kv_seconds(pairs) == pytest.approx((each, token), abs=1e-12)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 999), st.floats(-1, 1)), max_size=5))
def test_kv_terms_are_never_negative(pairs):
    assert min(fit_kv_seconds([KvPair(*pair) for pair in pairs])) >= 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["curves"], []),
        (["curves"], None),
        (["curves", 0, "seconds", 0], math.nan),
        (["curves", 0, "seconds", 0], -1.0),
        (["curves", 0, "seconds", 2], math.inf),
        (["curves", 0, "seconds", 0], 2.0),  # falls
        (["curves", 0, "seconds"], [1.0]),
        (["curves", 0, "widths", 0], 0),
        (["curves", 1, "num_rows"], 1),
        (["curves", 1, "num_rows"], "five"),
        (["kv_seconds"], -1e-9),
        (["kv_token_seconds"], None),
    ],
)
def test_a_damaged_curve_is_refused(path, value):
    data = json.loads(json.dumps(COST.to_json()))
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=r"\w"):
        StepCost.from_json(data)


LOOKAHEAD = 5


class Clock:
    """Time that passes only in steps of an executor."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class TimedExecutor(FakeExecutor):
    """A fake engine whose steps take what a known law says; every third one is disturbed."""

    def __init__(self, clock, *args, slow=1.0, **options):
        super().__init__(*args, **options)
        self.clock, self.slow = clock, slow
        self.pasts = []
        self.third = 5

    def execute(self, want="logits"):
        shape = self._shape
        self.pasts.append(self._buffers.kv_lens[:, 0].tolist())
        entries = int(self._buffers.kv_lens.sum())
        width = shape.num_tokens / shape.num_seqs
        law = 1e-3 + 2e-4 * shape.num_tokens + 1e-4 * shape.num_logit_rows + entries * (1e-6 + 2e-7 * width)
        self.clock.now += self.slow * law * (self.third if len(self.calls) % 3 == 0 else 1)
        return super().execute(want)


def make_runner(rows=4, capacity=80, **options):
    clock = Clock()
    return ModelRunner(TimedExecutor(clock, 17, rows, capacity, **options)), clock


@pytest.mark.parametrize(("all_logits", "each_logit"), [(True, 3e-4), (False, 2e-4)])
def test_a_known_law_is_measured(all_logits, each_logit):
    runner, clock = make_runner()
    cost = measure_step_cost(
        runner, max_rows=4, max_tokens=5, contexts=(8, 64), all_logits=all_logits, budget_s=1e9, clock=clock
    )
    assert cost.kv_seconds == pytest.approx(1e-6)
    assert cost.kv_token_seconds == pytest.approx(2e-7)
    rest = 0.0 if all_logits else 1e-4
    for rows, width, entries in ((1, 1, 0), (1, 4, 30), (4, 5, 200), (3, 2, 90)):
        wanted = 1e-3 + rows * width * each_logit + rows * rest + entries * (1e-6 + 2e-7 * width)
        assert cost.seconds(rows * width, rows, entries) == pytest.approx(wanted)


@pytest.mark.parametrize("modes", [{}, {"unpad_kv": False}, {"unpad_kv": False, "unpad_input": False}])
def test_measuring_leaves_no_trace(modes):
    executor = FakeExecutor(17, 5, 80)
    runner = ModelRunner(executor, **modes)
    untouched = executor._cache.copy()
    runner.prefill(4, [1, 2, 3])
    kept = executor._cache[4].copy()
    measure_step_cost(runner, max_rows=4, max_tokens=5)
    assert [runner.kv.entries(row) for row in range(5)] == [0, 0, 0, 0, 3]
    assert runner.kv.kv_len(4) == 3
    runner.kv.check()
    assert np.array_equal(executor._cache[:4], untouched[:4])
    assert np.array_equal(executor._cache[4], kept)


def test_rows_are_given_back_when_a_step_fails():
    runner, clock = make_runner()

    def fail(want="logits"):
        raise RuntimeError("no")

    runner.prefill(0, [1])
    runner.release_row(0)
    runner.executor.execute = fail
    with pytest.raises(RuntimeError, match="no"):
        measure_step_cost(runner, max_rows=4, max_tokens=5, clock=clock)
    assert [runner.kv.entries(row) for row in range(4)] == [0] * 4


def test_rows_in_use_are_refused():
    runner, clock = make_runner()
    runner.prefill(2, [1, 2])
    with pytest.raises(SpecexportError, match="row 2 is in use"):
        measure_step_cost(runner, max_rows=4, max_tokens=5, clock=clock)
    assert runner.kv.kv_len(2) == 2


class StatefulExecutor(FakeExecutor):
    """A fake engine that says it keeps a state, and notes what its steps are given."""

    num_pending = LOOKAHEAD + 1

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.given = []

    def prepare(self, shape):
        steps = np.full((shape.num_seqs, 4), -7, np.int64)
        self._buffers = super().prepare(shape)._replace(state_steps=steps)
        return self._buffers

    def execute(self, want="logits"):
        rows = (buffer[0] for buffer in np.split(self._buffers.state_steps, len(self._buffers.state_steps)))
        tokens = self._buffers.input_ids.tolist()
        self.given.append((self._shape.num_tokens // self._shape.num_seqs, {tuple(row) for row in rows}, tokens))
        return super().execute(want)


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_with_states_are_those_of_decoding(drafts):
    """A verification settles accepted drafts; a draft step goes through the drafts before it."""
    runner = ModelRunner(StatefulExecutor(50, 4, 80))
    measure_step_cost(
        runner, max_rows=4, max_tokens=2 if drafts else LOOKAHEAD + 1, all_logits=not drafts, lookahead=LOOKAHEAD
    )
    found = {(width, steps) for width, rows, _ in runner.executor.given for steps in rows if width <= LOOKAHEAD + 1}
    if drafts:
        assert found == {(1, (0, 2, 0, 1)), (2, (2, 0, 2, 0))}
    else:
        assert found == {(1, (0, 0, 1, 0)), (2, (1, 0, 1, 1)), (3, (1, 0, 1, 2)), (5, (2, 0, 1, 4)), (6, (3, 0, 1, 5))}
    runner.kv.check()
    assert [runner.kv.state_len(row) for row in range(4)] == [0] * 4


def test_the_draft_model_is_measured_with_the_drafts_of_a_bundle(cache):
    draft = ModelRunner(StatefulExecutor(50, 4, 80))
    measure_costs(ModelRunner(FakeExecutor(50, 4, 80)), {"draft-model": draft}, max_rows=2, lookahead=LOOKAHEAD)
    assert {steps for width, rows, _ in draft.executor.given for steps in rows if width == 1} == {(0, 2, 0, 1)}


@pytest.mark.parametrize("vocab_size", [2, 50, 4096])
def test_tokens_are_as_different_as_those_of_texts(vocab_size):
    """A router sends equal tokens to the same experts: five of them would cost what one does."""
    runner = ModelRunner(StatefulExecutor(vocab_size, 4, 80))
    measure_step_cost(runner, max_rows=4, max_tokens=5)
    for _, _, tokens in runner.executor.given:
        assert len(set(tokens)) == min(len(tokens), vocab_size)
        if vocab_size > len(tokens) > 4:
            assert max(tokens) > vocab_size / 2, "ids from one corner of the vocabulary are of one kind"
            assert max(tokens) - min(tokens) > vocab_size / 2


def test_medusa_heads_are_asked_by_their_numbers():
    executor = FakeExecutor(50, 2, 80, reads_features=True, num_draft_heads=3)
    measure_step_cost(ModelRunner(executor), max_rows=2, max_tokens=2, all_logits=False, lookahead=3)
    assert executor.calls, "it takes no other numbers"


def test_grid():
    assert widths_up_to(1) == [1]
    assert widths_up_to(5) == [1, 2, 3, 5]
    assert widths_up_to(8) == [1, 2, 3, 5, 8]
    assert row_counts_up_to(1) == [1]
    assert row_counts_up_to(8) == [1, 3, 8]


def test_pasts_are_short_and_long_and_fit_the_row():
    runner, clock = make_runner(rows=2, capacity=40)
    measure_step_cost(runner, max_rows=2, max_tokens=5, contexts=(8, 500), clock=clock)
    assert {past for step in runner.executor.pasts for past in step} == {0, 8, 35}


def test_a_slow_machine_is_measured_less():
    quick, slow = make_runner(), make_runner(slow=1e3)
    for runner, clock in (quick, slow):
        cost = measure_step_cost(runner, max_rows=4, max_tokens=5, clock=clock)
        assert [curve.num_rows for curve in cost.curves][0 :: len(cost.curves) - 1] == [1, 4]
    assert len(slow[0].executor.calls) < 20 < len(quick[0].executor.calls)
    assert {(s.num_seqs, s.max_new_tokens) for s in slow[0].executor.calls[1:]} >= {(1, 1), (1, 5), (4, 1), (4, 5)}


@pytest.mark.parametrize(("slow", "noisy"), [([1], False), ([1, 1, 1, 1, 9], False), ([1, 2, 4, 8, 16, 32, 64], True)])
def test_noise_is_seen(slow, noisy):
    runner, clock = make_runner()
    turns = iter(slow * 999)
    plain = runner.executor.execute

    def execute(want="logits"):
        runner.executor.slow = next(turns)
        return plain(want)

    runner.executor.execute = execute
    runner.executor.third = 1
    cost = measure_step_cost(runner, max_rows=1, max_tokens=5, repeats=4, clock=clock)
    assert (cost.noise > MAX_NOISE) == noisy


def test_engines_of_limited_steps_are_not_asked_for_more():
    runner, clock = make_runner()
    runner.executor.max_num_tokens = runner.max_chunk = 8
    cost = measure_step_cost(runner, max_rows=4, max_tokens=5, clock=clock)
    assert max(shape.num_tokens for shape in runner.executor.calls) <= 8
    assert cost.curves[-1].num_rows == 4


LAYERS = 4
CURVES = CostCurves(
    StepCost((RowCurve(1, (1, 5), (10.0, 18.0)),), 0.01),
    {"draft-model": StepCost((RowCurve(1, (1, 2), (1.0, 1.1)),))},
    GateCost(LAYERS, StepCost((RowCurve(1, (1, 2), (2.0, 2.0)),)), StepCost((RowCurve(1, (1, 2), (4.0, 4.0)),))),
)


@pytest.mark.parametrize(
    ("attention", "mlp", "seconds"), [(0, 0, 2.0), (0, 4, 4.0), (4, 4, 11.0), (2, 4, 7.5), (0, 1, 2.5), (3, 2, 8.25)]
)
def test_a_draft_of_some_layers_is_priced_by_its_parts(attention, mlp, seconds):
    assert CURVES.self_draft_seconds(attention, mlp, 1, 1, 100) == pytest.approx(seconds)


def test_mlps_are_a_share_of_those_there_are():
    fewer = CostCurves(CURVES.target, gates=replace(CURVES.gates, num_mlps=2))
    assert fewer.self_draft_seconds(0, 1, 1, 1, 100) == pytest.approx(3.0)
    assert fewer.self_draft_seconds(4, 2, 1, 1, 100) == pytest.approx(11.0)
    assert CostCurves.from_json(json.loads(json.dumps(fewer.to_json()))) == fewer
    none = CostCurves(CURVES.target, gates=GateCost(LAYERS, CURVES.gates.none, CURVES.gates.none, 0))
    assert none.self_draft_seconds(2, 0, 1, 1, 100) == pytest.approx(6.5)


def test_without_gates_a_draft_step_is_a_target_step():
    assert CostCurves(CURVES.target).self_draft_seconds(0, 0, 1, 1, 100) == pytest.approx(11.0)


@pytest.mark.parametrize("curves", [CURVES, CostCurves(COST)])
def test_curves_survive_json(curves):
    assert CostCurves.from_json(json.loads(json.dumps(curves.to_json()))) == curves


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(user_cache.ROOT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch):
    """How often something was measured. On a busy machine, timings may be too noisy to keep; not here."""
    count = []

    def measure(*args, **options):
        count.append(options)
        return measure_costs(*args, **options)

    monkeypatch.setattr(cost_curves, "MAX_NOISE", math.inf)

    monkeypatch.setattr(cost_curves, "measure_costs", measure)
    return count


PRIOR = CostCurves(COST, {"draft-model": COST})


def load(prior=PRIOR, **options):
    runners = [ModelRunner(FakeExecutor(17, 4, 80, seed=seed)) for seed in (0, 1)]
    usual = {"bundle_key": "k", "kernels": "avx2", "max_rows": 2, "lookahead": 4, "measure": True}
    target, draft = runners
    return load_costs(target, {"draft-model": draft}, prior, **(usual | options))


def test_measured_once_then_read(cache, measured):
    first = load().curves
    assert load().curves == load(measure=False).curves == first
    assert len(measured) == 1
    assert set(first.drafters) == {"draft-model"}
    assert first.target.curves[0].widths == (1, 2, 3, 5)
    assert first.drafters["draft-model"].curves[0].widths == (1, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"bundle_key": "l"},
        {"kernels": "portable"},
        {"max_rows": 3},
        {"lookahead": 5},
        {"num_threads": 1},
        {"spin": False},
        {"cuda_graphs": False},
    ],
)
def test_other_circumstances_are_measured_again(cache, measured, other):
    load()
    load(**other)
    load()
    assert len(measured) == 2


def test_another_machine_is_measured_again(cache, measured, monkeypatch):
    load()
    monkeypatch.setattr(cost_curves, "machine_key", lambda: "another")
    load()
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', "damaged", "foreign"])
def test_a_damaged_file_is_measured_again_and_replaced(cache, measured, content):
    load()
    (path,) = (cache / "costs").iterdir()
    if content == "damaged":
        data = json.loads(path.read_text())
        data["target"]["curves"][0]["seconds"][0] = -1
        content = json.dumps(data)
    if content == "foreign":  # a file that was copied to another's name
        data = json.loads(path.read_text())
        data["key"]["max_rows"] = 9
        content = json.dumps(data)
    path.write_text(content)
    second = load().curves
    assert len(measured) == 2
    assert load().curves == second
    assert len(measured) == 2


def test_no_cache_is_no_obstacle(cache, measured, caplog):
    cache.write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        load()
        load()
    assert len(measured) == 2
    assert len(caplog.records) == 1
    load(cache=False)
    assert len(caplog.records) == 1
    assert len(measured) == 3


def test_nothing_is_measured_unasked_and_what_was_learned_stays(cache, measured):
    first = load(measure=False)
    assert first.curves == PRIOR
    assert first.learned.level(1) is None  # a prior's level is no time
    teach(first.learned)
    second = load(measure=False)
    assert second.curves == PRIOR
    assert second.learned.draft_ratio("draft-model", 1) == pytest.approx(3.0)
    assert not measured
    third = load()  # measured: what was learned about the prior is of no use any more
    assert len(measured) == 1
    assert third.learned.draft_ratio("draft-model", 1) == 1.0


def test_what_mends_another_prior_is_forgotten(cache):
    teach(load(measure=False).learned)
    other = CostCurves(COST, {"draft-model": COST, "self": COST})
    found = load(measure=False, prior=other)
    assert found.curves == other
    assert found.learned.draft_ratio("draft-model", 1) == 1.0
    assert load(measure=False).learned.draft_ratio("draft-model", 1) == pytest.approx(3.0)


def test_noisy_timings_are_thrown_away(cache, measured, monkeypatch, caplog):
    monkeypatch.setattr(cost_curves, "MAX_NOISE", -1.0)
    with caplog.at_level(logging.INFO):
        assert load().curves == PRIOR
    assert "busy" in caplog.text
    assert not (cache / "costs").exists()


@pytest.mark.parametrize(
    "learned",
    [None, [], {"target/drafts": 3}, {"target/drafts": {"x": 1.0}}, {"target/drafts": {"1": 1e9}}, {"a": {"1": None}}],
)
def test_damaged_ratios_are_forgotten(learned):
    assert LearnedCosts(learned).extra_ratio(1) == 1.0


def teach(learned):
    """Rounds in which the draft's steps take three times what the curve says."""
    for i in range(12):
        learned.observe(RoundSeconds(1, 1.0, 0.1 * (i % 3), 1.0 + 0.1 * (i % 3), {"draft-model": (0.4, 1.2)}))
    assert learned.adopt()


def test_no_more_rows_are_filled_than_there_is_memory_for(cache):
    target, draft = (ModelRunner(FakeExecutor(17, 4, 80)) for _ in range(2))
    curves = measure_costs(target, {"draft-model": draft}, max_rows=4, lookahead=4, max_bytes=2 * target.row_bytes(80))
    assert [curve.num_rows for curve in curves.target.curves] == [1, 2]
    assert max(shape.num_seqs for runner in (target, draft) for shape in runner.executor.calls) == 2
    assert target.kv.touched(0) == target.executor.resident_bytes == 0


def test_gates_are_all_on_again(cache):
    target = ModelRunner(FakeExecutor(17, 4, 80, num_gates=2 * LAYERS))
    masks = []
    apply = target.executor.set_layers

    def note(mask):
        masks.append(None if mask is None else mask.tolist())
        apply(mask)

    target.executor.set_layers = note
    target.executor.gate_kinds = ("recurrence", "", *("attention", "MLP") * 3)
    curves = measure_costs(target, {}, max_rows=2, lookahead=4)
    assert curves.gates.num_mlps == 3
    assert masks == [[False] * 8, [False, True] * 4, None]
    assert curves.gates.num_layers == LAYERS
    assert CostCurves.from_json(json.loads(json.dumps(curves.to_json()))) == curves
