"""Part (b): speculative greedy output equals plain greedy output, token for token.

On a CPU a token's logits have the same bits in any step, and any difference is a mistake. On GPUs a step of K+1 tokens
sums in another order than a step of one. Where the two likeliest tokens are closer than that rounding, either may come
out. Such a difference is told from a mistake by running the sequence once more, one token at a time, and looking at the
gap between the two logits.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specexport.verify.differences import GreedyDifference, compare_outputs
from specexport.verify.scripted import ScriptedDrafter
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import as_gated
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.layer_choice import LayerRules
from specexport_runtime.sequences.sequence import Sequence

_RULES = LayerRules(period=2, keep_last=None)
"""Rules that leave something out of any model of two layers or more, so that drafts do differ from their target."""


@dataclass(frozen=True)
class GreedyRun:
    """All prompts in one batch at one lookahead."""

    drafter: str  # in words
    lookahead: int  # K
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
    prompts: Seq[Seq[int]],  # token ids, of one prompt or more
    *,
    # values of K, larger ones than the engine's are left out; empty takes 1, 2, 4 and the engine's
    lookaheads: Seq[int] = (),
    max_tokens: int = 64,  # of each prompt; end tokens are ignored
    tolerance: float = 0.0,  # see ``tolerance.step_tolerance``
) -> GreedyResult:
    """Decode all prompts plainly and speculatively and compare the tokens.

    The draft model drafts if the engine has one, the target's own layers if they can be switched off, lookup and the
    scripted drafter always. An empty prompt, one that is too long or out of range, or such a lookahead raises
    InvalidRequestError.
    """
    given = [list(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    chosen = sorted({k for k in lookaheads or (1, 2, 4, engine.lookahead) if k <= engine.lookahead})
    plain = [result.token_ids for result in engine.generate(given, params, speculation=False)]
    runs: list[GreedyRun] = []
    differences: list[GreedyDifference] = []
    for drafter, lookahead in _drafters(engine, chosen):
        kind = drafter.replace("-", " ")
        gated = as_gated(engine.target)
        free = gated is not None and gated.fixed_layers is None
        rules = _RULES if free and drafter in KINDS and KINDS[drafter].traits.takes_layers else None
        results = engine.generate(given, params, drafter=drafter, num_speculative_tokens=lookahead, layer_rules=rules)
        rounds = sum(result.stats.draft_rounds for result in results)
        accepted = sum(result.stats.accepted for result in results)
        found = compare_outputs(
            engine.target, given, plain, [result.token_ids for result in results], kind, lookahead, tolerance
        )
        runs.append(_run(kind, lookahead, plain, found, accepted, rounds))
        differences += found
    sequences = _decode_scripted(engine, given, params, plain)
    found = compare_outputs(
        engine.target, given, plain, [seq.output for seq in sequences], "scripted", engine.lookahead, tolerance
    )
    accepted, rounds = (sum(getattr(seq.stats, name) for seq in sequences) for name in ("accepted", "draft_rounds"))
    runs.append(_run("scripted", engine.lookahead, plain, found, accepted, rounds))
    differences += found
    compared = (
        f"{max_tokens} tokens of {len(given)} prompts in one batch, K = {', '.join(map(str, chosen))}, against plain "
        "greedy decoding"
    )
    passed = all(difference.explained for difference in differences)
    return GreedyResult(passed, len(given), tuple(runs), tuple(differences), tolerance, compared)


def _drafters(engine: SpecEngine, lookaheads: Seq[int]) -> list[tuple[str, int]]:
    """What drafts in each run, by the engine's name for it, and K.

    A drafter with its own cache is tried at every K: what it keeps must be taken back by any number of tokens.
    """
    runs = []
    for name, kind in KINDS.items():
        try:
            engine.resolve_drafting(drafter=name)
        except InvalidRequestError:  # the bundle has nothing to draft so
            continue
        if kind.traits.has_own_cache:
            runs += [(name, lookahead) for lookahead in lookaheads]
        elif kind.traits.is_free:
            runs.append((name, min(kind.traits.default_lookahead, engine.lookahead)))
        else:
            runs.append((name, max(lookaheads)))
    if engine.draft is not None or engine.head is not None:
        runs.append(("chained", max(lookaheads)))
    return runs


def _run(
    drafter: str,
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
