"""Which layers a draft leaves out: worked examples, and what holds for any similarities and rules."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.layer_choice import LayerChoice, LayerRules, choose_layers

ACS = (0.5, 0.99, 0.97, 0.986, 0.985, 0.999, 0.2, 0.99, 0.995, 0.99)  # ten layers


def removed(rules: LayerRules, acs=ACS) -> tuple[tuple[int, ...], tuple[int, ...]]:
    choice = choose_layers(acs, rules)
    return choice.removed_attention, choice.removed_mlp


def test_all_rules_together():
    assert LayerRules() == LayerRules(threshold=0.985, period=3, keep_last=2), "as in the paper"
    # Layer 4 lies on the threshold, which is not above it.
    assert removed(LayerRules()) == ((1, 2, 3, 5, 7), (2, 5))
    assert removed(LayerRules(threshold=0.9, period=4, keep_last=3)) == ((1, 2, 3, 4, 5), (3,))
    assert choose_layers((), LayerRules(threshold=None), 10).removed_attention == (2, 5)


def test_a_choice_says_what_it_is_as_json():
    choice = choose_layers((0.99, math.nan, 0.1), LayerRules(period=None, keep_last=1))
    assert json.loads(json.dumps(choice.to_json(), allow_nan=False)) == {
        "num_layers": 3, "removed_attention": [0], "removed_recurrences": [], "removed_mlp": [],
        "acs": [0.99, None, 0.1],
    }  # fmt: skip


HYBRID = ("recurrence", "", "attention", "MLP", "attention and recurrence", "MLP", "recurrence", "")


def test_recurrences_are_chosen_as_attention_is_and_named():
    rules = LayerRules(threshold=0.9, period=3, keep_last=0)
    choice = choose_layers((0.95, 0.1, 0.2, 0.99), rules, kinds=HYBRID)
    assert choice.removed_attention == (2,)
    assert choice.removed_recurrences == (0, 2, 3)
    assert choice.removed_mlp == (2,)  # the first layer and the last one have none that could be removed
    assert choice.mask.tolist() == [False, False, True, True, False, False, False, False]
    assert choice.to_json()["removed_recurrences"] == [0, 2, 3]


def test_an_mlp_that_is_not_there_makes_no_draft():
    assert not choose_layers((), LayerRules(threshold=None, period=5), 4, HYBRID).can_draft
    assert choose_layers((), LayerRules(threshold=None, period=4, keep_last=0), 4, HYBRID).can_draft
    assert not LayerChoice((False,), (False,), kinds=("recurrence", "")).can_draft  # nothing would be left


def test_named_layers_go_whatever_the_rules_say():
    fixed = LayerRules(None, None, None, skip_mixers=[3, 1, 3], skip_mlps=(0,))
    assert (fixed.skip_mixers, fixed.is_blind, LayerRules().is_blind) == ((1, 3), True, False)
    choice = choose_layers((), fixed, 5)
    assert (choice.removed_attention, choice.removed_mlp) == ((1, 3), (0,))
    both = LayerRules(skip_mixers=(9, 0), skip_mlps=(9,))
    assert removed(both) == ((0, 1, 2, 3, 5, 7, 9), (2, 5, 9)), "the last layers are protected from the rules alone"
    assert choose_layers((), fixed, 4, HYBRID).removed_mlp == (), "there is none"
    LayerRules(None, None, 7, skip_mlps=(1,)).check_layers(2)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (LayerRules(skip_mixers=(2, 7)), "layer 7 is to be left out, and the model has layers 0 to 3"),
        (LayerRules(skip_mixers=range(4), skip_mlps=range(4)), "all 4 layers are left out"),
    ],
)
def test_named_layers_that_the_model_has_not_are_refused(rules, message):
    with pytest.raises(InvalidRequestError, match=message):
        rules.check_layers(4)


def test_a_draft_that_is_the_target_or_nothing_is_no_draft():
    kept, gone = (True, True), (False, False)
    assert not LayerChoice(kept, kept).can_draft
    assert not LayerChoice(gone, gone).can_draft
    assert LayerChoice(gone, kept).can_draft
    assert LayerChoice(kept, (True, False)).can_draft
    assert not choose_layers((0.1, 0.2, 0.3, 0.4), LayerRules(period=None)).can_draft


def test_similarities_must_be_there_and_be_of_all_layers():
    for acs, rules in (((), LayerRules()), ((0.1, 0.2, 0.3), LayerRules(threshold=None))):
        with pytest.raises(ValueError, match=f"{len(acs)} similarities for 4 layers"):
            choose_layers(acs, rules, 4)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"threshold": 0.0}, "threshold is 0", r"\(0, 1\]"), ({"threshold": 1.01}, "threshold is 1.01", r"\(0, 1\]"),
        ({"skip_mixers": (-1,)}, "skip_mixers is -1", "from 0"), ({"skip_mlps": ("2",)}, "skip_mlps is '2'", "from 0"),
        ({"threshold": math.nan}, "threshold is nan", r"\(0, 1\]"),
        ({"threshold": True}, "threshold is True", r"\(0, 1\]"), ({"period": 1}, "period is 1", "at least 2"),
        ({"period": 2.0}, "period is 2.0", "at least 2"), ({"keep_last": -1}, "keep_last is -1", "at least 0"),
        ({"keep_last": True}, "keep_last is True", "at least 0"),
        ({"threshold": None, "period": None}, "the target itself", "give one"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(options, message, hint):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        LayerRules(**options)
    assert re.search(hint, refusal.value.hint)


@pytest.mark.parametrize(
    ("options", "num_layers", "message", "hint"),
    [
        ({"keep_last": 8}, 8, "keep_last is 8", "at most 7"),
        ({}, 2, "keep_last is 2", "at most 1"),
        ({"threshold": None, "period": 7}, 8, "period is 7", "at most 6"),
        ({"threshold": None, "period": 2, "keep_last": 3}, 4, "period is 2", "a threshold"),
        ({"threshold": None, "period": 9, "keep_last": None}, 8, "period is 9", "at most 8"),
    ],
)
def test_rules_that_make_no_draft_of_a_model_are_refused(options, num_layers, message, hint):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        LayerRules(**options).check_layers(num_layers)
    assert hint in refusal.value.hint


def test_rules_that_may_make_a_draft_are_taken():
    LayerRules().check_layers(3)
    LayerRules(period=100).check_layers(12)  # rule 1 idles, similarities may remove something
    LayerRules(threshold=None, period=6).check_layers(8)


RULES = st.builds(
    LayerRules,
    threshold=st.none() | st.floats(0.01, 1.0),
    period=st.integers(2, 12),
    keep_last=st.none() | st.integers(0, 12),
) | st.builds(LayerRules, threshold=st.floats(0.01, 1.0), period=st.none(), keep_last=st.none() | st.integers(0, 12))


@given(acs=st.lists(st.floats(-1, 1) | st.just(math.nan), min_size=1, max_size=20), rules=RULES)
def test_what_holds_for_every_choice(acs, rules):
    choice = choose_layers(acs, rules)
    count, last = len(acs), rules.keep_last or 0
    assert choice.num_layers == count
    assert len(choice.mask) == 2 * count
    for i in range(count):
        protected = i >= count - last
        periodic = rules.period is not None and (i + 1) % rules.period == 0
        above = rules.threshold is not None and acs[i] > rules.threshold
        assert choice.mixers[i] == (protected or not (periodic or above))
        assert choice.mlp[i] == (protected or not periodic)
        assert choice.mask[2 * i] == choice.mixers[i]
        assert choice.mask[2 * i + 1] == choice.mlp[i]
    assert any(choice.mask)  # no rules leave an empty draft
    try:
        rules.check_layers(count)
    except InvalidRequestError:
        assert not choice.can_draft  # whatever is refused for a model would never have drafted
