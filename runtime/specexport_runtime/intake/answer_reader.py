"""From the text of an answer to what it consists of: thinking, text for the user, calls of functions."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specexport_runtime.intake.tool_formats.base import (
    Arguments,
    Broken,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Feed,
    ReasoningSpan,
    ToolFormat,
)
from specexport_runtime.requests.text import StopStrings


class ThinkingMarks(NamedTuple):
    """Texts around what a model thinks."""

    begin: str
    end: str


@dataclass(frozen=True)
class AnswerSyntax:
    """How to read an answer."""

    thinking: ThinkingMarks | None = None  # what stands around its thinking; None where the model does not think
    has_begun: bool = False  # the prompt has begun the thinking
    format: ToolFormat | None = None  # how calls are written; None where none are looked for
    names: frozenset[str] = frozenset()  # functions that may be called
    most_calls: int | None = None  # further calls are left out; None for no limit
    beginning: str = ""  # of the answer, which the prompt has: it is read first
    echo: bool = False  # and told, in front of the rest


@dataclass
class Call:
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str = ""


@dataclass
class AnswerParts:
    """What an answer consists of."""

    content: str = ""  # text for the user
    reasoning: str = ""  # what the model thought before
    calls: list[Call] = field(default_factory=list)


class AnswerReader:
    """Reads one answer while it comes. Nothing it can meet is an error: what is no call is text."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax, self._feed = syntax, Feed()
        self._events = _read_answer(self._feed, syntax)
        self._begun = 0
        self._untold: list[Event] = []  # of the beginning
        self._held: tuple[type[Event], int] | None = None  # what is not told, as more was needed to read it: its length
        if syntax.beginning:
            told = self.take(syntax.beginning)
            if syntax.echo:
                self._untold = told
            else:
                self._hold(read_whole(replace(syntax, beginning=""), syntax.beginning, is_cut=True), told)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        most = self._syntax.most_calls
        return self._begun if most is None else min(self._begun, most)

    def take(self, text: str) -> list[Event]:
        """What new text brings."""
        self._feed.text += text
        untold, self._untold = self._untold, []
        return untold + list(self._read_available_events())

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The rest, as no text follows; ``is_cut``: the answer ended by its length, wherever it was."""
        self._feed.ended, self._feed.is_cut = True, is_cut
        return self.take("")

    def _hold(self, whole: Sequence[Event], told: Sequence[Event]) -> None:
        """Leave out what follows of a beginning: ``whole``, if nothing came after it, of which ``told`` is known."""
        if whole and isinstance(last := join_neighbours(whole)[-1], (Content, ReasoningSpan)):
            known = sum(len(each.text) for each in told if isinstance(each, type(last)))
            self._held = type(last), len(last.text) - known

    def _without_held(self, found: Event) -> Event | None:
        held, self._held = self._held, None
        if held is None or not isinstance(found, (Content, ReasoningSpan)) or not isinstance(found, held[0]):
            return found
        self._held = held[0], max(held[1] - len(found.text), 0)
        return found._replace(text=found.text[held[1] :]) if len(found.text) > held[1] else None

    def _read_available_events(self) -> Iterator[Event]:
        most = self._syntax.most_calls
        for found in self._events:
            if found is None:
                return
            if isinstance(found, (CallBegin, Arguments, CallEnd, Broken)):
                begins = isinstance(found, CallBegin)
                if most is not None and self._begun + begins > most:
                    self._begun = most + 1
                    continue
                self._begun += begins
            if (new := self._without_held(found)) is not None:
                yield new


def read_parts(syntax: AnswerSyntax, text: str, *, is_cut: bool) -> AnswerParts:
    """A whole answer, ``is_cut`` if its length ended it. Calls whose arguments are no JSON are text."""
    parts = AnswerParts()
    for found in read_whole(syntax, text, is_cut=is_cut):
        match found:
            case Content(piece):
                parts.content += piece
            case ReasoningSpan(piece):
                parts.reasoning += piece
            case CallBegin(name):
                parts.calls.append(Call(name))
            case Arguments(piece):
                parts.calls[-1].arguments += piece
    return parts


def read_whole(syntax: AnswerSyntax, text: str, *, is_cut: bool) -> list[Event]:
    """What a whole answer consists of, in its order; arguments as :func:`read_parts`. There is no ``Broken`` in it."""
    reader = AnswerReader(syntax)
    events: list[Event] = []
    for found in (*reader.take(text), *reader.finish(is_cut=is_cut)):
        if isinstance(found, Broken):
            while not isinstance(events.pop(), CallBegin):
                pass
            events.append(Content(found.text))
        else:
            events.append(found)
    return events


def join_neighbours(events: Sequence[Event]) -> list[Event]:
    """Pieces of text of one kind that follow each other, as one."""
    joined: list[Event] = []
    for found in events:
        last = joined[-1] if joined else None
        if isinstance(found, (Content, ReasoningSpan, Arguments)) and isinstance(last, type(found)):
            joined[-1] = found._replace(text=last.text + found.text)
        else:
            joined.append(found)
    return joined


def _read_answer(feed: Feed, syntax: AnswerSyntax) -> Iterator[Event | None]:
    if syntax.thinking is not None:
        yield from _read_thinking(feed, syntax.thinking, has_begun=syntax.has_begun)
    calls = syntax.format
    if calls is None:
        yield from _read_until(feed, (), Content)
        return
    begin = feed.at
    yield from feed.skip_space()
    opener = begin if feed.next and feed.next in calls.starts else None
    if opener is None:
        feed.at = begin
    has_called = False
    while True:
        if opener is None:
            if has_called:
                yield from feed.skip_space()
            opener = yield from _read_until(feed, calls.openers, Content)
        if opener is None:
            return
        behind, feed.mark = feed.at, opener
        if (yield from calls.read(feed, syntax.names)):
            has_called = True
        elif feed.mark > opener:  # some calls were good
            feed.at, has_called = feed.mark, True
        else:  # what looked like a call is text
            feed.at = max(behind, opener + 1)
            yield Content(feed.text[opener : feed.at])
        opener = None


def _read_until(
    feed: Feed, ends: Sequence[str], kind: type[Content] | type[ReasoningSpan]
) -> Generator[Event | None, None, int | None]:
    """Text up to one of ``ends``, without the white space before it; returns where that begins, None without one."""
    beginnings = StopStrings(tuple(ends), include=False)
    while True:
        found = [(at, len(end)) for end in ends if (at := feed.text.find(end, feed.at)) >= 0]
        if found:
            begin, length = min(found)
            text = feed.text[feed.at : begin].rstrip()
            left_out = feed.at + len(text)
            if text:
                yield kind(text)
            feed.at = begin + length
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


def _read_thinking(feed: Feed, marks: ThinkingMarks, *, has_begun: bool) -> Iterator[Event | None]:
    begin = feed.at
    if not has_begun:
        yield from feed.skip_space()
        if not (yield from feed.consume(marks.begin)):
            feed.at = begin
            return
    yield from feed.skip_space()
    if (yield from _read_until(feed, (marks.end,), ReasoningSpan)) is not None:
        yield from feed.skip_space("\n")
