"""Cost curves that are wrong are mended by what rounds take, and by nothing else."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.costs.learned import WRONG, LearnedCosts, RoundSeconds, make_reading_key
from tests.support.cases.chance import examples


def rounds(
    learned, count, *, draft=1.0, extra=1.0, load=lambda i: 1.0, rows=1, seed=0, widths=(0, 1, 4, 8), noise=0.03
):
    """Rounds of a machine on which draft steps and draft tokens cost so many times what the curves say.

    ``load``: how much slower everything is in round i. ``noise``: by how much each round is off, at most.
    """
    chance = random.Random(seed)
    for i in range(count):
        width = chance.choice(widths)
        luck = chance.uniform(1 - noise, 1 + noise)
        promised = 0.2 * width
        learned.observe(
            RoundSeconds(
                rows, width, lambda drafted: 2.0 + 0.15 * drafted, load(i) * luck * 0.01 * (2.0 + extra * 0.15 * width),
                {"draft-model": (promised, load(i) * luck * 0.01 * draft * promised)} if width else {},
            )
        )  # fmt: skip


def test_curves_that_are_right_stay():
    for options in ({}, {"load": lambda i: 1.0 + i / 100}, {"widths": (0,)}):  # on a machine that slows down too
        learned = LearnedCosts()
        assert learned.level(1) is None
        rounds(learned, 200, **options)
        assert not learned.adopt()
        assert learned.version == 0
        if "load" not in options:
            assert learned.level(1) == pytest.approx(0.01, rel=0.05)


@examples(40)
@given(
    draft=st.floats(0.1, 8.0), extra=st.floats(0.2, 8.0), seed=st.integers(0, 9), slow=st.floats(1.0, 2.5),
    period=st.integers(20, 60),
)  # fmt: skip
def test_both_ratios_are_found_on_a_machine_that_is_busy_at_times(draft, extra, seed, slow, period):
    learned = LearnedCosts()
    for step in range(60):
        rounds(
            learned, 10, draft=draft, extra=extra, seed=seed * 100 + step,
            load=lambda i, first=10 * step: slow if (first + i) // period % 2 else 1.0,
        )  # fmt: skip
        learned.adopt()
    # To within what is called wrong, and what a line through two loads of the machine is off by.
    for found, real in ((learned.draft_ratio("draft-model", 1), draft), (learned.extra_ratio(1), extra)):
        assert max(found / real, real / found) < 2 * WRONG


def test_a_wrong_ratio_is_mended_within_three_dozen_rounds_and_not_before_it_is_adopted():
    learned = LearnedCosts()
    rounds(learned, 10, draft=4.0)
    assert learned.draft_ratio("draft-model", 1) == 1.0
    assert learned.adopt()
    assert not learned.adopt()
    assert learned.draft_ratio("draft-model", 1) == pytest.approx(4.0, rel=0.2)
    learned = LearnedCosts()
    rounds(learned, 36, draft=4.0, extra=3.0)
    assert learned.adopt()
    assert learned.draft_ratio("draft-model", 1) == pytest.approx(4.0, rel=0.2)
    assert learned.extra_ratio(1) == pytest.approx(3.0, rel=0.25)
    assert learned.version == 1
    learned = LearnedCosts()
    rounds(learned, 100, widths=(4,), draft=3.0)  # one width alone tells nothing of draft tokens
    learned.adopt()
    assert learned.extra_ratio(1) == 1.0
    assert learned.draft_ratio("draft-model", 1) == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("widths", [(0, 1, 2), (1, 4), (0, 8)])
def test_chance_and_slow_changes_are_not_taken_for_costs(seed, widths):
    learned, found = LearnedCosts(), []
    for step in range(60):
        rounds(
            learned, 10, seed=100 * seed + step, widths=widths, noise=0.25,
            load=lambda i, first=10 * step: 1.0 + 0.5 * math.sin((first + i) / 12),
        )  # fmt: skip
        learned.adopt()
        found.append(learned.extra_ratio(1))
    assert all(1 / (2 * WRONG) < ratio < 2 * WRONG for ratio in found)


@pytest.mark.parametrize("seed", range(4))
def test_a_ratio_is_believed_no_further_than_it_is_certain(seed):
    learned, found = LearnedCosts(), []
    for step in range(30):
        rounds(learned, 4, extra=0.5, seed=1000 * seed + step, widths=(0, 4, 8), noise=0.2)
        learned.adopt()
        found.append(learned.extra_ratio(1))
    assert 0.3 < min(found) <= found[-1] < 0.9


@pytest.mark.parametrize("seed", range(4))
def test_rounds_that_something_disturbed_are_not_taken_for_costs(seed):
    learned, found, chance = LearnedCosts(), [], random.Random(seed)

    def burst():
        return chance.uniform(2.0, 8.0) if chance.random() < 0.15 else chance.uniform(0.9, 1.1)

    for _ in range(150):
        width = chance.choice((0, 0, 2, 4))
        drafts = {"draft-model": (0.2 * width, burst() * 0.2 * width)} if width else {}
        learned.observe(RoundSeconds(8, width, lambda d: 2.0 + 0.15 * d, burst() * (2.0 + 0.15 * width), drafts))
        learned.adopt()
        found += [learned.extra_ratio(8), learned.draft_ratio("draft-model", 8)]
    assert all(0.5 < ratio < 2 for ratio in found)


def test_what_curves_of_other_row_counts_get_wrong_is_no_matter_of_draft_tokens():
    learned = LearnedCosts()
    for step in range(120):
        # Only 7 rows draft, and their curve is wrong by a half: plain steps and draft tokens alike.
        rows_now, wrong, widths = ((4, 1.0, (0,)), (7, 1.5, (1, 4)))[step % 2]
        for i in range(3):
            rounds(learned, 1, rows=rows_now, widths=widths, seed=3 * step + i, load=lambda _, wrong=wrong: wrong)
        learned.adopt()
        assert 1 / WRONG < learned.extra_ratio(7) < WRONG


def test_hiccups_say_nothing_unless_they_last():
    learned = LearnedCosts()
    rounds(learned, 100)
    rounds(learned, 4, load=lambda i: 50.0)
    rounds(learned, 4)
    assert not learned.adopt()
    assert learned.level(1) == pytest.approx(0.01, rel=0.05)
    rounds(learned, 300, load=lambda i: 50.0)
    assert learned.level(1) == pytest.approx(0.5, rel=0.05)


def test_times_decide_nothing_about_lengths():
    calm, busy = (LearnedCosts() for _ in range(2))
    for step in range(80):
        widths = (0,) if step < 20 else (4,)  # who begins to draft meets a machine that is busy
        for learned, load in ((calm, 1.0), (busy, 50.0 if 20 <= step < 27 else 1.0)):
            rounds(learned, 1, widths=widths, seed=step, load=lambda i, load=load: load)
        assert calm.is_unknown("draft-model") == busy.is_unknown("draft-model")
        assert calm.needs_shorter_draft(1) == busy.needs_shorter_draft(1)


def test_sizes_learn_apart_and_lend_to_those_that_know_nothing():
    learned = LearnedCosts()
    rounds(learned, 60, draft=4.0, rows=1)
    rounds(learned, 60, draft=2.0, rows=8)
    learned.adopt()
    assert learned.draft_ratio("draft-model", 1) == pytest.approx(4.0, rel=0.2)
    assert (
        learned.draft_ratio("draft-model", 9) == learned.draft_ratio("draft-model", 64) == pytest.approx(2.0, rel=0.2)
    )
    assert learned.draft_ratio("draft-model", 2) == learned.draft_ratio("draft-model", 1)
    assert learned.draft_ratio("self", 1) == 1.0


def test_what_was_learned_is_kept_with_every_change_and_read_again():
    kept = []
    learned = LearnedCosts(keep=kept.append)
    for draft in (4.0, 1.0):
        rounds(learned, 200, draft=draft)
        assert len(kept) == learned.version
        assert learned.adopt()
        assert kept[-1] == learned.to_json()
    assert kept[0]["ratios"]["draft-model"]["1"] == pytest.approx(4.0, rel=0.2)
    learned.flush()  # nothing is new
    assert len(kept) == learned.version == 2
    again = LearnedCosts(json.loads(json.dumps(kept[0])))
    assert again.draft_ratio("draft-model", 1) == pytest.approx(4.0, rel=0.2)


def test_reading_is_told_apart_from_what_was_believed_of_it_because_of_the_steps():
    learned = LearnedCosts()
    rounds(learned, 30, draft=4.0)
    learned.adopt()
    assert learned.draft_ratio(make_reading_key("draft-model"), 1) == learned.draft_ratio("draft-model", 1) > 3
    for _ in range(6):  # it takes what the curve says, which is not what is in use
        learned.observe(RoundSeconds(1, 0, lambda d: 2.0, 0.02, {make_reading_key("draft-model"): (1.0, 0.01)}))
    learned.adopt()
    assert learned.draft_ratio(make_reading_key("draft-model"), 1) == pytest.approx(1.0, rel=0.2)
    assert learned.draft_ratio("draft-model", 1) > 3


def test_a_ratio_that_nothing_confirms_fades_from_life_to_life():
    ratios = {"draft-model": {"1": 2.0}, "target/drafts": {"1": 0.5}}
    lives = [ratios]
    for _ in range(8):
        learned = LearnedCosts({"ratios": lives[-1]})
        rounds(learned, 9, widths=(0,))
        lives.append(learned.to_json()["ratios"])
    assert LearnedCosts({"ratios": ratios}).draft_ratio("draft-model", 1) == 2.0
    assert lives[-1]["draft-model"]["1"] < WRONG
    assert lives[-1]["target/drafts"]["1"] > 1 / WRONG
    learned = LearnedCosts({"ratios": ratios})
    rounds(learned, 30, draft=2.0, extra=0.5)
    assert learned.to_json()["ratios"] == ratios
