"""Section 6: a model of over a billion parameters, plain and speculative, at forced acceptance rates."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner, RowWork, step_shape
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.forced import Decoded, decode
from tools.gpu_check_lib.rows import reason_of
from tools.gpu_check_lib.steps import fill, random_tokens, time_step

RATIO_TARGET = 1.15
RATIO_LOOKAHEAD = 4
HOST_US_TARGET = 100.0
LONG_LOOKAHEADS = (RATIO_LOOKAHEAD, 2, 8)
"""K behind long pasts: each has its own profile."""


class Plan(NamedTuple):
    """What is measured."""

    bundle: str  # its name
    batches: tuple[int, ...]  # sequences at a time
    lookaheads: tuple[int, ...]  # K
    rates: tuple[float, ...]  # probabilities that a draft token is right; the first one is in the table
    past: int  # entries of a row while steps are timed
    prompt: int  # tokens of a prompt
    tokens: int  # to generate for each
    repeats: int  # of a step
    long_pasts: tuple[int, ...] = ()  # more entries of a row to time steps behind, the one that matters most first


LARGE = Plan(
    "large-speed", (1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8), (0.8, 0.6, 0.95), 256, 32, 192, 50, (8192, 2048)
)  # fmt: skip
TINY = Plan("tiny", (1, 4), (1, 4), (0.8,), 32, 8, 48, 5, (48,))


def plan_of(context: Context) -> Plan:
    """What this run measures."""
    return TINY if context.tiny else LARGE


def step_plans(plan: Plan) -> Iterator[Plan]:
    """What to time steps of: one sequence alone at every length, then more at once."""
    lookaheads = tuple(k for k in LONG_LOOKAHEADS if k in plan.lookaheads)
    long = [plan._replace(past=past, lookaheads=lookaheads) for past in plan.long_pasts]
    for each in (plan, *long):
        yield each._replace(batches=plan.batches[:1])
    yield plan._replace(batches=plan.batches[1:])
    for each in long:
        yield each._replace(batches=plan.batches[-1:], lookaheads=(RATIO_LOOKAHEAD,))


def cells(plan: Plan) -> Iterator[tuple[int, int, float]]:
    """(batch, K, rate) in the order of what matters most, should the time not suffice for all."""
    order = [RATIO_LOOKAHEAD, *(k for k in plan.lookaheads if k != RATIO_LOOKAHEAD)]
    first, *others = plan.rates
    yield from ((1, k, first) for k in order)
    yield from ((batch, RATIO_LOOKAHEAD, first) for batch in plan.batches if batch > 1)
    yield from ((batch, k, first) for k in order[1:] for batch in plan.batches if batch > 1)
    yield from ((batch, k, rate) for rate in others for k in order for batch in plan.batches)


def build_pair(context: Context, backend: str) -> None:
    """Write the checkpoints and build the bundle; the next task finds it."""
    context.require_backend(backend)
    from tools.gpu_check_lib.bundles import PLANS, get_bundle
    from tools.gpu_check_lib.models import SIZES

    plan = plan_of(context)
    bundle = get_bundle(context, plan.bundle, backend)
    entry = bundle.manifest.models["target"]
    size = sum(file.size for file in bundle.manifest.files.values())
    context.recorder.row(
        f"{backend}: model",
        f"Llama of {entry.parameters.total / 1e6:.1f} M parameters, {entry.dtype}, "
        f"{SIZES[PLANS[plan.bundle].model].layers} layers; draft of its first "
        f"{len(bundle.manifest.models['draft'].attention.layers)}; bundle of {size / 1e6:.0f} MB",
        parameters=entry.parameters.total,
    )


def measure_speed(context: Context, backend: str) -> None:
    """Steps, then decoding, with one pair of executors."""
    context.require_backend(backend)
    from tools.gpu_check_lib.bundles import get_bundle, open_executor

    plan = plan_of(context)
    bundle = get_bundle(context, plan.bundle, backend)
    target = open_or_eager(context, f"{backend}: target", lambda graphs: open_executor(bundle, "target", graphs=graphs))
    try:
        for chosen in step_plans(plan):
            what = f"{backend}, {chosen.past} past"
            with context.part(f"{what}: steps"):
                measure_steps(context, what, target, chosen)
        draft = open_or_eager(
            context, f"{backend}: draft", lambda graphs: open_executor(bundle, "draft", graphs=graphs)
        )
        try:
            with context.part(f"{backend}: decoding"):
                measure_decoding(context, backend, target, draft, plan)
        finally:
            draft.close()
    finally:
        target.close()


def open_or_eager(context: Context, what: str, open_engine: Callable[[bool], Executor]) -> Executor:
    """An executor with recorded CUDA graphs; one kernel at a time where recording them is refused, which a row says.

    ``open_engine`` opens it with graphs or without.
    """
    executor = None
    try:
        executor = open_engine(True)
        executor.capture([step_shape(0, [RowWork([0], 1)])])
    except Exception as error:  # whatever it is, what follows is worth more than nothing
        context.recorder.row(f"{what}: CUDA graphs", f"refused, goes on one kernel at a time: {reason_of(error)}",
                             target="recorded", verdict="missed")  # fmt: skip
        if executor is not None:  # or both would hold the weights
            executor.close()
        return open_engine(False)
    pool = getattr(executor, "graphs", None)
    if pool is not None and not pool.enabled:  # it has said so in the log, and goes on by itself
        context.recorder.row(f"{what}: CUDA graphs", "refused, goes on one kernel at a time", target="recorded",
                             verdict="missed")  # fmt: skip
    return executor


class Steps(NamedTuple):
    """Milliseconds of decode(1) and of verify(5) with the same rows and past."""

    decode_ms: float
    verify_ms: float


def measure_steps(context: Context, backend: str, target: Executor, plan: Plan) -> dict[int, Steps]:
    """verify(K+1) against decode(1), for each batch; returns what was found by batch."""
    found: dict[int, Steps] = {}
    runner = ModelRunner(target)
    fill(runner, random_tokens(target.vocab_size, max(plan.batches), plan.past))
    for batch in plan.batches:
        what = f"{backend}: steps, batch {batch}"
        if not context.has_time(what, 5):
            break
        with context.part(what):
            seconds = 1.5 if batch == 1 else 0.5
            decode_ms = time_step(runner, batch, 1, repeats=plan.repeats, seconds=seconds).total_ms
            ratios = {
                k: time_step(runner, batch, k + 1, repeats=plan.repeats, seconds=seconds).total_ms / decode_ms
                for k in plan.lookaheads
            }
            shown = ", ".join(f"K={k}: {ratio:.2f}" for k, ratio in ratios.items())
            context.recorder.row(what, f"decode(1) {decode_ms:.3f} ms; verify(K+1)/decode(1): {shown}",
                                 decode_ms=decode_ms, ratios=ratios)  # fmt: skip
            found[batch] = Steps(decode_ms, ratios[RATIO_LOOKAHEAD] * decode_ms)
            if batch == 1:
                ratio = ratios[RATIO_LOOKAHEAD]
                context.recorder.row(
                    f"{backend}: verify(5)/decode(1), batch 1", f"{ratio:.3f}",
                    target=f"at most {RATIO_TARGET}", ratio=ratio,
                    verdict=context.judge_time(ratio, at_most=RATIO_TARGET),
                )  # fmt: skip
    return found


def capture_draft(draft: Executor, plan: Plan) -> None:
    """Record the draft's steps where that is asked for by size: one token a row, and one row catching up with two."""
    sizes = [(batch, 1) for batch in plan.batches] + [(1, 2)]
    draft.capture([step_shape(0, [RowWork([0] * new, 1)] * batch) for batch, new in sizes])


def measure_decoding(context: Context, backend: str, target: Executor, draft: Executor, plan: Plan) -> None:
    """Tokens a second, plain and speculative."""
    plain: dict[int, Decoded] = {}
    capture_draft(draft, plan)
    for batch, lookahead, rate in cells(plan):
        what = f"{backend}: batch {batch}, K={lookahead}, acceptance {rate}"
        if context.left < 3:
            context.recorder.row(what, "skipped: out of time, with all after it", verdict="skipped")
            return
        with context.part(what):
            prompts = random_tokens(target.vocab_size, batch, plan.prompt, seed=13)
            if batch not in plain:
                plain[batch] = _plain(context, backend, target, prompts, plan.tokens)
            settings = {
                "draft": draft, "lookahead": lookahead, "rate": rate, "continuations": plain[batch].outputs
            }  # fmt: skip
            decode(target, prompts, min(plan.tokens, 16), **settings)  # type: ignore[arg-type]  # records its graphs
            found = decode(target, prompts, plan.tokens, **settings)  # type: ignore[arg-type]
            _report(context, what, found, plain[batch], is_detail=rate != plan.rates[0])
            if (batch, lookahead, rate) == (1, RATIO_LOOKAHEAD, plan.rates[0]):
                context.recorder.row(f"{backend}: host time a speculative round, batch 1, K={lookahead}",
                                     f"{found.host_us:.0f} us outside the engines ({lookahead + 1} steps or more)",
                                     host_us=found.host_us)  # fmt: skip


def _plain(context: Context, backend: str, target: Executor, prompts: list[list[int]], tokens: int) -> Decoded:
    decode(target, prompts, 16)
    found = decode(target, prompts, tokens)
    batch, host = len(prompts), found.host_us
    context.recorder.row(
        f"{backend}: batch {batch}, plain",
        f"{found.tokens_per_second:.0f} tokens/s; {host:.0f} us of host time a round",
        target=f"at most {HOST_US_TARGET:.0f} us" if batch == 1 else "",
        verdict=context.judge_time(host, at_most=HOST_US_TARGET) if batch == 1 else "info",
        tokens_per_second=found.tokens_per_second, host_us=host,
    )  # fmt: skip
    return found


def _report(context: Context, what: str, found: Decoded, plain: Decoded, *, is_detail: bool) -> None:
    same = sum(one == other for one, other in zip(found.outputs, plain.outputs, strict=True))
    speedup = found.tokens_per_second / plain.tokens_per_second
    acceptance = found.acceptance
    measured = "nothing was decided" if acceptance is None else f"{acceptance:.3f} measured"
    context.recorder.row(
        what,
        f"{found.tokens_per_second:.0f} tokens/s, {speedup:.2f}x plain; acceptance {measured}; "
        f"{found.tokens / found.rounds:.2f} tokens a round; {same} of {len(plain.outputs)} texts as plain",
        is_detail=is_detail, tokens_per_second=found.tokens_per_second, speedup=speedup, acceptance=acceptance,
        departed=found.departed, host_us=found.host_us, same_texts=same,
    )  # fmt: skip
