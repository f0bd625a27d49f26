"""What a parallel head is fed to draft all tokens of a request in one step.

::

    masks (K = 3)     feature:  fa   fb   m    m        the tokens so far are a b c, and c is the newest
                      token:    b    c    M    M        the last three places give the draft
    block (K = 3)     feature:  fa   fb   .    .    .    .
                      token:    .    .    c    M    M    M

With masks (P-EAGLE), an entry has a token and a feature, the learned one beside a mask. In a block (DFlash), an entry
has either: features are context, and after them comes a block that begins with the newest token; where that place
guesses too (DSpark), there is a mask less. What stands for unknown tokens is forgotten after the step, and so is the
whole block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.bundle.arrays import MaskInput
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.lookahead.draft_cost import EngineCost
from specexport_runtime.packing.batch import RowWork
from specexport_runtime.requests.request import Request


class ParallelWork(NamedTuple):
    """A draft in one step."""

    work: RowWork  # what the head is fed; its last entries are the places of the draft
    kept: int  # entries that are committed


class ParallelCost(EngineCost):
    """The cost of a drafter that drafts all tokens of a request in one step, paid once a round, a token each."""

    def seconds(self, requests: Sequence[Request], num_rows: int, kv_entries: float) -> float:  # noqa: ARG002
        """See ``DraftCost.seconds``: what one token more a row costs."""
        wide, narrow = (self._curve.seconds(count * num_rows, num_rows, kv_entries) for count in (2, 1))
        return wide - narrow

    def round_seconds(self, num_rows: int) -> float:
        """See ``DraftCost.round_seconds``: its part of the step that all rows share."""
        return self._curve.seconds(num_rows, num_rows) / num_rows


def make_entry_tokens(tokens: Sequence[int], mask: MaskInput | None) -> list[int]:
    """Input ids of the entries of known features, by the token after each; ``mask`` None: token after token."""
    return [CONTEXT_ID] * len(tokens) if mask is not None and mask.block_size is not None else list(tokens)


def count_entries_behind(count: int, mask: MaskInput) -> int:
    """Entries after those of features in a draft of ``count`` tokens: unknown ones, and the newest one of a block."""
    return count - 1 if mask.block_size is None else count + (not mask.from_anchor)


def make_parallel_work(
    tokens: Sequence[int], features: Float32Array, newest: int, count: int, mask: MaskInput
) -> ParallelWork:
    """The step that drafts ``count`` tokens after ``newest`` and unread ``tokens`` with ``features`` [n, E]."""
    first = [] if mask.block_size is None else [newest]
    behind = [*first, *[mask.token] * (count_entries_behind(count, mask) - len(first))]
    whole = np.concatenate([features, np.tile(mask.feature, (len(behind), 1))])
    return ParallelWork(RowWork([*tokens, *behind], count, whole), len(tokens))
