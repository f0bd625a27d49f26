"""Each part as a step of a verification: runs the check and says passed, failed or skipped."""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TypeVar

from specexport.compare import OutputResult
from specexport.progress import StageClock
from specexport.verify.goodness_of_fit import SamplingResult
from specexport.verify.greedy import GreedyResult, check_greedy
from specexport.verify.logits import check_neighbours, check_tensors, make_sequences
from specexport.verify.perplexity import PerplexityResult, compare_perplexity, count_predicted, score_engine
from specexport.verify.references import References, list_roles
from specexport.verify.report import PartStatus, ReportPart
from specexport.verify.sampling import check_sampling
from specexport.verify.tolerance import text_limits
from specexport_runtime.bundle.manifest import Manifest
from specexport_runtime.bundle.token_map import own_texts
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import CheckFailedError, UserInputError
from specexport_runtime.executors.base import Executor

_Result = TypeVar("_Result", GreedyResult, SamplingResult)


def run_tensors(engine: SpecEngine, manifest: Manifest, references: References, clock: StageClock) -> ReportPart | None:
    """Compare the logits of each engine that is no approximation; None if there is no such engine."""

    def check(role: str, executor: Executor) -> OutputResult:
        entry, reference = manifest.models[role], references.logits[role]
        return check_tensors(
            role,
            executor,
            reference.sequences,
            reference.logits,
            lookahead=manifest.lookahead,
            dtype=entry.dtype,
            num_layers=len(entry.attention.layers),
        )

    roles = [role for role in list_roles(manifest) if manifest.models[role].approximation is None]
    return _compare_roles("tensors", roles, references.logits, references, engine, clock, check)


def run_perplexity(
    bundle: Path,
    engine: SpecEngine,
    manifest: Manifest,
    references: References,
    roles: Sequence[str],
    windows: Sequence[Sequence[int]],
    clock: StageClock,
) -> ReportPart | None:
    """Compare the loss of each of ``roles`` with the float model's; None if there are none."""

    def check(role: str, executor: Executor) -> PerplexityResult:
        entry, reference = manifest.models[role], references.losses[role]
        cut_head = engine.cut_head if role == "draft" else None
        own_windows = own_texts(bundle, manifest.models, role, windows)
        score = score_engine(
            executor, own_windows, lookahead=manifest.lookahead, cut_head=cut_head, reference=reference.likeliest
        )
        return compare_perplexity(
            role,
            score,
            reference.loss,
            count_predicted(own_windows, cut_head),
            approximation=entry.approximation,
            limits=text_limits(entry.approximation, entry.dtype, len(entry.attention.layers)),
            reference=reference.source,
        )

    return _compare_roles("perplexity", roles, references.losses, references, engine, clock, check)


def _compare_roles(
    name: str,
    roles: Sequence[str],
    found: Container[str],  # roles that there is something to compare with
    references: References,
    engine: SpecEngine,
    clock: StageClock,
    check: Callable[[str, Executor], OutputResult | PerplexityResult],
) -> ReportPart | None:
    """A part that looks at one engine after another; None if there is none to look at."""
    if not roles:
        return None
    results = []
    for role in roles:
        executor = engine.target if role == "target" else engine.draft
        if executor is not None and role in found:
            with clock.stage(name, role):
                results.append(check(role, executor))
    missing = [references.missing[role] for role in roles if role in references.missing]
    passed: PartStatus = "skipped" if missing else "passed"
    status = passed if all(result.passed for result in results) else "failed"
    return ReportPart(name, status, " ".join(missing) or None, tuple(results))


def run_neighbours(
    engine: SpecEngine, manifest: Manifest, prompts: Sequence[Sequence[int]], tolerance: float, clock: StageClock
) -> ReportPart:
    """Compare the target's logits with its own: a token alone in a step against the same token beside others."""
    with clock.stage("neighbours", "target"):
        sequences = make_sequences(
            prompts,
            manifest.models["target"].vocab_size,
            lookahead=manifest.lookahead,
            max_model_len=manifest.max_model_len,
        )
        result = check_neighbours("target", engine.target, sequences, lookahead=manifest.lookahead, tolerance=tolerance)
    return ReportPart("neighbours", "passed" if result.passed else "failed", None, (result,))


def run_greedy(
    engine: SpecEngine,
    prompts: Sequence[Sequence[int]],
    clock: StageClock,
    *,
    max_tokens: int,
    tolerance: float = 0.0,
) -> ReportPart:
    """Compare speculative with plain greedy decoding."""
    with clock.stage("greedy"):
        result, reason = _attempt(lambda: check_greedy(engine, prompts, max_tokens=max_tokens, tolerance=tolerance))
    if result is None:
        return ReportPart("greedy", "failed", reason, ())
    return ReportPart("greedy", "passed" if result.passed else "failed", None, (result,))


def run_sampling(
    engine: SpecEngine,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    clock: StageClock,
    *,
    num_samples: int,
    seed: int,
) -> ReportPart:
    """Compare sampled output with the target's distribution."""
    with clock.stage("sampling"):
        result, reason = _attempt(
            lambda: check_sampling(
                engine,
                prompts,
                num_samples=num_samples,
                num_runs=num_samples // 10,
                draft_vocab_size=manifest.vocabulary.size,
                seed=seed,
            )
        )
    if result is None:
        return ReportPart("sampling", "failed", reason, ())
    if not result.passed:
        return ReportPart("sampling", "failed", None, (result,))
    if not result.has_power:
        return ReportPart("sampling", "skipped", "the target is certain of every token: nothing to test.", (result,))
    return ReportPart("sampling", "passed", None, (result,))


def _attempt(check: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """Run a check; logits that are not numbers end it, and are its finding."""
    try:
        return check(), None
    except UserInputError:
        raise
    except (CheckFailedError, ValueError) as error:
        return None, str(error)
