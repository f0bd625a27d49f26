"""Records that pass between drafting, lengths, verification and those who watch. They hold no state and import none."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from specexport_runtime.sampling.distribution import Distribution

DraftEnd = Literal["lookahead", "exit", "text", "none"]
"""Why a draft ended: K was reached, the drafter was not sure any more, nothing more to copy, or no draft at all."""

FORCED = "forced"
"""What draft tokens that a grammar forces are counted under, whoever made the draft around them."""


class Proposal(NamedTuple):
    """Draft tokens for one sequence.

    Attributes:
        tokens: the draft tokens, in order; empty for plain decoding.
        distributions: the distribution each token was drawn from; None says one-hot (greedy, copied text, a token that
            a grammar forces), for all of them or for one.
        end: why the draft has no more tokens.
        drafter: name of the drafter in the draft plan; empty if none was asked or none found anything.
        match_length: of a copied draft, how many tokens before it matched; 0 for drafts of models.
        gamma: threshold that could end the draft early; None if nothing could.
        asked: the stages of the draft plan that were considered, in order; only for a sequence that keeps a trace.
        promised: what each way to go on promised; only for an adaptive sequence that keeps a trace.
        error: drafting failed for this sequence, by logits that are no numbers for example: it ends with this error.
        forced: places of the tokens that a grammar forces, ascending; the others are the drafter's own.
    """

    tokens: list[int]
    distributions: "list[Distribution | None] | None" = None
    end: DraftEnd = "lookahead"
    drafter: str = ""
    match_length: int = 0
    gamma: float | None = None
    asked: "tuple[Asked, ...]" = ()
    promised: "tuple[Promise, ...]" = ()
    error: Exception | None = None
    forced: tuple[int, ...] = ()

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

    def own_tests(self, accepted: int) -> tuple[int, bool]:
        """What became of the drafter's own tokens: how many passed their test, and whether one failed.

        Args:
            accepted: tests passed, of all tokens; if that is not all of them, the next one failed.
        """
        failed = accepted < len(self.tokens) and accepted not in self.forced
        return accepted - self.num_forced(accepted), failed

    def shares(self, accepted: int) -> list[tuple[str, int, int]]:
        """Who drafted tokens: name, tokens, and how many of them are among the first ``accepted``."""
        if not self.forced:
            return [(self.drafter, len(self.tokens), accepted)] if self.tokens else []
        known = self.num_forced(accepted)
        shares = [(self.drafter, self.num_own, accepted - known), (FORCED, len(self.forced), known)]
        return [share for share in shares if share[1]]


class Begun(NamedTuple):
    """The draft tokens that are there before any drafter is asked: what a grammar forces.

    Attributes:
        tokens: draft token ids.
        room: most tokens of the whole draft, these included.
    """

    tokens: list[int]
    room: int


class DrafterTraits(NamedTuple):
    """What a drafter is like, for those that plan drafts and weigh what they cost.

    Attributes:
        default_lookahead: K where nothing else is asked for.
        is_free: a draft costs next to nothing, so how much of one is tested is decided when it is there.
        has_own_cache: it must read what it has missed of a sequence before it can draft.
        can_exit: it drafts token by token, and ends a draft that it is no longer sure of (``Sequence.draft_exit``).
        takes_reference: it copies from the text that a request brings along.
        takes_layers: it leaves out layers of the target, by a request's layer rules.
        remembers: it keeps what sequences with a ``scope`` were given, and drafts from it for later ones.
        max_lookahead: most tokens that it ever drafts at a time; None for no bound of its own.
        goes_on: it can draft behind tokens that are drafted already (``ContinuingDrafter``).
    """

    default_lookahead: int
    is_free: bool = False
    has_own_cache: bool = False
    can_exit: bool = False
    takes_reference: bool = False
    takes_layers: bool = False
    remembers: bool = False
    max_lookahead: int | None = None
    goes_on: bool = False


LengthReason = Literal["fixed", "goodput", "probe", "bypass", "room"]
"""Why a stage was allowed so many tokens: the plan says so; best expected tokens per second; a cheap test of a drafter
that is bypassed; drafting does not pay; the sequence has no room for more."""


class StepLoad(NamedTuple):
    """What a step of the target holds before anything is drafted.

    Attributes:
        num_rows: rows that take part (B).
        num_tokens: tokens without drafts: one for each row that decodes, and the prompt chunks.
        num_ready: rows that get a token of the target's own.
        kv_entries: cache entries of all rows together.
        num_soon: rows that decode when all prompts that are here have been read, if that is more than ``num_ready``.
    """

    num_rows: int
    num_tokens: int
    num_ready: int
    kv_entries: int
    num_soon: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts in the step (0 in a round that only decodes)."""
        return self.num_tokens - self.num_rows

    def when_full(self) -> "StepLoad | None":
        """The step that follows when all prompts have been read; None if this is one of that kind."""
        rows = max(self.num_soon, self.num_rows)
        if rows == self.num_ready and not self.prompt_tokens:
            return None
        return StepLoad(rows, rows, rows, self.kv_entries * rows // self.num_rows)


class Allowed(NamedTuple):
    """How far one stage may draft in this round.

    Attributes:
        lookahead: most draft tokens.
        reason: why so many.
        expected: tokens that the round is expected to give the sequence, the target's own included; None if unknown.
    """

    lookahead: int
    reason: LengthReason = "fixed"
    expected: float | None = None


class Asked(NamedTuple):
    """One stage of the draft plan in one round.

    Attributes:
        drafter: its drafter.
        lookahead: most draft tokens that it was allowed; 0 is a bypass: it was not called.
        reason: why so many.
        expected: tokens that the round was expected to give, the target's own included; None if nobody estimated.
    """

    drafter: str
    lookahead: int
    reason: LengthReason
    expected: float | None = None


class Promise(NamedTuple):
    """What one way to go on promised a sequence in one round, before anything was tested.

    Attributes:
        drafter: who would draft; empty for plain decoding.
        lookahead: draft tokens: as many as it was allowed, else those that promise the most; 0 for plain decoding.
        expected: tokens that the round would give, the target's own included.
        tokens_per_second: of the sequence, if all rows of the step did the same.
    """

    drafter: str
    lookahead: int
    expected: float
    tokens_per_second: float

    def describe(self) -> str:
        """A few words for people."""
        way = f"{self.drafter} K={self.lookahead}" if self.drafter else "plain"
        return f"{way} {self.tokens_per_second:.1f}"


class RoundTrace(NamedTuple):
    """What one round did for one sequence.

    Attributes:
        round: number of the round in the engine's life.
        num_rows: sequences in the step.
        num_tokens: tokens that the target was fed, of all sequences.
        prompt_tokens: of these, tokens of prompts that other sequences brought along.
        asked: the stages of the draft plan that were considered, in order.
        drafter: who drafted; empty if nobody did.
        drafted: draft token ids.
        accepted: how many of them were accepted.
        end: why the draft had no more tokens.
        emitted: token ids that the round gave the sequence.
        gamma: threshold of the draft exit in this round; None without one.
        milliseconds: of the whole round.
        plain_milliseconds: what plain decoding would have taken for as many tokens: from the engine's cost curves (time
            inside the engine alone, so it errs on the low side), else from rounds without drafts that were measured;
            None if there were none.
        promised: what each way to go on promised, plain decoding too; empty where nobody weighed them.
        forced: places of draft tokens that a grammar forces.
    """

    round: int
    num_rows: int
    num_tokens: int
    prompt_tokens: int
    asked: tuple[Asked, ...]
    drafter: str
    drafted: tuple[int, ...]
    accepted: int
    end: DraftEnd
    emitted: tuple[int, ...]
    gamma: float | None
    milliseconds: float
    plain_milliseconds: float | None
    promised: tuple[Promise, ...] = ()
    forced: tuple[int, ...] = ()

    @property
    def own(self) -> tuple[int, int]:
        """Draft tokens that the drafter guessed, and those of them that were accepted."""
        accepted = self.accepted - sum([place < self.accepted for place in self.forced])
        return len(self.drafted) - len(self.forced), accepted

    @property
    def taken(self) -> Promise | None:
        """What the way that was gone promised; None where nobody knew."""
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
        draft = f"drafted {len(self.drafted)} ({self.end}), accepted {self.accepted}" if self.drafted else "no draft"
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
            "emitted": list(self.emitted),
            "saved_milliseconds": self.saved_milliseconds,
        }


class DraftStage(NamedTuple):
    """One way to draft for a sequence, and how far.

    Attributes:
        drafter: ``"lookup"``, ``"draft-model"``, ``"head"`` or ``"self"``.
        lookahead: most draft tokens a round (K).
    """

    drafter: str
    lookahead: int
