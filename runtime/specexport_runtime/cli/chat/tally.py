"""What answers cost, one and all together."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexport_runtime.sequences.stats import SequenceStats


@dataclass(frozen=True)
class Tally:
    """Counters of answers.

    Attributes:
        answers: how many.
        prompt: tokens of their prompts.
        cached: of these, that were not read again.
        generated: tokens that were generated.
        rounds: target steps that gave tokens.
        drafted: draft tokens that were tested.
        accepted: of these, that passed.
        seconds: they took, their prompts included.
        first_token: seconds to their first tokens.
    """

    answers: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    first_token: float = 0.0

    @classmethod
    def of(cls, stats: "SequenceStats") -> "Tally":
        """The tally of one answer that has ended."""
        return cls(
            answers=1,
            prompt=stats.num_prompt_tokens,
            cached=stats.cached_tokens or 0,
            generated=stats.num_generated_tokens,
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            seconds=(stats.end_time or stats.start_time) - stats.start_time,
            first_token=stats.time_to_first_token_s or 0.0,
        )

    def __add__(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def describe_tallies(last: Tally, total: Tally) -> str:
    """A table of the last answer and of all."""
    lines = [("", "last answer", f"all {total.answers}")]
    lines += [(name, one, both) for (name, one), (_, both) in zip(_rows(last), _rows(total), strict=True)]
    return "\n".join(f"{name:<32}{one:>12}{both:>12}" for name, one, both in lines)


def _rows(tally: Tally) -> list[tuple[str, str]]:
    def ratio(top: float, bottom: float, form: str) -> str:
        return format(top / bottom, form) if bottom else "-"

    return [
        ("prompt tokens", str(tally.prompt)),
        ("  of these known from before", str(tally.cached)),
        ("generated tokens", str(tally.generated)),
        ("tokens/s, prompt included", ratio(tally.generated, tally.seconds, ".1f")),
        ("seconds to the first token", ratio(tally.first_token, tally.answers, ".3f")),
        ("acceptance rate", ratio(tally.accepted, tally.drafted, ".3f")),
        ("tokens a round", ratio(tally.generated, tally.rounds, ".2f")),
    ]
