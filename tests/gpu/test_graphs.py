"""Steps recorded as CUDA graphs against one kernel at a time, drafts in a chain against single ones, and host time."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tools.proof.steps import SCRIPT, compare_steps, decode, fill, random_tokens, time_step

if TYPE_CHECKING:
    from tests.gpu.conftest import Engines, Rows

pytestmark = pytest.mark.gpu
HOST_US = 100.0  # of a round of plain decoding, outside the engine
LOOKAHEAD = 4
PAST, LONG_PASTS = 256, (2048, 8192)
"""Entries of a row; after the long ones one sequence alone is timed too."""
LONG = "the interpreter takes minutes"


class Measured(NamedTuple):
    """One way to run: step times by (past, rows, new tokens), host microseconds of a round, logits of a step."""

    steps: dict[tuple[int, int, int], float]
    host_us: float
    logits: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"


def test_graphs_and_single_kernels_give_the_same(engines: "Engines", rows: "Rows") -> None:
    if rows.tiny and engines.kind == "proof":
        pytest.skip(LONG)
    found: dict[bool, Measured] = {}
    for graphs in (False, True):
        executor = engines.open(graphs=graphs, num_rows=engines.most_rows)
        found[graphs] = measured = measure(executor, rows.tiny)
        for (past, count, new), ms in measured.steps.items():
            eager = found[False].steps[past, count, new]
            how = f"graph {ms:.3f} ms, eager {eager:.3f} ms: {eager / ms:.2f}x" if graphs else f"eager {ms:.3f} ms"
            what = f"{engines.kind}: step of {count} x {new} tokens, {past} past"
            rows.row(what if graphs else f"{what}, eager", how, ms=ms)
        what = f"{engines.kind}: host time a round, batch 1, {'graphs' if graphs else 'eager'}"
        host_us = measured.host_us
        rows.reach(what, f"{host_us:.0f} us outside the engine", f"at most {HOST_US:.0f} us", host_us <= HOST_US)
    worst = float(np.abs(found[False].logits - found[True].logits).max())
    rows.right(f"{engines.kind}: logits of graph and eager", f"differ by up to {worst:.1e}", "equal", worst == 0)
    assert not rows.wrong


def test_replayed_steps_of_every_form_are_the_eager_ones(proof: "Engines", rows: "Rows") -> None:
    eager, replayed = (proof.open(graphs=graphs) for graphs in (False, True))
    worst = max(step.max_abs for step in compare_steps(eager, replayed, SCRIPT[1:3] if rows.tiny else SCRIPT))
    replays = replayed.graphs.replays
    rows.right("proof: logits of graph and eager, ragged steps", f"differ by up to {worst:.1e}", "equal", worst == 0)
    rows.right("proof: CUDA graphs", f"replayed {replays} times", "replayed", replays > 0)
    assert not rows.wrong


def test_drafts_in_a_chain_are_those_with_a_wait_a_step(engines: "Engines", rows: "Rows") -> None:
    if rows.tiny and engines.kind == "proof":
        pytest.skip(LONG)
    target, draft = engines.open("target"), engines.open("draft")
    if not draft.chains:
        pytest.skip(f"{engines.kind} has no drafts in a chain")
    for batch in (1, 4):
        compare_chains(engines.kind, target, draft, batch, rows)
    assert not rows.wrong


def compare_chains(kind: str, target: Executor, draft: Executor, batch: int, rows: "Rows") -> None:
    """Greedy drafts whose steps follow each other on the device, and the same with a wait after each step."""
    prompts, count = random_tokens(target.vocab_size, batch, 8 if rows.tiny else 32, seed=5), 12
    found = {}
    for chains in (False, True):
        draft.chains = chains
        decode(target, prompts, count, draft=draft, lookahead=LOOKAHEAD)  # records its graphs
        count, spent = 12 if rows.tiny else 100, time_calls(draft, ("enqueue", "collect"))
        found[chains] = decode(target, prompts, count, draft=draft, lookahead=LOOKAHEAD)
    waits, chained = found[False], found[True]
    same = (waits.outputs, waits.tested, waits.accepted) == (chained.outputs, chained.tested, chained.accepted)
    rows.right(f"{kind}: texts and accepted drafts of chains, batch {batch}", "equal" if same else "differ",
               "equal", same, acceptance=chained.acceptance)  # fmt: skip
    times = ", ".join(
        f"{what} {each.seconds / each.rounds * 1e3:.3f} ms, {each.host_us:.0f} us of it outside the engines"
        for what, each in (("chained", chained), ("a wait a step", waits))
    )
    rows.row(f"{kind}: a speculative round, batch {batch}, K={LOOKAHEAD}", times, host_us=chained.host_us)
    put, wait = (1e6 * float(np.median(spent[name])) for name in ("enqueue", "collect"))
    rows.row(f"{kind}: a chain, batch {batch}, K={LOOKAHEAD}",
             f"{put:.0f} us to put a step on the device, {wait:.0f} us to wait for all")  # fmt: skip


def time_calls(executor: Executor, names: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each call of some of an executor's methods from here on, by name."""
    spent: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments, **options)
            spent[name].append(time.perf_counter() - start)
            return result

        return call

    for name in names:
        setattr(executor, name, timed(name, getattr(executor, name)))
    return spent


def measure(executor: Executor, tiny: bool) -> Measured:
    """Run everything with one executor of four rows or more; few repetitions and short pasts if ``tiny``."""
    repeats = 5 if tiny else 200
    rows = min(executor.num_rows, 8)
    past = 8 if tiny else PAST
    runner = ModelRunner(executor)
    fill(runner, random_tokens(executor.vocab_size, rows, past))
    steps = {
        (past, count, new): time_step(runner, count, new, repeats=repeats, seconds=2.0)
        for count, new in ((1, 1), (1, 5), (rows, 1), (rows, 5))
    }
    for longer in (2 * past,) if tiny else [each for each in LONG_PASTS if each + 5 < executor.kv_capacity]:
        more = longer - runner.kv.kv_len(0)
        fill(runner, random_tokens(executor.vocab_size, 1, more, seed=longer))
        for new in (1, 5):
            steps[longer, 1, new] = time_step(runner, 1, new, repeats=repeats, seconds=1.0)
    tokens = random_tokens(executor.vocab_size, 1, 5, seed=9)[0]
    for _ in range(3):  # the first run of a shape may record it; what is compared is a replay
        logits = np.array(runner.step(0, [RowWork(tokens, 5)]))
    decode(executor, random_tokens(executor.vocab_size, 1, past), 8)
    plain = decode(executor, random_tokens(executor.vocab_size, 1, past), 16 if tiny else 100)
    return Measured(steps, plain.host_us, logits)
