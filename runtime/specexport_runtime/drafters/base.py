"""What the decoding loop needs from a drafter: proposals, and news of what became of them.

A drafter of our own is a file here with a :class:`DrafterKind`, and one line of ``drafters/registry.py``. One of the
user's is a class that inherits from :class:`Drafter`, given as ``SpecEngine.load(..., drafters={"name": factory})``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport_runtime.requests.records import DrafterTraits, DraftPrefix, Proposal

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead, MaskInput
    from specexport_runtime.bundle.token_map import TokenMap
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.drafters.suffix_store import SuffixStore
    from specexport_runtime.executors.base import Float32Array
    from specexport_runtime.lookahead.draft_cost import DraftCost
    from specexport_runtime.packing.batch import ModelRunner
    from specexport_runtime.requests.request import Request

__all__ = [
    "DraftOffer",
    "DraftPrefix",
    "Drafter",
    "DrafterFactory",
    "DrafterKind",
    "DrafterParts",
    "DrafterTraits",
    "Obstacle",
    "Proposal",
]


class Drafter(ABC):
    """A way to guess the next tokens of many requests. Guesses change speed, never the output's distribution.

    A guess may depend on all that was before its round. It must not depend on random draws that are still to be used,
    and a token that was drawn must not be left out: either would bias sampled text. One that samples does not copy from
    other requests, which may have the same draws.

    A class needs ``traits`` and :meth:`propose`. The other defaults fit a drafter that keeps nothing by row and reads
    nothing but the tokens of requests.
    """

    @property
    @abstractmethod
    def traits(self) -> DrafterTraits:
        """What it is like; the same for its whole life. A class attribute will do."""

    @abstractmethod
    def propose(
        self, requests: "Sequence[Request]", lookaheads: Sequence[int], begun: "Sequence[DraftPrefix] | None" = None
    ) -> list[Proposal]:
        """Up to ``lookaheads[i]`` draft tokens for each request. 0 must return an empty proposal.

        Args:
            requests: whom drafts are for.
            lookaheads: most tokens of its own, for each.
            begun: the beginning of each draft, which is part of what is returned; None if none has begun. A drafter
                that has nothing to add returns an empty proposal. Given only with ``traits.goes_on``: a drafter that
                cannot go on after draft tokens is not asked in a round in which a grammar forces tokens of the
                request, and may leave the argument out.
        """

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside engine execution since creation. A class attribute will do, to be counted up."""
        return 0.0

    @property
    def prefill_seconds(self) -> float:
        """Seconds of ``engine_seconds`` in steps that only read prompts."""
        return 0.0

    def commit(self, requests: "Sequence[Request]") -> None:
        """Called after every round: the requests' tokens now end with what was committed; forget the rest."""

    def move_row(self, source: int, destination: int) -> None:
        """A request moved between cache rows; move any state kept for that row."""

    def release_row(self, row: int) -> None:
        """The request of ``row`` is done; drop any state kept for it."""

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """What its steps cost on this machine, so that K can be chosen (``"auto"``); None if that is not known."""
        return None

    # ---- what the target gives beside tokens ----

    def wants_similarity(self, request: "Request") -> bool:
        """Whether the target should measure attention similarity while it reads this request's prompt."""
        return False

    def note_similarity(self, request: "Request", similarity: "Float32Array") -> None:
        """Attention similarity [N, t] of the ``t`` prompt tokens that the target has just read."""

    def wants_features(self, request: "Request") -> bool:
        """Whether the target should give features of what it reads of this request; the same for its whole life."""
        return False

    def note_features(self, request: "Request", start: int, features: "Float32Array") -> None:
        """Features [t, E] of the tokens from position ``start`` on that the target has just read, drafts included.

        A view that the target's next step overwrites. What becomes of the drafts is told by the next ``commit``.
        """

    # ---- pauses ----

    def can_restart(self, request: "Request") -> bool:
        """Whether a request may be paused.

        By default, where the drafter reads neither its features nor its similarity: it then finds the request in a row
        of which it has nothing, and catches up. One that reads them says True if :meth:`restart` does what is needed.
        """
        return not (self.wants_features(request) or self.wants_similarity(request))

    def restart(self, request: "Request") -> None:
        """A request has left its row. It is read again from its beginning, or goes on from a kept text (``adopt``).

        What was noted while it was read (features, similarities) comes again, or is in the snapshot.
        """

    # ---- going on from what a row has of another request's text (prefix reuse) ----
    # By default nothing is kept in rows: a request begins anew, as if its prompt had just been read.

    def snapshot(self, request: "Request") -> Any:
        """What it has of a request's row, between rounds, never None.

        What becomes of the request later does not change it.
        """
        return ()

    def restored(self, entries: "Mapping[ModelRunner, int]") -> Any:
        """What :meth:`snapshot` gives of a row in which models have so many entries, and of which nothing else is left.

        A model without an entry here has none in the row.
        """
        return ()

    def usable(self, request: "Request", kept: Any, count: int) -> int:
        """How many of ``count`` common tokens a request may take over, with ``kept`` of the other; 0 for none."""
        return count

    def adopt(self, request: "Request", kept: Any, count: int) -> None:
        """A request begins whose first ``count`` tokens are not read again; what the snapshot is of is in its row."""

    def copy_row(self, source: int, destination: int, kept: Any) -> None:
        """Copy what the snapshot is of to another row."""

    def swap_rows(self, one: int, other: int, kept: tuple[Any, Any]) -> None:
        """Exchange what two snapshots are of, that of row ``one`` and that of row ``other``.

        If the first is None, a request runs in row ``one``, and goes on in ``other``; if the second is, nothing is
        kept in ``other``.
        """
        if kept[0] is None:
            self.move_row(one, other)

    def forget_row(self, row: int) -> None:
        """In place of ``release_row``: what is in the row's memory stays as it is, for ``adopt``."""
        self.release_row(row)


class Obstacle(NamedTuple):
    """Why something cannot be done, and what can be done about it."""

    message: str
    hint: str


HEAD = "head"
"""Name of the drafter of a draft head in draft plans, whatever its kind."""
NO_HEAD = Obstacle("this bundle has no draft head.", "build it with --head, or use drafter 'lookup'.")


class DraftOffer(NamedTuple):
    """What a bundle has to draft with.

    Attributes:
        has_draft: there is a draft model.
        layers_obstacle: why layers of the target cannot be left out; None if they can.
        head_obstacle: why no draft head can be asked; None if one can.
    """

    has_draft: bool
    layers_obstacle: Obstacle | None
    head_obstacle: Obstacle | None = NO_HEAD


class DrafterParts(NamedTuple):
    """What an engine has to make drafters of.

    Attributes:
        target: the target.
        draft: the draft model; None if there is none.
        vocab_size: ids below it may be drafted.
        match_length: fewest tokens that a copy must match.
        store: what was generated before; None lets the drafter that remembers begin with nothing.
        cut_head: the token ids of the LM head of the draft model, or the draft head; None where it has all.
        head: the draft head; None if there is none.
        mask: of a head that drafts all tokens in one step: what stands for unknown tokens.
        token_map: of a draft model with another vocabulary: its tokens and the target's; None where they are the same.
    """

    target: "ModelRunner"
    draft: "ModelRunner | None"
    vocab_size: int
    match_length: int
    store: "SuffixStore | None" = None
    cut_head: "CutHead | None" = None
    head: "ModelRunner | None" = None
    mask: "MaskInput | None" = None
    token_map: "TokenMap | None" = None


DrafterFactory = Callable[[DrafterParts], Drafter]


class DrafterKind(NamedTuple):
    """One of the drafters that every engine may have.

    Attributes:
        traits: of all drafters of this kind.
        make: makes one.
        obstacle: why a bundle cannot draft so; None if it can.
        method: vLLM's name for it.
        config_keys: keys of vLLM's speculative config that it alone takes.
        other_methods: further names that vLLM has for it.
    """

    traits: DrafterTraits
    make: DrafterFactory
    obstacle: Callable[[DraftOffer], Obstacle | None]
    method: str
    config_keys: frozenset[str] = frozenset()
    other_methods: tuple[str, ...] = ()
