"""Drafting token after token with a model, whichever: K steps of it, each fed what the one before gave."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specexport_runtime.drafters.siblings import (
    MAX_OFFERED,
    choose_default_siblings,
    combine_branches,
    draw_siblings,
    find_runners_up,
    path_chances,
)
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.logit_rows import NO_TOKEN, Float32Array, LogitRow, NumpyRows
from specexport_runtime.executors.row_kernels import NOTHING, RowAsk, RowRule, ask_whole_row
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.requests.records import Branch, DraftEnd, DraftPrefix, Proposal
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.distribution import Distribution, sample_token

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead
    from specexport_runtime.drafters.at_once import ParallelWork
    from specexport_runtime.drafters.correction import Correction, Corrector

_Rows = TypeVar("_Rows")
_NAN = "the draft's logits contain NaN."
_log = logging.getLogger(__name__)


class Draft:
    """A draft that grows, by at most ``limit`` steps of the model (K).

    ``one_by_one``: the model reads what it handed on itself with each draft token, or has a place for each, so that a
    token that is forced takes a step too.
    """

    def __init__(
        self, request: Request, limit: int, begun: DraftPrefix | None = None, *, one_by_one: bool = False
    ) -> None:
        self.request, self.limit = request, limit
        self.tokens: list[int] = []
        self.waiting: list[int] = [] if begun is None else list(begun.tokens)  # forced tokens after them
        self.forced: list[int] = []  # places of forced tokens in the draft
        # What each token was drawn from; None for a greedy request.
        self.distributions: list[Distribution | None] | None = None if request.sampler.is_greedy else []
        self.branches: list[Branch] = []  # beside its tokens
        self.has_exited = False  # the model was no longer sure
        self.is_combined = False  # its places know nothing of each other
        self.carried: Float32Array | None = None  # [E], what a draft head handed on after its last token
        self.error: Exception | None = None  # why no token comes next: its logits hold a NaN, say
        self._siblings = request.siblings if request.adaptive else choose_default_siblings(request, limit)
        self._exit = request.draft_exit or request.sure
        self._num_begun = len(self.waiting)
        # Its last token ends the text.
        self.has_ended = bool(self.waiting) and request.is_end(self.waiting[-1])
        self._room = 0 if begun is None else begun.room
        self._steps = 0
        self._one_by_one = one_by_one

    @property
    def is_open(self) -> bool:
        """Whether it takes more of the model's tokens."""
        steps, ended = self._steps, self.has_exited or self.has_ended or self.error is not None
        if self._one_by_one:
            steps += len(self.waiting)
        if steps >= self.limit or ended:
            return False
        return not self._room or len(self.tokens) + len(self.waiting) < self._room

    @property
    def may_exit(self) -> bool:
        """Whether the draft may end with the next token because the model is not sure: the last has nothing to end."""
        return self._exit is not None and self._steps + 1 < self.limit

    def _siblings_at(self, ahead: int = 0) -> int:
        """Branches that there may be beside the token ``ahead`` of the next, if it is the model's."""
        place = len(self.tokens) - len(self.forced) + ahead
        return self._siblings[place] if place < len(self._siblings) else 0

    def count_chainable_steps(self, *, draws: bool) -> int:
        """Steps that feed the model ids that it gave, or that the device draws; 0 where more is looked at."""
        sampler = self.request.sampler
        if self._one_by_one or self.waiting or self._exit is not None or self._siblings:
            return 0
        if not sampler.is_plain_greedy and not (draws and sampler.is_uncut):
            return 0
        steps = self.limit - self._steps
        return min(steps, self._room - len(self.tokens)) if self._room else steps

    def list_tokens_since(self, position: int) -> list[int]:
        """The tokens of the request and of its draft from a position on."""
        known = self.request.tokens
        if position >= len(known):
            return self.tokens[position - len(known) :]
        return known[position:] + self.tokens

    def place_waiting(self) -> None:
        """Take the tokens that wait, without a step."""
        while self.waiting:
            self._place_one()

    def begin_step(self) -> None:
        """Take the tokens that wait, if the model reads them all at once."""
        if not self._one_by_one:
            self.place_waiting()

    def step_waiting(self) -> bool:
        """Take one token that waits in place of the one that a step gave; False if none does."""
        if not self.waiting:
            return False
        self._place_one()
        self._steps += 1
        return True

    def _place_one(self) -> None:
        self.forced.append(len(self.tokens))
        self._put(self.waiting.pop(0), None)

    def _put(self, token: int, distribution: Distribution | None) -> None:
        self.tokens.append(token)
        if self.distributions is not None:
            self.distributions.append(distribution)

    def ask(self, width: int, num_rows: int, ahead: int = 0) -> RowAsk:
        """What to ask of the row of logits ``ahead`` of the next; there are ``num_rows`` cache rows."""
        sampler, steps = self.request.sampler, self._steps + ahead
        if self._siblings_at(ahead):
            return ask_whole_row(width)
        if sampler.is_plain_greedy:  # the probability of the likeliest token, to end the draft by
            may_exit = self._exit is not None and steps + 1 < self.limit
            return RowAsk(RowRule(1.0, width)) if may_exit else NOTHING
        uniform = self.request.draws.peek(len(self.tokens) + ahead).draft
        return sampler.ask(uniform, width, slot=steps * num_rows + self.request.row)

    def draw(self, row: LogitRow, width: int, confidence: float | None = None) -> None:
        """Append the token, below ``width``, that a row of logits gives; end the draft if it is not sure of it.

        The token is kept then: to leave it out because of *what it is* would make the text follow another distribution.
        ``confidence`` is what the model itself says of the place, whatever is drawn; without it the top probability is.
        CheckFailedError: the logits hold NaN or +inf. InvalidRequestError: every token is banned.
        """
        if row.ask is NOTHING:
            if row.token_id == NO_TOKEN:
                raise CheckFailedError(_NAN)
            # One that may not be drafted: a wrong guess costs a rejection, nothing else.
            return self.append(row.token_id if row.token_id < width else 0)
        distribution, top, may_exit = None, 1.0, self.may_exit
        if self.distributions is not None:
            distribution = self.request.sampler.make_row_distribution(row, self.tokens)
            token = sample_token(distribution, self.request.draws(len(self.tokens)).draft)
            if count := self._siblings_at():
                self._branch_drawn(distribution, token, count)
            if may_exit and confidence is None:
                top = distribution.top
        else:
            token, top = self._draw_greedily(row, width)
        if self._exit is not None and may_exit:
            self.has_exited = self._exit.should_end(top if confidence is None else confidence)
        return self.append(token, distribution)

    def _draw_greedily(self, row: LogitRow, width: int) -> tuple[int, float]:
        """The likeliest token, and its probability if the draft may end with it."""
        sampler, count = self.request.sampler, self._siblings_at()
        if sampler.is_plain and not count and row.found.is_whole and 0 <= row.token_id < width:
            return row.token_id, 1.0 / row.found.total
        logits = row.fetch()
        token = _argmax_token(logits) if sampler.is_plain else sampler.greedy_token(logits, self.tokens)
        # With penalties: of the token they chose, but before them.
        top = _probability(logits, token) if self.may_exit else 1.0
        if count:
            allowed, ids = sampler.allowed_logits(logits, self.tokens)
            found = find_runners_up(allowed, token if ids is None else int(ids.searchsorted(token)), count)
            self.branches += [
                Branch(best if ids is None else int(ids[best]), len(self.tokens) - 1, ratio=ratio)
                for best, ratio in found
            ]
        return token, top

    def _branch_drawn(self, distribution: Distribution, token: int, count: int) -> None:
        """Put tokens beside the next one, ``token``, that are drawn from what it and its elder siblings leave."""
        parent, number = len(self.tokens) - 1, len(self.branches)
        uniforms = [self.request.draws.branch(number + i).draft for i in range(count)]
        self.branches += [
            Branch(sibling, parent, distribution) for sibling in draw_siblings(distribution, token, uniforms)
        ]

    def append(self, token: int, distribution: Distribution | None = None) -> None:
        """Append the token of a step, drawn from ``distribution``, and look at what a grammar forces after it."""
        self._put(token, distribution)
        self._steps += 1
        grammar = self.request.sampler.grammar
        if grammar is not None and self._room:
            self.waiting = grammar.forced(self._room - len(self.tokens), self.tokens)
            self.has_ended = self.request.is_end((self.waiting or self.tokens)[-1])

    def proposal(self, drafter: str) -> Proposal:
        """What is to be tested, under the name of ``drafter`` in draft plans."""
        if isinstance(self.error, CheckFailedError):
            _warn_of_nan(drafter)
        elif self.error is not None and not isinstance(self.error, InvalidRequestError):
            return Proposal([], None, "none", drafter, error=self.error)
        if len(self.tokens) <= self._num_begun:
            return Proposal([], None, "none")
        self.place_waiting()
        end: DraftEnd = "exit" if self.has_exited else "lookahead"
        draft_exit = self.request.draft_exit
        gamma = None if draft_exit is None else draft_exit.gamma
        proposal = Proposal(self.tokens, self.distributions, end, drafter, gamma=gamma, forced=tuple(self.forced))
        return proposal._replace(branches=self._select_branches()) if self.branches else proposal

    def _select_branches(self) -> tuple[Branch, ...]:
        """The likeliest that a tree of fixed size has room for, and all that were drawn, *whatever* they are."""
        req, room = self.request, self.request.tree_size - len(self.tokens) + len(self.forced)
        if self.distributions is None and self.is_combined and not self.forced:
            return combine_branches(
                self.branches, self.tokens, max(min(room, MAX_OFFERED) if req.adaptive else room, 0)
            )
        if req.adaptive or self.distributions is not None or len(self.branches) <= room:
            return tuple(self.branches)
        chances = path_chances(self.branches, len(self.tokens))
        best = sorted(range(len(chances)), key=lambda place: -chances[place])[: max(room, 0)]
        return tuple([self.branches[place] for place in sorted(best)])


def open_drafts(
    requests: Sequence[Request],
    lookaheads: Sequence[int],
    begun: Sequence[DraftPrefix] | None = None,
    *,
    most: int | None = None,
    one_by_one: bool = False,
) -> list[Draft]:
    """A draft of at most ``lookaheads`` steps (K) for each request; none if its prompt was not read to the end."""
    limits = lookaheads if most is None else [min(limit, most) for limit in lookaheads]
    return [
        Draft(req, limits[i] if req.num_generated else 0, None if begun is None else begun[i], one_by_one=one_by_one)
        for i, req in enumerate(requests)
    ]


def run_drafts(
    runner: ModelRunner,  # its committed lengths grow by what it is fed
    drafts: Sequence[Draft],  # in ascending rows
    width: int,  # ids that may be drafted; logits beyond it are cut off
    pending: Callable[[Draft], RowWork],  # what is fed for a draft as it stands: what the model has not seen
    is_kept: Callable[[Draft], bool] = lambda _: True,  # whether what is fed for a draft as it stands is committed
) -> None:
    """Fill all drafts, one packed step of the model a depth, or several depths with one wait where a device draws."""
    executor = runner.executor
    can_chain = runner.chains and executor.head is None and not executor.reads_features
    while active := [draft for draft in drafts if draft.is_open]:
        for draft in active:
            draft.begin_step()
        work = [pending(draft) for draft in active]
        count = min(draft.count_chainable_steps(draws=executor.keeps_rows) for draft in active) if can_chain else 0
        if count > 1:
            _chain(runner, active, work, width, count)
            continue
        kept = [len(given.tokens) if is_kept(draft) else 0 for draft, given in zip(active, work, strict=True)]
        if runner.has_states:
            drafted = [len(draft.tokens) for draft in active]
            work = [given._replace(drafts=count) for given, count in zip(work, drafted, strict=True)]
        asks = [draft.ask(width, executor.num_rows) for draft in active]
        if any(ask is not NOTHING for ask in asks):
            work = [given._replace(asks=[ask]) for given, ask in zip(work, asks, strict=True)]
        rows, starts = _step(runner, active, work, kept, runner.step_rows)
        if executor.reads_features:
            for draft, handed in zip(active, executor.next_features.copy(), strict=True):
                draft.carried = handed
        for draft, start in zip(active, starts, strict=True):
            _draw(draft, rows[start], width)


def _chain(runner: ModelRunner, active: Sequence[Draft], work: Sequence[RowWork], width: int, count: int) -> None:
    """Run ``count`` steps, the first with ``work``; what a step was fed that no draft has is not committed."""
    kv, num_rows = runner.kv, runner.executor.num_rows
    before = [kv.kv_len(draft.request.row) + len(given.tokens) for draft, given in zip(active, work, strict=True)]
    asks = [[draft.ask(width, num_rows, ahead) for draft in active] for ahead in range(count)]
    steps = runner.chain(active[0].request.row, _with_idle_rows(active, work), asks)
    for i, draft in enumerate(active):
        for depth, rows in enumerate(steps):
            _draw(draft, rows[i], width)
            if draft.error is not None or draft.tokens[-1] != rows[i].token_id:
                kv.commit(draft.request.row, before[i] + depth)  # what comes after it followed another token
                break


def draft_at_once(
    runner: ModelRunner,
    drafts: Sequence[Draft],
    work: "Sequence[ParallelWork]",
    width: int,
    corrector: "Corrector | None" = None,
) -> None:
    """Fill all drafts, open ones in ascending rows, from one packed step, whose last rows are of the draft's places.

    ``work`` wants as many logits for each draft as it has places; ids below ``width`` may be drafted. A ``corrector``
    changes the logits of a place by the tokens before it.
    """
    executor, kept = runner.executor, [given.kept for given in work]
    if corrector is not None:
        logits, starts = _step(runner, drafts, [given.work for given in work], kept, runner.step)
        num_rows = width if executor.head is None else len(executor.head.ids)
        for draft, given, start in zip(drafts, work, starts, strict=True):
            places = slice(start, start + given.work.num_logits)
            newest, states = draft.request.tokens[-1], executor.next_features[places]
            correction = corrector.begin(logits[places, :num_rows], states, newest)
            _draw_corrected(draft, correction, width, executor.head)
        return
    asked = [
        given.work._replace(asks=[draft.ask(width, executor.num_rows, i) for i in range(given.work.num_logits)])
        for draft, given in zip(drafts, work, strict=True)
    ]
    rows, starts = _step(runner, drafts, asked, kept, runner.step_rows)
    for draft, given, start in zip(drafts, work, starts, strict=True):
        draft.is_combined = True
        for place in range(start, start + given.work.num_logits):
            if draft.is_open:
                _draw(draft, rows[place], width)


def _draw(draft: Draft, row: LogitRow, width: int) -> None:
    """Let a draft draw its next token. It ends where there is none: that is an error only if the text comes there."""
    try:
        if not draft.step_waiting():
            draft.draw(row, width)
    except Exception as error:  # whatever it is, it concerns this request alone
        draft.error = error


def _draw_corrected(draft: Draft, correction: "Correction", width: int, head: "CutHead | None") -> None:
    """As :func:`_draw` till the draft is full, each place's logits corrected by the tokens before it."""
    try:
        while draft.is_open:
            if not draft.step_waiting():
                logits = correction.logits(draft.tokens)
                confidence = correction.confidence(draft.tokens) if draft.may_exit else None
                draft.draw(NumpyRows(logits[None], [ask_whole_row(width)], head)[0], width, confidence)
    except Exception as error:  # see ``_draw``
        draft.error = error


def _step(
    runner: ModelRunner,
    drafts: Sequence[Draft],
    work: Sequence[RowWork],
    kept: Sequence[int],  # tokens of each that are committed
    step: Callable[[int, Sequence[RowWork]], _Rows],
) -> tuple[_Rows, list[int]]:
    """Feed the model; gives the rows of logits, and where those of each draft begin."""
    first = drafts[0].request.row
    rows = step(first, _with_idle_rows(drafts, work))
    for draft, count in zip(drafts, kept, strict=True):
        row = draft.request.row
        runner.kv.commit(row, runner.kv.kv_len(row) + count)
    return rows, [runner.logit_starts[draft.request.row - first] for draft in drafts]


def _with_idle_rows(drafts: Sequence[Draft], work: Sequence[RowWork]) -> list[RowWork]:
    first = drafts[0].request.row
    rows = [IDLE] * (drafts[-1].request.row - first + 1)
    for draft, given in zip(drafts, work, strict=True):
        rows[draft.request.row - first] = given
    return rows


def _argmax_token(logits: Float32Array) -> int:
    """The likeliest token; as with the target's, one look finds any NaN: the first one counts as the largest."""
    token = int(logits.argmax())
    best = logits[token]
    if best != best:  # noqa: PLR0124 - only NaN is unequal to itself
        raise CheckFailedError(_NAN)
    return token


@cache
def _warn_of_nan(drafter: str) -> None:
    _log.warning("drafter %s: drafts end where its logits are no numbers. Fix: run `specexport verify`.", drafter)


def _probability(logits: Float32Array, token: int) -> float:
    """Softmax probability of one token; 0 if the logits are no numbers."""
    peak = float(logits.max())
    if not math.isfinite(peak):
        return 0.0
    return math.exp(float(logits[token]) - peak) / float(np.exp(logits - peak).sum())
