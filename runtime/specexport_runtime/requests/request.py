"""State of one request while it is decoded."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from specexport_runtime.errors import SpecexportError
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import FORCED, DraftStage, Proposal
from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.requests.text import TextStream
from specexport_runtime.sampling.block import DEFAULT_RULE
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler

if TYPE_CHECKING:
    from specexport_runtime.requests.draft_exit import DraftExit, EndsDraft
    from specexport_runtime.requests.records import RoundTrace
    from specexport_runtime.sampling.grammar import TokenRules
    from specexport_runtime.sampling.logprobs import TokenLogprobs

NO_ROW = -1
FinishReason = Literal["stop", "length", "cancelled", "error"]


class DraftPlan(NamedTuple):
    """How to draft for one request."""

    stages: tuple[DraftStage, ...] = ()  # tried in order until one finds something; empty for plain decoding
    adaptive: bool = False  # the lookahead of each stage is the most that may be chosen, round by round
    tree_size: int = 0  # most draft tokens of a drafter in a round, branches included; 0: chains without bound
    reference: Sequence[int] = ()  # token ids that lookup drafting may copy from, besides the request's own
    draft_exit: "DraftExit | None" = None  # ends drafts of models that are no longer sure; None never does
    layer_rules: LayerRules = LayerRules()  # what a draft out of the target itself leaves out
    forced_lookahead: int = 0  # most draft tokens of a round in which the grammar forces some
    acceptance: str = DEFAULT_RULE  # of drafts if it is sampled, one of ``sampling.block.RULES``


class Delivery(NamedTuple):
    """For whom a request is, and what of it is handed on or kept."""

    stream: bool = False  # keep the text of each token for :meth:`Request.take_pieces`
    trace: bool = False  # keep what each round did
    scope: str | None = None  # who may see what is kept of it, and whose texts it may see; None: nothing either way
    is_pinned: bool = False  # its prompt stays in its cache row when it has ended
    owner: str = ""  # owners get rows in turns
    priority: int = 0  # lower ones go first
    adapter: int | None = None  # number of its LoRA adapter, from 1; None for the engine's default


PLAIN, AS_USUAL = DraftPlan(), Delivery()


class Request:
    """A prompt, the tokens generated for it, and when to stop; others remember it by a weak reference."""

    def __init__(
        self,
        index: int,  # the caller's number for this request
        prompt: Sequence[int],  # token ids, at least one
        params: SamplingParams,
        *,
        vocab_size: int,  # rows of the target's LM head (V)
        max_model_len: int,  # most tokens, prompt and generated, that a cache row can hold
        eos_token_ids: Sequence[int] = (),  # end the text unless ``params.ignore_eos``
        text: TextStream | None = None,  # None if no text is wanted
        seed: int = 0,
        grammar: "TokenRules | None" = None,  # which tokens may come next; None for any
        plan: DraftPlan = PLAIN,
        delivery: Delivery = AS_USUAL,
    ) -> None:
        self.index = index
        self.params = params
        self.tokens = list(prompt)  # prompt and committed output
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = min(params.max_tokens, max_model_len - len(prompt))
        self.sampler = Sampler(params, prompt, vocab_size, grammar)
        self.acceptance = plan.acceptance
        self.draws = RoundDraws(RandomStream(seed))  # by place in the round
        self.text = text
        self._pieces: list[tuple[str, int]] | None = [] if delivery.stream else None
        self.row = NO_ROW  # cache row while it is running
        self.num_agreed = len(prompt)  # tokens up to where the last draft's chain went on as the text does
        self.finish_reason: FinishReason | None = None  # None while it may go on
        self.error: Exception | None = None
        self.draft_plan, self.reference, self.adaptive = plan.stages, plan.reference, plan.adaptive
        self.draft_exit, self.layer_rules, self.tree_size = plan.draft_exit, plan.layer_rules, plan.tree_size
        self.sure: EndsDraft | None = None  # ends a draft of this round that is no longer worth its steps
        # Branches that a model's draft of this round may have beside each of its own tokens, if it is adaptive.
        self.siblings: tuple[int, ...] = ()
        self.drafters: list[str] = []  # of each token of the output; empty for the target's own
        self.trace: list[RoundTrace] | None = [] if delivery.trace else None  # one entry a round; None: not asked for
        self.scope, self.adapter, self.is_pinned = delivery.scope, delivery.adapter, delivery.is_pinned
        self.owner, self.priority = delivery.owner, delivery.priority
        # ``reads_again``: it was paused, and what it had generated is being read again, but for its newest token, with
        # which the next round begins. ``num_read``: tokens read before the pause, so that none is counted twice.
        self.reads_again, self.num_read, self._paused_at = False, 0, 0
        self._forced_lookahead = 0 if grammar is None else plan.forced_lookahead
        # One entry for each token of the output, and of the prompt that was read, None for its first, which follows
        # nothing; None where they were not asked for.
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        now = time.perf_counter()
        self.stats = RequestStats(num_prompt_tokens=len(prompt), submit_time=now, start_time=now)
        self._stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        if not prompt or self.max_tokens < 1:
            raise SpecexportError("a request needs a prompt token and room for one generated token.")

    @property
    def num_generated(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether exactly one of its tokens is unread: the newest."""
        return self.num_generated > 0 and not self.reads_again

    @property
    def num_since_pause(self) -> int:
        """Committed output tokens since it was paused, or since its beginning."""
        return self.num_generated - self._paused_at

    @property
    def output(self) -> list[int]:
        """Committed output token ids."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def row_scope(self) -> tuple[str, int | None] | None:
        """The scope and adapter of requests that may go on from its cache row; None for no request."""
        return None if self.scope is None else (self.scope, self.adapter)

    @property
    def room_for_drafts(self) -> int:
        """Most draft tokens worth testing: a round always adds one token of the target's own."""
        return self.max_tokens - self.num_generated - 1

    @property
    def is_scored(self) -> bool:
        """Whether its prompt has log-probabilities that are wanted and not there yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def max_lookahead(self) -> int:
        """Most draft tokens of a round: what the plan may ask for, or what a grammar forces besides."""
        planned = max((stage.lookahead for stage in self.draft_plan), default=0)
        return max(planned, self._forced_lookahead) if planned else 0

    def is_end(self, token: int) -> bool:
        """Whether the text ends with this token, wherever it comes."""
        return token in self._stop_ids

    def finish_text(self) -> str:
        """The whole text, cut at a stop string; empty if no detokenizer was given."""
        if self.text is None:
            return ""
        self.text.finish()
        return self.text.text

    def take_pieces(self, count: int) -> list[tuple[str, int]]:
        """Text that became safe to show with each of the next ``count`` tokens, and where each begins in the text."""
        if self._pieces is None:
            raise SpecexportError("this request was made without stream=True.")
        pieces, self._pieces = self._pieces[:count], self._pieces[count:]
        return pieces

    def commit(self, new_tokens: Sequence[int]) -> int:
        """Append one round's tokens up to the first that ends the text; the number of tokens that were taken."""
        taken = 0
        for token in new_tokens:
            taken += 1
            self.tokens.append(token)
            begin = 0 if self.logprobs is None or self.text is None else self.text.length
            # The text sees an ending token too, so that `skip_special_tokens=False` shows it.
            if (self.text is not None and self.text.append(token)) or token in self._stop_ids:
                self.finish_reason = "stop"
            elif self.num_generated >= self.max_tokens:
                self.finish_reason = "length"
            if self._pieces is not None and self.text is not None:
                piece = self.text.take() if self.finish_reason is None else self.text.finish()
                self._pieces.append((piece, begin))
            if self.finish_reason is not None:
                break
        self.sampler.append(new_tokens[:taken])
        self.draws.end_round()
        self._note_time()
        return taken

    def pause(self, num_read: int) -> None:
        """It gives its row up; the ``num_read`` tokens are read again later, or found in a row that kept them."""
        self.reads_again = self.num_generated > 0
        self.num_read, self._paused_at = max(self.num_read, num_read), self.num_generated
        self.stats.preemptions += 1

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request that has not finished; one that has stays as it is."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            self._note_time()

    def _note_time(self) -> None:
        now = time.perf_counter()
        if self.num_generated and self.stats.first_token_time is None:
            self.stats.first_token_time = now
        if self.finish_reason is not None:
            self.stats.end_time = now


class RoundEvent(NamedTuple):
    """What one round did for one request."""

    request: Request  # its ``finish_reason`` says whether it is done
    tokens: list[int]  # committed: ``accepted`` drafts, then the target's own unless the text ended; none if it failed
    drafted: int  # draft tokens tested
    accepted: int  # of these, accepted and committed
    is_bonus: bool  # the target's own token follows a fully accepted draft; otherwise it corrects the draft
    proposal: Proposal = Proposal([])
    gamma: float | None = None  # threshold that the draft was made with; None if it had none
    path: tuple[int, ...] | None = None  # places of the accepted nodes of a tree; None for a chain

    @property
    def on_chain(self) -> int:
        """Accepted tokens of the draft's chain."""
        if self.path is None:
            return self.accepted
        return sum([place < len(self.proposal.tokens) for place in self.path[: self.accepted]])

    @property
    def drafters(self) -> list[str]:
        """Who drafted each of its tokens; empty for the target's own."""
        names = [self.proposal.drafter] * self.accepted + [""] * (len(self.tokens) - self.accepted)
        for place in self.proposal.forced[: self.proposal.num_forced(self.on_chain)]:
            names[place] = FORCED
        return names

    def is_branch(self, position: int) -> bool:
        """Whether one of its tokens is an accepted one of a branch: these come after those of the chain."""
        return self.on_chain <= position < self.accepted
