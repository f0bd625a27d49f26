"""Each part as a step of a verification: runs the check and says passed, failed or skipped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specexport.progress import StageClock
from specexport.verify.goodness_of_fit import SamplingResult
from specexport.verify.greedy import GreedyResult, check_greedy
from specexport.verify.report import Part
from specexport.verify.sampling import check_sampling
from specexport.verify.tensors import TensorResult, check_tensors
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import CheckFailedError, UserInputError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.manifest import Manifest

_Result = TypeVar("_Result", GreedyResult, SamplingResult)


@dataclass(frozen=True)
class Reference:
    """What an engine will be compared with.

    Attributes:
        sequences: token ids.
        logits: eager logits [len, V] of each.
    """

    sequences: list[list[int]]
    logits: list[Float32Array]


def run_tensors(
    engine: SpecEngine,
    manifest: Manifest,
    references: Mapping[str, Reference],
    missing: Sequence[str],
    clock: StageClock,
) -> Part:
    """Compare each engine that has references; ``missing`` says why others have none."""
    results: list[TensorResult] = []
    executors = {"target": engine.target, "draft": engine.draft}
    for role, reference in references.items():
        executor = executors[role]
        if executor is None:
            continue
        with clock.stage("tensors", role):
            dtype = manifest.models[role].dtype
            results.append(
                check_tensors(
                    role, executor, reference.sequences, reference.logits, lookahead=manifest.lookahead, dtype=dtype
                )
            )
    failed = any(not result.passed for result in results)
    status = "failed" if failed else "skipped" if missing else "passed"
    return Part("tensors", status, " ".join(missing) or None, tuple(results))  # type: ignore[arg-type]


def run_greedy(engine: SpecEngine, prompts: Sequence[Sequence[int]], clock: StageClock, *, max_tokens: int) -> Part:
    """Compare speculative with plain greedy decoding."""
    with clock.stage("greedy"):
        result, reason = _attempt(lambda: check_greedy(engine, prompts, max_tokens=max_tokens))
    if result is None:
        return Part("greedy", "failed", reason, ())
    return Part("greedy", "passed" if result.passed else "failed", None, (result,))


def run_sampling(
    engine: SpecEngine,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    clock: StageClock,
    *,
    num_samples: int,
    seed: int,
) -> Part:
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
        return Part("sampling", "failed", reason, ())
    if not result.passed:
        return Part("sampling", "failed", None, (result,))
    if not result.has_power:
        return Part("sampling", "skipped", "the target is certain of every token: nothing to test.", (result,))
    return Part("sampling", "passed", None, (result,))


def _attempt(check: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """Run a check; logits that are not numbers end it, and are its finding."""
    try:
        return check(), None
    except UserInputError:
        raise
    except (CheckFailedError, ValueError) as error:
        return None, str(error)
