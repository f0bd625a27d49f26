"""Distributions of texts, exactly, and how likely a sample is of one."""

from functools import cache

import numpy as np
from scipy.stats import chi2

from specexport_runtime.sampling.distribution import sample_token
from specexport_runtime.sampling.sampler import Sampler

VOCAB = 6
PROMPT = (2, 4)
P_VALUE = 1e-5  # hundreds of fixed cases: a correct procedure stays above this, a wrong one falls far below
rng = np.random.default_rng(20240607)
TARGET = (1.3 * rng.normal(size=(VOCAB, VOCAB))).astype(np.float32)
NOISE = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFTS = {
    "good": TARGET + 0.4 * NOISE, "random": 1.5 * NOISE, "adversarial": -TARGET,
    "disjoint": np.where(TARGET.argsort(axis=1).argsort(axis=1) < 3, 0, -np.inf).astype(np.float32),
    "short": (TARGET + NOISE)[:, : VOCAB - 2], "one-hot": None,
}  # fmt: skip
COPIED = (TARGET + NOISE).argmax(axis=1).tolist()  # the one-hot draft's guess after each token


class Toy:
    """A table-driven target and draft after the real Sampler; distributions are remembered by history."""

    def __init__(self, params, draft):
        self.params = params
        self.table = DRAFTS[draft]
        self.target = cache(lambda done, drafted: self._distribution(TARGET, done, drafted))
        self.draft = cache(lambda done, drafted: self._distribution(self.table, done, drafted))

    def _distribution(self, table, done, drafted):
        sampler = Sampler(self.params, PROMPT, VOCAB)
        sampler.append(done)
        return sampler.distribution(table[(*PROMPT, *done, *drafted)[-1]], drafted)

    def propose(self, done, lookahead, draws):
        drafted, distributions = (), []
        for j in range(lookahead):
            if self.table is None:
                drafted += (COPIED[(*PROMPT, *done, *drafted)[-1]],)
                continue
            distributions.append(self.draft(done, drafted))
            drafted += (sample_token(distributions[-1], draws(j).draft),)
        return drafted, distributions if self.table is not None else None

    def exact(self, length):
        return joint(lambda done: self.target(done, ()), length)


def joint(distribution, length, vocab=VOCAB):
    """Probability of every text of ``length`` tokens; ``distribution`` gives the distribution after a text."""
    distribution, texts = cache(distribution), {(): 1.0}
    for _ in range(length):
        texts = {
            (*done, token): p * q
            for done, p in texts.items()
            for token in range(vocab)
            if (q := distribution(done).probability(token)) > 0
        }
    return texts


def emit(toy, length, lookahead, draws, rule):
    """Tokens of one sequence, round by round, as the decoding loop does it."""
    done = ()
    while len(done) < length:
        drafted, distributions = toy.propose(done, lookahead, draws)
        verdict = rule(
            drafted, distributions, lambda j, done=done, drafted=drafted: toy.target(done, drafted[:j]), draws
        )
        draws.end_round()
        done += (*drafted[: verdict.accepted], verdict.next_token)
    return done[:length]


def p_value(counts, exact):
    """Chi-square test of counts against exact probabilities; cells that expect few counts are pooled."""
    total = sum(counts.values())
    if any(exact.get(cell, 0.0) == 0.0 for cell in counts):
        return 0.0  # something impossible was emitted
    cells = [(counts[cell], p * total) for cell, p in exact.items() if p > 0]
    kept = [(o, e) for o, e in cells if e >= 5]
    rest = [(o, e) for o, e in cells if e < 5]
    if sum(e for _, e in rest) >= 5:
        kept.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    statistic = sum((o - e) ** 2 / e for o, e in kept)
    return float(chi2.sf(statistic, max(len(kept) - 1, 1)))
