"""Where two greedy outputs part, and whether float rounding explains it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specexport.verify.tolerance import logit_scale
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork


@dataclass(frozen=True)
class GreedyDifference:
    """The first difference of one prompt at one lookahead."""

    drafter: str  # in words, such as ``"draft model"``, or ``"scripted"`` (see ScriptedDrafter)
    lookahead: int  # K
    prompt: int  # its index, from 0
    position: int  # index of the token in the output, from 0
    plain_token: int  # -1 if plain decoding ended before
    speculative_token: int  # -1 if speculative decoding ended before
    # difference of the two tokens' logits in a rerun one token at a time; infinite for outputs of unequal lengths
    gap: float
    shortfall: float  # how far the lower of the two is below the largest logit of that rerun
    limit: float  # near-tie tolerance at that position's logit scale
    # ``shortfall`` is below ``limit``: float rounding decides between the tokens; a limit of 0 explains nothing
    explained: bool


def compare_outputs(
    target: Executor,  # runs a sequence once more, in cache row 0
    prompts: Seq[list[int]],  # token ids
    plain: Seq[list[int]],  # outputs of plain decoding
    outputs: Seq[list[int]],  # outputs of speculative decoding
    drafter: str,
    lookahead: int,
    tolerance: float = 0.0,  # relative to the logit scale; 0 for engines whose logits have the same bits in any step
) -> list[GreedyDifference]:
    """The first difference of each prompt that has one."""
    found = []
    for index, (expected, output) in enumerate(zip(plain, outputs, strict=True)):
        pairs = zip(expected, output, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(output)))
        if position == len(expected) == len(output):
            continue
        if position == min(len(expected), len(output)):
            found.append(_length_difference(expected, output, drafter, lookahead, index, position))
            continue
        logits = logits_one_at_a_time(target, prompts[index], expected[:position])
        pair = (expected[position], output[position])
        found.append(
            explain(
                logits,
                pair,
                drafter=drafter,
                lookahead=lookahead,
                prompt=index,
                position=position,
                tolerance=tolerance,
            )
        )
    return found


def explain(
    logits: Float32Array,
    tokens: tuple[int, int],
    *,
    drafter: str,
    lookahead: int,
    prompt: int,
    position: int,
    tolerance: float = 0.0,
) -> GreedyDifference:
    """Judge one difference by the logits [V] of its position; ``tokens`` are the plain and the speculative token."""
    first, second = (float(logits[token]) for token in tokens)
    shortfall = float(logits.max()) - min(first, second)
    limit = tolerance * logit_scale(logits)
    return GreedyDifference(
        drafter,
        lookahead,
        prompt,
        position,
        *tokens,
        gap=abs(first - second),
        shortfall=shortfall,
        limit=limit,
        explained=shortfall < limit,  # false for NaN, and for equal logits without a tolerance
    )


def _length_difference(
    expected: Seq[int], output: Seq[int], drafter: str, lookahead: int, prompt: int, position: int
) -> GreedyDifference:
    """One output stops early: no logit gap can explain that. The missing token is reported as -1."""
    plain, other = (tokens[position] if position < len(tokens) else -1 for tokens in (expected, output))
    gap = float("inf")
    return GreedyDifference(drafter, lookahead, prompt, position, plain, other, gap, gap, 0.0, explained=False)


def logits_one_at_a_time(executor: Executor, prompt: Seq[int], output: Seq[int]) -> Float32Array:
    """Logits [V] of the token after ``prompt`` and ``output``, fed to cache row 0 in steps of one token."""
    runner = ModelRunner(executor)
    tokens = [*prompt, *output]
    runner.prefill(0, tokens[: len(prompt) - 1])
    for position in range(len(prompt) - 1, len(tokens)):
        logits = runner.step(0, [RowWork([tokens[position]], 1)])
        runner.kv.commit(0, position + 1)
    last: Float32Array = logits[0].copy()
    return last
