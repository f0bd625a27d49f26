"""Drafting with a Gemma-4 assistant: a head without a cache, which reads the target's own keys and values.

::

    position:     0    1    2    3    4
    token:        a    b    c    d    e         e is the newest, which the target has not seen
    feature:      fa   fb   fc   fd             what the target thought behind each
    cache entry:  a    b    c    d              the target's
    fed:                         fd,e           at position 4, over all entries; it guesses f
                                 g,f            g is what it handed on; position and entries stay as they are

So there is nothing to catch up on, whatever was copied or left undrafted before, and nothing to forget behind a test:
the next draft begins with a true feature and with the entries of the tokens that were accepted.
"""

from collections.abc import Sequence as Seq
from typing import Any

from specexport_runtime.drafters.base import HEAD, DrafterTraits
from specexport_runtime.drafters.draft_loop import Draft, open_drafts, run_drafts
from specexport_runtime.drafters.last_feature import LastFeatureDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import borrows_cache
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sequences.records import Begun, Proposal
from specexport_runtime.sequences.sequence import Sequence

DEFAULT_ASSISTANT_LOOKAHEAD = 4
"""K where nothing else is asked for, as with other heads."""


class AssistantDrafter(LastFeatureDrafter):
    """Draft tokens from an assistant over the target's last feature and the target's cache; it has no cache itself.

    The rows of ``runner`` are the target's (``BorrowedKv``); SpecexportError if its engine is no assistant's.
    ``named``: see ``OwnCacheDrafter``.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_ASSISTANT_LOOKAHEAD, can_exit=True, goes_on=True)

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        if not borrows_cache(runner.executor):
            raise SpecexportError("the assistant drafter needs the engine of an assistant.")
        super().__init__(runner, **named)

    def propose(
        self, sequences: Seq[Sequence], lookaheads: Seq[int], begun: Seq[Begun] | None = None
    ) -> list[Proposal]:
        """Draft up to ``lookaheads[i]`` tokens for each sequence; see ``ContinuingDrafter.propose``.

        A sequence whose prompt the target has not read to its end drafts nothing.
        """
        drafts = open_drafts(sequences, lookaheads, begun, one_by_one=True)
        run_drafts(self.runner, drafts, self.vocab_size, self._pending, self._head)
        return [draft.proposal(HEAD) for draft in drafts]

    def _pending(self, draft: Draft) -> RowWork:
        """The newest token with the target's feature, or the last draft token with what the assistant handed on."""
        if draft.tokens:
            if draft.carried is None:
                raise SpecexportError("the assistant handed nothing on.")
            return RowWork(self._known(draft.tokens[-1:]), 1, draft.carried[None])
        seq = draft.sequence
        if self.runner.kv.kv_len(seq.row) != len(seq.tokens) - 1:
            raise SpecexportError(
                f"the target has {self.runner.kv.kv_len(seq.row)} entries of a sequence of {len(seq.tokens)} tokens."
            )
        return RowWork(self._known(seq.tokens[-1:]), 1, self._last.of(seq)[None])
