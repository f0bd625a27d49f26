"""How large a tree a request may ask for, and what it gets where it does not say."""

import pytest

from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.drafting import MAX_NODES, Capabilities, DraftDefaults, resolve_draft_plan

TRAITS = {name: kind.traits for name, kind in KINDS.items()}


def plan(*, takes_trees=True, **options):
    capabilities = Capabilities(TRAITS, {}, 8, frozenset(TRAITS), takes_trees=takes_trees)
    return resolve_draft_plan(options, capabilities, DraftDefaults())


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, MAX_NODES), ({"tree_size": "auto"}, MAX_NODES), ({"tree_size": 0}, 0), ({"tree_size": 9}, 9),
        ({"num_speculative_tokens": 4}, 0), ({"num_speculative_tokens": 4, "tree_size": 12}, 12),
        ({"speculation": False}, 0), ({"speculation": False, "tree_size": "auto"}, 0), ({"takes_trees": False}, 0),
        ({"takes_trees": False, "tree_size": "auto"}, 0), ({"takes_trees": False, "tree_size": 0}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_has_the_tree_it_asks_for_and_none_where_it_pins_a_chain(options, size):
    assert plan(**options).tree_size == size


def test_the_chain_is_no_longer_than_the_tree():
    assert {stage.lookahead for stage in plan(num_speculative_tokens=4, tree_size=3).stages} == {3}
    assert {stage.lookahead for stage in plan(tree_size=3).stages} == {3}
    assert plan(tree_size="auto").stages == plan(tree_size=0).stages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tree_size": 64}, "tree_size is 64"),
        ({"tree_size": -1}, "tree_size is -1"),
        ({"tree_size": True}, "tree_size is True"),
        ({"tree_size": "large"}, "tree_size is 'large'"),
        ({"tree_size": 8, "speculation": False}, "nothing drafts"),
        ({"tree_size": 8, "takes_trees": False}, "cannot verify trees"),
        ({"tree_size": "auto", "num_speculative_tokens": 4}, "number of draft tokens"),
    ],
    ids=str,
)
def test_a_tree_that_cannot_be_had_is_refused(options, words):
    with pytest.raises(InvalidRequestError, match=words):
        plan(**options)
