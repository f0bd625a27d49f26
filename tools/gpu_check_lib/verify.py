"""What ``specexport verify`` proves, on the engines of this GPU: of a bundle, and of the proof engine's loop."""

import importlib.util

from specexport_runtime.executors.trt import TrtExecutor
from tools.gpu_check_lib.context import Context, SkipTaskError
from tools.gpu_check_lib.rows import judge

NUM_PROMPTS = 4
NUM_TOKENS = 48
NUM_SAMPLES = 1000


def verify_bundle(context: Context, backend: str) -> None:
    """All parts over one backend's bundle. Without transformers nothing gives references: logits are then skipped."""
    context.require_backend(backend)
    from specexport.verify.options import VerifyOptions
    from specexport.verify.run import verify_bundle as verify
    from tools.gpu_check_lib.bundles import PLANS, get_bundle
    from tools.gpu_check_lib.models import ensure_pair

    name = "tiny" if context.tiny else "small"
    bundle = get_bundle(context, name, backend)
    target, draft = ensure_pair(
        context.work / "checkpoints", PLANS[name].model, decisive=PLANS[name].is_decisive
    )  # unless it is there
    found = {"target": str(target), "draft": str(draft)}
    options = VerifyOptions(
        checkpoints={role: found[role] for role in bundle.manifest.models} if has_references() else {},
        prompts=_prompts(bundle.manifest.models["target"].vocab_size),
        max_tokens=8 if context.tiny else NUM_TOKENS,
        num_samples=NUM_SAMPLES,
    )
    report = verify(bundle.folder, options)
    for part in report.parts:
        context.recorder.row(
            f"{backend}: verify, {part.name}",
            ", ".join([part.status, *([part.reason] if part.reason else [])]),
            target="passed",
            verdict={"passed": "ok", "failed": "failed", "skipped": "skipped"}[part.status],  # type: ignore[arg-type]
            results=report.to_json()["parts"][part.name]["results"],
        )


def has_references() -> bool:
    """Whether eager references can be computed here."""
    from specexport.compile.model import require_export_stack
    from specexport_runtime.errors import MissingDependencyError

    try:
        require_export_stack()
    except MissingDependencyError:
        return False
    return True


def _prompts(vocab_size: int) -> list[str]:
    from tools.gpu_check_lib.steps import random_tokens

    return [" ".join(f"t{token}" for token in ids) for ids in random_tokens(vocab_size, NUM_PROMPTS, 20, seed=3)]


def check_loop(context: Context, target: TrtExecutor, draft: TrtExecutor, *, num_layers: int) -> None:
    """Parts ``neighbours`` and ``greedy`` over the proof engine: they compare it with itself.

    The target is float16 and has four rows or more. SkipTaskError: there is no tokenizers package; the proof engine
    does without it.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise SkipTaskError("tokenizers is not installed")
    from tokenizers import Tokenizer, models

    from specexport.rounding import logit_tolerance
    from specexport.verify.greedy import check_greedy
    from specexport.verify.logits import check_neighbours
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.engine_parts import EngineParts
    from tools.gpu_check_lib.steps import random_tokens

    lookahead, tolerance = 2 if context.tiny else 4, logit_tolerance("float16", num_layers).largest
    prompts = random_tokens(target.vocab_size, 2 if context.tiny else NUM_PROMPTS, 7, seed=3)
    if not context.tiny:
        alone = check_neighbours("target", target, prompts, lookahead=lookahead, tolerance=tolerance)
        context.recorder.row(
            "proof: a token's logits beside others in a step",
            f"differ by up to {alone.max_relative:.1e} of the logit scale from those alone",
            target=f"at most {alone.tolerance:.0e}",
            verdict=judge(alone.max_relative, at_most=alone.tolerance),
            cases={case.name: case.max_relative for case in alone.cases},
        )
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(target.vocab_size)}, unk_token="t0"))  # noqa: S106
    parts = EngineParts(target, words, 64 if context.tiny else 256, draft=draft, lookahead=lookahead)
    engine = SpecEngine(parts)
    found = check_greedy(
        engine,
        prompts,
        lookaheads=(lookahead,) if context.tiny else (),
        max_tokens=3 if context.tiny else NUM_TOKENS,
        tolerance=tolerance,
    )
    same = sum(run.identical for run in found.runs)
    context.recorder.row(
        "proof: verify, greedy",
        f"{same} of {len(found.runs) * found.num_prompts} outputs as plain decoding's, {found.near_ties} part where "
        f"rounding decides, {found.failures} elsewhere",
        target="none elsewhere",
        verdict="ok" if found.passed else "failed",
        drafters=[f"{run.drafter}, K={run.lookahead}" for run in found.runs],
        gaps=[item.gap for item in found.differences],
    )
