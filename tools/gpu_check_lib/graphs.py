"""Section 5: recorded CUDA graphs against one kernel at a time, and what the host costs."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tools.gpu_check_lib.context import Context

HOST_US_TARGET = 100.0
LOOKAHEAD = 4
PAST = 256
LONG_PASTS = (2048, 8192)
"""Entries behind which one sequence alone is timed too."""


class Measured(NamedTuple):
    """One way to run: step times by (past, rows, new tokens), host microseconds of a round, logits of a step."""

    steps: dict[tuple[int, int, int], float]
    host_us: float
    logits: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"


def compare_graphs(context: Context, backend: str) -> None:
    """Step times and outputs with graphs and without, and the host's share of a round at batch 1."""
    context.require_backend(backend)
    from tools.gpu_check_lib.bundles import get_bundle, open_executor

    tiny = get_bundle(context, "tiny", backend)  # it has a draft model
    compare_chains(context, backend, lambda role: open_executor(tiny, role, graphs=True))
    bundle = tiny if context.tiny else get_bundle(context, "small", backend)
    compare(context, backend, lambda graphs: open_executor(bundle, "target", graphs=graphs))


def compare(context: Context, backend: str, open_engine: Callable[[bool], Executor]) -> None:
    """The rows of one backend.

    ``open_engine`` opens its executor of four rows or more, with recorded graphs or without.
    """
    found: dict[bool, Measured] = {}
    for graphs in (False, True):
        name = f"{backend}: {'graphs' if graphs else 'eager'}"
        with context.part(name):
            executor = open_engine(graphs)
            try:
                found[graphs] = measure(executor, context.tiny)
            finally:
                executor.close()
    if len(found) < 2:
        for key, milliseconds in (found[False].steps if False in found else {}).items():
            context.recorder.row(f"{backend}: {step_name(*key)}, eager, for want of graphs",
                                 f"{milliseconds:.3f} ms", eager_ms=milliseconds)  # fmt: skip
        return
    for key, eager in found[False].steps.items():
        replayed = found[True].steps[key]
        context.recorder.row(
            f"{backend}: {step_name(*key)}",
            f"graph {replayed:.3f} ms, eager {eager:.3f} ms: {eager / replayed:.2f}x",
            graph_ms=replayed, eager_ms=eager,
        )  # fmt: skip
    same = bool(np.array_equal(found[False].logits, found[True].logits))
    worst = float(np.abs(found[False].logits - found[True].logits).max())
    context.recorder.row(f"{backend}: logits of graph and eager", "equal" if same else f"differ by up to {worst:.1e}",
                         target="equal", verdict="ok" if same else "missed", worst=worst)  # fmt: skip
    for graphs, measured in found.items():
        context.recorder.row(
            f"{backend}: host time a round, batch 1, {'graphs' if graphs else 'eager'}",
            f"{measured.host_us:.0f} us outside the engine",
            target=f"at most {HOST_US_TARGET:.0f} us" if graphs else "",
            verdict=context.judge_time(measured.host_us, at_most=HOST_US_TARGET) if graphs else "info",
            host_us=measured.host_us,
        )


def compare_chains(context: Context, backend: str, open_role: Callable[[str], Executor]) -> None:
    """Greedy drafts whose steps follow each other on the device, and the same with a wait behind each step.

    ``open_role`` opens the target or the draft of a pair, for four rows or more.
    """
    from tools.gpu_check_lib.forced import decode
    from tools.gpu_check_lib.steps import random_tokens

    target, draft = open_role("target"), open_role("draft")
    if not draft.chains:
        context.recorder.row(f"{backend}: drafts in a chain", "this engine has none", verdict="skipped")
    for batch in (1, 4) if draft.chains else ():
        with context.part(f"{backend}: drafts in a chain, batch {batch}"):
            prompts, count = random_tokens(target.vocab_size, batch, 8 if context.tiny else 32, seed=5), 12
            found = {}
            for chains in (False, True):
                draft.chains = chains
                decode(target, prompts, count, draft=draft, lookahead=LOOKAHEAD, rate=None)  # records its graphs
                count, spent = 12 if context.tiny else 100, time_calls(draft, ("enqueue", "collect"))
                found[chains] = decode(target, prompts, count, draft=draft, lookahead=LOOKAHEAD, rate=None)
            waits, chained = found[False], found[True]
            same = (waits.outputs, waits.tested, waits.accepted) == (chained.outputs, chained.tested, chained.accepted)
            context.recorder.row(
                f"{backend}: texts and accepted drafts of chains, batch {batch}", "equal" if same else "differ",
                target="equal", verdict="ok" if same else "missed", acceptance=chained.acceptance,
            )  # fmt: skip
            times = ", ".join(
                f"{what} {each.seconds / each.rounds * 1e3:.3f} ms, {each.host_us:.0f} us of it outside the engines"
                for what, each in (("chained", chained), ("a wait a step", waits))
            )
            context.recorder.row(f"{backend}: a speculative round, batch {batch}, K={LOOKAHEAD}", times,
                                 host_us=chained.host_us, host_us_before=waits.host_us)  # fmt: skip
            put, wait = (1e6 * float(np.median(spent[name])) for name in ("enqueue", "collect"))
            context.recorder.row(
                f"{backend}: a chain, batch {batch}, K={LOOKAHEAD}",
                f"{put:.0f} us to put a step on the device, {wait:.0f} us to wait for all", put_us=put, wait_us=wait,
            )  # fmt: skip
    draft.close()
    target.close()


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


def step_name(past: int, rows: int, new: int) -> str:
    """For the report."""
    return f"step of {rows} x {new} tokens, {past} past"


def measure(executor: Executor, tiny: bool) -> Measured:
    """Run everything with one executor of four rows or more; few repetitions and short pasts if ``tiny``."""
    from tools.gpu_check_lib.forced import decode
    from tools.gpu_check_lib.steps import fill, random_tokens, time_step

    repeats = 5 if tiny else 200
    rows = min(executor.num_rows, 8)
    past = 8 if tiny else PAST
    runner = ModelRunner(executor)
    fill(runner, random_tokens(executor.vocab_size, rows, past))
    steps = {
        (past, count, new): time_step(runner, count, new, repeats=repeats, seconds=2.0).total_ms
        for count, new in ((1, 1), (1, 5), (rows, 1), (rows, 5))
    }
    for longer in (2 * past,) if tiny else [each for each in LONG_PASTS if each + 5 < executor.kv_capacity]:
        more = longer - runner.kv.kv_len(0)
        fill(runner, random_tokens(executor.vocab_size, 1, more, seed=longer))
        for new in (1, 5):
            steps[longer, 1, new] = time_step(runner, 1, new, repeats=repeats, seconds=1.0).total_ms
    tokens = random_tokens(executor.vocab_size, 1, 5, seed=9)[0]
    for _ in range(3):  # the first run of a shape may record it; what is compared is a replay
        logits = np.array(runner.step(0, [RowWork(tokens, 5)]))
    decode(executor, random_tokens(executor.vocab_size, 1, past), 8)
    plain = decode(executor, random_tokens(executor.vocab_size, 1, past), 16 if tiny else 100)
    return Measured(steps, plain.host_us, logits)
