"""Section 7, last: which attention operator ``ort-cuda`` should use, by a rule over what was measured."""

from collections.abc import Mapping
from typing import NamedTuple

from tools.gpu_check_lib.context import Context, SkipTaskError
from tools.gpu_check_lib.operators import OURS, Way
from tools.gpu_check_lib.speed import RATIO_TARGET, Steps

PAST = 8192
WORTH = 0.9
"""An operator that does not reach the target must still save a tenth of a verify step to be worth the change."""
TODAY = "PagedAttention as it is used"
CHOICES: Mapping[str, tuple[str, ...]] = {
    TODAY: (Way("rows").name, Way("PagedAttention", cudnn=False).name),
    "GroupQueryAttention, a node for each row": (
        Way("GroupQueryAttention").name, Way("GroupQueryAttention", cudnn=False).name,
    ),
    "an operator of our own": (OURS,),
}  # fmt: skip
"""What can be chosen, the least work first, and the ways that show its speed. ``GroupQueryAttention`` takes several new
tokens behind a past for one row only."""


class Choice(NamedTuple):
    """What the rule says."""

    name: str  # one of ``CHOICES``
    reason: str  # why, with figures
    steps: dict[str, Steps]  # milliseconds of the model's steps with each choice; predicted for all but today's


def choose(model: Steps, num_layers: int, operators: Mapping[str, tuple[float, float]]) -> Choice:
    """The operator to use.

    A step with another operator takes what the model's step takes today, plus the difference of the two operators times
    the number of layers. The first choice, in order of work, whose verify step is at most ``RATIO_TARGET`` times the
    fastest decode step is taken. If there is none, the one with the fastest verify step is, if it is ``WORTH`` it; one
    that decodes slower than today's by more than the same ratio does not count then.

    ``model`` was measured behind 8,192 entries. ``operators`` has the microseconds of decode(1) and verify(5) a layer,
    by way; ways that failed are not there. KeyError: today's operator was not measured.
    """
    # What runs today is cuDNN with a row for each token from sm 90 on, and neither before: the faster stands for it.
    times = {
        name: min((operators[way] for way in ways if way in operators), key=sum)
        for name, ways in CHOICES.items()
        if any(way in operators for way in ways)
    }
    now = times[TODAY]
    steps = {
        name: Steps(*(
            measured + num_layers * (other - today) / 1e3
            for measured, other, today in zip(model, each, now, strict=True)
        ))
        for name, each in times.items()
    }  # fmt: skip
    decode = min(each.decode_ms for each in steps.values())
    good = [name for name, each in steps.items() if each.verify_ms <= RATIO_TARGET * decode]
    if good:
        ratio = steps[good[0]].verify_ms / decode
        return Choice(
            good[0], f"verify(5) is {ratio:.2f}x the fastest decode(1), and nothing simpler reaches it", steps
        )
    fair = [name for name, each in steps.items() if each.decode_ms <= RATIO_TARGET * model.decode_ms]
    best = min(fair, key=lambda name: steps[name].verify_ms)
    share = steps[best].verify_ms / steps[TODAY].verify_ms
    if share > WORTH:
        return Choice(TODAY, f"none reaches it, and the fastest ({best}) takes {share:.0%} of today's verify(5)", steps)
    return Choice(best, f"none reaches it; this one takes {share:.0%} of today's verify(5)", steps)


def conclude(context: Context) -> None:
    """The verdict's row, with the figures that it used."""
    from tools.gpu_check_lib.models import SIZES

    found, measured = context.recall("operators"), context.recall("verify-ort-cuda")
    if not found or not measured:
        missing = "operators.measure" if not found else "speed.measure-ort-cuda"
        raise SkipTaskError(f"{missing} has not measured anything")
    if measured["past"] != PAST:
        raise SkipTaskError(f"the model was measured behind {measured['past']} entries, not {PAST}")
    operators = {
        name: (pasts[str(PAST)][0], pasts[str(PAST)][1]) for name, pasts in found.items() if str(PAST) in pasts
    }
    model = Steps(measured["decode_ms"], measured["verify_ms"])
    try:
        choice = choose(model, SIZES["large"].layers, operators)
    except KeyError as error:
        raise SkipTaskError("PagedAttention was not measured") from error
    ratio = model.verify_ms / model.decode_ms
    for name, each in choice.steps.items():
        context.recorder.row(
            f"verify(5) and decode(1) of the model behind {PAST} entries: {name}",
            f"{each.verify_ms:.3f} and {each.decode_ms:.3f} ms ({'measured' if name == TODAY else 'predicted'})",
        )  # fmt: skip
    context.recorder.row(
        "attention of ort-cuda should be", f"{choice.name}: {choice.reason}; today verify(5)/decode(1) is {ratio:.2f}",
        target=f"verify(5)/decode(1) at most {RATIO_TARGET}", choice=choice.name, ratio=ratio,
        operators=operators, steps={name: each._asdict() for name, each in choice.steps.items()},
    )  # fmt: skip
