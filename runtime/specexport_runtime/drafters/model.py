"""Drafting with a draft model (Chen et al. 2023): K tokens, one after another, from a smaller model."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.drafters.base import DrafterKind, DrafterParts, DrafterTraits, DraftOffer, Obstacle
from specexport_runtime.drafters.draft_loop import Draft, run_drafts
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sequences.records import Proposal
from specexport_runtime.sequences.sequence import Sequence

if TYPE_CHECKING:
    from specexport_runtime.bundle.cut_head import CutHead
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.lookahead.draft_cost import DraftCost

DRAFT_MODEL = "draft-model"
"""Name of this drafter in draft plans."""
DEFAULT_LOOKAHEAD = 4
"""K where nothing else is asked for: the best in most settings of Chen et al. 2023 (figure 1)."""
MAX_BACKLOG = 32  # tokens that a draft model catches up on within a drafting step: several copied drafts in a row


class ModelDrafter:
    """Draft tokens from a second model with a KV cache of its own, row for row beside the target's.

    Before drafting, the model is fed every committed token beyond its own ``kv_len``: one after a rejection, two after
    a round that accepted everything, more after rounds in which it was not asked, the whole prompt for a new sequence.
    Catching up needs no other case.

    Args:
        runner: the draft model.
        vocab_size: ids that may be drafted; logits of padding rows beyond it are cut off.
        head: the token ids of the model's LM head; None where it has all.
        max_backlog: a sequence with more tokens to catch up on is prefilled alone first, so that the packed step
            stays narrow; at most what lets every row catch up in one step of the draft's engine.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_LOOKAHEAD, has_own_cache=True, can_exit=True)

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, max_backlog: int, head: "CutHead | None" = None
    ) -> None:
        self.runner = runner
        self._known_ids = runner.executor.vocab_size if head is None else head.vocab_size
        self.vocab_size = min(vocab_size, self._known_ids)
        self._head = None if head is None else head.below(self.vocab_size)
        limit = runner.executor.max_num_tokens
        self.max_backlog = max_backlog if limit is None else min(max_backlog, max(1, limit // runner.executor.num_rows))

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside the draft engine since creation."""
        return self.runner.executor.engine_seconds

    @property
    def prefill_seconds(self) -> float:
        """Of these, in steps that only read a prompt, or else what it had not seen."""
        return self.runner.prefill_seconds

    def propose(self, sequences: Seq[Sequence], lookaheads: Seq[int]) -> list[Proposal]:
        """Draft up to ``lookaheads[i]`` tokens for each sequence; see ``Drafter.propose``.

        The sequences may be in any ascending rows. Rows between them, and sequences that draft nothing (any more),
        sit the step out.
        """
        # A new prompt's first token should not wait for the draft model to read the prompt.
        drafts = [
            Draft(seq, limit if seq.num_generated else 0) for seq, limit in zip(sequences, lookaheads, strict=True)
        ]
        run_drafts(self.runner, drafts, self.vocab_size, self._pending, self._head)
        return [draft.proposal(DRAFT_MODEL) for draft in drafts]

    def _pending(self, draft: Draft) -> RowWork:
        """Tokens the draft model has not seen: the last draft token, or what it must catch up on."""
        if draft.tokens:
            return RowWork(draft.tokens[-1:], 1)
        seq = draft.sequence
        pending = self._known(seq.tokens[self.runner.kv.kv_len(seq.row) :])
        if len(pending) > self.max_backlog:
            self.runner.prefill(seq.row, pending[:-1])
            pending = pending[-1:]
        return RowWork(pending, 1)

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids the draft model can embed. The target may emit a padding id of its own; any stand-in is lossless."""
        limit = self._known_ids
        return tokens if max(tokens) < limit else [token if token < limit else 0 for token in tokens]

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Keep the cache entries of accepted tokens; the token the target added has not been fed yet."""
        for seq in sequences:
            kv_len = self.runner.kv.kv_len(seq.row)
            self.runner.kv.commit(seq.row, min(kv_len, len(seq.tokens) - 1))

    def move_row(self, source: int, destination: int) -> None:
        """Move a sequence's draft cache to another row."""
        self.runner.move_row(source, destination)

    def release_row(self, row: int) -> None:
        """Forget the sequence of ``row``."""
        self.runner.release_row(row)

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """See ``CostedDrafter.cost``."""
        from specexport_runtime.lookahead.draft_cost import EngineCost

        curve = curves.drafters.get(DRAFT_MODEL)
        return None if curve is None else EngineCost(curve)


def _make(parts: DrafterParts) -> ModelDrafter:
    if parts.draft is None:
        raise SpecexportError("there is no draft model to draft with.")
    return ModelDrafter(parts.draft, vocab_size=parts.vocab_size, max_backlog=MAX_BACKLOG, head=parts.draft_head)


def _obstacle(offer: DraftOffer) -> Obstacle | None:
    if offer.has_draft:
        return None
    return Obstacle(
        "this bundle has no draft model.", "build it with --draft, use drafter 'lookup', or do not speculate."
    )


KIND = DrafterKind(ModelDrafter.traits, _make, _obstacle, method="draft_model", config_keys=frozenset(["model"]))
