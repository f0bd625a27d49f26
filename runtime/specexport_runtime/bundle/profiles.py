"""Optimization profiles: the step sizes an engine was built for, and which of them serves a step.

An engine whose kernels are chosen ahead of time (TensorRT) runs only step sizes inside one of its profiles. A fixed
profile has one size of everything: steps are padded up to it, and one CUDA graph replays it. A ranged profile takes any
size up to its own. The compiler plans profiles (``specexport.backends.profiles``), the manifest lists them in the
engine's order, and the runtime chooses with :func:`choose_profile`. Imports the standard library only.

A draft head runs steps between two rounds.

A row of such a step has the entries whose features the head has not read, and after them stand-ins for tokens that
are not known yet (see ``drafters.at_once``)::

                       not read    stand-ins                 logits
    token by token     1 … K+1     none                      1        then one entry a step
    with masks         1 … K+1     K-1 masks                 K
    in blocks          1 … K+1     the newest, and K masks   K
    heads by number    none        K numbers of heads        K

After a round up to K+1 features are new: those of the tokens that were accepted.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from specexport_runtime.abi import Size, StepShape
from specexport_runtime.errors import IncompatibleError

ProfileKind = Literal["decode", "verify", "catch-up", "draft", "prefill"]
"""One token a row; K+1 tokens a row of the target; what a draft model is
fed after a round that accepted everything, two tokens a row (K+1 of a draft head, which reads all its entries again);
a head that drafts all tokens in one step; and ranged."""


class Profile(NamedTuple):
    """One optimization profile: the sizes of a fixed one, the largest sizes of a ranged one."""

    kind: ProfileKind
    num_seqs: Size  # B
    max_new_tokens: Size  # Q
    num_tokens: Size  # T; B*Q in a fixed profile, where every row is padded to Q tokens
    num_logit_rows: Size  # R
    fold: Size = 1  # tokens of a row that the attention takes for heads: the width of its tile is a multiple of it

    @property
    def largest(self) -> StepShape:
        """The largest step."""
        sizes = (0, self.num_seqs, self.num_tokens, self.max_new_tokens, self.num_logit_rows)
        return StepShape(*sizes, fold=self.fold)

    @property
    def is_fixed(self) -> bool:
        """Whether every size is fixed; a prefill profile takes any size from 1 up."""
        return self.kind != "prefill"

    @property
    def name(self) -> str:
        """For people and logs, for example ``"verify 8x5"`` or ``"prefill 256, up to 8 rows"``."""
        if self.is_fixed:
            return f"{self.kind} {self.num_seqs}x{self.max_new_tokens}"
        return f"{self.kind} {self.num_tokens}, up to {self.num_seqs} rows"

    def fits(self, shape: StepShape) -> bool:
        """Whether a step of ``shape`` can run in this profile (padded up to it if it is fixed)."""
        if shape.num_seqs > self.num_seqs or shape.max_new_tokens > self.max_new_tokens:
            return False
        return shape.num_tokens <= self.num_tokens and shape.num_logit_rows <= self.num_logit_rows


def choose_profile(profiles: Sequence[Profile], shape: StepShape) -> int:
    """Index of the cheapest profile for a step: fixed first, then fewest padded tokens, then fewest rows."""
    fitting = [i for i, profile in enumerate(profiles) if profile.fits(shape)]
    if not fitting:
        raise IncompatibleError(_too_large(profiles, shape), "build it again with larger limits.")
    # A fixed profile is never worse than a ranged one that fits: it holds at most a row of K+1 tokens more a sequence.
    return min(fitting, key=lambda i: (not profiles[i].is_fixed, profiles[i].num_tokens, profiles[i].num_seqs, i))


def _too_large(profiles: Sequence[Profile], shape: StepShape) -> str:
    rows, tokens = (max(getattr(p, name) for p in profiles) for name in ("num_seqs", "num_tokens"))
    if shape.num_seqs > rows:
        return f"a step has {shape.num_seqs} sequences, the engine was built for {rows} (--max-num-seqs)."
    if shape.num_tokens > tokens:
        return f"a step has {shape.num_tokens} tokens, the engine was built for {tokens} (--max-num-tokens)."
    return f"no profile of the engine fits {shape}: {', '.join(profile.name for profile in profiles)}."


class HeadSteps(NamedTuple):
    """Sizes of a draft head's steps, beside the steps that only read a prompt."""

    fresh: int  # most entries of a row whose features are new
    behind: int  # entries of a row after these
    logits: int  # rows of logits that a row of the step wants
    steps_alone: bool  # the head drafts token after token, so that most of its steps have one entry a row

    @property
    def width(self) -> int:
        """Most entries of a row."""
        return self.fresh + self.behind

    @property
    def widths(self) -> range:
        """Entries that a row may have, of a draft of K tokens."""
        return range(self.behind + min(self.fresh, 1), self.width + 1)


def head_steps(
    lookahead: int, *, num_draft_heads: int = 0, block_size: int | None = None, has_mask: bool = False
) -> HeadSteps:
    """The steps of a head that drafts up to ``lookahead`` tokens (K); K is less where the head has no more to give."""
    if num_draft_heads:
        drafted = min(lookahead, num_draft_heads)
        return HeadSteps(0, drafted, drafted, steps_alone=False)
    if block_size is not None:
        drafted = min(lookahead, block_size - 1)
        return HeadSteps(lookahead + 1, drafted + 1, drafted, steps_alone=False)
    if has_mask:
        return HeadSteps(lookahead + 1, lookahead - 1, lookahead, steps_alone=False)
    return HeadSteps(lookahead + 1, 0, 1, steps_alone=True)
