"""The goodput controller: how far to draft for the most expected tokens per second of the whole step."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.cost_curves import CostCurves
from specexport_runtime.draft_length import Allowed, StepLoad
from specexport_runtime.drafters.base import Proposal

if TYPE_CHECKING:
    from specexport_runtime.sequence import Sequence
    from specexport_runtime.tune_profile import TuneProfile


class GoodputLength:
    """A ``DraftLength`` that maximizes expected tokens per second.

    Args:
        curves: what steps cost; fixed when the engine is loaded.
        profile: bounds K from above by its table, where it has one.
    """

    def __init__(self, curves: CostCurves, profile: "TuneProfile | None" = None) -> None:
        self.curves, self.profile = curves, profile

    def begin_round(self, load: StepLoad) -> None:
        """See ``DraftLength.begin_round``."""

    def allow(self, drafter: str, sequences: "Seq[Sequence]", limits: Seq[int]) -> list[Allowed]:
        """See ``DraftLength.allow``."""
        raise NotImplementedError

    def cut(self, drafter: str, sequences: "Seq[Sequence]", proposals: Seq[Proposal]) -> list[Allowed]:
        """See ``DraftLength.cut``."""
        raise NotImplementedError

    def observe(self, sequence: "Sequence", proposal: Proposal, accepted: int, *, rejected: bool) -> None:
        """See ``DraftLength.observe``."""
