"""Ranges of what the model is given."""

import math

from specexport_runtime.errors import UserInputError

MAX_DRAFT_TOKENS = 1 << 21
"""Most draft tokens of a round, all sequences together: 16 MB of random numbers."""


def check_probability(name: str, value: float) -> None:
    """Refuse a value outside [0, 1], or NaN, with UserInputError."""
    if not 0.0 <= value <= 1.0:
        raise UserInputError(f"{name} is {value:g}, which is not a probability.", "give a number from 0 to 1.")


def check_count(name: str, value: int) -> None:
    """Refuse a count below 1 with UserInputError."""
    if value < 1:
        raise UserInputError(f"{name} is {value}.", "give a whole number from 1 up.")


def check_batch(batch_size: int, draft_length: int) -> None:
    """Refuse a batch or a draft below 1, or too large for memory, with UserInputError."""
    check_count("The batch size", batch_size)
    check_count("The draft length", draft_length)
    if batch_size * draft_length > MAX_DRAFT_TOKENS:
        raise UserInputError(
            f"{batch_size} drafts of {draft_length} tokens are too many.",
            f"stay below {MAX_DRAFT_TOKENS} draft tokens a round.",
        )


def check_not_negative(name: str, value: float) -> None:
    """Refuse a negative or infinite value, or NaN, with UserInputError."""
    if not 0.0 <= value < math.inf:
        raise UserInputError(f"{name} is {value:g}.", "give a finite number from 0 up.")


def check_concentration(value: float | None) -> None:
    """Refuse a concentration that is not positive and finite with UserInputError; None passes."""
    if value is not None and not 0.0 < value < math.inf:
        raise UserInputError(f"The concentration is {value:g}.", "give a finite number above 0, or none.")
