"""JSON of a response and of its events, as OpenAI's Responses API has them.

One response is one message with one part, so far: an item that is not (a call of a tool, say) would be made in
``_item``, and begun and ended by events of its own.
"""

import json
import time
from collections.abc import Sequence as Seq
from typing import Any

from specexport_runtime.sequences.results import StreamPiece
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.responses import Header, chat_logprobs, origins_of
from specexport_runtime.server.responses_protocol import ResponsesRequest
from specexport_runtime.server.sse import named_event
from specexport_runtime.server.token_text import TokenTexts

_text = json.encoder.encode_basestring_ascii
_DELTA = "response.output_text.delta"


class ResponsesFormat:
    """JSON of one response; remembers what was streamed, because the last events tell it again.

    Args:
        body: what was asked for.
        header: what all its parts repeat.
        texts: of tokens; None for no log-probabilities.
        origins: say where each token came from.
        include_usage: not looked at: the last event always has the usage.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        header: Header,
        *,
        texts: TokenTexts | None,
        origins: bool,
        include_usage: bool,  # noqa: ARG002
    ) -> None:
        self._header, self._texts, self._origins = header, texts, origins
        self._asked = _echo(body)
        self._item_id = f"msg_{header.id.partition('_')[2]}"
        self._where = f'"item_id":{_text(self._item_id)},"output_index":0,"content_index":0'
        self._count = 0  # of events
        self._said: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._tokens: list[dict[str, str]] = []
        self._finish: str | None = None

    def opening(self, index: int, echo: str) -> bytes:  # noqa: ARG002  # one choice, and no echo
        """The events before the first token."""
        response = self._response("in_progress", [], None)
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        item = self._item("in_progress") | {"content": []}
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **where, part=self._part()),
            ]
        )

    def chunk(
        self,
        index: int,  # noqa: ARG002
        pieces: Seq[StreamPiece],
        finish: str | None,
        offset: int,  # noqa: ARG002
        drafted: int,
        usage: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> bytes:
        """The event of new tokens; empty if there is nothing to tell."""
        self._finish = finish or self._finish
        text = self._take(pieces)
        if not pieces or not (text or self._origins or self._texts):
            return b""
        logprobs = "[]" if self._texts is None else json.dumps(chat_logprobs(pieces, self._texts))
        more = f',"tokens":{json.dumps(origins_of(pieces))},"drafted":{drafted}' if self._origins else ""
        number, self._count = self._count, self._count + 1
        return (
            f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","sequence_number":{number},{self._where},'
            f'"delta":{_text(text)},"logprobs":{logprobs}{more}}}\n\n'
        ).encode()

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream."""
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        part, status = self._part(), self._status()
        item = self._item(status)
        return b"".join(
            [
                self._event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **where, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=self._response(status, [item], usage)),
            ]
        )

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream that failed."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        failed = self._response("failed", [self._item("incomplete")], None)
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("error", **told) + self._event("response.failed", response=failed)

    def choice(self, index: int, text: str, pieces: Seq[StreamPiece], finish: str) -> dict[str, Any]:  # noqa: ARG002
        """The item of an answer that is not streamed."""
        self._take(pieces)
        self._said, self._finish = [text], finish
        return self._item(self._status())

    def whole(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any],
        prompt_logprobs: list[Any] | None = None,  # noqa: ARG002  # there is no such parameter
    ) -> bytes:
        """An answer that is not streamed."""
        return json.dumps(self._response(self._status(), choices, usage)).encode()

    def _take(self, pieces: Seq[StreamPiece]) -> str:
        """Remember new tokens; their text."""
        text = "".join([piece.text for piece in pieces])
        self._said.append(text)
        if self._texts is not None:
            self._logprobs += chat_logprobs(pieces, self._texts)
        if self._origins:
            self._tokens += origins_of(pieces)
        return text

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _part(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "".join(self._said), "annotations": [], "logprobs": self._logprobs}
        return part | ({"tokens": self._tokens} if self._origins else {})

    def _item(self, status: str) -> dict[str, Any]:
        head = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return {**head, "content": [self._part()]}

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
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
            "output": output,
            "usage": None if usage is None else _usage(usage),
            **self._asked,
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **values})


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request, with the values that were left out."""
    form = None if body.text is None else body.text.format
    told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": told},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat's usage by the names of this API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "speculative": usage["speculative"],
    }
