"""What each round did for each sequence, and what it saved: collected only for requests that ask."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport_runtime.draft_length import LengthReason, StepLoad
from specexport_runtime.drafters.base import DraftEnd

if TYPE_CHECKING:
    from specexport_runtime.cost_curves import CostCurves
    from specexport_runtime.events import RoundEvent


class Asked(NamedTuple):
    """One stage of the draft plan in one round.

    Attributes:
        drafter: its drafter.
        lookahead: most draft tokens that it was allowed; 0 is a bypass: it was not called.
        reason: why so many.
        expected: tokens that the round was expected to give, the target's own included; None if nobody estimated.
    """

    drafter: str
    lookahead: int
    reason: LengthReason
    expected: float | None = None


class RoundTrace(NamedTuple):
    """What one round did for one sequence.

    Attributes:
        round: number of the round in the engine's life.
        num_rows: sequences in the step.
        num_tokens: tokens that the target was fed, of all sequences.
        prompt_tokens: of these, tokens of prompts that other sequences brought along.
        asked: the stages of the draft plan that were considered, in order.
        drafter: who drafted; empty if nobody did.
        drafted: draft token ids.
        accepted: how many of them were accepted.
        end: why the draft had no more tokens.
        emitted: token ids that the round gave the sequence.
        gamma: threshold of the draft exit in this round; None without one.
        milliseconds: of the whole round.
        plain_milliseconds: what plain decoding would have taken for as many tokens: from the engine's cost curves (time
            inside the engine alone, so it errs on the low side), else from rounds without drafts that were measured;
            None if there were none.
    """

    round: int
    num_rows: int
    num_tokens: int
    prompt_tokens: int
    asked: tuple[Asked, ...]
    drafter: str
    drafted: tuple[int, ...]
    accepted: int
    end: DraftEnd
    emitted: tuple[int, ...]
    gamma: float | None
    milliseconds: float
    plain_milliseconds: float | None

    @property
    def allowed(self) -> Asked | None:
        """The stage that drafted; else the last one considered; None for plain decoding."""
        used = [stage for stage in self.asked if stage.drafter == self.drafter]
        return used[0] if used else self.asked[-1] if self.asked else None

    @property
    def saved_milliseconds(self) -> float | None:
        """Milliseconds saved against plain decoding; negative if the round lost time; None if that is not known."""
        return None if self.plain_milliseconds is None else self.plain_milliseconds - self.milliseconds

    def describe(self) -> str:
        """One line for people."""
        stages = [f"{name} K={most} ({why})" for name, most, why, _ in self.asked]
        allowed = self.allowed
        if allowed is not None and allowed.expected is not None:
            stages.append(f"{allowed.expected:.1f} tokens expected")
        if self.gamma is not None:
            stages.append(f"gamma {self.gamma:.3f}")
        draft = f"drafted {len(self.drafted)} ({self.end}), accepted {self.accepted}" if self.drafted else "no draft"
        saved, took = self.saved_milliseconds, f"{len(self.emitted)} tokens in {self.milliseconds:.2f} ms"
        if saved is not None:
            took += f", {'saved' if saved >= 0 else 'lost'} {abs(saved):.2f} ms"
        return f"round {self.round}: {', '.join([*stages, draft])}; {took}"

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            **self._asdict(),
            "asked": [stage._asdict() for stage in self.asked],
            "drafted": list(self.drafted),
            "emitted": list(self.emitted),
            "saved_milliseconds": self.saved_milliseconds,
        }


class RoundTracer:
    """Writes down rounds, and what plain decoding would have taken for them.

    Args:
        curves: what steps cost; None measures rounds without drafts.
    """

    def __init__(self, curves: "CostCurves | None" = None) -> None:
        self.curves = curves
        self._plain: dict[int, float] = {}
        self._rounds = 0

    def record(self, events: "Seq[RoundEvent]", load: StepLoad, seconds: float) -> float | None:
        """Append a round to the traces of its sequences that keep one.

        Args:
            events: what it did.
            load: the step without drafts.
            seconds: the whole round took.

        Returns:
            seconds of a round of plain decoding of the same rows; None if that is not known.
        """
        self._rounds += 1
        drafted = sum(event.drafted for event in events)
        if not drafted and not load.prompt_tokens:
            known = self._plain.get(load.num_rows, seconds)
            self._plain[load.num_rows] = known + 0.2 * (seconds - known)
        plain = self._plain_seconds(load)
        for event in events:
            seq = event.sequence
            if seq.trace is None:
                continue
            seq.trace.append(
                RoundTrace(
                    round=self._rounds,
                    num_rows=load.num_rows,
                    num_tokens=load.num_tokens + drafted,
                    prompt_tokens=load.prompt_tokens,
                    asked=tuple(seq.asked),
                    drafter=event.proposal.drafter,
                    drafted=tuple(event.proposal.tokens),
                    accepted=event.accepted,
                    end=event.proposal.end,
                    emitted=tuple(event.tokens),
                    gamma=event.gamma,
                    milliseconds=1000 * seconds,
                    plain_milliseconds=None if plain is None else 1000 * plain * len(event.tokens),
                )
            )
        return plain

    def _plain_seconds(self, load: StepLoad) -> float | None:
        """Seconds of a round of plain decoding of the same rows."""
        if self.curves is None:
            return self._plain.get(load.num_rows)
        return self.curves.target.seconds(load.num_rows, load.num_rows, load.kv_entries)
