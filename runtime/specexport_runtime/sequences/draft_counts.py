"""What a drafter did, counted: of one sequence, or of all that an engine decoded."""

from collections.abc import Iterable
from dataclasses import dataclass

UNNAMED = "other"
"""What drafts of a drafter without a name are counted under."""
FEW_TOKENS, FEW_DRAFTS = 64, 16
"""So much must have been tested before it means something that nothing was accepted. Tokens behind a refused one tell
nothing: where one draft in five has an accepted token, 16 drafts without any are an accident of 3 %."""


@dataclass
class DraftCounts:
    """What one drafter did."""

    rounds: int = 0  # of a sequence, with a draft of it
    drafted: int = 0  # draft tokens that the target tested
    accepted: int = 0  # of these, accepted and emitted

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def never_accepted(self) -> bool:
        """Nothing was accepted, of :data:`FEW_TOKENS` tokens in :data:`FEW_DRAFTS` drafts at least."""
        return not self.accepted and self.drafted >= FEW_TOKENS and self.rounds >= FEW_DRAFTS

    def to_json(self) -> dict[str, int]:
        """JSON form."""
        return {"rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}


def counts_of(counts: dict[str, DraftCounts], drafter: str) -> DraftCounts:
    """The counts of a drafter among those of others; new ones if it has none."""
    found = counts.get(drafter)
    if found is None:
        found = counts[drafter] = DraftCounts()
    return found


def sum_counts(parts: Iterable[DraftCounts]) -> DraftCounts:
    """Several counts together."""
    total = DraftCounts()
    for part in parts:
        total.rounds += part.rounds
        total.drafted += part.drafted
        total.accepted += part.accepted
    return total


def sum_by_drafter(parts: Iterable[dict[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """The counts of several sequences together, by drafter."""
    found: dict[str, list[DraftCounts]] = {}
    for part in parts:
        for name, counts in part.items():
            found.setdefault(name, []).append(counts)
    return {name: sum_counts(each) for name, each in found.items()}
