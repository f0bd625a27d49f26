"""The distribution of a small fake target's texts, by enumeration, and requests whose texts are compared with it."""

from collections import Counter

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.sampling.sampler import Sampler
from tests.support.fakes.requests import request_of
from tests.support.references.exact import joint, p_value

SMALL, PROMPTS, LENGTH = 5, [[1], [4, 2, 4]], 3


def small_model(**options):
    return FakeExecutor(SMALL, 8, 40, context=3, sharpness=1.2, **options)


def exact(target, params, prompt, length=LENGTH, grammar=None):
    """Probability of every text of ``length`` tokens under the target alone; ``grammar`` makes one for each text."""

    def distribution(done):
        rules = None
        if grammar is not None:
            rules = grammar()
            rules.consume(list(done))
        sampler = Sampler(params, prompt, target.vocab_size, rules)
        if rules is None:
            sampler.append(done)
        return sampler.distribution(target.logits_after([*prompt, *done]))

    return joint(distribution, length, target.vocab_size)


def make_requests(count, params, *, prompts=PROMPTS, vocab=SMALL, **options):
    """Requests for prompts in turn, each with its own seed; an option that is a function is asked for each number."""
    return [
        request_of(
            i, prompts[i % len(prompts)], params, vocab_size=vocab, max_model_len=30, seed=i,
            **{name: value(i) if callable(value) else value for name, value in options.items()},
        )
        for i in range(count)
    ]  # fmt: skip


def least_p_value(target, requests, length=LENGTH, grammar=None):
    groups = {}
    for req in requests:
        groups.setdefault(tuple(req.tokens[: req.num_prompt_tokens]), []).append(req)
    return min(
        p_value(
            Counter(tuple(req.output[:length]) for req in group),
            exact(target, group[0].params, prompt, length, grammar),
        )
        for prompt, group in groups.items()
    )
