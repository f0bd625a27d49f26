"""Records that pass between drafting, lengths, verification and observers. They hold no state and import none."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from specexport_runtime.sampling.distribution import Distribution

DraftEnd = Literal["lookahead", "exit", "text", "none"]
"""Why a draft ended: K was reached, the drafter was not sure any more, nothing more to copy, or no draft at all."""

FORCED = "forced"
"""What forced draft tokens of a grammar are counted under, with any drafter around them."""


class Branch(NamedTuple):
    """One more token that is tested in the place of another: a draft with branches is a tree."""

    token: int
    # Place of the token before it, among the draft's tokens and then its branches; -1 after the text. A branch comes
    # after its parent, and siblings stand in the order in which they were drawn, the draft's own token first.
    parent: int
    distribution: "Distribution | None" = None  # of its parent's children; it was drawn from it without elder siblings
    ratio: float | None = None  # how likely its drafter took it to be beside its parent's likeliest child; None: unsaid


class Share(NamedTuple):
    """What a drafter has in one draft."""

    drafter: str
    drafted: int  # tokens, those of branches included
    accepted: int  # of these
    branches: int = 0  # of ``drafted``, tokens beside the chain
    accepted_branches: int = 0


class Proposal(NamedTuple):
    """Draft tokens for one request."""

    tokens: list[int]  # in order; empty for plain decoding
    # What each token was drawn from. None, for all or for one: it was not (greedy, copied text, forced by a grammar).
    distributions: "list[Distribution | None] | None" = None
    end: DraftEnd = "lookahead"
    drafter: str = ""  # its name in the draft plan; empty: none was asked, or none found anything
    match_length: int = 0  # of a copied draft, tokens before it that matched; 0 for drafts of models
    gamma: float | None = None  # threshold that could end the draft early; None if nothing could
    asked: "tuple[Asked, ...]" = ()  # stages considered, in order; only for a request that keeps a trace
    promised: "tuple[Promise, ...]" = ()  # by each way to go on; only for an adaptive request that keeps a trace
    error: Exception | None = None  # drafting failed, by logits with a NaN for example: the request ends with this
    forced: tuple[int, ...] = ()  # places of tokens that a grammar forces, ascending; the others are the drafter's own
    branches: tuple[Branch, ...] = ()  # beside ``tokens``, which is the best chain; empty for a chain

    @property
    def nodes(self) -> list[int]:
        """All tokens that are tested: the chain's, then those of its branches."""
        return [*self.tokens, *[branch.token for branch in self.branches]] if self.branches else self.tokens

    @property
    def parents(self) -> list[int]:
        """Of each node, the place of the one before it; -1 after the text."""
        return [*range(-1, len(self.tokens) - 1), *[branch.parent for branch in self.branches]]

    def path_to(self, place: int) -> list[int]:
        """Places of the nodes from the text to a node, which is the last; none for -1."""
        if place < len(self.tokens):
            return list(range(place + 1))
        return [*self.path_to(self.branches[place - len(self.tokens)].parent), place]

    @property
    def num_own(self) -> int:
        """Tokens that the drafter guessed."""
        return len(self.tokens) - len(self.forced)

    @property
    def last_own(self) -> int:
        """Place of the last token that the drafter guessed; -1 if there is none."""
        return max(set(range(len(self.tokens))).difference(self.forced), default=-1)

    def num_forced(self, count: int) -> int:
        """How many of the first ``count`` tokens a grammar forces."""
        return sum([place < count for place in self.forced])

    def count_own_tests(self, accepted: int) -> tuple[int, bool]:
        """How many of the chain's own tokens passed their test, of ``accepted`` of it, and whether one failed."""
        failed = accepted < len(self.tokens) and accepted not in self.forced
        return accepted - self.num_forced(accepted), failed

    def shares(self, accepted: int, on_chain: int) -> list[Share]:
        """Who drafted tokens, of which ``accepted`` stay, ``on_chain`` of them the chain's."""
        known = self.num_forced(on_chain) if self.forced else 0
        beside, drafted = len(self.branches), self.num_own + len(self.branches)
        shares = [
            Share(self.drafter, drafted, accepted - known, beside, accepted - on_chain),
            Share(FORCED, len(self.forced), known),
        ]
        return [share for share in shares if share.drafted]


class DraftPrefix(NamedTuple):
    """The draft tokens that are there before any drafter is asked: what a grammar forces."""

    tokens: list[int]
    room: int  # most tokens of the whole draft, these included


class DrafterTraits(NamedTuple):
    """What a drafter is like, for the draft plan and the weighing of costs."""

    default_lookahead: int  # K where nothing else is asked for
    is_free: bool = False  # a draft costs next to nothing; how much of it is tested is decided when it is there
    has_own_cache: bool = False  # it must read what it has missed of a request before it can draft
    can_exit: bool = False  # it drafts token by token, and ends a draft it is not sure of (``Request.draft_exit``)
    takes_reference: bool = False  # it copies from the text that a request brings along
    takes_layers: bool = False  # it leaves out layers of the target, by a request's layer rules
    remembers: bool = False  # it keeps what requests with a ``scope`` were given, and drafts from it later
    max_lookahead: int | None = None  # most tokens of a draft; None: no bound
    goes_on: bool = False  # it can draft after tokens that are drafted already (``Drafter.propose``)


LengthReason = Literal["fixed", "goodput", "probe", "bypass", "room"]
"""Why a stage was allowed so many tokens: the plan says so; best expected tokens per second; a cheap test of a drafter
that is bypassed; drafting does not pay; the request has no room for more."""


class StepLoad(NamedTuple):
    """What a step of the target holds before anything is drafted."""

    num_rows: int  # rows that take part (B)
    num_tokens: int  # without drafts: one for each row that decodes, and the prompt chunks
    num_ready: int  # rows that get a token of the target's own
    kv_entries: int  # of all rows together
    num_soon: int = 0  # rows that decode when all prompts that are here have been read, if more than ``num_ready``

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts in the step (0 in a round that only decodes)."""
        return self.num_tokens - self.num_rows

    @property
    def decoding(self) -> "StepLoad":
        """The step without its prompts. They must be read anyway, so the time of that decides about no draft."""
        return self._with_rows(self.num_ready)

    def when_full(self) -> "StepLoad | None":
        """The step that follows when all prompts have been read; None if this is one of that kind."""
        rows = max(self.num_soon, self.num_rows)
        return None if rows == self.num_ready and not self.prompt_tokens else self._with_rows(rows)

    def _with_rows(self, rows: int) -> "StepLoad":
        return StepLoad(rows, rows, rows, self.kv_entries * rows // self.num_rows)


class Allowed(NamedTuple):
    """How far one stage may draft in this round."""

    lookahead: int  # most draft tokens
    reason: LengthReason = "fixed"
    expected: float | None = None  # tokens of the round, the target's own included; None if unknown


class Asked(NamedTuple):
    """One stage of the draft plan in one round."""

    drafter: str
    lookahead: int  # most draft tokens that it was allowed; 0 is a bypass: it was not called
    reason: LengthReason
    expected: float | None = None  # tokens of the round, the target's own included; None if not estimated


class Promise(NamedTuple):
    """What one way to go on promised a request in one round, before anything was tested."""

    drafter: str  # empty for plain decoding
    lookahead: int  # as many tokens as it was allowed, else those that promise the most; 0 for plain decoding
    expected: float  # tokens of the round, the target's own included
    tokens_per_second: float  # of the request, if all rows of the step did the same

    def describe(self) -> str:
        """A few words for people."""
        way = f"{self.drafter} K={self.lookahead}" if self.drafter else "plain"
        return f"{way} {self.tokens_per_second:.1f}"


class RoundTrace(NamedTuple):
    """What one round did for one request."""

    round: int  # number of the round in the engine's life
    num_rows: int  # requests in the step
    num_tokens: int  # that the target was fed, of all requests
    prompt_tokens: int  # of these, of prompts that other requests brought along
    asked: tuple[Asked, ...]  # stages of the draft plan that were considered, in order
    drafter: str  # empty if none drafted
    drafted: tuple[int, ...]  # token ids of the chain
    accepted: int  # draft tokens, those of branches included
    end: DraftEnd
    emitted: tuple[int, ...]  # token ids that the round gave the request
    gamma: float | None  # threshold of the draft exit; None without one
    milliseconds: float  # of the whole round
    # Of plain decoding for as many tokens: by the engine's cost curves (time inside the engine alone, so it errs on the
    # low side), else by rounds without drafts that were measured; None if there were none.
    plain_milliseconds: float | None
    promised: tuple[Promise, ...] = ()  # by each way to go on, plain decoding too; empty where none was weighed
    forced: tuple[int, ...] = ()  # places of draft tokens that a grammar forces
    # Tokens beside the chain, each with the place of the one before it, as ``Branch`` counts places.
    branches: tuple[tuple[int, int], ...] = ()
    path: tuple[int, ...] | None = None  # places of the accepted tokens if some are of branches; else None

    @property
    def num_tested(self) -> int:
        """Draft tokens, those of branches included."""
        return len(self.drafted) + len(self.branches)

    @property
    def on_chain(self) -> int:
        """Accepted tokens of the chain: all that branches have come after them."""
        if self.path is None:
            return self.accepted
        return sum([place < len(self.drafted) for place in self.path])

    @property
    def is_fully_accepted(self) -> bool:
        """Whether nothing was drafted after the last accepted token: the target's own is no correction."""
        last = self.path[-1] if self.path else self.accepted - 1
        parents = [*range(-1, len(self.drafted) - 1), *[parent for _, parent in self.branches]]
        return last not in parents

    @property
    def own(self) -> tuple[int, int]:
        """Tokens of the chain that the drafter guessed, and those of them that were accepted."""
        accepted = self.on_chain - sum([place < self.on_chain for place in self.forced])
        return len(self.drafted) - len(self.forced), accepted

    @property
    def taken(self) -> Promise | None:
        """What the way that was gone promised; None where that was not known."""
        return next((each for each in self.promised if each.drafter == self._way), None)

    @property
    def turned_down(self) -> list[Promise]:
        """What the other ways promised, the best first."""
        others = [each for each in self.promised if each.drafter != self._way]
        return sorted(others, key=lambda each: -each.tokens_per_second)

    @property
    def _way(self) -> str:
        return self.drafter if self.drafted else ""

    @property
    def allowed(self) -> Asked | None:
        """The stage that drafted; else the last one considered; None for plain decoding."""
        used = [stage for stage in self.asked if stage.drafter == self.drafter]
        return used[0] if used else self.asked[-1] if self.asked else None

    @property
    def saved_milliseconds(self) -> float | None:
        """Milliseconds saved against plain decoding; negative if the round lost time; None if that is not known."""
        return None if self.plain_milliseconds is None else self.plain_milliseconds - self.milliseconds

    def describe(self) -> str:
        """One line for people."""
        stages = [f"{name} K={most} ({why})" for name, most, why, _ in self.asked]
        allowed = self.allowed
        if allowed is not None and allowed.expected is not None:
            stages.append(f"{allowed.expected:.1f} tokens expected")
        if self.gamma is not None:
            stages.append(f"gamma {self.gamma:.3f}")
        draft = "no draft"
        if self.drafted:
            beside = f" and {len(self.branches)} branches" if self.branches else ""
            draft = f"drafted {len(self.drafted)}{beside} ({self.end}), accepted {self.accepted}"
        if self.path is not None:
            draft += f", {self.accepted - self.on_chain} of them beside the draft"
        saved, took = self.saved_milliseconds, f"{len(self.emitted)} tokens in {self.milliseconds:.2f} ms"
        if saved is not None:
            took += f", {'saved' if saved >= 0 else 'lost'} {abs(saved):.2f} ms"
        if self.promised:
            ways = [*([self.taken] if self.taken else []), *self.turned_down]
            took += "; promised " + ", ".join(each.describe() for each in ways) + " tokens/s"
        return f"round {self.round}: {', '.join([*stages, draft])}; {took}"

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            **self._asdict(),
            "asked": [stage._asdict() for stage in self.asked],
            "promised": [each._asdict() for each in self.promised],
            "drafted": list(self.drafted),
            "forced": list(self.forced),
            "branches": [list(branch) for branch in self.branches],
            "path": None if self.path is None else list(self.path),
            "emitted": list(self.emitted),
            "saved_milliseconds": self.saved_milliseconds,
        }


class DraftStage(NamedTuple):
    """One way to draft for a request, and how far."""

    drafter: str  # ``"lookup"``, ``"suffix"``, ``"draft-model"``, ``"head"``, ``"self"``, or a name from ``drafters``
    lookahead: int  # most draft tokens a round (K)
