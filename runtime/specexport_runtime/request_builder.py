"""From what a caller asks for to the state of a sequence: encoding, checks, how to draft."""

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests import (
    DraftDefaults,
    RequestOptions,
    check_token_ids,
    check_token_range,
    resolve_draft_plan,
)
from specexport_runtime.results import Prompt
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.sequence import Sequence
from specexport_runtime.text import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class RequestBuilder:
    """What every request of an engine is checked against.

    Attributes:
        tokenizer: tokenizer of all models.
        vocab_size: rows of the target's LM head (V).
        max_model_len: most tokens of one sequence, prompt included.
        lookahead: largest K.
        has_draft: there is a draft model.
        eos_token_ids: ids that end a text.
        defaults: how to draft for requests that do not say.
    """

    tokenizer: "Tokenizer"
    vocab_size: int
    max_model_len: int
    lookahead: int
    has_draft: bool
    eos_token_ids: tuple[int, ...]
    defaults: DraftDefaults

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        ids = (
            [] if not len(prompt) else self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else _plain(prompt)
        )
        check_token_ids(ids, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        return ids

    def encode_reference(self, reference: Prompt | None) -> list[int]:
        """Token ids of a reference text, without special tokens; none for None or an empty text.

        Raises:
            InvalidRequestError: it has ids out of range.
        """
        if reference is None or not len(reference):
            return []
        if isinstance(reference, str):
            ids: list[int] = self.tokenizer.encode(reference, add_special_tokens=False).ids
            return ids
        ids = _plain(reference)
        check_token_range(ids, vocab_size=self.vocab_size, what="the reference")
        return ids

    def build(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        reference: Prompt | None = None,
        *,
        stream: bool = False,
    ) -> Sequence:
        """The sequence of one request.

        Args:
            index: the caller's number for it.
            prompt: a text or token ids.
            params: sampling parameters.
            options: how to draft.
            reference: what lookup may copy from.
            stream: keep the text of each token.

        Raises:
            InvalidRequestError: the request can never be served.
        """
        plan = resolve_draft_plan(*options, has_draft=self.has_draft, built=self.lookahead, defaults=self.defaults)
        if reference is not None and not any(stage.drafter == "lookup" for stage in plan):
            raise InvalidRequestError(
                "a reference is copied from by lookup only.", "use drafter 'lookup' or 'chained'."
            )
        return Sequence(
            index,
            self.encode(prompt),
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            text=TextStream(self.tokenizer, params),
            stream=stream,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            draft_plan=plan,
            reference=self.encode_reference(reference),
        )


def _plain(ids: Seq[int]) -> list[int]:
    return [int(token) if isinstance(token, np.integer) else token for token in ids]
