"""What the decoding loop needs from a drafter: proposals, and news of what became of them.

A drafter of our own is a file here with a :class:`DrafterKind`, and one line of ``drafters/registry.py``. One of the
user's is a factory, given to ``SpecEngine.load(..., drafters={"name": factory})``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specexport_runtime.requests.records import Begun, DrafterTraits, Proposal

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead, MaskInput
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.drafters.suffix_store import SuffixStore
    from specexport_runtime.executors.base import Float32Array
    from specexport_runtime.lookahead.draft_cost import DraftCost
    from specexport_runtime.packing.batch import ModelRunner
    from specexport_runtime.requests.request import Request

__all__ = [
    "Begun",
    "ContinuingDrafter",
    "CostedDrafter",
    "DraftOffer",
    "Drafter",
    "DrafterFactory",
    "DrafterKind",
    "DrafterParts",
    "DrafterTraits",
    "FeatureDrafter",
    "Obstacle",
    "Proposal",
    "SimilarityDrafter",
    "as_continuing",
    "as_feature_drafter",
    "as_similarity",
    "prefill_seconds_of",
]


class Drafter(Protocol):
    """A way to guess the next tokens of many requests. Guesses change speed, never the output's distribution.

    A guess may depend on the committed tokens of its request and on what was tested. It must not depend on draft
    tokens that were never tested, on random draws that are still to be used, or on measured time: each of them would
    bias sampled text.
    """

    @property
    def traits(self) -> DrafterTraits:
        """What it is like; the same for its whole life."""
        ...

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside engine execution since creation; 0 for drafters without an engine."""
        ...

    def propose(self, requests: "Sequence[Request]", lookaheads: Sequence[int]) -> list[Proposal]:
        """Up to ``lookaheads[i]`` draft tokens for each request. 0 must return an empty proposal."""
        ...

    def commit(self, requests: "Sequence[Request]") -> None:
        """Called after every round: the requests' tokens now end with what was committed; forget the rest."""
        ...

    def move_row(self, source: int, destination: int) -> None:
        """A request moved between cache rows; move any state kept for that row."""
        ...

    def release_row(self, row: int) -> None:
        """The request of ``row`` is done; drop any state kept for it."""
        ...


class ContinuingDrafter(Drafter, Protocol):
    """A drafter that can go on behind draft tokens that are there already; optional, with ``traits.goes_on``.

    One that cannot is not asked in a round in which a grammar forces tokens of the request.
    """

    def propose(
        self, requests: "Sequence[Request]", lookaheads: Sequence[int], begun: "Sequence[Begun] | None" = None
    ) -> list[Proposal]:
        """As ``Drafter.propose``.

        Args:
            requests: whom drafts are for.
            lookaheads: most tokens of its own, for each.
            begun: the beginning of each draft, which is part of what is returned; None if none has begun. A drafter
                that has nothing to add returns an empty proposal.
        """
        ...


def as_continuing(drafter: Drafter) -> ContinuingDrafter | None:
    """``drafter`` if it follows :class:`ContinuingDrafter`; None if not."""
    return drafter if drafter.traits.goes_on else None  # type: ignore[return-value]


class SimilarityDrafter(Drafter, Protocol):
    """A drafter that looks at how little each attention layer of the target changes a prompt; optional."""

    def wants_similarity(self, request: "Request") -> bool:
        """Whether the target should measure attention similarity while it reads this request's prompt."""
        ...

    def note_similarity(self, request: "Request", similarity: "Float32Array") -> None:
        """Attention similarity [N, t] of the ``t`` prompt tokens that the target has just read."""
        ...


def as_similarity(drafter: Drafter) -> SimilarityDrafter | None:
    """``drafter`` if it follows :class:`SimilarityDrafter`; None if not."""
    return drafter if hasattr(drafter, "wants_similarity") else None  # type: ignore[return-value]


def prefill_seconds_of(drafter: Drafter) -> float:
    """Seconds of ``engine_seconds`` in steps that only read prompts; 0 for a drafter that does not say."""
    seconds: float = getattr(drafter, "prefill_seconds", 0.0)
    return seconds


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states, of every token of a request; optional."""

    def wants_features(self, request: "Request") -> bool:
        """Whether the target should give features of what it reads of this request; the same for its whole life."""
        ...

    def note_features(self, request: "Request", start: int, features: "Float32Array") -> None:
        """Features [t, E] of the tokens from position ``start`` on that the target has just read, drafts included.

        A view that the target's next step overwrites. What becomes of the drafts is told by the next ``commit``.
        """
        ...


def as_feature_drafter(drafter: Drafter) -> FeatureDrafter | None:
    """``drafter`` if it follows :class:`FeatureDrafter`; None if not."""
    return drafter if hasattr(drafter, "wants_features") else None  # type: ignore[return-value]


class PrefixDrafter(Drafter, Protocol):
    """A drafter that can go on from what a row has of another request's text (prefix reuse); optional.

    One that is not begins anew with each request, as if its prompt had just been read.
    """

    def snapshot(self, request: "Request") -> Any:
        """What it has of a request's row, between rounds. What becomes of the request later does not change it."""
        ...

    def usable(self, request: "Request", kept: Any, count: int) -> int:
        """How many of ``count`` common tokens a request may take over, with ``kept`` of the other; 0 for none."""
        ...

    def adopt(self, request: "Request", kept: Any, count: int) -> None:
        """A request begins whose first ``count`` tokens are not read again; what the snapshot is of is in its row."""
        ...

    def copy_row(self, source: int, destination: int, kept: Any) -> None:
        """Copy what the snapshot is of to another row."""
        ...

    def swap_rows(self, one: int, other: int, kept: tuple[Any, Any]) -> None:
        """Exchange what two snapshots are of, that of row ``one`` and that of row ``other``.

        If the first is None, a request runs in row ``one``, and goes on in ``other``; if the second is, nothing is
        kept in ``other``.
        """
        ...

    def forget_row(self, row: int) -> None:
        """In place of ``release_row``: what is in the row's memory stays as it is, for ``adopt``."""
        ...


def as_prefix_drafter(drafter: Drafter) -> PrefixDrafter | None:
    """``drafter`` if it follows :class:`PrefixDrafter`; None if not."""
    return drafter if hasattr(drafter, "snapshot") else None  # type: ignore[return-value]


class RestartingDrafter(Drafter, Protocol):
    """A drafter that can go on with a request that was paused; needed only of those that are told what was read."""

    def restart(self, request: "Request") -> None:
        """A request has left its row. It is read again from its beginning, or goes on from a kept text (``adopt``).

        What was noted while it was read (features, similarities) comes again, or is in the snapshot.
        """
        ...


def can_restart(drafter: Drafter, request: "Request") -> bool:
    """Whether a request may be paused, as far as a drafter is concerned.

    One that is told nothing of what is read may always be: it finds a request in a row of which it has nothing, and
    catches up, as with one that it was not asked about before.
    """
    asked: Callable[[Request], bool] | None = getattr(drafter, "can_restart", None)
    if asked is not None:
        return asked(request)
    return hasattr(drafter, "restart") or (as_feature_drafter(drafter) is None and as_similarity(drafter) is None)


def restart(drafter: Drafter, request: "Request") -> None:
    """Tell a drafter that follows :class:`RestartingDrafter`."""
    if hasattr(drafter, "restart"):
        drafter.restart(request)


class CostedDrafter(Drafter, Protocol):
    """A drafter whose steps have a known cost, so that K can be chosen (``"auto"``); optional, not for free ones."""

    def cost(self, curves: "CostCurves") -> "DraftCost | None":
        """What its steps cost on this machine; None if that is not known."""
        ...


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
    """

    target: "ModelRunner"
    draft: "ModelRunner | None"
    vocab_size: int
    match_length: int
    store: "SuffixStore | None" = None
    cut_head: "CutHead | None" = None
    head: "ModelRunner | None" = None
    mask: "MaskInput | None" = None


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
