"""How a draft with another vocabulary speaks its target's: token-level intersection (Timor et al. 2025, TLI).

::

    draft's token d ── equal bytes ──▶ target's token M(d)          what it drafts: over shared tokens alone
    target's token t ── spelled ─────▶ draft's tokens d1 d2 …       what it reads: one where they share it

M is injective, so a distribution over the draft's shared tokens is a distribution over the target's vocabulary, and
acceptance is exact whatever M is. Spelling goes token by token: a text's spelling never changes when it grows, so that
cache entries stay true, and going back a token is going back by its spelling. A spelling that the draft would not have
chosen costs acceptance only.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.arrays import REBUILD, CutHead
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import BundleError

MAP_NAME = "token_map.npz"
"""File in the draft's folder, a field of :class:`TokenMap` each array."""
NOT_SHARED = -1
STRETCH = 1.5
"""Most cache entries of the draft for each token of a text: one that takes more is not drafted for."""

_MAX_PIECES = 64
"""Most tokens of the draft for one of the target, on average: far more than any vocabulary needs."""

Int32Array = npt.NDArray[np.int32]


class TokenMap(NamedTuple):
    """The tokens of a draft and of its target, each in the other's."""

    target_ids: Int32Array  # [draft's V]: M, ``NOT_SHARED`` where the target has no equal token
    starts: Int32Array  # [target's V + 1]: where the spelling of each token of the target begins in ``pieces``
    pieces: Int32Array  # [n], tokens of the draft, one or more for each token of the target
    lead: Int32Array  # [l], what the draft reads before a text that begins otherwise than with ``first``
    first: npt.NDArray[np.int64]  # []: the target's token that stands for ``lead``; ``NOT_SHARED`` for none

    def spell(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The draft's tokens for some of the target's, and how many each takes."""
        ids = np.asarray(tokens, np.int64)
        starts = self.starts[ids].astype(np.int64)
        counts = self.starts[ids + 1] - starts
        ends = counts.cumsum()
        places = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        return self.pieces[places].tolist(), counts.tolist()

    def get_lead(self, tokens: Sequence[int]) -> list[int]:
        """What the draft reads before a text of the target."""
        lead: list[int] = [] if tokens[0] == int(self.first) else self.lead.tolist()
        return lead

    def target_head(self, head: CutHead, vocab_size: int) -> CutHead:
        """The rows of an LM head of shared tokens, by the ids of a target of ``vocab_size`` tokens: in no order."""
        return CutHead(self.target_ids[head.ids], vocab_size)

    @property
    def num_shared(self) -> int:
        """Tokens that both have."""
        return int((self.target_ids != NOT_SHARED).sum())

    @property
    def most(self) -> int:
        """Most tokens that a token of the target is spelled in."""
        return int(np.diff(self.starts).max())

    def save(self, path: Path) -> None:
        """Write the file."""
        np.savez_compressed(path, **self._asdict())


def load_token_map(folder: Path, draft: ModelEntry | None, target: ModelEntry) -> TokenMap | None:
    """The map of a draft, None if it has the target's vocabulary; BundleError if the file does not fit both models."""
    if draft is None or draft.token_map is None:
        return None
    path = folder / draft.token_map.path
    most = 4 * (draft.vocab_size + _MAX_PIECES * target.vocab_size)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if sum(each.file_size for each in arrays.zip.infolist()) > most:  # nothing is unpacked beyond that
                raise ValueError("it unpacks to more than a map of these vocabularies takes")
            found = TokenMap(**{name: arrays[name] for name in TokenMap._fields})
    except (OSError, ValueError, EOFError, KeyError, MemoryError, AttributeError, zipfile.BadZipFile) as error:
        raise BundleError(f"{path} cannot be read ({error}).", REBUILD) from error
    problem = _find_problem(found, draft.vocab_size, target.vocab_size)
    if problem is not None:
        raise BundleError(f"{path}: {problem}.", REBUILD)
    return found


def _find_problem(found: TokenMap, draft_size: int, target_size: int) -> str | None:
    arrays = (found.target_ids, found.starts, found.pieces, found.lead)
    if any(array.dtype != np.int32 for array in arrays) or found.first.dtype != np.int64 or found.first.shape:
        return "its arrays are of other types"
    if found.target_ids.shape != (draft_size,) or found.starts.shape != (target_size + 1,):
        return f"it is of other vocabularies than {draft_size} and {target_size} tokens"
    shared = found.target_ids[found.target_ids != NOT_SHARED]
    if not _are_within(shared, target_size) or len(np.unique(shared)) < len(shared):
        return "it gives two tokens of the draft one token of the target, or one that is not there"
    sizes = np.diff(found.starts)
    if found.starts[0] != 0 or found.starts[-1] != len(found.pieces) or (sizes < 1).any():
        return "it leaves tokens of the target without a spelling"
    return (
        None
        if _are_within(found.pieces, draft_size) and _are_within(found.lead, draft_size)
        else "it spells unknown tokens"
    )


def _are_within(ids: Int32Array, size: int) -> bool:
    return not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < size)


def own_texts(
    folder: Path, models: Mapping[str, ModelEntry], role: str, texts: Sequence[Sequence[int]]
) -> Sequence[Sequence[int]]:
    """Texts of the target's tokens in those of a role's model, none longer than the longest was."""
    token_map = load_token_map(folder, models[role], models["target"])
    if token_map is None or not texts:
        return texts
    longest = max(map(len, texts))
    return [[*token_map.get_lead(text), *token_map.spell(text)[0]][:longest] for text in texts]
