"""Part (c): sampled speculative output follows the target's distribution.

Ways to draw, judged by the same test against the same exact probabilities:

``acceptance``  logits of target and draft are computed once for each context and continuation; drafting, testing and
                resampling then run thousands of times on them with the runtime's own sampler, random streams and
                acceptance function
``engine``      whole generations through the engine, each with its own seed: fewer, but every part takes part
``trees``       the same with drafts that have branches, if the target takes them

An outcome is the first few tokens together, so that acceptance at one position and its effect on the next are seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from specexport.verify.goodness_of_fit import SamplingResult, SamplingTest, assess_outcomes
from specexport.verify.logit_tree import Conditional, HeadTree, LogitTree, Partition, Path, make_conditional
from specexport.verify.trees import Drafting, tree_drafting
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.block import DEFAULT_RULE, RULES
from specexport_runtime.sampling.distribution import HostDistribution, one_hot, sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import Draws, RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler

FAMILY_ALPHA = 1e-6
"""Probability that a correct bundle fails any of the tests; each of n tests gets 1/n of it for either statistic."""

MAX_CONTEXT = 24
"""Tokens of context: the end of a real prompt. Longer ones would only cost prefill time."""

AcceptFunction = Callable[
    [Sequence[int], Sequence[HostDistribution] | None, Callable[[int], HostDistribution], Callable[[int], Draws]],
    Verdict,
]
"""The form of the rules in ``specexport_runtime.sampling.block.RULES``."""

_UNSEEN = one_hot(0)


class Setting(NamedTuple):
    """Sampling parameters to test."""

    name: str  # for the report
    params: SamplingParams  # seed and lengths are replaced
    # tokens of an outcome on recorded logits; 1 where the support is large: a second token would need an engine step
    # for every first one
    depth: int


SETTINGS = (
    Setting("temperature 1", SamplingParams(temperature=1.0), 1),
    Setting("top-k 4", SamplingParams(temperature=1.2, top_k=4), 3),
    Setting("top-p 0.9", SamplingParams(temperature=1.0, top_p=0.9), 1),
    Setting(
        "temperature 0.8, top-k 6, top-p 0.95, penalties",
        SamplingParams(
            temperature=0.8, top_k=6, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3
        ),
        3,
    ),
)
"""One for each rule on its own, and one that joins them with penalties, which look at the history."""

_ENGINE_DEPTH = 3
_MIN_SAMPLES = 100
_NOTABLE = 0.025  # ten expected draws in the engine's 400 runs


class _Context(NamedTuple):
    """A context with the trees of both models."""

    prompt: int  # its index
    tokens: list[int]  # token ids
    target: LogitTree
    draft: LogitTree | None  # None without a draft model or head

    def sampler(self, params: SamplingParams) -> Sampler:
        """Logits processing after this context."""
        return Sampler(params, self.tokens, self.target.vocab_size)


class _DrawOptions(NamedTuple):
    lookahead: int
    num_samples: int
    seed: int
    alpha: float


def check_sampling(
    engine: SpecEngine,
    # token ids of real prompts; the ends of the prompts with most possible next tokens are the contexts
    prompts: Sequence[Sequence[int]],
    *,
    settings: Sequence[Setting] = SETTINGS,
    num_samples: int = 4000,  # outcomes on recorded logits, for each setting and context
    num_runs: int = 400,  # generations through the engine, for each setting
    num_contexts: int = 3,  # for the recorded logits; the first one serves the engine too
    draft_vocab_size: int | None = None,  # ids below it may be drafted; None takes the draft's LM head
    seed: int = 0,  # of the first draw; the result depends on it and the bundle only
    accept: AcceptFunction = RULES[DEFAULT_RULE],  # the acceptance rule on recorded logits
) -> SamplingResult:
    """Compare draws with the target's distribution: of the speculative process, or plain and of one-hot drafts."""
    if not prompts or not settings or min(num_samples, num_runs) < _MIN_SAMPLES:
        raise InvalidRequestError(f"the sampling test needs a prompt and {_MIN_SAMPLES} samples.", "ask for more.")
    chosen = _choose_contexts(engine, prompts, num_contexts)
    trees = tree_drafting(engine, _ENGINE_DEPTH)
    alpha = FAMILY_ALPHA / (2 * (len(settings) * (len(chosen) + 1) + (trees is not None)))
    drawing = _DrawOptions(engine.lookahead, num_samples, seed, alpha)
    tests: list[SamplingTest] = []
    control: float | None = None
    exact: list[Partition] = []
    for prompt, tokens in chosen:
        target = LogitTree(engine.target, tokens)
        draft = None
        if engine.draft is not None:
            head, own = engine.cut_head, engine.token_map
            if head is not None and own is not None:
                head = own.target_head(head, engine.target.vocab_size)
            draft = LogitTree(engine.draft, tokens, vocab_size=draft_vocab_size, cut_head=head, token_map=own)
        elif engine.head is not None and len(tokens) > 1:  # a head begins with the second token
            draft = HeadTree(
                engine.target,
                engine.head,
                tokens,
                vocab_size=draft_vocab_size,
                cut_head=engine.cut_head,
                mask=engine.mask,
                places=engine.lookahead,
            )
        context = _Context(prompt, tokens, target, draft)
        for setting in settings:
            tests.append(_test_recorded(context, setting, accept, drawing))
            if control is None and tests[-1].cells > 1 and setting.depth > 1:
                control = _test_recorded(context, setting, accept_everything, drawing).p_value
            if len(exact) < len(settings):  # the first context serves the engine: its cells, while its tree lives
                distribution = make_conditional(target, context.sampler(setting.params))
                exact.append(Partition(distribution, _ENGINE_DEPTH, num_runs))
    for setting, partition in zip(settings, exact, strict=True):
        prompt, tokens = chosen[0]
        outcomes = _run_engine(engine, tokens, setting.params, num_runs, seed)
        tests.append(assess_outcomes("engine", setting.name, prompt, partition, outcomes, _ENGINE_DEPTH, alpha))
    if trees is not None:  # with the last setting, which looks at the history: of a tree, each path's own
        outcomes = _run_engine(engine, tokens, setting.params, num_runs, seed, trees)
        tests.append(assess_outcomes("trees", setting.name, prompt, partition, outcomes, _ENGINE_DEPTH, alpha))
    compared = (
        f"{len(settings)} settings: {num_samples} draws on recorded logits of {len(chosen)} contexts and {num_runs} "
        "generations each, against the target's exact distribution"
    )
    return SamplingResult(all(test.passed for test in tests), tuple(tests), alpha, control, compared)


def _choose_contexts(engine: SpecEngine, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, list[int]]]:
    """Index and last tokens of the prompts that the test can see most of: with most next tokens of notable mass."""
    length = max(1, min(MAX_CONTEXT, engine.max_model_len - _ENGINE_DEPTH - 2))
    sampler = Sampler(SamplingParams(temperature=1.0), (), engine.target.vocab_size)
    ranked = []
    for index, prompt in enumerate(prompts):
        tokens = list(prompt)[-length:]
        probs = sampler.distribution(LogitTree(engine.target, tokens)(())).probs
        ranked.append((-int(np.count_nonzero(probs >= _NOTABLE)), index, tokens))
    return [(index, tokens) for _, index, tokens in sorted(ranked)[:count]]


def _test_recorded(context: _Context, setting: Setting, accept: AcceptFunction, drawing: _DrawOptions) -> SamplingTest:
    target = make_conditional(context.target, context.sampler(setting.params))
    draft = None if context.draft is None else make_conditional(context.draft, context.sampler(setting.params))
    streams = [RoundDraws(RandomStream(drawing.seed + i)) for i in range(drawing.num_samples)]
    outcomes = [
        draw_outcome(target, draft, draws, accept, depth=setting.depth, lookahead=drawing.lookahead)
        for draws in streams
    ]
    partition = Partition(target, setting.depth, drawing.num_samples)
    return assess_outcomes(
        "acceptance", setting.name, context.prompt, partition, outcomes, setting.depth, drawing.alpha
    )


def _run_engine(
    engine: SpecEngine,
    tokens: list[int],
    params: SamplingParams,
    count: int,
    seed: int,
    drafting: Drafting | None = None,  # None takes what the engine does
) -> list[Path]:
    """First tokens of ``count`` generations. One more token is generated, so that the last one counted was drafted."""
    each = [
        replace(params, seed=seed + i, max_tokens=_ENGINE_DEPTH + 1, ignore_eos=True, stop=(), stop_token_ids=())
        for i in range(count)
    ]
    results = engine.generate([tokens] * count, each, **({} if drafting is None else drafting.options))
    return [tuple(result.token_ids[:_ENGINE_DEPTH]) for result in results]


def accept_everything(
    drafted: Sequence[int],
    draft_distributions: Sequence[HostDistribution] | None,  # noqa: ARG001  # the signature of a rule
    target_distribution: Callable[[int], HostDistribution],
    draws: Callable[[int], Draws],
) -> Verdict:
    """A wrong acceptance rule: the control that shows what the test can see."""
    last = len(drafted)
    return Verdict(last, sample_token(target_distribution(last), draws(last).resample), is_bonus=True)


def draw_outcome(
    target: Conditional,
    draft: Conditional | None,
    draws: RoundDraws,  # random numbers by place in a round
    accept: AcceptFunction,
    *,
    depth: int,
    lookahead: int,  # most draft tokens a round
) -> Path:
    """The first ``depth`` tokens of a speculative decoding; a ``draft`` of None drafts the likeliest token, one-hot."""
    known: Path = ()
    while len(known) < depth:
        path, distributions = known, []
        for place in range(min(lookahead, depth - len(known))):
            if draft is None:
                likeliest = target(path)
                index = int(likeliest.probs.argmax())
                token = index if likeliest.token_ids is None else int(likeliest.token_ids[index])
            else:
                distributions.append(draft(path))
                token = sample_token(distributions[-1], draws(place).draft)
            path = (*path, token)
        verdict = accept(
            path[len(known) :],
            None if draft is None else distributions,
            partial(_distribution_at, target, path, len(known), depth),
            draws,
        )
        draws.end_round()
        known = (*path[: len(known) + verdict.accepted], verdict.next_token)
    return known[:depth]


def _distribution_at(target: Conditional, path: Path, start: int, depth: int, place: int) -> HostDistribution:
    """The target's before a place of a draft; a token beyond the outcome needs none."""
    return target(path[: start + place]) if start + place < depth else _UNSEEN
