"""What each round did for each request, and what it saved: collected only for requests that ask."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexport_runtime.requests.records import RoundTrace, StepLoad

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.costs.learned import LearnedCosts
    from specexport_runtime.requests.request import RoundEvent


class RoundTracer:
    """Writes down rounds, and what plain decoding would have taken by ``curves`` and ``learned``."""

    def __init__(self, curves: "CostCurves | None" = None, learned: "LearnedCosts | None" = None) -> None:
        self.curves, self.learned = curves, learned
        self._plain: dict[int, float] = {}
        self._rounds = 0

    def record(self, events: "Sequence[RoundEvent]", load: StepLoad, seconds: float) -> float | None:
        """Append a round, of ``load`` and ``seconds``, to traces; gives plain decoding's seconds, None if not known."""
        self._rounds += 1
        drafted = sum(event.drafted for event in events)
        if not drafted and not load.prompt_tokens:
            known = self._plain.get(load.num_rows, seconds)
            self._plain[load.num_rows] = known + 0.2 * (seconds - known)
        plain = self._plain_seconds(load)
        for event in events:
            req = event.request
            if req.trace is None:
                continue
            req.trace.append(
                RoundTrace(
                    round=self._rounds,
                    num_rows=load.num_rows,
                    num_tokens=load.num_tokens + drafted,
                    prompt_tokens=load.prompt_tokens,
                    asked=event.proposal.asked,
                    drafter=event.proposal.drafter,
                    drafted=tuple(event.proposal.tokens),
                    accepted=event.accepted,
                    end=event.proposal.end,
                    emitted=tuple(event.tokens),
                    gamma=event.gamma,
                    milliseconds=1000 * seconds,
                    plain_milliseconds=None if plain is None else 1000 * plain * len(event.tokens),
                    promised=event.proposal.promised,
                    forced=event.proposal.forced,
                    branches=tuple([branch[:2] for branch in event.proposal.branches]),
                    path=event.path[: event.accepted] if event.path and event.accepted > event.on_chain else None,
                )
            )
        return plain

    def _plain_seconds(self, load: StepLoad) -> float | None:
        """Seconds of a round of plain decoding of the same rows."""
        level = 1.0 if self.learned is None else self.learned.level(load.num_rows)
        if self.curves is None or level is None:
            return self._plain.get(load.num_rows)
        return level * self.curves.target.seconds(load.num_rows, load.num_rows, load.kv_entries)
