"""The other likely tokens beside one of a model's draft: tests of the target that cost the draft no step.

How many there may be is decided before anything is drafted (``Request.siblings``).
"""

import math
from collections.abc import Sequence

from specexport_runtime.executors.base import Float32Array
from specexport_runtime.requests.records import Branch

LEAST_RATIO = 0.02
"""A greedy draft has no branch that its model takes to be less likely, beside the token that it drafts."""


def runners_up(logits: Float32Array, token: int, count: int) -> list[tuple[int, float]]:
    """Up to ``count`` tokens beside the likeliest one, the best first, and how likely each is beside it.

    ``logits`` are changed meanwhile: a row is as long as the vocabulary, and to sort it, or copy it, takes longer.
    """
    if not logits.flags.writeable:
        logits = logits.copy()
    masked, found = [(token, logits[token])], list[tuple[int, float]]()
    peak = float(logits[token])
    while len(found) < count and math.isfinite(peak):
        logits[masked[-1][0]] = -math.inf
        best = int(logits.argmax())
        masked.append((best, logits[best]))
        ratio = math.exp(float(logits[best]) - peak)
        if ratio < LEAST_RATIO:
            break
        found.append((best, ratio))
    for best, logit in masked:
        logits[best] = logit
    return found


def path_chances(branches: Sequence[Branch], depth: int) -> list[float]:
    """How likely the model takes each path from the text to a leaf beside one of its ``depth`` tokens.

    What is not among a token's siblings counts as nothing.
    """
    totals = [1.0] * depth
    for branch in branches:
        totals[branch.parent + 1] += branch.ratio or 0.0
    reached, chances = 1.0, []
    for total in totals:
        chances.append(reached / total)
        reached /= total
    return [chances[branch.parent + 1] * (branch.ratio or 0.0) for branch in branches]
