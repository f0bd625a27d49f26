"""What forms of a draft promise, by the tokens that they guessed and by what steps cost; and whether that is sure.

All forms read the same texts. What two differ in are therefore only the tokens that one of them guessed and the other
did not, and a few texts show which form is the best long before they show how often it is right.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

from specexport_runtime.bundle.entry import ModelEntry, TriedForm
from specexport_runtime.costs.curves import StepCost
from specexport_runtime.costs.prior import DRAFTER_OF, prior_costs
from specexport_runtime.executors.base import BoolArray

MARGIN = 0.03
"""A form must promise so much more than a simpler one: a few hundred tokens tell no less."""
_LEFT = 2 * MARGIN
"""No form may promise so much more than the chosen one, with the confidence of ``_DEVIATIONS`` on one side (95 %)."""
_DEVIATIONS = 1.64
_KERNELS = "avx512vnni"
"""What steps are priced for, whatever this machine has."""


class PricedForm(NamedTuple):
    """A form, and what it costs."""

    entry: ModelEntry
    size: int  # tokens of its LM head
    target: ModelEntry
    lookahead: int  # largest K

    def _step_costs(self) -> tuple[StepCost, StepCost]:
        """Of the target and of the draft."""
        costs = prior_costs({"target": self.target, "draft": self.entry}, kernels=_KERNELS)
        return costs.target, costs.drafters[DRAFTER_OF["draft"]]

    def speed(self, accepted: float) -> float:
        """Tokens a second over plain decoding's, if ``accepted`` is the chance."""
        return promised_speed(accepted, *self._step_costs(), self.lookahead)

    def tried(self, right: BoolArray) -> TriedForm:
        """What is known of it once it guessed some tokens, ``right`` of them bool [tokens]."""
        target, step = self._step_costs()
        accepted, price = float(right.mean()), step.seconds(1, 1) / target.seconds(1, 1)
        return TriedForm(self.entry.quantize, self.size, accepted, price, self.speed(accepted))

    def rounded(self, quantize: str) -> "PricedForm":
        """The form with such weights before it is built: no dearer than it will be."""
        engine = replace(self.entry.engine, packed_bytes=None)
        return self._replace(entry=replace(self.entry, quantize=quantize, engine=engine))


def pick(tried: Sequence[TriedForm]) -> TriedForm:
    """The form to build: the simplest first, and each other one only if it promises clearly more."""
    best = tried[0]
    for form in tried[1:]:
        if form.speed > (1 + MARGIN) * best.speed:
            best = form
    return best


def is_sure(forms: Sequence[PricedForm], right: BoolArray) -> bool:
    """Whether more tokens would hardly show a form that promises much more than the picked one.

    ``right`` says which tokens each guessed, bool [forms, tokens].
    """
    tried, num_tokens = [form.tried(own) for form, own in zip(forms, right, strict=True)], right.shape[1]
    best = pick(tried)
    of_best = right[tried.index(best)]
    for form, own in zip(forms, right, strict=True):
        more, odd = int(own.sum()) - int(of_best.sum()), int((own != of_best).sum())
        most = best.accepted + (more + _DEVIATIONS * sqrt(odd + 1)) / num_tokens
        if own is not of_best and form.speed(min(most, 1.0)) > (1 + _LEFT) * best.speed:
            return False
    return True


def promised_speed(accepted: float, target: StepCost, draft: StepCost, lookahead: int) -> float:
    """Tokens a second over plain decoding's at the best K of ``lookahead``, if ``accepted`` is the chance."""
    plain, step, best, expected = target.seconds(1, 1), draft.seconds(1, 1), 1.0, 1.0
    for k in range(1, lookahead + 1):
        expected += accepted**k
        best = max(best, expected * plain / (target.seconds(k + 1, 1) + k * step))
    return best
