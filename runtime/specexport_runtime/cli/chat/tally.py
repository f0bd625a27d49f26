"""What answers cost, one and all together."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexport_runtime.sequences.stats import SequenceStats


@dataclass(frozen=True)
class Tally:
    """Counters of answers."""

    answers: int = 0
    prompt: int = 0  # tokens of the prompts
    cached: int = 0  # prompt tokens that were not read again
    generated: int = 0  # tokens
    rounds: int = 0  # target steps that gave tokens
    drafted: int = 0  # draft tokens that were tested
    accepted: int = 0  # draft tokens that passed
    seconds: float = 0.0  # prompts included
    first_token: float = 0.0  # seconds to the first tokens

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
