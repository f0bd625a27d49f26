"""JSON of answers and of chunks, as each endpoint has it. Chunks are put together from prepared text: no models."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.requests.stats import RequestStats, sum_by_drafter, sum_counts
from specexport_runtime.sampling.logprobs import TokenLogprobs
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.json_text import LongList, json_text
from specexport_runtime.server.sse import DONE, event
from specexport_runtime.server.token_text import TokenTexts

_text = json.encoder.encode_basestring_ascii

MAX_ENTRIES = 2**20
"""Most log-probabilities in one answer, alternatives included; as many again of prompts: a hundred megabytes each."""


class Header(NamedTuple):
    """What all parts of an answer repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class AnswerFormat(ABC):
    """JSON of one answer; all its parts repeat the header, and ``origins`` say where each token came from.

    ``texts`` are None for no log-probabilities; ``include_usage`` gives every chunk a key ``usage``, as OpenAI's.
    """

    closes_briefly = True
    whole_object: str
    chunk_object: str

    def __init__(self, header: Header, *, texts: TokenTexts | None, origins: bool, include_usage: bool) -> None:
        self._header, self._texts, self._origins = header, texts, origins
        self._include_usage = include_usage
        parts = json.dumps(self._head(self.chunk_object), separators=(",", ":"))
        self._before = f'data: {parts[:-1]},"choices":[{{"index":'
        self._after = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def chunk(
        self,
        index: int,  # the choice
        pieces: Sequence[StreamPiece],  # its new tokens
        finish: str | None,  # why it ended; None while it goes on
        drafted: int,  # draft tokens that were tested for them
        usage: dict[str, Any] | None = None,  # of the answer so far; None for none
    ) -> bytes:
        """The event of what one choice got; empty if there is nothing to tell."""
        text = pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])
        if not text and finish is None and not self._origins and self._texts is None:
            return b""
        return self._event(index, self._delta(text), pieces, finish, drafted, usage)

    def _event(
        self,
        index: int,
        delta: str,
        pieces: Sequence[StreamPiece],
        finish: str | None,
        drafted: int,
        usage: dict[str, Any] | None,
    ) -> bytes:
        """An event of one choice; arguments as :meth:`chunk`, ``delta`` is its JSON text."""
        more = "" if finish is None else f'"{finish}"'
        logprobs = "null" if self._texts is None or not pieces else json_text(self._logprobs(pieces))
        origins = f',"tokens":{json.dumps(list_origins(pieces))},"drafted":{drafted}' if self._origins else ""
        body = f'{delta},"logprobs":{logprobs},"finish_reason":{more or "null"}{origins}'
        after = self._after if usage is None else f'}}],"usage":{json.dumps(usage)}}}\n\n'
        return f"{self._before}{index},{body}{after}".encode()

    def opening(self, index: int, echo: str) -> bytes:
        """The event before the first token of a choice, if there is one."""
        delta = self._opening(echo)
        if delta is None:
            return b""
        return f'{self._before}{index},{delta},"logprobs":null,"finish_reason":null{self._after}'.encode()

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream."""
        last = self._head(self.chunk_object) | {"choices": [], "usage": usage}
        return (event(last) if self._include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream that failed."""
        return event(error.body())

    def choice(self, index: int, text: str, pieces: Sequence[StreamPiece], finish: str) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""
        return self._choice(index, self._content(text), pieces, finish)

    def _choice(
        self, index: int, content: dict[str, Any], pieces: Sequence[StreamPiece], finish: str
    ) -> dict[str, Any]:
        logprobs = None if self._texts is None else self._logprobs(pieces)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return choice | ({"tokens": make_lazy_origins(pieces)} if self._origins else {})

    def whole(
        self, choices: list[dict[str, Any]], usage: dict[str, Any], prompt_logprobs: list[Any] | None = None
    ) -> bytes:
        """An answer that is not streamed; ``prompt_logprobs`` are those of each choice's prompt."""
        answer = self._head(self.whole_object) | {"choices": choices, "usage": usage}
        if prompt_logprobs is not None:
            self._add_prompt_logprobs(prompt_logprobs, answer)
        return json_text(answer).encode()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"object": kind, **self._header._asdict()}

    def _logprobs(self, pieces: Sequence[StreamPiece]) -> dict[str, Any]:
        assert self._texts is not None  # noqa: S101  # callers check
        return self._build_logprobs(pieces, self._texts)

    @abstractmethod
    def _delta(self, text: str) -> str: ...

    @abstractmethod
    def _opening(self, echo: str) -> str | None: ...

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _add_prompt_logprobs(self, prompt_logprobs: list[Any], answer: dict[str, Any]) -> None: ...

    @abstractmethod
    def _build_logprobs(self, pieces: Sequence[StreamPiece], texts: TokenTexts) -> dict[str, Any]: ...


class CompletionFormat(AnswerFormat):
    """Of ``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _delta(self, text: str) -> str:
        return f'"text":{_text(text)}'

    def _opening(self, echo: str) -> str | None:
        return self._delta(echo) if echo else None

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _add_prompt_logprobs(self, prompt_logprobs: list[Any], answer: dict[str, Any]) -> None:
        for choice, each in zip(answer["choices"], prompt_logprobs, strict=True):
            choice["prompt_logprobs"] = each

    def _build_logprobs(self, pieces: Sequence[StreamPiece], texts: TokenTexts) -> dict[str, Any]:
        tokens, offsets = [], [piece.offset for piece in pieces]
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for piece, behind in zip(pieces, [*offsets[1:], 1], strict=True):
            own = texts[piece.token_id].text
            if piece.offset == 0:
                own = _format_first_token(own, piece.text, is_shown=behind > 0)
            tokens.append(own)
            if piece.logprobs is None:  # the first token of a prompt follows nothing
                values.append(None)
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token, value in (*piece.logprobs.top, (piece.token_id, piece.logprobs.logprob)):
                name = own if token == piece.token_id else texts[token].text
                top.setdefault(name, clamp_logprob(value))  # the likelier one of two that read the same
            values.append(clamp_logprob(piece.logprobs.logprob))
            tops.append(top)
        told = LongList(len(tops), lambda begin, end: tops[begin:end])
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": told, "text_offset": offsets}


class ChatFormat(AnswerFormat):
    """Of ``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _delta(self, text: str) -> str:
        return f'"delta":{{"content":{_text(text)}}}' if text else '"delta":{}'

    def _opening(self, echo: str) -> str | None:  # noqa: ARG002  # chats have no echo
        return '"delta":{"role":"assistant","content":""}'

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _add_prompt_logprobs(self, prompt_logprobs: list[Any], answer: dict[str, Any]) -> None:
        answer["prompt_logprobs"] = prompt_logprobs[0]  # a chat has one prompt

    def _build_logprobs(self, pieces: Sequence[StreamPiece], texts: TokenTexts) -> dict[str, Any]:
        return {"content": make_lazy_chat_logprobs(pieces, texts), "refusal": None}


def _format_first_token(name: str, shown: str, *, is_shown: bool) -> str:
    """A token that may be the first of a text: decoders show it without its space, or with its ``##``."""
    if shown and (name.endswith(shown) or shown.endswith(name)):
        return shown
    return "" if name.isspace() and not is_shown else name


def build_usage(num_prompt_tokens: int, stats: Sequence[RequestStats], cached_tokens: int = 0) -> dict[str, Any]:
    """Tokens and draft tokens of all choices and prompts; of the prompts ``cached_tokens`` were not read again."""
    generated = sum(item.num_generated_tokens for item in stats)
    drafters = sum_by_drafter(item.drafters for item in stats)
    drafts = sum_counts(drafters.values())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": num_prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "speculative": {
            "rounds": sum(item.rounds for item in stats),
            "drafted": drafts.drafted,
            "accepted": drafts.accepted,
            "branches": drafts.branches,
            "accepted_branches": drafts.accepted_branches,
            "acceptance_rate": drafts.accepted / drafts.drafted if drafts.drafted else None,
            "mean_accepted_length": 1 + drafts.accepted / drafts.rounds if drafts.rounds else None,
            "drafters": {name: counts.to_json() for name, counts in drafters.items()},
        },
    }


def make_lazy_origins(pieces: Sequence[StreamPiece]) -> LongList:
    """Where each token came from, made when it is written."""
    return LongList(len(pieces), lambda begin, end: list_origins(pieces[begin:end]))


def list_origins(pieces: Sequence[StreamPiece]) -> list[dict[str, Any]]:
    """Where each token came from."""
    return [
        {"text": piece.text, "kind": piece.kind}
        | ({"drafter": piece.drafter} if piece.drafter else {})
        | ({"branch": True} if piece.is_branch else {})
        for piece in pieces
    ]


def make_lazy_chat_logprobs(pieces: Sequence[StreamPiece], texts: TokenTexts) -> LongList:
    """Log-probabilities of tokens as chats have them, made when they are written: they take ten times their JSON."""
    return LongList(len(pieces), lambda begin, end: chat_logprobs(pieces[begin:end], texts))


def chat_logprobs(pieces: Sequence[StreamPiece], texts: TokenTexts) -> list[dict[str, Any]]:
    """Log-probabilities of tokens as chats have them."""
    content = []
    for piece in pieces:
        assert piece.logprobs is not None  # noqa: S101  # the plan asked for them
        top = [_chat_token(texts, token, value) for token, value in piece.logprobs.top]
        content.append(_chat_token(texts, piece.token_id, piece.logprobs.logprob) | {"top_logprobs": top})
    return content


def _chat_token(texts: TokenTexts, token: int, value: float) -> dict[str, Any]:
    text = texts[token]
    return {"token": text.text, "logprob": clamp_logprob(value), "bytes": list(text.data)}


def clamp_logprob(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot be."""
    return max(logprob, -9999.0)


def max_logprob_tokens(num_choices: int, alternatives: int) -> int:
    """Tokens of each choice whose log-probabilities an answer holds."""
    return MAX_ENTRIES // (num_choices * (1 + alternatives))


def check_logprob_count(param: str, what: str, num_tokens: int, alternatives: int) -> None:
    """Refuse (``ApiError`` 400, for ``param``) log-probabilities that would not fit into the server's memory."""
    count = num_tokens * (1 + alternatives)
    if count > MAX_ENTRIES:
        raise ApiError(
            400,
            f"{param}: {num_tokens} {what} with {alternatives} alternatives each are {count} "
            f"log-probabilities; an answer holds {MAX_ENTRIES}: ask for fewer tokens, or alternatives.",
            param=param,
            code="limit_exceeded",
        )


def prompt_pieces(
    entries: Sequence[TokenLogprobs | None], ids: Sequence[int], texts: TokenTexts, params: SamplingParams
) -> list[StreamPiece]:
    """The tokens of a prompt that was scored, an entry each, as pieces of an echo."""
    shown, pieces = texts.stream(params), []
    for token, entry in zip(ids, entries, strict=True):
        offset = shown.length
        shown.append(token)
        pieces.append(StreamPiece(shown.take(), token, "target", entry, offset=offset))
    return pieces


def prompt_logprobs_json(entries: Sequence[TokenLogprobs | None], texts: TokenTexts, alternatives: int) -> LongList:
    """The ``prompt_logprobs`` of vLLM: None, then a dict for each: the prompt's own token, and the likeliest."""

    def made(begin: int, end: int) -> list[Any]:
        return [None if each is None else _token_json(each, texts, alternatives) for each in entries[begin:end]]

    return LongList(len(entries), made)


def _token_json(entry: TokenLogprobs, texts: TokenTexts, alternatives: int) -> dict[str, Any]:
    found = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token, value) in enumerate(entry.top[:alternatives], 1):
        found.setdefault(token, (value, rank))
    return {
        str(token): {"logprob": clamp_logprob(value), "rank": rank, "decoded_token": texts[token].text}
        for token, (value, rank) in found.items()
    }
