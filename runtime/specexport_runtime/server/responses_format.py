"""JSON of a response and of its events, as OpenAI's Responses API has them; ``responses_items`` has its items."""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from specexport_runtime.intake.answer_reader import AnswerReader, read_whole
from specexport_runtime.intake.tool_formats.base import Content, Event
from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.server.answer_format import Header, list_origins, make_lazy_chat_logprobs, make_lazy_origins
from specexport_runtime.server.conversation import ParsedConversation
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.json_text import json_text
from specexport_runtime.server.responses_items import MessageItem, OutputItems, Told
from specexport_runtime.server.responses_protocol import ResponsesRequest
from specexport_runtime.server.sse import named_event
from specexport_runtime.server.token_text import TokenTexts

_text = json.encoder.encode_basestring_ascii


class ResponsesFormat:
    """JSON of one response; remembers what was streamed, because the last events tell it again, with the usage.

    ``conversation`` is None for answers of one message, ``texts`` for no log-probabilities.
    """

    closes_briefly = False

    def __init__(
        self,
        body: ResponsesRequest,
        conversation: ParsedConversation | None,
        header: Header,
        *,
        texts: TokenTexts | None,
        origins: bool,  # say where each token came from
    ) -> None:
        self._header, self._texts, self._origins = header, texts, origins
        self._asked = _echo(body)
        self._syntax = None if conversation is None else conversation.syntax
        self._reader = None if self._syntax is None else AnswerReader(self._syntax)
        self._thought = _ThinkingCounter(None if conversation is None else conversation.dialect.end_of_thinking)
        new_call_id = secrets.token_hex if conversation is None else conversation.dialect.new_id
        self._items = OutputItems(header.id.partition("_")[2], new_call_id)
        self._count = 0  # of events
        self._before_delta = ""  # of the event of more text, where the answer is one message
        self._finish: str | None = None

    def opening(self, index: int, echo: str) -> bytes:  # noqa: ARG002  # one choice, and no echo
        """The events before the first token."""
        response = self._response("in_progress", None)
        told: list[Told] = [(f"response.{kind}", {"response": response}) for kind in ("created", "in_progress")]
        return self._events(told + (list(self._items.begin_message()) if self._reader is None else []))

    def chunk(
        self,
        index: int,  # noqa: ARG002
        pieces: Sequence[StreamPiece],
        finish: str | None,
        drafted: int,
        usage: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> bytes:
        """The events of new tokens; empty if there is nothing to tell."""
        self._finish = finish or self._finish
        text = "".join([piece.text for piece in pieces])
        if self._reader is None:
            return self._delta(text, pieces, drafted)
        self._thought.take(pieces)
        found: list[Event] = self._reader.take(text)
        if finish is not None:
            found += self._reader.finish(is_cut=finish == "length")
        return self._events(self._items.take(found))

    def _delta(self, text: str, pieces: Sequence[StreamPiece], drafted: int) -> bytes:
        """The event of more text of the only message, put together by hand: it comes once a round."""
        message = self._items.open
        assert isinstance(message, MessageItem)  # noqa: S101  # it was begun before the first token
        message.append_text(text)
        self._record_pieces(message, pieces)
        if not pieces or not (text or self._origins or self._texts):
            return b""
        logprobs = "[]" if self._texts is None else json_text(make_lazy_chat_logprobs(pieces, self._texts))
        more = f',"tokens":{json.dumps(list_origins(pieces))},"drafted":{drafted}' if self._origins else ""
        if not self._before_delta:
            where = json.dumps(message.where, separators=(",", ":"))[1:-1]
            self._before_delta = f'event: {message.delta}\ndata: {{"type":"{message.delta}",{where},"sequence_number":'
        number, self._count = self._count, self._count + 1
        event = f'{self._before_delta}{number},"delta":{_text(text)},"logprobs":{logprobs}{more}}}\n\n'
        return event.encode()

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream."""
        told = list(self._items.finish(is_cut=self._finish == "length"))
        status = self._status()
        return self._events([*told, (f"response.{status}", {"response": self._response(status, usage)})])

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream that failed."""
        for _ in self._items.end("incomplete"):
            pass  # clients hear of the failure alone
        failed = self._response("failed", None)
        failed["error"] = {"code": "server_error", "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._events([("error", told), ("response.failed", {"response": failed})])

    def choice(self, index: int, text: str, pieces: Sequence[StreamPiece], finish: str) -> dict[str, Any]:  # noqa: ARG002
        """The output of an answer that is not streamed."""
        self._finish = finish
        if self._syntax is None:
            found: list[Event] = [Content(text)]
        else:
            found = read_whole(self._syntax, text, is_cut=finish == "length")
            self._thought.take(pieces)
        for _ in self._items.take(found):
            pass  # events are for streams
        if isinstance(message := self._items.open, MessageItem) and self._syntax is None:
            self._record_pieces(message, pieces)
        for _ in self._items.finish(is_cut=finish == "length"):
            pass
        return {}

    def whole(
        self,
        choices: list[dict[str, Any]],  # noqa: ARG002  # one, whose items are remembered
        usage: dict[str, Any],
        prompt_logprobs: list[Any] | None = None,  # noqa: ARG002  # there is no such parameter
    ) -> bytes:
        """An answer that is not streamed."""
        return json_text(self._response(self._status(), usage)).encode()

    def _record_pieces(self, message: MessageItem, pieces: Sequence[StreamPiece]) -> None:
        """Remember what is told of each token."""
        if self._texts is not None or self._origins:
            message.pieces += pieces
        if self._texts is not None:
            message.logprobs = make_lazy_chat_logprobs(message.pieces, self._texts)
        if self._origins:
            message.origins = make_lazy_origins(message.pieces)

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._header.id,
            "object": "response",
            "created_at": self._header.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._header.model,
            "system_fingerprint": self._header.system_fingerprint,
            "output": self._items.to_json(),
            "usage": None if usage is None else _usage(usage, self._thought.count if self._items.has_thought else 0),
            **self._asked,
        }

    def _events(self, told: Iterable[Told]) -> bytes:
        events = []
        for kind, values in told:
            events.append(named_event(kind, {"type": kind, "sequence_number": self._count, **values}))
            self._count += 1
        return b"".join(events)


class _ThinkingCounter:
    """Counts the tokens of an answer up to ``end``, which ends its thinking; None: nothing is counted."""

    def __init__(self, end: int | None) -> None:
        self._end, self.count = end, 0

    def take(self, pieces: Sequence[StreamPiece]) -> None:
        """Count new tokens."""
        for piece in pieces:
            if self._end is None:
                return
            self.count += 1
            if piece.token_id == self._end:
                self._end = None


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request, with the values that were left out."""
    form, choice = None if body.text is None else body.text.format, body.tool_choice or "auto"
    told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": told},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage: dict[str, Any], thought: int) -> dict[str, Any]:
    """A chat's usage by the names of this API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
        "speculative": usage["speculative"],
    }
