"""What a generation gives back: results, and the pieces of a stream."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.records import RoundTrace
from specexport_runtime.requests.request import FinishReason, Request, RoundEvent
from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.sampling.logprobs import TokenLogprobs

Prompt = str | Sequence[int]
"""A text, or token ids."""
PieceKind = Literal["accepted", "corrected", "bonus", "target"]


class GenerationResult(NamedTuple):
    """One finished generation.

    Attributes:
        prompt: the prompt as it was given.
        text: what the tokens add to the decoded prompt, cut at a stop string.
        token_ids: generated token ids, the ending one included.
        finish_reason: ``"stop"`` (end token, stop id or stop string), ``"length"`` or ``"cancelled"``.
        stats: counters and times.
        trace: what each round did; None unless it was asked for.
        logprobs: log-probabilities, one entry for each token id; None unless they were asked for.
        prompt_logprobs: of the prompt, one entry for each of its tokens, None for the first; None unless asked for.
        drafters: who drafted each token; empty for the target's own.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    trace: list[RoundTrace] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafters: Sequence[str] = ()


class StreamPiece(NamedTuple):
    """Text that became safe to show with one token (may be empty), and where the token came from.

    ``kind`` is ``"accepted"`` (a draft token that passed), ``"corrected"`` (the target's token in place of a rejected
    one), ``"bonus"`` (the target's token after a draft that passed whole) or ``"target"`` (no draft was tested).
    ``logprobs`` is None unless the request asked for them. ``drafter`` is who drafted an accepted token, and empty for
    others. ``offset`` is how many characters of the text are before the token, if log-probabilities were asked for;
    one that a stop string ended may lie after the end of the text. ``is_branch``: an accepted token stood beside the
    chain of its draft.
    """

    text: str
    token_id: int
    kind: PieceKind
    logprobs: TokenLogprobs | None = None
    drafter: str = ""
    offset: int = 0
    is_branch: bool = False


class StreamChunk(NamedTuple):
    """The pieces of one round. The last chunk has a ``finish_reason``.

    Attributes:
        pieces: one a token.
        finish_reason: why the request ended; None while it goes on.
        stats: counters of the request up to now: one object, the same in all its chunks, which goes on counting.
        trace: what the round did; None unless it was asked for.
        drafted: draft tokens that the round tested, those of branches included.
    """

    pieces: list[StreamPiece]
    finish_reason: FinishReason | None
    stats: RequestStats
    trace: RoundTrace | None = None
    drafted: int = 0

    @property
    def text(self) -> str:
        """Text of all pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all pieces."""
        return [piece.token_id for piece in self.pieces]

    @property
    def drafters(self) -> list[str]:
        """Who drafted each token; empty for the target's own."""
        return [piece.drafter for piece in self.pieces]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or many, as a list. Token ids of one prompt are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise InvalidRequestError(f"the prompts are {prompts!r:.80}.", "give a text, token ids, or a list of either.")
    if len(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # the check above makes it token ids
    return list(prompts)  # type: ignore[arg-type]


def make_result(prompt: Prompt, req: Request) -> GenerationResult:
    """The result of a finished request."""
    return GenerationResult(
        prompt,
        req.finish_text(),
        req.output,
        req.finish_reason or "cancelled",
        req.stats,
        req.trace,
        req.logprobs,
        req.prompt_logprobs,
        req.drafters,
    )


def make_chunk(event: RoundEvent) -> StreamChunk:
    """The chunk of one round of a request that was made with ``stream=True``."""
    req = event.request
    count = len(event.tokens)
    texts = req.take_pieces(count)
    logprobs: Sequence[TokenLogprobs | None] = [None] * count if req.logprobs is None else req.logprobs[-count:]
    drafters = event.drafters
    pieces = [
        StreamPiece(text, event.tokens[j], piece_kind(event, j), logprobs[j], drafters[j], offset, event.is_branch(j))
        for j, (text, offset) in enumerate(texts)
    ]
    return StreamChunk(pieces, req.finish_reason, req.stats, req.trace[-1] if req.trace else None, event.drafted)


def piece_kind(event: RoundEvent, position: int) -> PieceKind:
    """Where the token at ``position`` of a round's tokens came from."""
    if not event.drafted:
        return "target"
    if position < event.accepted:
        return "accepted"
    return "bonus" if event.is_bonus else "corrected"
