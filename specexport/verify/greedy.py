"""Part (b): speculative greedy output equals plain greedy output, token for token.

Nothing is bit-identical between a step of one token and a step of K+1 tokens: sums are taken in another order. Where
the two likeliest tokens are closer than that rounding, either may come out. Such a difference is told from a mistake by
running the sequence once more, one token at a time, and looking at the gap between the two logits.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from specexport.verify.scripted import ScriptedDrafter
from specexport.verify.tolerance import NEAR_TIE_TOLERANCE, logit_scale
from specexport_runtime.batch import ModelRunner, RowWork
from specexport_runtime.decoder import Decoder
from specexport_runtime.drafters.lookup import DEFAULT_COPY_LENGTH
from specexport_runtime.engine import SpecEngine
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.sequence import Sequence

DrafterKind = Literal["draft model", "lookup", "chained", "scripted"]


@dataclass(frozen=True)
class GreedyDifference:
    """The first difference of one prompt at one lookahead.

    Attributes:
        drafter: ``"draft model"``, or ``"scripted"`` (see :class:`ScriptedDrafter`).
        lookahead: K.
        prompt: index of the prompt.
        position: index of the token in the output.
        plain_token: what plain decoding gave.
        speculative_token: what speculative decoding gave.
        gap: difference of the two tokens' logits in a rerun one token at a time.
        shortfall: how far the lower of the two is below the largest logit of that rerun.
        limit: near-tie tolerance at that position's logit scale.
        explained: both tokens lie within ``limit`` of the largest logit: float rounding decides between them.
    """

    drafter: DrafterKind
    lookahead: int
    prompt: int
    position: int
    plain_token: int
    speculative_token: int
    gap: float
    shortfall: float
    limit: float
    explained: bool


@dataclass(frozen=True)
class GreedyRun:
    """All prompts in one batch at one lookahead.

    Attributes:
        drafter: who drafted.
        lookahead: K.
        identical: prompts whose output is the same to the last token.
        tokens_compared: tokens up to each prompt's first difference, that one included.
        mean_accepted_length: mean tokens of a speculative round; None if no round had a draft.
    """

    drafter: DrafterKind
    lookahead: int
    identical: int
    tokens_compared: int
    mean_accepted_length: float | None


@dataclass(frozen=True)
class GreedyResult:
    """Speculative against plain greedy decoding.

    Attributes:
        passed: every difference is explained by a near-tie.
        num_prompts: prompts decoded together.
        runs: one for each drafter and lookahead.
        differences: the first difference of each prompt and run that has one.
        tolerance: near-tie tolerance, relative to the logit scale.
        compared: what was compared, in words.
    """

    passed: bool
    num_prompts: int
    runs: tuple[GreedyRun, ...]
    differences: tuple[GreedyDifference, ...]
    tolerance: float
    compared: str

    @property
    def near_ties(self) -> int:
        """Differences explained by a near-tie."""
        return sum(difference.explained for difference in self.differences)

    @property
    def failures(self) -> int:
        """Differences that nothing explains."""
        return len(self.differences) - self.near_ties


def check_greedy(
    engine: SpecEngine, prompts: Seq[Seq[int]], *, lookaheads: Seq[int] = (), max_tokens: int = 64
) -> GreedyResult:
    """Decode all prompts plainly and speculatively and compare the tokens.

    Args:
        engine: the engine; without a draft model only lookup and the scripted drafter are run.
        prompts: token ids of each prompt, at least one.
        lookaheads: values of K; empty takes 1, 2, 4 and the engine's largest. Those above the largest are left out.
        max_tokens: tokens to generate for each prompt, end tokens ignored.

    Raises:
        InvalidRequestError: a prompt is empty, too long or out of range, or a lookahead is.
    """
    given = [list(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    chosen = sorted({k for k in lookaheads or (1, 2, 4, engine.lookahead) if k <= engine.lookahead})
    plain = [result.token_ids for result in engine.generate(given, params, speculation=False)]
    runs: list[GreedyRun] = []
    differences: list[GreedyDifference] = []
    for kind, drafter, lookahead in _drafters(engine, chosen):
        results = engine.generate(given, params, drafter=drafter, num_speculative_tokens=lookahead)
        rounds = sum(result.stats.draft_rounds for result in results)
        accepted = sum(result.stats.accepted for result in results)
        found = _compare(engine.target, given, plain, [result.token_ids for result in results], kind, lookahead)
        runs.append(_run(kind, lookahead, plain, found, accepted, rounds))
        differences += found
    sequences = _decode_scripted(engine, given, params, plain)
    found = _compare(engine.target, given, plain, [seq.output for seq in sequences], "scripted", engine.lookahead)
    accepted, rounds = (sum(getattr(seq.stats, name) for seq in sequences) for name in ("accepted", "draft_rounds"))
    runs.append(_run("scripted", engine.lookahead, plain, found, accepted, rounds))
    differences += found
    compared = (
        f"{max_tokens} tokens of {len(given)} prompts in one batch, K = {', '.join(map(str, chosen))}, against plain "
        "greedy decoding"
    )
    passed = all(difference.explained for difference in differences)
    return GreedyResult(passed, len(given), tuple(runs), tuple(differences), NEAR_TIE_TOLERANCE, compared)


def _drafters(engine: SpecEngine, lookaheads: Seq[int]) -> list[tuple[DrafterKind, str, int]]:
    """What drafts in each run: its name in reports, its name for the engine, and K."""
    copied = min(DEFAULT_COPY_LENGTH, engine.lookahead)
    runs: list[tuple[DrafterKind, str, int]] = [("lookup", "lookup", copied)]
    if engine.draft is not None:
        runs = [("draft model", "draft-model", lookahead) for lookahead in lookaheads] + runs
        runs.append(("chained", "chained", max(lookaheads)))
    return runs


def _run(
    drafter: DrafterKind,
    lookahead: int,
    plain: Seq[Seq[int]],
    found: Seq[GreedyDifference],
    accepted: int,
    rounds: int,
) -> GreedyRun:
    ends = {difference.prompt: difference.position + 1 for difference in found}
    compared = sum(ends.get(index, len(output)) for index, output in enumerate(plain))
    mean = 1 + accepted / rounds if rounds else None
    return GreedyRun(drafter, lookahead, len(plain) - len(found), compared, mean)


def _decode_scripted(
    engine: SpecEngine, prompts: Seq[list[int]], params: SamplingParams, plain: Seq[Seq[int]]
) -> list[Sequence]:
    """Decode with drafts that are right and wrong by turns, so that every accepted length occurs."""
    vocab_size = engine.target.vocab_size
    sequences = [
        Sequence(index, prompt, params, vocab_size=vocab_size, max_model_len=engine.max_model_len)
        for index, prompt in enumerate(prompts)
    ]
    decoder = Decoder(ModelRunner(engine.target), ScriptedDrafter(plain, vocab_size, engine.lookahead))
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
        decoder.check()
    return sequences


def _compare(
    target: Executor,
    prompts: Seq[list[int]],
    plain: Seq[list[int]],
    outputs: Seq[list[int]],
    drafter: DrafterKind,
    lookahead: int,
) -> list[GreedyDifference]:
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
        found.append(explain(logits, pair, drafter=drafter, lookahead=lookahead, prompt=index, position=position))
    return found


def explain(
    logits: Float32Array,
    tokens: tuple[int, int],
    *,
    drafter: DrafterKind,
    lookahead: int,
    prompt: int,
    position: int,
) -> GreedyDifference:
    """Judge one difference by the logits [V] of its position; ``tokens`` are the plain and the speculative token."""
    first, second = (float(logits[token]) for token in tokens)
    shortfall = float(logits.max()) - min(first, second)
    limit = NEAR_TIE_TOLERANCE * logit_scale(logits)
    return GreedyDifference(
        drafter,
        lookahead,
        prompt,
        position,
        *tokens,
        gap=abs(first - second),
        shortfall=shortfall,
        limit=limit,
        explained=shortfall <= limit,  # false for NaN
    )


def _length_difference(
    expected: Seq[int], output: Seq[int], drafter: DrafterKind, lookahead: int, prompt: int, position: int
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
