"""``/v1/chat/completions``, and answers of chats that have calls of functions, or thinking."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from specexport_runtime.intake.answer_reader import AnswerReader, join_neighbours, read_parts
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.tool_formats.base import Arguments, CallBegin, Content, Event, ReasoningSpan
from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.server.answer import AnswerForm
from specexport_runtime.server.answer_format import ChatFormat, Header
from specexport_runtime.server.answer_schema import ChatAnswer
from specexport_runtime.server.completions import answer
from specexport_runtime.server.conversation import ParsedConversation
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.protocol import ChatRequest
from specexport_runtime.server.token_text import TokenTexts
from specexport_runtime.server.translate import RequestPlan, plan_chat

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses=responses(ChatAnswer),
    openapi_extra=request_body(ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, "chatcmpl-", ChatRequest, plan_chat, _choose_format)


def _choose_format(_: ChatRequest, plan: RequestPlan) -> Callable[..., AnswerForm]:
    form = ChatFormat if plan.conversation is None else partial(PartsFormat, plan.conversation)
    return partial(form, include_usage=plan.include_usage)


class PartsFormat(ChatFormat):
    """Of ``/v1/chat/completions``, where answers are read for calls and thinking as the conversation says."""

    def __init__(
        self,
        conversation: ParsedConversation,
        header: Header,
        *,
        texts: TokenTexts | None,
        origins: bool,
        include_usage: bool,
    ) -> None:
        super().__init__(header, texts=texts, origins=origins, include_usage=include_usage)
        self._syntax, self._dialect = conversation.syntax, conversation.dialect
        self._read: dict[int, tuple[AnswerReader, _Deltas]] = {}

    def chunk(
        self,
        index: int,
        pieces: Sequence[StreamPiece],
        finish: str | None,
        drafted: int,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The events of what one choice got; see ``AnswerFormat.chunk``. Its tokens are those of the first one."""
        if index not in self._read:
            self._read[index] = AnswerReader(self._syntax), _Deltas(self._dialect)
        reader, deltas = self._read[index]
        found = reader.take("".join([piece.text for piece in pieces]))
        if finish is not None:
            found += reader.finish(is_cut=finish == "length")
            finish = "tool_calls" if finish == "stop" and reader.num_calls else finish
        told = list(deltas.of(found))
        if not told and (finish is not None or self._origins or self._texts is not None):
            told = [{}]
        events = []
        for i, delta in enumerate(told):
            own, tested = (pieces, drafted) if i == 0 else ((), 0)
            end = finish if i == len(told) - 1 else None
            text = f'"delta":{json.dumps(delta, separators=(",", ":"))}'
            events.append(self._event(index, text, own, end, tested, usage))
        return b"".join(events)

    def choice(self, index: int, text: str, pieces: Sequence[StreamPiece], finish: str) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        parts = read_parts(self._syntax, text, is_cut=finish == "length")
        empty = None if parts.calls or parts.reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": parts.content or empty, "refusal": None}
        if self._syntax.thinking is not None:
            message |= {"reasoning_content": parts.reasoning or None, "reasoning": parts.reasoning or None}
        if parts.calls:
            message["tool_calls"] = [
                _call(call.id or self._dialect.new_id(), call.name, call.arguments) for call in parts.calls
            ]
            finish = "tool_calls" if finish == "stop" else finish
        return self._choice(index, {"message": message}, pieces, finish)


class _Deltas:
    """From what was read of one choice to deltas, as OpenAI's: neighbours of a kind are one."""

    def __init__(self, dialect: ChatDialect) -> None:
        self._dialect, self._calls = dialect, -1

    def of(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        for event in join_neighbours(events):
            match event:
                case Content(text):
                    yield {"content": text}
                case ReasoningSpan(text):
                    yield {"reasoning_content": text, "reasoning": text}
                case CallBegin(name, call_id):
                    self._calls += 1
                    yield {"tool_calls": [{"index": self._calls, **_call(call_id or self._dialect.new_id(), name, "")}]}
                case Arguments(text):
                    yield {"tool_calls": [{"index": self._calls, "function": {"arguments": text}}]}


def _call(name_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": name_id, "type": "function", "function": {"name": name, "arguments": arguments}}
