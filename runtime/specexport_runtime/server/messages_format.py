"""JSON of a message of ``/v1/messages`` and of its events, as Anthropic's API has them."""

from collections.abc import Iterable, Iterator, Sequence
from secrets import token_hex
from typing import Any

from specexport_runtime.intake.answer_reader import AnswerReader, AnswerSyntax, join_neighbours, read_whole
from specexport_runtime.intake.tool_formats.base import Arguments, CallBegin, CallEnd, Content, Event, ReasoningSpan
from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.server.answer_format import Header
from specexport_runtime.server.errors import ApiError, build_messages_error
from specexport_runtime.server.json_text import JsonText, json_text
from specexport_runtime.server.messages_protocol import MessagesRequest
from specexport_runtime.server.sse import named_event
from specexport_runtime.server.translate import RequestPlan

Told = tuple[str, dict[str, Any]]
"""An event: its type, and its values."""
_GOES_ON: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}


class MessagesFormat:
    """JSON of one message. Its thinking is signed with its id: some clients drop what has no signature."""

    closes_briefly = True

    def __init__(self, body: MessagesRequest, plan: RequestPlan, header: Header, **_: Any) -> None:
        self._id, self._model = header.id, header.model
        self._num_prompt_tokens, self._stops = plan.num_prompt_tokens, body.stop_sequences or ()
        room = plan.specs[0].params.max_tokens
        self._at_length = "max_tokens" if room == body.max_tokens else "model_context_window_exceeded"
        self._syntax = AnswerSyntax() if plan.conversation is None else plan.conversation.syntax
        self._new_call_id = token_hex if plan.conversation is None else plan.conversation.dialect.new_id
        self._reader = AnswerReader(self._syntax)
        self._count, self._open = 0, ""  # blocks that have begun; the type of the one that still grows
        self._has_called = False
        self._finish, self._stop_sequence = "", ""  # why it ended, if a text that was asked for did by which

    def opening(self, *_: Any) -> bytes:
        """The event before the first token."""
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": self._num_prompt_tokens, **cache, "output_tokens": 0}
        return _write_events([("message_start", {"message": self._build_message([], _GOES_ON, usage)})])

    def chunk(self, _: int, pieces: Sequence[StreamPiece], finish: str | None, *__: Any) -> bytes:
        """The events of new tokens; empty if there is nothing to tell."""
        found = self._reader.take(self._remove_stop_sequence("".join([piece.text for piece in pieces]), finish))
        if finish is not None:
            found += self._reader.finish(is_cut=finish == "length")
        return _write_events(self._read_events(found))

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream."""
        delta = {"delta": self._build_stop_fields(), "usage": _convert_usage(usage)}
        return _write_events([*self._end_block(), ("message_delta", delta), ("message_stop", {})])

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream that failed."""
        return named_event("error", build_messages_error(error, self._id.partition("_")[2]))

    def choice(self, _: int, text: str, __: Sequence[StreamPiece], finish: str) -> dict[str, Any]:
        """The blocks of an answer that is not streamed; a call that was cut off is text, so that nobody runs it."""
        text = self._remove_stop_sequence(text, finish)
        return {"content": self._build_blocks(read_whole(self._syntax, text, is_cut=False))}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], _: Any = None) -> bytes:
        """An answer that is not streamed."""
        message = self._build_message(choices[0]["content"], self._build_stop_fields(), _convert_usage(usage))
        return json_text(message).encode()

    def _remove_stop_sequence(self, text: str, finish: str | None) -> str:
        """The last text without the stop sequence that ended it: of two that end alike the one that began first."""
        self._finish = finish or self._finish
        if finish == "stop":
            self._stop_sequence = max((stop for stop in self._stops if text.endswith(stop)), key=len, default="")
        return text.removesuffix(self._stop_sequence)

    def _build_stop_fields(self) -> dict[str, str | None]:
        """Why the answer ended."""
        if self._stop_sequence:
            reason = "stop_sequence"
        elif self._finish == "length":
            reason = self._at_length
        else:
            reason = "tool_use" if self._has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence or None}

    def _build_message(self, content: list[Any], end: dict[str, str | None], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **end, "usage": usage}

    def _build_blocks(self, found: Sequence[Event]) -> list[dict[str, Any]]:
        """The blocks of a whole answer, of their events; arguments are told as the model wrote them."""
        blocks: list[dict[str, Any]] = []
        for kind, told in (*self._read_events(found), *self._end_block()):
            if kind == "content_block_start":
                blocks.append(told["content_block"])
            elif kind == "content_block_delta":
                _, (name, text) = told["delta"].items()
                blocks[-1] |= {"input": JsonText(text)} if name == "partial_json" else {name: text}
        return blocks

    def _read_events(self, found: Sequence[Event]) -> Iterator[Told]:
        """The events of what was read of the answer."""
        for event in join_neighbours(found):
            match event:
                case Content(text):
                    yield from self._begin_block({"type": "text", "text": ""}, again=False)
                    yield self._make_delta("text_delta", text=text)
                case ReasoningSpan(text):
                    yield from self._begin_block({"type": "thinking", "thinking": "", "signature": ""}, again=False)
                    yield self._make_delta("thinking_delta", thinking=text)
                case CallBegin(name):
                    call = {"type": "tool_use", "id": self._new_call_id(), "name": name, "input": {}}
                    yield from self._begin_block(call)
                case Arguments(text):
                    yield self._make_delta("input_json_delta", partial_json=text)
                case _:  # of a broken one, what was sent stays sent
                    self._has_called |= isinstance(event, CallEnd)
                    yield from self._end_block()

    def _begin_block(self, block: dict[str, Any], *, again: bool = True) -> Iterator[Told]:
        """Begin a block; not if one of its type still grows, unless ``again``."""
        if not again and self._open == block["type"]:
            return
        yield from self._end_block()
        self._open, self._count = block["type"], self._count + 1
        yield "content_block_start", {"index": self._count - 1, "content_block": block}

    def _end_block(self) -> Iterator[Told]:
        """End the block that still grows, if there is one."""
        if self._open == "thinking":
            yield self._make_delta("signature_delta", signature=self._id)
        if self._open:
            yield "content_block_stop", {"index": self._count - 1}
        self._open = ""

    def _make_delta(self, kind: str, **more: str) -> Told:
        return "content_block_delta", {"index": self._count - 1, "delta": {"type": kind, **more}}


def _write_events(told: Iterable[Told]) -> bytes:
    return b"".join([named_event(kind, {"type": kind, **values}) for kind, values in told])


def _convert_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat's usage as here, where what a cache row had is counted apart; nothing is charged for what is written."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "speculative": usage["speculative"],
    }
