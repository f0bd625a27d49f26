"""What an answer consists of, piece by piece, and the text that is yet to be read."""

from collections.abc import Generator
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thought before it answered."""

    text: str


class CallBegin(NamedTuple):
    """A call of a function begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


class CallEnd(NamedTuple):
    """The call that began last is complete, and its arguments are a JSON object."""


class Broken(NamedTuple):
    """The call that began last is none: its arguments are no JSON. ``text`` is what it was made of."""

    text: str


Event = Content | Reasoning | CallBegin | Arguments | CallEnd | Broken
Reading = Generator[Event | None, None, bool]
"""Reads as far as the text goes: gives events, and None when it needs more text. Returns whether it found what it
looked for; what it did not take is read otherwise."""


class Feed:
    """Text that grows."""

    def __init__(self) -> None:
        self.text = ""
        # where reading goes on; mark: where what is read now began (what is broken is text from there on)
        self.at = self.mark = 0
        # no more comes; is_cut: it ended by its length, in the middle of whatever it was
        self.ended = self.is_cut = False

    def skip_space(self, space: str | None = None) -> Generator[None, None, None]:
        """Go to the next character that is no white space, or none of ``space``."""
        while True:
            rest = self.text[self.at :]
            self.at = len(self.text) - len(rest.lstrip(space))
            if self.at < len(self.text) or self.ended:
                return
            yield

    def takes(self, wanted: str) -> Generator[None, None, bool]:
        """Go behind ``wanted``, if it is what comes next."""
        while not self.text.startswith(wanted, self.at):
            if self.ended or not wanted.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(wanted)
        return True

    @property
    def next(self) -> str:
        """The next character; empty if it has not come yet."""
        return self.text[self.at : self.at + 1]
