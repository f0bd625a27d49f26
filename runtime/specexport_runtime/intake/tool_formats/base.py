"""What a format of calls has: how calls begin, how they are written, and how they are read, piece by piece."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from specexport_runtime.requests.text import StopStrings
from specexport_runtime.sampling.one_of import with_any_of


class Content(NamedTuple):
    """Text for the user."""

    text: str


class ReasoningSpan(NamedTuple):
    """Text that the model thought before it answered."""

    text: str


class CallBegin(NamedTuple):
    """A call of a function begins; its arguments follow."""

    name: str
    id: str = ""  # as the model wrote it, in formats that have ids


class Arguments(NamedTuple):
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


class CallEnd(NamedTuple):
    """The call that began last is complete, and its arguments are a JSON object."""


class Broken(NamedTuple):
    """The call that began last is none: its arguments are no JSON. ``text`` is what it was made of."""

    text: str


Event = Content | ReasoningSpan | CallBegin | Arguments | CallEnd | Broken
Reading = Generator[Event | None, None, bool]
"""Reads as far as the text goes: gives events, and None when it needs more text. Returns whether it found what it
looked for; what it did not take is read otherwise."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Functions that may be called, and the JSON schemas of their arguments."""
LONGEST_HEAD = 256  # characters, so that what looks like a call is soon known


class Feed:
    """Text that grows."""

    def __init__(self) -> None:
        self.text = ""
        # where reading goes on; mark: where what is read now began (what is broken is text from there on)
        self.at = self.mark = 0
        # no more comes; is_cut: it ended by its length, in the middle of whatever it was
        self.ended = self.is_cut = False
        self.is_odd = False  # a value began like JSON and was none: others are not tried, so that each is read once

    def skip_space(self, space: str | None = None) -> Generator[None, None, None]:
        """Go to the next character that is no white space, or none of ``space``."""
        while True:
            rest = self.text[self.at :]
            self.at = len(self.text) - len(rest.lstrip(space))
            if self.at < len(self.text) or self.ended:
                return
            yield

    def consume(self, wanted: str) -> Generator[None, None, bool]:
        """Go after ``wanted``, if it is what comes next."""
        while not self.text.startswith(wanted, self.at):
            if self.ended or not wanted.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(wanted)
        return True

    def match(self, wanted: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """Go after what ``wanted`` matches, if it is what comes next."""
        while (found := wanted.match(self.text, self.at, self.at + LONGEST_HEAD)) is None:
            if self.ended or len(self.text) - self.at >= LONGEST_HEAD:
                return None
            yield
        self.at = found.end()
        return found

    @property
    def next(self) -> str:
        """The next character; empty if it has not come yet."""
        return self.text[self.at : self.at + 1]


def read_until(
    feed: Feed, ends: Sequence[str], kind: type[Content] | type[ReasoningSpan]
) -> Generator[Event | None, None, int | None]:
    """Text up to one of ``ends``, without the white space before it; returns where that begins, None without one."""
    beginnings, wanted = StopStrings(tuple(ends), include=False), re.compile("|".join(map(re.escape, ends)))
    while True:
        found = wanted.search(feed.text, feed.at) if ends else None
        if found:
            text = feed.text[feed.at : found.start()].rstrip()
            left_out = feed.at + len(text)
            if text:
                yield kind(text)
            feed.at = found.end()
            return left_out
        text = feed.text[feed.at :]
        if ends and not feed.ended:
            text = text[: len(text) - beginnings.find_partial_stop_length(text, len(text))].rstrip()
        if text:
            yield kind(text)
            feed.at += len(text)
        if feed.ended:
            return None
        yield None


class Style(NamedTuple):
    """How a model writes JSON."""

    item: str = ", "  # what stands between items
    key: str = ": "  # what stands between a key and its value
    # A grammar of calls has the lexemes of JSON, as that of an answer beside them has: a lexer cannot go back from a
    # longer one. Beside free text, the longer one is what parts them.
    apart: bool = False


Marks = Callable[[str], str]
"""From a marker to what a Lark grammar calls it: its token, or its text."""


class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: ClassVar[str]  # vLLM's where it has one
    openers: ClassVar[tuple[str, ...]] = ()  # texts after which calls stand, anywhere in an answer
    markers: ClassVar[tuple[str, ...]] = ()  # all texts that must be seen to read calls; they may be special tokens
    signs: ClassVar[tuple[str, ...]] = ()  # those of them that tell it in a template; empty for all of them
    starts: ClassVar[str] = ""  # characters that begin an answer of calls without an opener; empty for none
    arguments_key: ClassVar[str] = "arguments"  # in a call that is one JSON object
    has_channels: ClassVar[bool] = False  # all of an answer is written in it, so that it is read without calls, too
    said_after: ClassVar[str] = ""  # the end of a prompt after which text for the user follows, and no call can
    has_lists: ClassVar[bool] = False  # one opener is enough for several calls
    id_length: ClassVar[int] = 0  # letters and digits of a call's id, where templates insist; 0 for ids like OpenAI's

    @classmethod
    def of(cls, template: str, call: str, function: str) -> "ToolFormat | None":  # noqa: ARG003
        """This format, if a chat template has it, by what it wrote of a ``call`` (empty: refused)."""
        signs = cls.signs or cls.markers
        return cls() if signs and all(text in (call or template) for text in signs) else None

    @abstractmethod
    def read(self, feed: Feed, schemas: Schemas) -> Reading:
        """The calls after an opener, or at the start of an answer; what stands between them is left out."""

    @abstractmethod
    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """Rules of a Lark grammar: ``calls`` is one call or, if ``several`` may be, more.

        ``arguments_0`` and so on are rules of the arguments of ``names``; ``opener`` is empty if it was read.
        """

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages as the template of this format wants them."""
        return messages

    def argument_rules(self, i: int, schema: Mapping[str, Any], style: Style, marks: Marks) -> str:  # noqa: ARG002
        """The rule ``arguments_i``, and those that it needs; ``InvalidRequestError`` for what would not be exact."""
        return f"arguments_{i}: {json_rule(schema, style)}\n"

    def spell(self, text: str, marks: Marks) -> str:
        """A text in Lark in which markers may be tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, self.markers))})", text)
        return " ".join(marks(part) if part in self.markers else json.dumps(part) for part in parts if part)

    def heads(self, style: Style) -> tuple[str, ...]:
        """How answers begin that are calls and have no opener."""
        start = f'{{"name"{style.key}"'
        return (start, f"[{start}") if "[" in self.starts else (start,)

    def object_rule(self, names: Sequence[str], style: Style) -> str:
        """The rule ``object``: a call that is one JSON object."""
        return f"object: {' | '.join(self._object(name, i, style) for i, name in enumerate(names))}\n"

    def _object(self, name: str, i: int, style: Style) -> str:
        parts = ["{", '"name"', style.key, f'"{name}"', style.item, f'"{self.arguments_key}"', style.key]
        head = " ".join(map(json.dumps, parts if style.apart else ["".join(parts)]))
        return f'{head} arguments_{i} "}}"'


def json_rule(schema: Mapping[str, Any], style: Style | None = None) -> str:
    """JSON of a schema in Lark; compact without a style."""
    separators = {} if style is None else {"item_separator": style.item, "key_separator": style.key}
    plain = json.loads(with_any_of(json.dumps(schema)))
    return "%json " + json.dumps({**plain, "x-guidance": {"whitespace_flexible": False, **separators}})


def escaped(text: str) -> str:
    r"""A text in an expression of Rust's ``regex`` between slashes."""
    return "".join(f"\\{sign}" if sign in r"\.+*?()|[]{}^$#&-~/\"" else sign for sign in text)
