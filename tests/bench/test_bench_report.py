"""Medians, ratios, the table, plots and files of a benchmark; chains and trees side by side."""

import dataclasses
import json

import pytest

from specexport.bench.bundles import check_room
from specexport.bench.methods import AUTO, Cell, make_cells, resolve_methods
from specexport.bench.plots import write_plots
from specexport.bench.records import BenchResult, PromptRecord, RunRecord, read_json, write_json
from specexport.bench.report import format_report, format_table, write_markdown
from specexport.bench.runner import run_bench
from specexport.bench.summary import find_fastest, summarize
from specexport.plots import check_plots
from specexport_runtime.errors import InvalidRequestError, MissingDependencyError, UserInputError, make_install_hint
from tests.support.fakes.bench_fakes import PROMPTS, make_options, make_subject

PLAIN = Cell("plain", "none", True, True, 2, 0, 0.0, "code", "continuous")
LOOKUP = PLAIN._replace(method="lookup", drafter="lookup", num_speculative_tokens=3)
VANILLA = LOOKUP._replace(method="vanilla", unpad_kv=False, unpad_input=False)


def run(cell, repeat, rate, *, decode=None, padding=2):
    phases = {"schedule": 0.1, "pack": 0.2, "total": 3.0, "draft_steps": 0, "rounds": 0}
    counters = {"accepted": 10, "padding": padding, "input_tokens": 30, "input_padding": 10, "ratio": padding / 10}
    return RunRecord(cell, repeat, 1, 100, 100 / rate, rate, decode, phases, counters)


def prompt(cell, repeat, name, milliseconds, *, drafted=0, accepted=0, draft_rounds=0, equal=True):
    return PromptRecord(
        cell, repeat, name, 5, 10, 10, 4, draft_rounds, drafted, accepted, [1], milliseconds / 100, 0.0, 0.1, 0.2,
        "length", equal, None if equal else 6,
    )  # fmt: skip


def result(runs, prompts=()):
    machine = {"cpu": "cpu", "cores": 2, "load_1min": 0.5, "memory_bytes": 8e9, "python": "3", "versions": {"a": "1"}}
    options = {"max_tokens": [4, 9], "repeats": 3}
    return BenchResult(["specexport", "bench", "a b"], machine, {"name": "fake", "threads": 2}, options, runs, prompts)


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_figures_are_medians_and_ratios_are_within_a_repeat():
    runs = [
        *(run(PLAIN, repeat, rate) for repeat, rate in enumerate([10, 100, 20])),
        *(run(LOOKUP, repeat, rate, decode=rate + 1) for repeat, rate in enumerate([30, 200, 22])),
        *(run(VANILLA, repeat, rate) for repeat, rate in enumerate([10, 50, 44])),
    ]
    plain, lookup, vanilla = summarize(result(runs))
    assert (plain.tokens_per_second, lookup.tokens_per_second, vanilla.tokens_per_second) == (20, 30, 44)
    assert (plain.decode_tokens_per_second, lookup.decode_tokens_per_second) == (None, 31)
    assert plain.spread == 90 / 20
    assert plain.speedup == 1
    assert lookup.speedup == 2  # of 3, 2 and 1.1; the ratio of the medians is 1.5
    assert lookup.over_vanilla == 3  # of 3, 4 and 0.5
    assert (plain.over_vanilla, vanilla.over_vanilla) == (None, 1)
    assert lookup.padding_ratio == pytest.approx(0.2)
    assert lookup.input_padding == pytest.approx(10 / 40)
    assert lookup.overhead == pytest.approx(0.1)
    one, other = summarize(result([run(LOOKUP, 0, 30), run(LOOKUP._replace(batching="static"), 0, 20)]))
    assert (one.over_static, other.over_static, one.speedup) == (1.5, None, None)  # no plain to compare with


def test_acceptance_and_latency_come_from_the_prompts():
    prompts = [
        *(prompt(LOOKUP, r, "x", ms, drafted=6, accepted=3, draft_rounds=2) for r, ms in enumerate([10, 12, 99])),
        *(prompt(LOOKUP, r, "y", ms, drafted=3, accepted=3, draft_rounds=1) for r, ms in enumerate([16, 1, 99])),
    ]
    (row,) = summarize(result([run(LOOKUP, r, 30) for r in range(3)], prompts))
    assert row.acceptance_rate == 18 / 27
    assert row.mean_accepted_length == 1 + 18 / 9
    assert row.efficiency == (18 + 9) / (27 + 9)
    assert (row.latency, row.latency_deviation) == (14, 2)  # of the medians 12 and 16
    assert (row.latency_p50, row.latency_p99) == (14, pytest.approx(12 + 0.99 * 4))


def test_rows_of_one_comparison_are_neighbours():
    other = [cell._replace(domain="math") for cell in (PLAIN, LOOKUP)]
    larger = [cell._replace(batch_size=8) for cell in (PLAIN, LOOKUP)]
    order = [PLAIN, LOOKUP, *other, *larger, VANILLA]
    assert [row.cell for row in summarize(result([run(cell, 0, 1) for cell in order]))] == [
        PLAIN, LOOKUP, VANILLA, *larger, *other,
    ]  # fmt: skip


def test_table_shows_what_varies():
    measured = summarize(result([run(PLAIN, 0, 20.04), run(LOOKUP, 0, 31)]))
    few = {"method": "lookup", "batch": "2", "K": "3", "tokens/s": "31.0", "speedup": "1.55×", "acceptance": "-"}
    assert cells(format_table(measured))[1] == few | {"accepted length": "-"}
    rows = cells(format_table(measured, wide=True))
    assert rows[1] == {
        "method": "lookup", "batch": "2", "K": "3", "tokens/s": "31.0", "decode tokens/s": "-", "speedup": "1.55×",
        "acceptance": "-", "accepted length": "-", "padding ratio": "20.0%", "input padding": "25.0%",
        "schedule + pack": "10.0%",
    }  # fmt: skip
    twice = cells(format_table(summarize(result([run(PLAIN, 0, 20), run(PLAIN, 1, 30)])), wide=True))
    assert twice[0]["spread"] == "40%"
    one, two = ([prompt(PLAIN, 0, name, ms) for name, ms in [("x", 10), ("y", 14)][:n]] for n in (1, 2))
    columns = [cells(format_table(summarize(result([run(PLAIN, 0, 1)], each)), wide=True))[0] for each in (one, two)]
    assert ["P99" in row for row in columns] == [False, True], "percentiles of one prompt say nothing"
    more = [PLAIN, LOOKUP, VANILLA, LOOKUP._replace(domain="math", temperature=0.7, batching="static")]
    rows = cells(format_table(summarize(result([run(cell, 0, 20) for cell in more]))))
    assert [row["method"] for row in rows] == ["plain", "lookup", "vanilla (lookup)", "lookup"]
    assert rows[1]["over vanilla"] == "1.00×"
    assert [rows[3][name] for name in ("domain", "temperature", "batching")] == ["math", "0.7", "static"]


def test_the_report_ends_in_words():
    auto = PLAIN._replace(method="auto", drafter="auto", num_speculative_tokens=AUTO, tree_size=AUTO)
    on_copy = [cell._replace(domain="copy") for cell in (PLAIN, LOOKUP, auto)]
    speeds = zip([PLAIN, LOOKUP, auto, *on_copy], [10, 12, 13.5, 10, 20, 9.1], strict=True)
    last = format_report(result([run(cell, 0, rate) for cell, rate in speeds])).splitlines()[-1]
    said = "auto is 1.35× as fast as plain decoding on code, 0.91× on copy."
    assert last == f"{said} Fastest: auto on code (1.35×), lookup, K=3 on copy (2.00×)."
    last = format_report(result([run(PLAIN, 0, 10), run(LOOKUP, 0, 12)])).splitlines()[-1]
    assert last == "lookup, K=3 is 1.20× as fast as plain decoding."
    assert "as fast as" not in format_report(result([run(PLAIN, 0, 10)]))


def test_report_names_command_machine_and_different_texts():
    prompts = [prompt(LOOKUP, repeat, "x", 1, equal=repeat < 2) for repeat in range(3)]
    text = format_report(result([run(LOOKUP, 0, 20)], prompts))
    assert "`specexport bench 'a b'`" in text
    assert "fake, threads 2: 1 prompts, 4 to 9 new tokens each, median of 3 runs." in text
    assert "Texts equal to plain greedy decoding: 2 of 3 (66.6 %)." in text
    where = "lookup, batch size 2, K=3, code, repeat 2"
    assert f"- prompt 'x' differs from plain greedy decoding at token 6 ({where})" in text
    assert "domain 'code' has 1 prompts for 2 rows" in text


@pytest.fixture(scope="module")
def measured():
    methods = resolve_methods(["lookup", "draft-model", "vanilla"], drafter="lookup", has_draft=True)
    options = make_options(methods, batch_sizes=(1, 2), num_speculative_tokens=(2, 4))
    found = run_bench(make_subject(), PROMPTS[:3], options, command=["specexport", "bench"])
    return dataclasses.replace(found, bundle={"name": "fake"})


def test_json_is_read_back_as_it_was(tmp_path, measured):
    path = tmp_path / "bench.json"
    write_json(path, measured)
    assert read_json(path) == measured
    found = json.loads(path.read_text())
    assert found["schema"] == "specexport.bench/1"
    assert found["texts"] == {"compared": len(measured.prompts), "different": 0}
    assert {"method", "batch_size", "accepted_lengths", "queued_s", "equal_to_plain"} <= set(found["prompts"][0])
    assert {"tokens_per_second", "phases", "padding"} <= set(found["runs"][0])
    assert list(tmp_path.iterdir()) == [path]
    write_markdown(tmp_path / "bench.md", measured)
    assert (tmp_path / "bench.md").read_text() == format_report(read_json(path)) + "\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ('{"schema": "specexport.bench/0"}', "has the schema 'specexport.bench/0'"),
        ('{"schema": "specexport.bench/1", "runs": 3}', "lacks a part"),
        (None, "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequestError, match=said):
        read_json(path)


def test_plots_are_drawn_and_repeatable_one_a_domain_where_there_are_two_values(tmp_path, measured):
    def drawn(name, runs):
        outcome = write_plots(tmp_path / name, dataclasses.replace(measured, runs=runs, prompts=[]))
        return {path.name: path.read_bytes() for path in outcome.written}, outcome.skipped

    plots, skipped = drawn("one", measured.runs)
    assert (list(plots), skipped) == (["batch-size.png", "lookahead.png", "padding.png"], [])
    assert drawn("two", measured.runs)[0] == plots
    assert {path.name for path in (tmp_path / "one").iterdir()} == set(plots)
    assert all(data.startswith(b"\x89PNG") and len(data) > 10_000 for data in plots.values())
    one_batch = [run for run in measured.runs if run.cell.batch_size == 1]
    plots, skipped = drawn("batch", one_batch)
    assert list(plots) == ["lookahead.png"]
    assert [line.split(":")[0] for line in skipped] == ["batch-size.png skipped", "padding.png skipped"]
    assert not drawn("none", [run for run in one_batch if run.cell.num_speculative_tokens != 2])[0]
    assert not (tmp_path / "none").exists()
    other = [dataclasses.replace(run, cell=run.cell._replace(domain="chat/x y")) for run in measured.runs]
    plots, _ = drawn("domains", [*measured.runs, *other])
    assert {"padding-a.png", "padding-chat-x-y.png"} <= set(plots)
    assert len(plots) == 6


def test_plots_that_cannot_be_drawn_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserInputError, match="in the way"):
        check_plots(file / "plots")
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(MissingDependencyError, match="matplotlib") as caught:
        check_plots(tmp_path)
    assert caught.value.hint == make_install_hint("bench")


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
        (LOOKUP, "lookup", None), (TREE, "lookup, trees of 9", 9), (CHOSEN, "auto", None),
        (CHOSEN._replace(tree_size=0), "auto, chains", 0), (CHOSEN._replace(tree_size=20), "auto, trees of 20", 20),
        (PLAIN, "plain", None), (VANILLA, "vanilla (lookup)", None),
        (LOOKUP._replace(unpad_kv=False), "lookup, padded KV", None),
        (LOOKUP._replace(unpad_kv=False, unpad_input=False), "lookup, padded KV and input", None),
        (VANILLA._replace(method="unpad-kv", unpad_kv=True), "unpad-kv only (lookup)", None),
    ],
    ids=lambda value: value.label if isinstance(value, Cell) else str(value),
)  # fmt: skip
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
    text = format_report(result([moved], [given]), wide=True)
    assert "of branches" in text
    assert "moved a round" in text
    assert "of branches" not in format_report(result([run(LOOKUP, 0, 1)], [prompt(LOOKUP, 0, "x", 10)]), wide=True)


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


def test_sizes_reach_the_engine_and_trees_that_cannot_be_had_are_refused_before_anything_is_loaded():
    chains, trees = (make_options(methods("lookup"), tree_sizes=sizes) for sizes in ((0,), (0, 9)))
    log = []
    run_bench(make_subject(log), PROMPTS, chains)
    assert {event[5]["tree_size"] for event in log if event[0] == "generate"} == {None}
    with pytest.raises(InvalidRequestError, match="cannot verify trees"):  # said by the engine, which was asked
        run_bench(make_subject(), PROMPTS, make_options(methods("lookup"), tree_sizes=(9,)))
    with pytest.raises(InvalidRequestError, match="target of the bundle cannot verify them"):
        check_room({"one": make_subject()}, trees)
    check_room({"one": make_subject()}, chains)
    check_room({"one": dataclasses.replace(make_subject(), takes_trees=True)}, trees)
    for size in (-3, 64):
        with pytest.raises(InvalidRequestError, match=f"tree_size is {size}"):
            make_options(methods("lookup"), tree_sizes=(size,))
