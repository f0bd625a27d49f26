"""Section 4: the real executor and decoding loop over a proof engine (``tools.proof``): torch, Triton, nothing else.

The graphs are those that a build for ``tensorrt`` makes, lowering ``plugin``; the attention is our kernels. So all that
this package runs on a GPU is tried, and only NVIDIA's builder is not.
"""

from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors.trt import TrtExecutor
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.needs import require_device
from tools.gpu_check_lib.outputs import TOLERANCES
from tools.gpu_check_lib.rows import judge
from tools.gpu_check_lib.speed import Plan
from tools.proof.texts import Text

ROWS = 4
STEPS = {256: ((1,), (8, 32)), 2048: ((1,), (8,)), 8192: ((1,), (8,))}
"""Batches of the timed steps by entries of each row: alone with every K, together with K=4, which have a profile."""

TINY_TOKENS = 5
LARGE = Plan("large", (1, 8), (4,), (0.8,), 256, 32, 128, 50)
LOOKAHEADS = (4, 2, 8)
TINY = Plan("tiny", (1,), (4,), (0.8,), 8, 4, 6, 1)


def open_role(
    context: Context, model: str, role: str, *, graphs: bool, num_rows: int = ROWS, profiles: tuple[Profile, ...] = ()
) -> TrtExecutor:
    """The executor of one model of a pair; its engine file is made if it is not in the work folder.

    ``model`` is one of ``proof.models.PLANS``; with ``graphs`` CUDA graphs are recorded; ``num_rows`` are cache rows;
    empty ``profiles`` stand for the step sizes that a build would plan. SkipTaskError: there is no GPU, and this is no
    dry run that interprets kernels.
    """
    from tools.proof.devices import HostGpu
    from tools.proof.models import ensure_engine, profiles_of
    from tools.proof.opened import open_engine

    gpu = HostGpu() if require_device(context) == "cpu" else None
    path = ensure_engine(context.work / "proof", model, role)
    profiles = profiles or profiles_of(model, role)
    if gpu is not None:  # each profile runs once before it is recorded, and an interpreter takes a second for that
        profiles = tuple(profile for profile in profiles if profile.num_seqs == num_rows or not profile.is_fixed)
    return open_engine(path, profiles, num_rows=num_rows, graphs=graphs, gpu=gpu)


def check_greedy(context: Context) -> None:
    """Greedy texts, plain and with a draft model, one at a time and four at once, against the CPU engine's."""
    from tools.gpu_check_lib.forced import decode
    from tools.proof.models import PLANS
    from tools.proof.texts import read_texts

    model = "tiny" if context.tiny else "small"
    texts, lookahead = read_texts(model), PLANS[model].lookahead
    count = TINY_TOKENS if context.tiny else len(texts[0].tokens)
    target = open_role(context, model, "target", graphs=True)
    draft = open_role(context, model, "draft", graphs=True)
    for batch in (len(texts),) if context.tiny else (1, len(texts)):
        for drafts in (None, draft):
            what = f"proof: greedy, {batch} at a time, {'plain' if drafts is None else f'draft model, K={lookahead}'}"
            with context.part(what):
                chosen = texts[:batch]
                prompts = [text.prompt for text in chosen]
                found = decode(target, prompts, count, draft=drafts, lookahead=lookahead, rate=None)
                report_texts(context, what, chosen, found.outputs, found.acceptance)
    context.recorder.row(
        "proof: CUDA graphs",
        f"{len(target.graphs.keys)} and {len(draft.graphs.keys)} recorded, replayed {target.graphs.replays} and "
        f"{draft.graphs.replays} times",
        target="replayed",
        verdict="ok" if target.graphs.enabled and draft.graphs.enabled and target.graphs.replays else "missed",
    )
    draft.close()
    target.close()


def report_texts(
    context: Context, what: str, texts: list[Text], outputs: list[list[int]], acceptance: float | None
) -> None:
    """One row: tokens that are equal, and how narrowly the CPU engine decided where a text parts first.

    ``texts`` are the CPU engine's, ``outputs`` the proof engine's, as long or shorter. ``acceptance`` is None without a
    draft.
    """
    equal, total, worst = 0, 0, 0.0
    for text, output in zip(texts, outputs, strict=True):
        same = next((i for i, token in enumerate(output) if token != text.tokens[i]), len(output))
        equal, total = equal + same, total + len(output)
        if same < len(output):
            worst = max(worst, text.gaps[same] / max(1.0, text.scale))
    bound = 2 * TOLERANCES["float16"]  # two logits, each off by as much
    accepted = "" if acceptance is None else f"; acceptance {acceptance:.3f}"
    parted = f"; the CPU engine's gap where they part: up to {worst:.1e} of its largest logit" if worst else ""
    context.recorder.row(
        what, f"{equal} of {total} tokens as the CPU engine's, before the first that differs{parted}{accepted}",
        target=f"all, or gaps up to {bound:.0e}", verdict=judge(worst, at_most=bound), equal=equal, total=total,
        worst=worst, acceptance=acceptance,
    )  # fmt: skip


def check_graphs(context: Context) -> None:
    """The same steps from recorded graphs and one kernel at a time: their logits, and but for a dry run their times."""
    from tools.gpu_check_lib.graphs import compare, compare_chains
    from tools.gpu_check_lib.steps import SCRIPT, compare_steps

    model, script = ("tiny", SCRIPT[1:3]) if context.tiny else ("small", SCRIPT)
    if not context.tiny:
        compare(context, "proof", lambda graphs: open_role(context, model, "target", graphs=graphs))
        compare_chains(context, "proof", lambda role: open_role(context, model, role, graphs=True))
    eager, replayed = (open_role(context, model, "target", graphs=graphs) for graphs in (False, True))
    found = compare_steps(eager, replayed, script)
    worst = max(step.largest for step in found)
    context.recorder.row(
        f"proof: logits of graph and eager, {len(script)} ragged steps", "equal" if worst == 0 else f"{worst:.1e}",
        target="equal", verdict="ok" if worst == 0 and replayed.graphs.replays else "missed",
        replays=replayed.graphs.replays,
    )  # fmt: skip
    eager.close()
    replayed.close()


def verify_loop(context: Context) -> None:
    """Parts of ``specexport verify`` that compare an engine with itself."""
    from tools.gpu_check_lib.models import SIZES
    from tools.gpu_check_lib.verify import check_loop

    model = "tiny" if context.tiny else "small"
    target, draft = (open_role(context, model, role, graphs=not context.tiny) for role in ("target", "draft"))
    check_loop(context, target, draft, num_layers=SIZES[model].layers)
    draft.close()
    target.close()


def measure_loop(context: Context) -> None:
    """verify(K+1)/decode(1) at several lengths, host time of a round, and tokens a second at a forced acceptance."""
    from tools.gpu_check_lib.bundles import large_profiles
    from tools.gpu_check_lib.speed import measure_decoding, measure_steps

    plan = TINY if context.tiny else LARGE
    steps = {plan.past: (plan.batches,)} if context.tiny else STEPS
    rows = max(batch for groups in steps.values() for batches in groups for batch in batches)
    target, draft = (
        open_role(
            context, plan.bundle, role, graphs=True, num_rows=rows,
            profiles=() if context.tiny else large_profiles(role),
        )
        for role in ("target", "draft")
    )  # fmt: skip
    for past, groups in steps.items():
        for batches in groups:
            lookaheads = LOOKAHEADS if batches == (1,) and not context.tiny else plan.lookaheads
            what = f"proof, {past} past"
            with context.part(f"{what}: steps"):
                chosen = plan._replace(past=past, batches=batches, lookaheads=lookaheads)
                measure_steps(context, what, target, chosen)
    if not context.tiny:  # the same over ``ort-cpu`` is in every dry run
        with context.part("proof: decoding"):
            measure_decoding(context, "proof", target, draft, plan)
    draft.close()
    target.close()
