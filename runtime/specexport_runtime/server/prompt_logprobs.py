"""Log-probabilities of prompts: how many of them an answer may hold, and vLLM's JSON of them."""

from collections.abc import Sequence as Seq
from typing import Any

from specexport_runtime.sampling.logprobs import TokenLogprobs
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.results import StreamPiece
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.responses import finite
from specexport_runtime.server.token_text import TokenTexts

MAX_ENTRIES = 2**20
"""Most log-probabilities of prompts in one answer, alternatives included: a hundred megabytes while it is made."""


def check_entries(param: str, num_prompt_tokens: int, alternatives: int) -> None:
    """Refuse (``ApiError`` 400, for ``param``) log-probabilities that would not fit into the server's memory.

    ``num_prompt_tokens`` is of all prompts, ``alternatives`` of each token.
    """
    count = num_prompt_tokens * (1 + alternatives)
    if count > MAX_ENTRIES:
        raise ApiError(
            400,
            f"{param}: {num_prompt_tokens} prompt tokens with {alternatives} alternatives each are {count} "
            f"log-probabilities; an answer holds {MAX_ENTRIES}: send fewer prompts, or ask for fewer alternatives.",
            param=param,
            code="limit_exceeded",
        )


def prompt_pieces(
    entries: Seq[TokenLogprobs | None], ids: Seq[int], texts: TokenTexts, params: SamplingParams
) -> list[StreamPiece]:
    """The tokens of a prompt that was scored, an entry each, as pieces of an echo."""
    shown, pieces = texts.stream(params), []
    for token, entry in zip(ids, entries, strict=True):
        offset = shown.length
        shown.append(token)
        pieces.append(StreamPiece(shown.take(), token, "target", entry, offset=offset))
    return pieces


def prompt_logprobs_json(
    entries: Seq[TokenLogprobs | None], texts: TokenTexts, alternatives: int
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of vLLM: None for the first token, then a dict by token id for each.

    A dict has the prompt's own token first, then the likeliest in its place, ``alternatives`` of them; one that is both
    is there once.
    """
    return [None if entry is None else _token_json(entry, texts, alternatives) for entry in entries]


def _token_json(entry: TokenLogprobs, texts: TokenTexts, alternatives: int) -> dict[str, Any]:
    found = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token, value) in enumerate(entry.top[:alternatives], 1):
        found.setdefault(token, (value, rank))
    return {
        str(token): {"logprob": finite(value), "rank": rank, "decoded_token": texts[token].text}
        for token, (value, rank) in found.items()
    }
