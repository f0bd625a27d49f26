"""Which plan makes which kind of draft. A plan is imported when it is asked for."""

from collections.abc import Callable

from specexport.train.options import HEAD_KINDS
from specexport.train.student import Plan


def find_plan(kind: str) -> Callable[..., Plan]:
    """What makes a draft of a kind, from options, target and texts."""
    if kind in HEAD_KINDS:
        from specexport.train.head import HeadPlan

        return HeadPlan
    from specexport.train.pruned import PrunedPlan

    return PrunedPlan
