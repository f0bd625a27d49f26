"""What drafters with a separate engine share: its KV cache, row for row beside the target's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specexport_runtime.drafters.base import Drafter
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.request import Request

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead

MAX_BACKLOG = 32  # tokens that a model catches up on within a drafting step: several copied drafts in a row


class OwnCacheDrafter(Drafter):
    """The part of a drafter that keeps a KV cache beside the target's."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,  # ids that may be drafted; logits of padding rows beyond it are cut off
        # A request with more tokens to catch up on is prefilled alone first, so that the packed step stays narrow; cut
        # to what lets every row catch up in one step of the engine.
        max_backlog: int = MAX_BACKLOG,
        cut_head: "CutHead | None" = None,  # the token ids of the model's LM head; None where it has all
    ) -> None:
        self.runner = runner
        self._known_ids = runner.executor.vocab_size if cut_head is None else cut_head.vocab_size
        self.vocab_size = min(vocab_size, self._known_ids)
        runner.executor.set_head(None if cut_head is None else cut_head.truncate_vocabulary(self.vocab_size))
        self.max_backlog = self._limit_new_tokens(max_backlog)

    def _limit_new_tokens(self, wanted: int, behind: int = 0) -> int:
        """``wanted`` tokens of a row, or fewer, if every row of a step is to have so many and ``behind`` others."""
        limit = self.runner.executor.max_num_tokens
        return wanted if limit is None else min(wanted, max(1, limit // self.runner.executor.num_rows - behind))

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside the model's engine since creation."""
        return self.runner.executor.engine_seconds

    @property
    def prefill_seconds(self) -> float:
        """Of these, in steps that only read a prompt, or else what it had not seen."""
        return self.runner.prefill_seconds

    def move_row(self, source: int, destination: int) -> None:
        """Move a request's cache to another row."""
        self.runner.move_row(source, destination)

    def release_row(self, row: int) -> None:
        """Forget the request of ``row``."""
        self.runner.release_row(row)

    def can_restart(self, request: Request) -> bool:  # noqa: ARG002
        """Always: what a row misses is read before the next draft."""
        return True

    def snapshot(self, request: Request) -> Any:
        """What the cache has of a request's row, between rounds, for :meth:`adopt`: entries."""
        return self.runner.kv.kv_len(request.row)

    def restored(self, entries: Mapping[ModelRunner, int]) -> Any:
        """See ``Drafter.restored``."""
        return entries.get(self.runner, 0)

    def adopt(self, request: Request, kept: Any, count: int) -> None:
        """A request goes on after ``count`` tokens of a text of which a snapshot was taken and that is in its row."""
        entries = min(self._entries_of(kept), count)
        # What the cache cannot go back to is read again, from the beginning.
        self.runner.resume_row(request.row, entries if entries >= self.runner.min_reusable_len(request.row) else 0)

    def copy_row(self, source: int, destination: int, kept: Any) -> None:
        """Copy what a snapshot was taken of to another row."""
        self.runner.copy_row(source, destination, self._entries_of(kept))

    def swap_rows(self, one: int, other: int, kept: tuple[Any, Any]) -> None:
        """Exchange what snapshots were taken of in two rows; see ``Drafter.swap_rows``."""
        own = self.runner.kv.kv_len(one) if kept[0] is None else self._entries_of(kept[0])
        self.runner.swap_rows(one, other, (own, 0 if kept[1] is None else self._entries_of(kept[1])))
        if kept[0] is None:
            self.runner.kv.move(one, other)

    def forget_row(self, row: int) -> None:
        """The request of ``row`` is done; what is in its memory stays as it is."""
        self.runner.forget_row(row)

    def _entries_of(self, kept: Any) -> int:
        """Cache entries of a snapshot."""
        entries: int = kept
        return entries

    def _replace_unknown_ids(self, tokens: list[int]) -> list[int]:
        """Ids the model can embed. The target may emit a padding id that the model lacks; any stand-in is lossless."""
        limit = self._known_ids
        return tokens if max(tokens) < limit else [token if token < limit else 0 for token in tokens]
