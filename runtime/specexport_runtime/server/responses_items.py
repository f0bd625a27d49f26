"""Items of a response while they grow: what the model thought, what it said, what it calls; and the events of each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from specexport_runtime.intake.answer_reader import join_neighbours
from specexport_runtime.intake.tool_formats.base import Arguments, CallBegin, CallEnd, Content, Event, ReasoningSpan
from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.server.json_text import LongList

Told = tuple[str, dict[str, Any]]
"""An event: its type, and its values."""
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One item; ``index`` is its place in the output."""

    prefix: ClassVar[str]
    delta: ClassVar[str]

    def __init__(self, item_id: str, index: int) -> None:
        self.where: dict[str, Any] = {"item_id": item_id, "output_index": index}
        self.status: Status = "in_progress"
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self._said)

    def append_text(self, text: str) -> None:
        """Take more text."""
        self._said.append(text)

    def append_delta(self, text: str) -> Told:
        """The event of more text, which is taken."""
        self.append_text(text)
        return self.delta, {**self.where, "delta": text}

    def begin_events(self) -> Iterator[Told]:
        """The events with which it begins."""
        item = self.to_json() | self._empty()
        yield "response.output_item.added", {"output_index": self.where["output_index"], "item": item}

    def end_events(self, status: Status) -> Iterator[Told]:
        """The events with which it ends."""
        self.status = status
        yield from self._done()
        yield "response.output_item.done", {"output_index": self.where["output_index"], "item": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """The item as it is now."""
        return {"id": self.where["item_id"], "status": self.status, **self._body()}

    @abstractmethod
    def _body(self) -> dict[str, Any]: ...

    @abstractmethod
    def _empty(self) -> dict[str, Any]: ...

    @abstractmethod
    def _done(self) -> Iterator[Told]: ...


class _SinglePartItem(OutputItem):
    """An item with one part."""

    kind: ClassVar[str]

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self.where["content_index"] = 0

    def begin_events(self) -> Iterator[Told]:
        """See ``OutputItem.begin_events``."""
        yield from super().begin_events()
        yield "response.content_part.added", {**self.where, "part": self._part()}

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind, "text": self.text}

    def _empty(self) -> dict[str, Any]:
        return {"content": []}

    def _done(self) -> Iterator[Told]:
        part = self._part()
        told = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield f"response.{self.kind}.done", {**self.where, **told}
        yield "response.content_part.done", {**self.where, "part": part}


class MessageItem(_SinglePartItem):
    """What the model said. Log-probabilities and origins are of all tokens of the answer: it is the only item then."""

    prefix, kind, delta = "msg", "output_text", "response.output_text.delta"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self.pieces: list[StreamPiece] = []  # tokens of which more is told than their text
        self.logprobs = LongList(0, lambda _begin, _end: [])
        self.origins: LongList | None = None

    def append_delta(self, text: str) -> Told:
        """See ``OutputItem.append_delta``."""
        kind, values = super().append_delta(text)
        return kind, values | {"logprobs": []}

    def _part(self) -> dict[str, Any]:
        part = super()._part() | {"annotations": [], "logprobs": self.logprobs}
        return part | ({} if self.origins is None else {"tokens": self.origins})

    def _body(self) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [self._part()]}


class ReasoningItem(_SinglePartItem):
    """What the model thought."""

    prefix, kind, delta = "rs", "reasoning_text", "response.reasoning_text.delta"

    def _body(self) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [self._part()]}


class CallItem(OutputItem):
    """A call of the function ``name``, whose output is known by ``call_id``."""

    prefix, delta = "fc", "response.function_call_arguments.delta"

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, index)
        self._call_id, self._name = call_id, name

    def _body(self) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"type": "function_call", **call}

    def _empty(self) -> dict[str, Any]:
        return {}

    def _done(self) -> Iterator[Told]:
        told = {"name": self._name, "arguments": self.text}
        yield "response.function_call_arguments.done", {**self.where, **told}


class OutputItems:
    """The items of one response, of which the last may still grow; their ids end with ``name``."""

    def __init__(self, name: str, new_call_id: Callable[[], str]) -> None:
        self._name, self._new_call_id = name, new_call_id
        self._items: list[OutputItem] = []
        self.has_thought = False

    @property
    def open(self) -> OutputItem | None:
        """The item that still grows."""
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def take(self, events: Sequence[Event]) -> Iterator[Told]:
        """The events of what was read of the answer."""
        for found in join_neighbours(events):
            match found:
                case Content(text):
                    yield from self._grow(MessageItem, text)
                case ReasoningSpan(text):
                    self.has_thought = True
                    yield from self._grow(ReasoningItem, text)
                case CallBegin(name, call_id):
                    yield from self.end("completed")
                    item_id, index = self._next_item_id(CallItem)
                    yield from self._begin(CallItem(item_id, index, call_id or self._new_call_id(), name))
                case Arguments(text):
                    yield self._items[-1].append_delta(text)
                case CallEnd():
                    yield from self.end("completed")
                case _:  # its arguments turned out to be no JSON; what was sent stays sent
                    yield from self.end("incomplete")

    def begin_message(self) -> Iterator[Told]:
        """Begin a message, whatever will be in it."""
        yield from self._begin(MessageItem(*self._next_item_id(MessageItem)))

    def end(self, status: Status) -> Iterator[Told]:
        """End the item that still grows, if there is one."""
        if self.open is not None:
            yield from self._items[-1].end_events(status)

    def finish(self, *, is_cut: bool) -> Iterator[Told]:
        """End the answer, which has at least a message."""
        if not self._items:
            yield from self.begin_message()
        yield from self.end("incomplete" if is_cut else "completed")

    def to_json(self) -> list[dict[str, Any]]:
        """All of them."""
        return [item.to_json() for item in self._items]

    def _grow(self, kind: type[MessageItem] | type[ReasoningItem], text: str) -> Iterator[Told]:
        if not isinstance(self.open, kind):
            yield from self.end("completed")
            yield from self._begin(kind(*self._next_item_id(kind)))
        yield self._items[-1].append_delta(text)

    def _begin(self, item: OutputItem) -> Iterator[Told]:
        self._items.append(item)
        yield from item.begin_events()

    def _next_item_id(self, kind: type[OutputItem]) -> tuple[str, int]:
        """Id and index of the next item; ids of one kind are told apart by a number."""
        before = sum(isinstance(item, kind) for item in self._items)
        return f"{kind.prefix}_{self._name}" + (f"_{before}" if before else ""), len(self._items)
