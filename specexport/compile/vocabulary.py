"""Do target and draft mean the same by every token id? Needs neither torch nor the tokenizers library."""

import hashlib
from collections.abc import Mapping, Sequence

from specexport_runtime.errors import VocabularyMismatchError


def check_vocabularies(target: Mapping[int, str], draft: Mapping[int, str], *, num_shared_rows: int | None) -> None:
    """Raise a VocabularyMismatchError unless target and draft, token texts by id, agree on each id.

    Tokens at the end that only one of the two has are padding: they are never drafted, so they may differ. Ids below
    ``num_shared_rows`` have a row in both LM heads; None if the heads are not known yet.
    """
    end = min(max(target, default=-1), max(draft, default=-1)) + 1
    if num_shared_rows is not None:
        end = min(end, num_shared_rows)
    different = [index for index in range(end) if target.get(index) != draft.get(index)]
    if different:
        first = different[0]
        raise VocabularyMismatchError(
            f"target and draft have different vocabularies: token id {first} is {_show(target.get(first))} in the "
            f"target and {_show(draft.get(first))} in the draft; {len(different):,} of {end:,} ids differ"
            f"{_format_ranges(different)}.",
            "use a draft with the target's tokenizer (of the same model family).",
        )
    if end == 0:
        raise VocabularyMismatchError("target and draft share no token.", "use a draft with the target's tokenizer.")


def _format_ranges(ids: Sequence[int], most: int = 5) -> str:
    """Which ids, as ranges: `` (3, 7-12 and more)``; nothing for a single one."""
    if len(ids) == 1:
        return ""
    ranges: list[list[int]] = []
    for index in ids:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        elif len(ranges) == most:
            return f" ({', '.join(_range(*each) for each in ranges)} and more)"
        else:
            ranges.append([index, index])
    return f" ({', '.join(_range(*each) for each in ranges)})"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _show(token: str | None) -> str:
    return "unused" if token is None else repr(token)


def draftable_size(vocabularies: Sequence[Mapping[int, str]], head_rows: Sequence[int]) -> int:
    """Token ids that every model knows and every tokenizer can produce: only ids below it are drafted."""
    return min([*head_rows, *(max(vocabulary, default=-1) + 1 for vocabulary in vocabularies)])


def sha256_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
