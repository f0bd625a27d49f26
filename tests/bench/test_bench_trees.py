"""Chains and trees of one drafter side by side: what is measured, what it is called, and what is written down."""

import dataclasses
import json

import pytest

from specexport.bench.bundles import check_room
from specexport.bench.methods import AUTO, Cell, make_cells, resolve_methods
from specexport.bench.records import read_json, write_json
from specexport.bench.report import format_report
from specexport.bench.runner import run_bench
from specexport.bench.summary import find_fastest, summarize
from specexport_runtime.errors import InvalidRequestError
from tests.support.fakes.bench_fakes import PROMPTS, make_options, make_subject
from tests.support.fakes.bench_results import LOOKUP, PLAIN, VANILLA, prompt, result, run

TREE = LOOKUP._replace(tree_size=9)
CHOSEN = PLAIN._replace(method="auto", drafter="auto", num_speculative_tokens=AUTO, tree_size=AUTO)


def methods(*names):
    return resolve_methods(names, drafter="lookup", has_draft=True)


def sizes(names, trees, requested=None):
    found = make_cells(
        methods(*names), 1, requested=requested, built=8, temperatures=[0], domains=["a"], batchings=["continuous"],
        trees=trees,
    )  # fmt: skip
    return [(cell.method, cell.num_speculative_tokens, cell.tree_size) for cell in found]


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        (None, [("lookup", 7, 0), ("vanilla", 7, 0), ("auto", AUTO, AUTO)]),
        ((0, 12), [("lookup", 7, 0), ("lookup", 7, 12), ("vanilla", 7, 0), ("auto", AUTO, 0), ("auto", AUTO, 12)]),
        ((0, AUTO), [("lookup", 7, 0), ("vanilla", 7, 0), ("auto", AUTO, 0), ("auto", AUTO, AUTO)]),
        ((AUTO,), [("lookup", 7, 0), ("vanilla", 7, 0), ("auto", AUTO, AUTO)]),
    ],
    ids=str,
)
def test_each_size_is_measured_with_what_can_have_it(trees, expected):
    assert sizes(("lookup", "vanilla", "auto"), trees) == [("plain", 0, 0), *expected]
    assert sizes(("vanilla",), trees, requested=(AUTO,)) == [("plain", 0, 0), ("vanilla", AUTO, AUTO)], "padded: none"


@pytest.mark.parametrize(
    ("cell", "label", "requested"),
    [
        (LOOKUP, "lookup", None),
        (TREE, "lookup, trees of 9", 9),
        (CHOSEN, "auto", None),
        (CHOSEN._replace(tree_size=0), "auto, chains", 0),
        (CHOSEN._replace(tree_size=20), "auto, trees of 20", 20),
        (PLAIN, "plain", None),
        (VANILLA, "vanilla (lookup)", None),
        (LOOKUP._replace(unpad_kv=False), "lookup, padded KV", None),
        (LOOKUP._replace(unpad_kv=False, unpad_input=False), "lookup, padded KV and input", None),
        (VANILLA._replace(method="unpad-kv", unpad_kv=True), "unpad-kv only (lookup)", None),
    ],
    ids=lambda value: value.label if isinstance(value, Cell) else str(value),
)
def test_names_say_what_differs_from_the_usual(cell, label, requested):
    assert (cell.label, cell.requested_tree) == (label, requested)


def test_a_tree_is_compared_with_plain_decoding_and_with_vanilla_s_chain():
    runs = [run(PLAIN, 0, 20), run(LOOKUP, 0, 30), run(TREE, 0, 40), run(VANILLA, 0, 10)]
    rows = {row.cell: row for row in summarize(result(runs))}
    assert (rows[TREE].speedup, rows[TREE].over_vanilla) == (2, 4)
    assert [row.cell for row in summarize(result(runs))][:3] == [PLAIN, LOOKUP, TREE], "side by side"
    several = [run(cell._replace(num_speculative_tokens=k), 0, k) for cell in (LOOKUP, TREE) for k in (2, 4)]
    found = find_fastest(summarize(result([run(PLAIN, 0, 1), *several])))
    assert [(each.cell.tree_size, each.lookahead) for each in found] == [(0, 4), (9, 4)]


def test_figures_of_branches():
    """Acceptance counts branches; efficiency is of the most that a chain could give."""
    given = dataclasses.replace(
        prompt(TREE, 0, "x", 10, drafted=18, accepted=4, draft_rounds=2), branches=12, accepted_branches=3
    )
    moved = run(TREE, 0, 40)
    moved = dataclasses.replace(moved, phases={**moved.phases, "moved": 6, "move": 0.03, "rounds": 4, "verify": 2.0})
    (row,) = summarize(result([moved], [given]))
    assert (row.acceptance_rate, row.branch_rate) == (4 / 18, 3 / 12)
    assert row.mean_accepted_length == 3
    assert row.efficiency == 6 / 8
    assert (row.moved, row.moving) == (1.5, 0.03 / 3)
    text = format_report(result([moved], [given]))
    assert "of branches" in text
    assert "moved a round" in text
    assert "of branches" not in format_report(result([run(LOOKUP, 0, 1)], [prompt(LOOKUP, 0, "x", 10)]))


def test_records_have_the_size_and_older_files_are_chains(tmp_path):
    path = tmp_path / "bench.json"
    write_json(path, result([run(TREE, 0, 2)], [prompt(TREE, 0, "x", 10)]))
    data = json.loads(path.read_text())
    assert data["runs"][0]["tree_size"] == data["prompts"][0]["tree_size"] == 9
    assert read_json(path).runs[0].cell == TREE
    for each in (*data["runs"], *data["prompts"]):
        del each["tree_size"]
    for each in data["prompts"]:
        del each["branches"], each["accepted_branches"]
    path.write_text(json.dumps(data))
    assert read_json(path).runs[0].cell == LOOKUP


def test_sizes_reach_the_engine():
    log = []
    options = make_options(methods("lookup"), tree_sizes=(0,), num_speculative_tokens=(3,))
    run_bench(make_subject(log), PROMPTS, options)
    asked = [event[5]["tree_size"] for event in log if event[0] == "generate"]
    assert set(asked) == {None}
    options = make_options(methods("lookup"), tree_sizes=(9,), num_speculative_tokens=(3,))
    with pytest.raises(InvalidRequestError, match="cannot verify trees"):  # said by the engine, which was asked
        run_bench(make_subject(), PROMPTS, options)


def test_trees_that_cannot_be_had_are_refused_before_anything_is_loaded():
    named, options = {"one": make_subject()}, make_options(methods("lookup"), tree_sizes=(0, 9))
    with pytest.raises(InvalidRequestError, match="target of the bundle cannot verify them"):
        check_room(named, options)
    check_room(named, make_options(methods("lookup"), tree_sizes=(0,)))
    check_room({"one": dataclasses.replace(make_subject(), takes_trees=True)}, options)
    for size in (-3, 64):
        with pytest.raises(InvalidRequestError, match=f"tree_size is {size}"):
            make_options(methods("lookup"), tree_sizes=(size,))
