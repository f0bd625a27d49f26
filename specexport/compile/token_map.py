"""Which tokens a draft with another vocabulary has in common with its target, and how it spells the others.

Tokens are compared as bytes: vocabularies write a space, a line break or a byte in different ways. Special tokens are
compared as they are written, and by what they do where a checkpoint says it: begin a text, end a turn, end a text.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.checkpoint.vocabulary import read_vocabulary
from specexport.compile.draft_cuts import read_counting_texts
from specexport.compile.vocabulary import check_vocabularies
from specexport_runtime.bundle.entry import TokenMapEntry
from specexport_runtime.bundle.token_map import MAP_NAME, NOT_SHARED, TokenMap
from specexport_runtime.errors import InvalidRequestError, VocabularyMismatchError
from specexport_runtime.executors.base import Int32Array
from specexport_runtime.intake.plain_tokens import PlainTokens
from specexport_runtime.requests.token_bytes import BYTE_TOKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_SHARE = 0.4
"""Of a text's tokens in the target's vocabulary that a draft must be able to say: no more can be accepted."""
MAX_PIECES = 16
"""A token that takes more is spelled by its last pieces: long runs of spaces, special tokens."""


class VocabularySide(NamedTuple):
    """What is read of one model's vocabulary."""

    name: str  # of the checkpoint, for messages
    tokenizer_json: bytes
    vocab_size: int | None = None  # V: ids that the model has a row for; None for all that the tokenizer has
    eos_token_ids: Sequence[int] = ()  # end a text or a turn
    chat_template: str | None = None  # names what ends a turn


class SharedTokens(NamedTuple):
    """A map and what it covers."""

    tokens: TokenMap
    entry: TokenMapEntry

    @property
    def head_ids(self) -> Int32Array:
        """The draft's shared tokens, ascending: all that its LM head has to have."""
        return np.flatnonzero(self.tokens.target_ids != NOT_SHARED).astype(np.int32)


class _Vocabulary:
    """The tokens of one side."""

    def __init__(self, side: VocabularySide) -> None:
        from tokenizers import Tokenizer

        self.tokenizer: Tokenizer = Tokenizer.from_buffer(side.tokenizer_json)
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.size = side.vocab_size or max(ids.values(), default=-1) + 1
        try:
            # An id beyond all others: there must be one that ends a text.
            self.spell = PlainTokens(self.tokenizer, self.size, (*side.eos_token_ids, self.size))
        except InvalidRequestError as error:
            reason = error.message.partition(": ")[2]
            raise VocabularyMismatchError(
                f"target and draft have different vocabularies, and that of {side.name} cannot be compared: {reason}",
                "use a draft with the target's tokenizer (of the same model family).",
            ) from error
        self.bytes = self.spell.tokens
        self.names = {token: name for name, token in ids.items() if token < self.size}
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {token: self.names[token] for token, each in added if each.special and token in self.names}
        self.lead = [token for token in self.tokenizer.encode("").ids[:1] if token in self.special]
        self.ends = _find_end_tokens(side, self.special)

    def list_text_tokens(self) -> Iterator[tuple[int, bytes]]:
        """Tokens of text with their bytes; those that are named by a byte come last, for they have twins."""
        known = [token for token in sorted(self.names) if token not in self.special and self.bytes[token]]
        for token in sorted(known, key=lambda each: BYTE_TOKEN.fullmatch(self.names[each]) is not None):
            yield token, self.bytes[token]


def _find_end_tokens(side: VocabularySide, special: Mapping[int, str]) -> tuple[int | None, int | None]:
    """The token that ends a turn, and the one that ends a text; None where there is none of its own."""
    ends = [token for token in side.eos_token_ids if token in special]
    template = side.chat_template or ""
    turns = [token for token in ends if special[token] in template]
    turn = turns[0] if turns else None
    return turn, next((token for token in ends if token != turn), None)


def check_shared(target: VocabularySide, draft: VocabularySide) -> None:
    """Refuse vocabularies that share too little, VocabularyMismatchError; they may be the same."""
    if _has_different_tokens(target, draft):
        _map_vocabularies(target, draft)


def find_shared(target: VocabularySide, draft: VocabularySide) -> SharedTokens | None:
    """The map between two vocabularies, None if they are one; VocabularyMismatchError if too little is shared."""
    if not _has_different_tokens(target, draft):
        return None
    theirs, own, target_ids, entry = _map_vocabularies(target, draft)
    spelled = _spellings(theirs, own, target_ids)
    starts = np.cumsum([0, *map(len, spelled)], dtype=np.int32)
    pieces = np.array([piece for each in spelled for piece in each], np.int32)
    first = theirs.lead[0] if theirs.lead and own.lead else NOT_SHARED
    tokens = TokenMap(target_ids, starts, pieces, np.array(own.lead, np.int32), np.array(first, np.int64))
    return SharedTokens(tokens, entry)


def _has_different_tokens(target: VocabularySide, draft: VocabularySide) -> bool:
    ids = [read_vocabulary(side.tokenizer_json, where=side.name) for side in (target, draft)]
    rows = [side.vocab_size for side in (target, draft) if side.vocab_size is not None]
    try:
        check_vocabularies(*ids, num_shared_rows=min(rows, default=None))
    except VocabularyMismatchError:
        return True
    return False


def _map_vocabularies(
    target: VocabularySide, draft: VocabularySide
) -> tuple[_Vocabulary, _Vocabulary, Int32Array, TokenMapEntry]:
    """Both vocabularies, the target's token of each of the draft's, and what that covers."""
    theirs, own = _Vocabulary(target), _Vocabulary(draft)
    target_ids = np.full(own.size, NOT_SHARED, np.int32)
    for token, wanted in _pair_tokens(theirs, own).items():
        target_ids[token] = wanted
    shared = target_ids[target_ids != NOT_SHARED]
    entry = TokenMapEntry(
        MAP_NAME,
        max(len(shared), 1),
        of_draft=len(shared) / max(len(own.names), 1),
        of_target=len(shared) / max(len(theirs.names), 1),
        of_text=_measure_text_share(theirs.tokenizer, shared),
    )
    if entry.of_text < MIN_SHARE or not len(shared):
        raise VocabularyMismatchError(
            f"target and draft have different vocabularies that share too little: {describe_share(entry)}; "
            f"{MIN_SHARE:.0%} of text is the least.",
            "use a draft whose tokenizer is more like the target's, best of the same model family.",
        )
    return theirs, own, target_ids, entry


def describe_share(entry: TokenMapEntry) -> str:
    """What two vocabularies share, in words."""
    return (
        f"{entry.num_shared} tokens, {entry.of_draft:.1%} of the draft's and {entry.of_target:.1%} of the target's, "
        f"which are {entry.of_text:.1%} of text"
    )


def _pair_tokens(theirs: _Vocabulary, own: _Vocabulary) -> dict[int, int]:
    """The target's token of each of the draft's that is shared; no two have the same."""
    by_bytes: dict[bytes, int] = {}
    for token, data in theirs.list_text_tokens():
        by_bytes.setdefault(data, token)
    found: dict[int, int] = {}
    for token, data in own.list_text_tokens():
        wanted = by_bytes.pop(data, None)
        if wanted is not None:
            found[token] = wanted
    by_name = {name: token for token, name in theirs.special.items()}
    found |= {token: by_name[name] for token, name in own.special.items() if name in by_name}
    taken = set(found.values())
    for own_role, role in [*zip(own.lead, theirs.lead, strict=False), *zip(own.ends, theirs.ends, strict=True)]:
        if own_role is not None and role is not None and own_role not in found and role not in taken:
            found[own_role] = role
            taken.add(role)
    return found


def _measure_text_share(tokenizer: "Tokenizer", shared: Int32Array) -> float:
    texts = read_counting_texts(None)
    ids = [token for each in tokenizer.encode_batch(list(texts), add_special_tokens=False) for token in each.ids]
    return float(np.isin(ids, shared).mean()) if ids else 0.0


def _spellings(theirs: _Vocabulary, own: _Vocabulary, target_ids: Int32Array) -> list[list[int]]:
    """The draft's tokens for each of the target's: its own token where they share it, else what has the same bytes."""
    stand_in = next((end for end in reversed(own.ends) if end is not None), 0)  # for what has no bytes
    shared = {int(wanted): token for token, wanted in enumerate(target_ids) if wanted != NOT_SHARED}
    spelled: list[list[int]] = [[shared.get(token, stand_in)] for token in range(theirs.size)]
    for token in theirs.names:
        if token not in shared and theirs.bytes[token]:
            spelled[token] = own.spell(theirs.bytes[token])[-MAX_PIECES:] or [stand_in]
    for token in theirs.lead:
        if token not in shared:
            spelled[token] = own.lead or [stand_in]
    return spelled


def make_vocabulary_side(found: Any, name: str, vocab_size: int) -> VocabularySide:
    """A side of what has a tokenizer: a loaded checkpoint, or a built model."""
    return VocabularySide(name, found.tokenizer_json, vocab_size, found.eos_token_ids, found.chat_template)
