"""The distribution of a small fake target's texts, by enumeration."""

from specexport_runtime.sampling.sampler import Sampler

SMALL, PROMPTS, LENGTH = 5, [[1], [4, 2, 4]], 3


def exact(target, params, prompt):
    """Probability of every text of ``LENGTH`` tokens under the target alone."""
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for done, p in joint.items():
            sampler = Sampler(params, prompt, SMALL)
            sampler.append(done)
            distribution = sampler.distribution(target.logits_after([*prompt, *done]))
            longer |= {(*done, token): p * distribution.probability(token) for token in range(SMALL)}
        joint = {done: p for done, p in longer.items() if p > 0}
    return joint
