"""One line of the doctor's report."""

from typing import Literal, NamedTuple

State = Literal["ok", "missing", "note"]


class Finding(NamedTuple):
    """One line of the report."""

    topic: str  # what was looked at
    state: State  # ``"missing"``: something cannot be done; ``"note"``: optional, or slower than it could be
    found: str
    fix: str = ""  # how to get what is missing; empty if nothing is
