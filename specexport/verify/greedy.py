"""Part (b): speculative greedy output equals plain greedy output, token for token.

On a CPU a token's logits have the same bits in any step, and any difference is a mistake. On GPUs a step of K+1 tokens
sums in another order than a step of one. Where the two likeliest tokens are closer than that rounding, either may come
out. Such a difference is told from a mistake by running the sequence once more, one token at a time, and looking at the
gap between the two logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from specexport.compare import logit_scale
from specexport.verify.trees import Drafting, tree_drafting
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.base import Drafter, DrafterTraits, DraftPrefix, Proposal
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.intake.drafting import RequestOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.request import Request
from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.sampling.params import SamplingParams

_TREE_LOOKAHEAD = 8
_RULES = LayerRules(period=2, keep_last=None)
"""Rules that leave something out of any model of two layers or more, so that drafts do differ from their target."""


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
    prompts: Sequence[list[int]],  # token ids
    plain: Sequence[list[int]],  # outputs of plain decoding
    outputs: Sequence[list[int]],  # outputs of speculative decoding
    drafter: str,
    lookahead: int,
    tolerance: float = 0.0,  # relative to the logit scale; 0 for engines whose logits have the same bits in any step
) -> list[GreedyDifference]:
    """The first difference of each prompt that has one."""
    found = []
    for index, (expected, output) in enumerate(zip(plain, outputs, strict=True)):
        pairs = enumerate(zip_longest(expected, output, fillvalue=-1))
        position, pair = next((each for each in pairs if each[1][0] != each[1][1]), (-1, (-1, -1)))
        if position >= 0:
            where: dict[str, Any] = {
                "drafter": drafter, "lookahead": lookahead, "prompt": index, "position": position,
                "plain_token": pair[0], "speculative_token": pair[1],
            }  # fmt: skip
            if -1 in pair:  # one output stops early: no logit gap can explain that
                found.append(GreedyDifference(**where, gap=math.inf, shortfall=math.inf, limit=0.0, explained=False))
            else:
                logits = logits_one_at_a_time(target, prompts[index], expected[:position])
                found.append(GreedyDifference(**where, **explain_difference(logits, pair, tolerance)))
    return found


def explain_difference(logits: Float32Array, tokens: tuple[int, int], tolerance: float = 0.0) -> dict[str, Any]:
    """Judge a difference between two tokens by the logits [V] of its position; see :class:`GreedyDifference`."""
    first, second = (float(logits[token]) for token in tokens)
    shortfall, limit = float(logits.max()) - min(first, second), tolerance * logit_scale(logits)
    # Not explained for NaN, and for equal logits without a tolerance.
    return {"gap": abs(first - second), "shortfall": shortfall, "limit": limit, "explained": shortfall < limit}


def logits_one_at_a_time(executor: Executor, prompt: Sequence[int], output: Sequence[int]) -> Float32Array:
    """Logits [V] of the token after ``prompt`` and ``output``, fed to cache row 0 in steps of one token."""
    runner = ModelRunner(executor)
    tokens = [*prompt, *output]
    runner.prefill(0, tokens[: len(prompt) - 1])
    for position in range(len(prompt) - 1, len(tokens)):
        logits = runner.step(0, [RowWork([tokens[position]], 1)])
        runner.kv.commit(0, position + 1)
    last: Float32Array = logits[0].copy()
    return last


@dataclass(frozen=True)
class GreedyRun:
    """All prompts in one batch at one lookahead."""

    drafter: str  # in words
    lookahead: int  # K
    tree_size: int  # most draft tokens of a round, branches included; 0 for chains
    identical: int  # prompts whose output is the same to the last token
    tokens_compared: int  # up to each prompt's first difference, that one included
    mean_accepted_length: float | None  # mean tokens of a speculative round; None if no round had a draft


@dataclass(frozen=True)
class GreedyResult:
    """Speculative against plain greedy decoding."""

    passed: bool  # a near-tie explains every difference
    num_prompts: int  # decoded together
    runs: tuple[GreedyRun, ...]  # one for each drafter and lookahead
    differences: tuple[GreedyDifference, ...]  # the first of each prompt and run that has one
    tolerance: float  # of a near-tie, relative to the logit scale; 0 where nothing is one
    compared: str  # in words

    @property
    def near_ties(self) -> int:
        """Differences explained by a near-tie."""
        return sum(difference.explained for difference in self.differences)

    @property
    def failures(self) -> int:
        """Differences that nothing explains."""
        return len(self.differences) - self.near_ties


def check_greedy(
    engine: SpecEngine,
    prompts: Sequence[Sequence[int]],  # token ids, of one prompt or more
    *,
    # values of K, larger ones than the engine's are left out; empty takes 1, 2, 4 and the engine's
    lookaheads: Sequence[int] = (),
    max_tokens: int = 64,  # of each prompt; end tokens are ignored
    tolerance: float = 0.0,  # see ``tolerance.step_tolerance``
) -> GreedyResult:
    """Decode all prompts plainly and speculatively and compare the tokens.

    The draft model drafts if the engine has one, the target's own layers if they can be switched off, lookup and the
    scripted drafter always. One run has trees, if the target takes them. An empty prompt, one that is too long or out
    of range, or such a lookahead raises InvalidRequestError.
    """
    given = [list(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    chosen = sorted({k for k in lookaheads or (1, 2, 4, engine.lookahead) if k <= engine.lookahead})
    plain = [result.token_ids for result in engine.generate(given, params, speculation=False)]
    runs: list[GreedyRun] = []
    differences: list[GreedyDifference] = []

    def compare(kind: str, lookahead: int, size: int, texts: Sequence[tuple[list[int], RequestStats]]) -> None:
        outputs, stats = zip(*texts, strict=True)
        found = compare_outputs(engine.target, given, plain, outputs, kind, lookahead, tolerance)
        ends = {difference.prompt: difference.position + 1 for difference in found}
        compared = sum(ends.get(index, len(output)) for index, output in enumerate(plain))
        accepted, rounds = sum(each.accepted for each in stats), sum(each.draft_rounds for each in stats)
        mean = 1 + accepted / rounds if rounds else None
        runs.append(GreedyRun(kind, lookahead, size, len(plain) - len(found), compared, mean))
        differences.extend(found)

    for way in _list_draftings(engine, chosen):
        drafter, lookahead, size = way
        kind = drafter.replace("-", " ") + (f", trees of {size}" if size else "")
        rules = _RULES if engine.target.num_gates and drafter in KINDS and KINDS[drafter].traits.takes_layers else None
        options: RequestOptions = {**way.options, "layer_rules": rules}
        results = engine.generate(given, params, **options)
        compare(kind, lookahead, size, [(result.token_ids, result.stats) for result in results])
    requests = _decode_scripted(engine, given, params, plain)
    compare("scripted", engine.lookahead, 0, [(request.output, request.stats) for request in requests])
    compared = (
        f"{max_tokens} tokens of {len(given)} prompts in one batch, K = {', '.join(map(str, chosen))}, against plain "
        "greedy decoding"
    )
    passed = all(difference.explained for difference in differences)
    return GreedyResult(passed, len(given), tuple(runs), tuple(differences), tolerance, compared)


def _list_draftings(engine: SpecEngine, lookaheads: Sequence[int]) -> list[Drafting]:
    """How each run drafts, the last by trees; a drafter with its own cache at every K, to take any number back."""
    runs = []
    for name, kind in KINDS.items():
        try:
            engine.resolve_drafting(drafter=name)
        except InvalidRequestError:  # the bundle has nothing to draft so
            continue
        if kind.traits.has_own_cache:
            runs += [Drafting(name, lookahead) for lookahead in lookaheads]
        elif kind.traits.is_free:
            runs.append(Drafting(name, min(kind.traits.default_lookahead, engine.lookahead)))
        else:
            runs.append(Drafting(name, max(lookaheads)))
    if engine.draft is not None or engine.head is not None:
        runs.append(Drafting("chained", max(lookaheads)))
    trees = tree_drafting(engine, min(max(lookaheads), _TREE_LOOKAHEAD))
    return runs if trees is None else [*runs, trees]


def _decode_scripted(
    engine: SpecEngine, prompts: Sequence[list[int]], params: SamplingParams, plain: Sequence[Sequence[int]]
) -> list[Request]:
    """Decode with drafts that are right and wrong by turns, so that every accepted length occurs."""
    vocab_size = engine.target.vocab_size
    requests = [
        Request(index, prompt, params, vocab_size=vocab_size, max_model_len=engine.max_model_len)
        for index, prompt in enumerate(prompts)
    ]
    decoder = Decoder(ModelRunner(engine.target), ScriptedDrafter(plain, vocab_size, engine.lookahead))
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
        decoder.check()
    return requests


class ScriptedDrafter(Drafter):
    """Proposes the next tokens of a known output, some of them changed.

    The right drafts before a mistake number 0, 1, 2, … K in turn, unequal between sequences, so that every accepted
    length occurs beside every other in one step, whatever the draft model is worth.

    ``outputs`` are the expected ones, by ``Request.index``; a changed token is the next id, modulo V.
    """

    traits = DrafterTraits(default_lookahead=1)

    def __init__(self, outputs: Sequence[Sequence[int]], vocab_size: int, lookahead: int) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._lookahead = lookahead
        self._turn = 0

    def propose(
        self,
        requests: Sequence[Request],
        lookaheads: Sequence[int],
        begun: Sequence[DraftPrefix] | None = None,  # noqa: ARG002 - it does not go on
    ) -> list[Proposal]:
        """Up to ``lookaheads[i]`` tokens of request i's script, the mistake moving on from round to round."""
        self._turn += 1
        return [
            Proposal(self._draft(request, min(limit, self._lookahead)))
            for request, limit in zip(requests, lookaheads, strict=True)
        ]

    def _draft(self, request: Request, limit: int) -> list[int]:
        start = request.num_generated
        tokens = list(self._outputs[request.index][start : start + limit])
        wrong = (self._turn + 2 * request.index) % (limit + 1)
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self._vocab_size
        return tokens
