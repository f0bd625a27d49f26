"""Arrays that lie beside an engine: token ids of a cut LM head, what stands for unknown tokens, tables of a head.

Of an LM head that was cut only some rows were kept. A draft need not be able to say everything (FR-Spec, Zhao et al.
2025; VocabTrim, Goel et al. 2025): the head is the largest product of a small model, and most of its rows are hardly
ever the answer. What is left out has probability 0 in the draft, which changes what is drafted and never what is
accepted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.entry import CorrectionEntry, ModelEntry
from specexport_runtime.errors import BundleError

REBUILD = "build it again with `specexport build`."

LM_HEAD_IDS_NAME = "lm_head_ids.npy"
"""File in the model's folder: int32 [N], ascending."""

MASK_NAME = "mask_feature.npy"
"""File in the head's folder: float32 [E]."""


def read_array(path: Path, *, in_place: bool = False) -> Any:
    """What an ``.npy`` file holds, unchecked, mapped if ``in_place``; BundleError: unreadable, or it holds pickles."""
    try:
        return np.load(path, "r" if in_place else None, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise BundleError(f"{path} cannot be read ({error}).", REBUILD) from error


class CutHead(NamedTuple):
    """An LM head of N of a model's V token ids: an engine's logits and greedy tokens are in its rows."""

    ids: npt.NDArray[np.int32]  # [N], ascending: the token id of each row
    vocab_size: int  # V, the ids that the model can be fed

    def truncate_vocabulary(self, vocab_size: int) -> "CutHead":
        """The head without the ids from ``vocab_size`` on: its first rows, for they ascend."""
        return CutHead(self.ids[: self.ids.searchsorted(vocab_size)], min(self.vocab_size, vocab_size))

    def widen(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits [V] of logits [N]: -inf for every id that has no row."""
        wide = np.full(self.vocab_size, -np.inf, np.float32)
        wide[self.ids] = logits
        return wide


def load_cut_head(folder: Path, entry: ModelEntry) -> CutHead | None:
    """Token ids that the LM head of a model has, None if it has all; BundleError if the file does not fit."""
    if entry.cut_lm_head is None:
        return None
    path = folder / entry.cut_lm_head.ids_path
    ids = read_array(path)
    problem = _find_problem(ids, entry)
    if problem is not None:
        raise BundleError(f"{path}: {problem}.", REBUILD)
    return CutHead(ids, entry.vocab_size)


def _find_problem(ids: object, entry: ModelEntry) -> str | None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
        return "it holds no int32 token ids"
    if len(ids) != entry.lm_head_rows:
        return f"it has {len(ids)} token ids and the LM head {entry.lm_head_rows} rows"
    wrong = np.flatnonzero(np.diff(ids) <= 0)
    if wrong.size:
        return f"token id {ids[wrong[0] + 1]} follows {ids[wrong[0]]}, and they should ascend"
    beyond = ids[(ids < 0) | (ids >= entry.vocab_size)]
    return f"token id {beyond[0]} lies outside 0 to {entry.vocab_size - 1}" if beyond.size else None


class CorrectionTables(NamedTuple):
    """By what a head corrects the logits of a place, when the token in front of it is known."""

    rule: str
    arrays: Mapping[str, npt.NDArray[np.float32]]  # by name, see the rule
    most: int  # how many tokens of a place it looks at, the likeliest ones


class MaskInput(NamedTuple):
    """The stand-in for a token that is not known."""

    token: int  # its id
    feature: npt.NDArray[np.float32]  # [E], what comes with it
    # Of a head that fills blocks: most tokens of a block, the newest and those to guess. None for a head whose entries
    # all have a token and a feature.
    block_size: int | None = None
    from_anchor: bool = False  # the block's first place guesses too
    correction: CorrectionTables | None = None  # None: logits stay as the engine gives them

    @property
    def most(self) -> int | None:
        """Most tokens that a step can draft; None for no limit."""
        return None if self.block_size is None else self.block_size - (not self.from_anchor)


def load_mask(folder: Path, entry: ModelEntry) -> MaskInput | None:
    """The stand-in of a head, None for one that drafts token after token; BundleError if the file does not fit."""
    head, size = entry.draft_head, entry.engine.feature_size
    if head is None or head.mask_token_id is None:
        return None
    token = head.mask_token_id
    if head.block_size is not None and token < entry.vocab_size:
        correction = None if head.correction is None else _load_tables(folder, entry, head.correction)
        return MaskInput(token, np.zeros(size, np.float32), head.block_size, head.from_anchor, correction)
    if head.mask_path is None:
        raise BundleError(f"{folder}: token {token} stands for unknown ones without a feature.", REBUILD)
    path = folder / head.mask_path
    feature = read_array(path)
    sound = isinstance(feature, np.ndarray) and feature.dtype == np.float32 and feature.shape == (size,)
    if not sound or not np.isfinite(feature).all() or token >= entry.vocab_size:
        raise BundleError(f"{path}: it is no feature of {size} numbers, or its token is unknown.", REBUILD)
    return MaskInput(token, feature)


def _load_tables(folder: Path, model: ModelEntry, entry: CorrectionEntry) -> CorrectionTables:
    """Tables that are read where they lie: of most of them a draft needs a few rows."""
    arrays = {}
    for name in entry.tables:
        path = folder / name
        arrays[path.stem] = table = read_array(path, in_place=True)
        if not isinstance(table, np.ndarray) or table.dtype != np.float32:
            raise BundleError(f"{path}: it holds no float32 table.", REBUILD)
    misfit = _find_misfit(model, entry.rule, {name: table.shape for name, table in arrays.items()})
    if misfit is not None:
        raise BundleError(f"{folder}: the head's table {misfit} is missing, or of another size.", REBUILD)
    return CorrectionTables(entry.rule, arrays, entry.most)


def _find_misfit(model: ModelEntry, rule: str, found: Mapping[str, tuple[int, ...]]) -> str | None:
    """A table that is missing, or of other sizes than the head's: a step would read beyond it."""
    needed = {"selector": ("predecessors", "successors", "projection"), "markov": ("w1", "w2")}.get(rule, ())
    n, e, r = model.lm_head_rows, model.engine.feature_size, next((found.get(name, ()) for name in needed), ())[1:]
    rows = {"predecessors": 1, "w1": 1, "successors": n, "w2": n}  # at least, of r numbers
    k = sum(r)
    sizes = {"projection": (k, e), "gate": (k, e + k), "joint": (3 * k, 2 * k + e), "joint_bias": (3 * k,)}
    sizes |= {"gate_bias": (k,), "confidence": (1, e + k), "confidence_bias": (1,)}
    for name in (*needed, *found):
        size = found.get(name, ())
        fits = (
            size[1:] == r and len(r) == 1 and size[0] >= rows[name] if name in rows else size == sizes.get(name, size)
        )
        if not (size and (fits or (name, size) == ("confidence", (1, e)))):
            return name
    return None
