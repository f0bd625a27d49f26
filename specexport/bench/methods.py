"""What is measured: a method is a drafter and two padding switches of the same decoding loop."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from specexport_runtime.cli.errors import suggest
from specexport_runtime.drafters.base import HEAD, NO_HEAD, DraftOffer, Obstacle
from specexport_runtime.drafters.model import DEFAULT_LOOKAHEAD, DRAFT_MODEL
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.drafting import resolve_lookahead

DRAFTERS = (*KINDS, "chained", "auto")
AUTO = -1
"""Stands for a K, or the size of a tree, that is chosen in every round."""
SWITCHES = {"unpad-kv": (True, False), "unpad-input": (False, True), "vanilla": (False, False)}
"""The padded methods as (unpad_kv, unpad_input); EMS-SD (Ni et al. 2025) calls the last one vanilla."""
METHODS = ("plain", *DRAFTERS, *SWITCHES)
OWN_DRAFTERS = frozenset({DRAFT_MODEL, HEAD})
"""Drafters that a model of the bundle is for: its draft."""


class LoadKey(NamedTuple):
    """What an engine is loaded for; each other value needs another one."""

    unpad_kv: bool
    unpad_input: bool
    max_num_seqs: int
    bundle: str = ""  # of several


class Method(NamedTuple):
    """A way to decode."""

    name: str  # one of :data:`METHODS`
    drafter: str  # as ``SpecEngine.generate`` takes it; ``"none"`` for plain decoding
    unpad_kv: bool = True  # each sequence writes its KV at its own position
    unpad_input: bool = True  # new tokens are concatenated, not padded
    bundle: str = ""  # whose draft is asked, where several are compared; empty for what the target can alone


PLAIN = Method("plain", "none")


class Cell(NamedTuple):
    """One combination of everything that is swept."""

    method: str  # its name
    drafter: str  # one of :data:`DRAFTERS`, or ``"none"``
    unpad_kv: bool  # see :class:`Method`
    unpad_input: bool  # see :class:`Method`
    batch_size: int  # cache rows: sequences decoded at a time
    num_speculative_tokens: int  # K; 0 for plain decoding, :data:`AUTO` where it is chosen in every round
    temperature: float  # 0 is greedy
    domain: str  # of the prompts
    batching: str  # ``"continuous"``, or ``"static"``: groups of ``batch_size`` prompts, one after another
    context: int = 0  # tokens of each prompt, repeated or cut; 0 for prompts as they are
    bundle: str = ""  # see :class:`Method`
    # most draft tokens of a round, branches included; 0 for chains, :data:`AUTO` where it is chosen in every round
    tree_size: int = 0

    @property
    def plain(self) -> "Cell":
        """Plain decoding in the same circumstances: what it is compared with."""
        return self._replace(
            method="plain", drafter="none", unpad_kv=True, unpad_input=True, num_speculative_tokens=0, bundle="",
            tree_size=0,
        )  # fmt: skip

    @property
    def vanilla(self) -> "Cell":
        """The padded method with the same drafter in the same circumstances; it takes no trees."""
        size = min(self.tree_size, 0)
        return self._replace(method="vanilla", unpad_kv=False, unpad_input=False, tree_size=size)

    @property
    def requested(self) -> int | Literal["auto"] | None:
        """K as ``SpecEngine.generate`` takes it."""
        return "auto" if self.num_speculative_tokens == AUTO else self.num_speculative_tokens or None

    @property
    def requested_tree(self) -> int | Literal["auto"] | None:
        """The tree's size as ``SpecEngine.generate`` takes it; None for what the request takes anyway."""
        if self.tree_size == self._usual_tree:
            return None
        return "auto" if self.tree_size == AUTO else self.tree_size

    @property
    def _usual_tree(self) -> int:
        return AUTO if self.num_speculative_tokens == AUTO else 0

    @property
    def label(self) -> str:
        """The method for a reader, without K and batch size."""
        of = f" of {self.bundle}" if self.bundle else ""
        if self.requested_tree is not None:
            of += f", trees of {self.tree_size}" if self.tree_size else ", chains"
        if self.method in SWITCHES:
            return f"{self.method}{'' if self.method == 'vanilla' else ' only'} ({self.drafter}){of}"
        padded = [name for name, unpadded in (("KV", self.unpad_kv), ("input", self.unpad_input)) if not unpadded]
        return self.method + of + (f", padded {' and '.join(padded)}" if padded else "")


def resolve_methods(
    # of :data:`METHODS`; None takes ``auto`` and the drafters that the bundle can run, except ones that learn
    names: Sequence[str] | None,
    *,
    drafter: str,  # of ``vanilla``, ``unpad-kv`` and ``unpad-input``
    has_draft: bool,  # the bundle has a draft model
    has_gates: bool = False,  # the target can draft with some of its layers
    has_head: bool = False,  # the bundle has a draft head
    unpad_kv: bool = True,  # of the methods that a drafter names
    unpad_input: bool = True,  # likewise
) -> list[Method]:
    """The methods to measure, plain decoding first; InvalidRequestError for what the bundle cannot draft with."""
    _check_name("drafter", drafter, DRAFTERS)
    offer = DraftOffer(has_draft, None if has_gates else _NO_LAYERS, None if has_head else NO_HEAD)
    lacking = {name: kind.obstacle(offer) for name, kind in KINDS.items()}
    models = [lacking[name] for name, kind in KINDS.items() if not kind.traits.is_free]
    lacking |= {"chained": None if None in models else models[0], "auto": None}
    if names is None:
        # What learns from one text for the next is measured by itself where that is asked for: it depends on the
        # prompts' order. So does `auto`, but that is what users get.
        learns = [name for name, kind in KINDS.items() if kind.traits.remembers]
        names = [name for name in DRAFTERS if lacking[name] is None and name not in learns]
    methods = [PLAIN]
    for name in names:
        _check_name("method", name, METHODS)
        if name == "plain":
            continue
        method = (
            Method(name, drafter, *SWITCHES[name]) if name in SWITCHES else Method(name, name, unpad_kv, unpad_input)
        )
        obstacle = lacking[method.drafter]
        if obstacle is not None:
            raise InvalidRequestError(f"method {name!r}: {obstacle.message}", obstacle.hint)
        if method not in methods:
            methods.append(method)
    return methods


def ablation(drafter: str) -> tuple[str, ...]:
    """Names of the four ways to pad or not, with one drafter (EMS-SD's ablation)."""
    return (drafter, *SWITCHES)


_NO_LAYERS = Obstacle(
    "none of the target's own layers, or too few, can be left out in this bundle.",
    "see `specexport inspect`, or use drafter 'lookup'.",
)


def is_copying(drafter: str) -> bool:
    """Whether a drafter copies from references."""
    return drafter in ("chained", "auto") or (drafter in KINDS and KINDS[drafter].traits.takes_reference)


def needs_draft(drafter: str) -> bool:
    """Whether what it drafts depends on the bundle's draft."""
    return drafter in OWN_DRAFTERS or drafter in ("chained", "auto")


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = suggest(name, known)
        fix = f"did you mean {near!r}?" if near else f"choose from {', '.join(known)}."
        raise InvalidRequestError(f"there is no {what} {name!r}.", fix)


def lookaheads(method: Method, requested: Sequence[int] | None, *, built: int) -> list[int]:
    """The values of K to measure a method with, [0] for plain decoding; InvalidRequestError above ``built``."""
    if method.drafter == "none":
        return [0]
    kind = KINDS.get(method.drafter)
    default = DEFAULT_LOOKAHEAD if kind is None else kind.traits.default_lookahead
    values = [
        AUTO if value == AUTO else resolve_lookahead(value, built=built, default=default)
        for value in requested or (AUTO if method.drafter == "auto" else None,)
    ]
    return list(dict.fromkeys(values))


def tree_sizes(method: Method, lookahead: int, requested: Sequence[int] | None) -> list[int]:
    """The sizes of trees to measure a method with one K with; chains alone where it can have no other."""
    if lookahead == AUTO:
        return [AUTO] if requested is None or not method.unpad_kv else list(requested)
    if method.drafter == "none" or not method.unpad_kv:
        return [0]
    return [size for size in requested or () if size != AUTO] or [0]


def make_cells(
    methods: Iterable[Method],
    batch_size: int,
    *,
    requested: Sequence[int] | None,
    built: int,
    temperatures: Sequence[float],
    domains: Sequence[str],
    batchings: Sequence[str],
    contexts: Sequence[int] = (0,),
    trees: Sequence[int] | None = None,
) -> list[Cell]:
    """Everything to measure at one batch size; the methods of one comparison are neighbours, plain first."""
    drafts = [
        (method, value, size)
        for method in methods
        for value in lookaheads(method, requested, built=built)
        for size in tree_sizes(method, value, trees)
    ]
    return [
        Cell(*method[:4], batch_size, value, temperature, domain, batching, context, method.bundle, size)
        for domain in domains
        for context in contexts
        for temperature in temperatures
        for batching in batchings
        for method, value, size in drafts
    ]
