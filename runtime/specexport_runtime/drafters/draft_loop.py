"""Drafting token after token with a model, whichever: K steps of it, each fed what the one before gave."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from specexport_runtime.drafters.siblings import (
    MOST_OFFERED,
    combined,
    drawn_siblings,
    path_chances,
    runners_up,
    usual_siblings,
)
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.base import NO_TOKEN, Float32Array, StepOutput, Want
from specexport_runtime.executors.device_rows import DeviceRow
from specexport_runtime.executors.row_kernels import NOTHING, RowAsk, RowRule, whole_row
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.requests.records import Begun, Branch, DraftEnd, Proposal
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.distribution import Distribution, sample_token

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead
    from specexport_runtime.drafters.at_once import AtOnce
    from specexport_runtime.drafters.correction import Correction, Corrector

_NAN = "the draft's logits contain NaN."
_log = logging.getLogger(__name__)


class Draft:
    """A draft that grows, by at most ``limit`` steps of the model (K).

    ``one_by_one``: the model reads what it handed on itself with each draft token, or has a place for each, so that a
    token that is forced takes a step too.
    """

    def __init__(self, request: Request, limit: int, begun: Begun | None = None, *, one_by_one: bool = False) -> None:
        self.request, self.limit = request, limit
        self.tokens: list[int] = []
        self.waiting: list[int] = [] if begun is None else list(begun.tokens)  # forced tokens behind them
        self.forced: list[int] = []  # places of forced tokens in the draft
        # What each token was drawn from; None for a greedy request.
        self.distributions: list[Distribution | None] | None = None if request.sampler.is_greedy else []
        self.branches: list[Branch] = []  # beside its tokens
        self.has_exited = False  # the model was no longer sure
        self.is_combined = False  # its places know nothing of each other
        self.carried: Float32Array | None = None  # [E], what a draft head handed on behind its last token
        self.error: Exception | None = None  # why no token comes next: its logits hold a NaN, say
        self._siblings = request.siblings if request.adaptive else usual_siblings(request, limit)
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
    def needs_logits(self) -> bool:
        """Whether the next token takes more than its id. The last token of a draft has nothing to end."""
        return self.may_exit or self.num_siblings > 0 or not self.request.sampler.is_plain_greedy

    @property
    def may_exit(self) -> bool:
        """Whether the draft may end with the next token because the model is not sure."""
        return self._exit is not None and self._steps + 1 < self.limit

    @property
    def num_siblings(self) -> int:
        """Branches that there may be beside the next token, if it is the model's."""
        place = len(self.tokens) - len(self.forced)
        return self._siblings[place] if place < len(self._siblings) else 0

    def plain_steps(self, *, draws: bool) -> int:
        """Steps that feed the model ids that it gave, or that the device draws; 0 where more is looked at."""
        sampler = self.request.sampler
        if self._one_by_one or self.waiting or self._exit is not None or self._siblings:
            return 0
        if not sampler.is_plain_greedy and not (draws and sampler.is_uncut):
            return 0
        steps = self.limit - self._steps
        return min(steps, self._room - len(self.tokens)) if self._room else steps

    def since(self, position: int) -> list[int]:
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
        """What to ask of a row of logits on the device, ``ahead`` of the next; there are ``num_rows`` cache rows."""
        sampler = self.request.sampler
        if self.num_siblings:
            return whole_row(width)
        if sampler.is_plain_greedy:  # the probability of the likeliest token, to end the draft by
            return NOTHING if self._exit is None else RowAsk(RowRule(1.0, width))
        uniform = self.request.draws.peek(len(self.tokens) + ahead).draft
        return sampler.ask(uniform, width, slot=(self._steps + ahead) * num_rows + self.request.row)

    def draw_row(self, row: DeviceRow, width: int) -> None:
        """As :meth:`draw`, from a row that stays on the device and was asked by :meth:`ask`."""
        sampler, distribution = self.request.sampler, None
        if self.num_siblings:
            return self.draw(row.fetch())
        if self.distributions is None:
            if sampler.is_plain and row.ask == NOTHING:
                return _take(self, row.token_id, width, None)
            if not sampler.is_plain or not row.found.is_whole or not 0 <= row.token_id < width:
                return self.draw(row.fetch())
            token, top = row.token_id, 1.0 / row.found.total
        else:
            distribution = sampler.row_distribution(row, self.tokens)
            token, top = sample_token(distribution, self.request.draws(len(self.tokens)).draft), distribution.top
        draft_exit = self._exit if self._steps + 1 < self.limit else None
        self.has_exited = draft_exit is not None and draft_exit.should_end(top)
        return self.append(token, distribution)

    def draw(self, logits: Float32Array, cut_head: "CutHead | None" = None, confidence: float | None = None) -> None:
        """Append the token that ``logits`` [V], or [N] of ``cut_head``, give; end the draft if it is not sure of it.

        The token is kept then: to leave it out because of *what it is* would make the text follow another distribution.
        ``confidence`` is what the model itself says of the place, whatever is drawn; without it the top probability is.
        CheckFailedError: the logits hold NaN or +inf. InvalidRequestError: every token is banned.
        """
        req, top, distribution, siblings = self.request, 1.0, None, self.num_siblings
        draft_exit = self._exit if self._steps + 1 < self.limit else None
        plain = req.sampler.is_plain_greedy
        if cut_head is not None and not plain:  # penalties and bias go by token id
            logits = cut_head.widen(logits)
        if self.distributions is None:
            token = _plain_greedy(logits) if plain else req.sampler.greedy_token(logits, self.tokens)
            if draft_exit is not None:  # with penalties: of the token they chose, but before them
                top = _probability(logits, token)
            if siblings:
                self._branch_greedily(logits, token, siblings, cut_head if plain else None)
            if cut_head is not None and plain:
                token = int(cut_head.ids[token])
        else:
            distribution = req.sampler.distribution(logits, self.tokens)
            token = sample_token(distribution, req.draws(len(self.tokens)).draft)
            if siblings:
                self._branch_drawn(distribution, token, siblings)
            if draft_exit is not None:
                top = distribution.top
        top = top if confidence is None else confidence
        self.has_exited = draft_exit is not None and draft_exit.should_end(top)
        self.append(token, distribution)

    def _branch_greedily(self, logits: Float32Array, token: int, count: int, cut_head: "CutHead | None") -> None:
        """Put the next best tokens beside the next one, ``token``; with a ``cut_head`` they are rows of it."""
        sampler, parent = self.request.sampler, len(self.tokens) - 1
        if sampler.is_plain:
            found = runners_up(logits, token, count)
        else:
            allowed, ids = sampler.allowed_logits(logits, self.tokens)
            found = runners_up(allowed, int(ids.searchsorted(token)), count)
            found = [(int(ids[place]), ratio) for place, ratio in found]
        if cut_head is not None:
            found = [(int(cut_head.ids[row]), ratio) for row, ratio in found]
        self.branches += [Branch(sibling, parent, ratio=ratio) for sibling, ratio in found]

    def _branch_drawn(self, distribution: Distribution, token: int, count: int) -> None:
        """Put tokens beside the next one, ``token``, that are drawn from what it and its elder siblings leave."""
        parent, number = len(self.tokens) - 1, len(self.branches)
        uniforms = [self.request.draws.branch(number + i).draft for i in range(count)]
        self.branches += [
            Branch(sibling, parent, distribution) for sibling in drawn_siblings(distribution, token, uniforms)
        ]

    def append(self, token: int, distribution: Distribution | None = None) -> None:
        """Append the token of a step, drawn from ``distribution``, and look at what a grammar forces behind it."""
        self._put(token, distribution)
        self._steps += 1
        grammar = self.request.sampler.grammar
        if grammar is not None and self._room:
            self.waiting = grammar.forced(self._room - len(self.tokens), self.tokens)
            self.has_ended = self.request.is_end((self.waiting or self.tokens)[-1])

    def proposal(self, drafter: str) -> Proposal:
        """What is to be tested, under the name of ``drafter`` in draft plans."""
        if isinstance(self.error, CheckFailedError):
            _warn_of(drafter)
        elif self.error is not None and not isinstance(self.error, InvalidRequestError):
            return Proposal([], None, "none", drafter, error=self.error)
        if len(self.tokens) <= self._num_begun:
            return Proposal([], None, "none")
        self.place_waiting()
        end: DraftEnd = "exit" if self.has_exited else "lookahead"
        draft_exit = self.request.draft_exit
        gamma = None if draft_exit is None else draft_exit.gamma
        proposal = Proposal(self.tokens, self.distributions, end, drafter, gamma=gamma, forced=tuple(self.forced))
        return proposal._replace(branches=self._kept_branches()) if self.branches else proposal

    def _kept_branches(self) -> tuple[Branch, ...]:
        """The likeliest that a tree of fixed size has room for, and all that were drawn, *whatever* they are."""
        req, room = self.request, self.request.tree_size - len(self.tokens) + len(self.forced)
        if self.distributions is None and self.is_combined and not self.forced:
            return combined(self.branches, self.tokens, max(min(room, MOST_OFFERED) if req.adaptive else room, 0))
        if req.adaptive or self.distributions is not None or len(self.branches) <= room:
            return tuple(self.branches)
        chances = path_chances(self.branches, len(self.tokens))
        best = sorted(range(len(chances)), key=lambda place: -chances[place])[: max(room, 0)]
        return tuple([self.branches[place] for place in sorted(best)])


def open_drafts(
    requests: Sequence[Request],
    lookaheads: Sequence[int],
    begun: Sequence[Begun] | None = None,
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
    vocab_size: int,  # ids that may be drafted; logits beyond it are cut off
    pending: Callable[[Draft], RowWork],  # what is fed for a draft as it stands: what the model has not seen
    cut_head: "CutHead | None" = None,  # ids below ``vocab_size`` of the LM head's rows; None where it has all
    is_kept: Callable[[Draft], bool] = lambda _: True,  # whether what is fed for a draft as it stands is committed
) -> None:
    """Fill all drafts, one packed step of the model a depth, on the device alone where only ids are needed."""
    can_chain = runner.chains and cut_head is None and not runner.executor.reads_features
    num_rows = vocab_size if cut_head is None else len(cut_head.ids)
    while active := [draft for draft in drafts if draft.is_open]:
        for draft in active:
            draft.begin_step()
        work = [(draft.request.row, pending(draft)) for draft in active]
        draws = runner.executor.keeps_rows
        count = min(draft.plain_steps(draws=draws) for draft in active) if can_chain else 0
        if count > 1:
            _chain(runner, active, work, num_rows, count)
            continue
        if runner.has_states:
            drafted = [len(draft.tokens) for draft in active]
            work = [(row, given._replace(drafts=count)) for (row, given), count in zip(work, drafted, strict=True)]
        kept = [is_kept(draft) for draft in active]
        if not any(draft.needs_logits for draft in active):
            ids = _step(runner, work, kept, "token_ids").tolist()
            _carry(runner, active)
            for draft, token in zip(active, ids, strict=True):
                _take(draft, token, num_rows, cut_head)
        elif runner.executor.keeps_rows and (cut_head is None or runner.executor.names_rows):
            _draw_on_device(runner, active, work, kept, vocab_size, cut_head)
        else:
            logits = _step(runner, work, kept, "logits")[:, :num_rows]
            _carry(runner, active)
            for draft, row in zip(active, logits, strict=True):
                _draw(draft, row, cut_head)


def _draw_on_device(
    runner: ModelRunner,
    active: Sequence[Draft],
    work: Sequence[tuple[int, RowWork]],
    kept: Sequence[bool],
    width: int,
    cut_head: "CutHead | None",
) -> None:
    """A step whose logits stay on the device."""
    num_rows = runner.executor.num_rows
    asked = [
        (row, given._replace(asks=[draft.ask(width, num_rows)]))
        for draft, (row, given) in zip(active, work, strict=True)
    ]
    first = work[0][0]
    rows = runner.step_rows(first, _with_idle_rows(asked))
    _count_seen(runner, work, kept)
    _carry(runner, active)
    for draft in active:
        place = runner.logit_starts[draft.request.row - first]
        if cut_head is not None and (draft.num_siblings or not draft.request.sampler.is_plain):
            _draw(draft, rows.fetch()[place, : len(cut_head.ids)], cut_head)
            continue
        try:
            if not draft.step_waiting():
                draft.draw_row(rows[place], width)
        except Exception as error:  # see ``_draw``
            draft.error = error


def _chain(
    runner: ModelRunner, active: Sequence[Draft], work: Sequence[tuple[int, RowWork]], num_rows: int, count: int
) -> None:
    """Run ``count`` steps, the first with ``work``; what a step was fed that no draft has is not committed."""
    before = [runner.kv.kv_len(row) + len(given.tokens) for row, given in work]
    if any(draft.needs_logits for draft in active):
        _chain_draws(runner, active, work, num_rows, count)
        return
    steps = [ids.tolist() for ids in runner.chain(work[0][0], _with_idle_rows(work), count)]
    for i, draft in enumerate(active):
        for depth, ids in enumerate(steps):
            _take(draft, ids[i], num_rows, None)
            if draft.error is not None or draft.tokens[-1] != ids[i]:  # what comes behind it followed another token
                runner.kv.commit(work[i][0], before[i] + depth)
                break


def _chain_draws(
    runner: ModelRunner, active: Sequence[Draft], work: Sequence[tuple[int, RowWork]], width: int, count: int
) -> None:
    """As :func:`_chain`, where the device draws the tokens that the next step is fed."""
    before = [runner.kv.kv_len(row) + len(given.tokens) for row, given in work]
    asks = [[draft.ask(width, runner.executor.num_rows, ahead) for draft in active] for ahead in range(count)]
    steps = runner.chain_rows(work[0][0], _with_idle_rows(work), asks)
    for i, draft in enumerate(active):
        for depth, rows in enumerate(steps):
            try:
                draft.draw_row(rows[i], width)
            except Exception as error:  # see ``_draw``
                draft.error = error
            if draft.error is not None or draft.tokens[-1] != rows[i].token_id:
                runner.kv.commit(work[i][0], before[i] + depth)
                break


def draft_at_once(
    runner: ModelRunner,
    drafts: Sequence[Draft],
    work: "Sequence[AtOnce]",
    vocab_size: int,
    cut_head: "CutHead | None" = None,
    corrector: "Corrector | None" = None,
) -> None:
    """Fill all drafts, open ones in ascending rows, from one packed step, whose last rows are of the draft's places.

    ``work`` wants as many logits for each draft as it has places; ``cut_head`` has the ids below ``vocab_size`` of the
    LM head's rows, None where it has all. A ``corrector`` changes the logits of a place by the tokens before it.
    """
    first = drafts[0].request.row
    rows = [IDLE] * (drafts[-1].request.row - first + 1)
    for draft, given in zip(drafts, work, strict=True):
        rows[draft.request.row - first] = given.work
    num_rows = vocab_size if cut_head is None else len(cut_head.ids)
    with_logits = corrector is not None or any(
        draft.request.draft_exit is not None or draft.needs_logits for draft in drafts
    )
    output = runner.step(first, rows, "logits" if with_logits else "token_ids")
    for draft, given in zip(drafts, work, strict=True):
        row = draft.request.row
        runner.kv.commit(row, runner.kv.kv_len(row) + given.kept)
        begin = runner.logit_starts[row - first]
        places = slice(begin, begin + given.work.num_logits)
        if corrector is not None:
            states = runner.executor.next_features[places]
            newest = draft.request.tokens[-1]
            _draw_corrected(draft, corrector.begin(output[places, :num_rows], states, newest), cut_head)
            continue
        draft.is_combined = True
        for at in range(places.start, places.stop):
            if not draft.is_open:
                break
            if with_logits:
                _draw(draft, output[at, :num_rows], cut_head)
            else:
                _take(draft, int(output[at]), num_rows, cut_head)


def _draw(draft: Draft, logits: Float32Array, cut_head: "CutHead | None") -> None:
    """Let a draft draw its next token. It ends where there is none: that is an error only if the text comes there."""
    try:
        if not draft.step_waiting():
            draft.draw(logits, cut_head)
    except Exception as error:  # whatever it is, it concerns this request alone
        draft.error = error


def _draw_corrected(draft: Draft, correction: "Correction", cut_head: "CutHead | None") -> None:
    """As :func:`_draw` till the draft is full, each place's logits corrected by the tokens before it."""
    try:
        while draft.is_open:
            if not draft.step_waiting():
                logits = correction.logits(draft.tokens)
                confidence = correction.confidence(draft.tokens) if draft.may_exit else None
                draft.draw(logits, cut_head, confidence)
    except Exception as error:  # see ``_draw``
        draft.error = error


def _take(draft: Draft, token: int, num_rows: int, cut_head: "CutHead | None") -> None:
    """Append the greedy token of a row of logits."""
    if token == NO_TOKEN:
        draft.error = CheckFailedError(_NAN)
    else:  # an id that may not be drafted: a wrong guess costs a rejection, nothing else
        row_id = token if token < num_rows else 0
        draft.append(row_id if cut_head is None else int(cut_head.ids[row_id]))


def _carry(runner: ModelRunner, active: Sequence[Draft]) -> None:
    """Give each draft what a head handed on for it; nothing with other models."""
    if runner.executor.reads_features:
        for draft, handed in zip(active, runner.executor.next_features.copy(), strict=True):
            draft.carried = handed


def _step(runner: ModelRunner, fed: Sequence[tuple[int, RowWork]], kept: Sequence[bool], want: Want) -> StepOutput:
    """Feed tokens to A rows, and count the kept ones as seen; logits [A, V] or token ids [A]."""
    first = fed[0][0]
    output = runner.step(first, _with_idle_rows(fed), want)
    _count_seen(runner, fed, kept)
    if len(output) > len(fed):  # a runner that pads its input returns logits of padding too
        output = output[[runner.logit_starts[row - first] for row, _ in fed]]
    return output


def _with_idle_rows(fed: Sequence[tuple[int, RowWork]]) -> list[RowWork]:
    first = fed[0][0]
    work = [IDLE] * (fed[-1][0] - first + 1)
    for row, given in fed:
        work[row - first] = given
    return work


def _count_seen(runner: ModelRunner, fed: Sequence[tuple[int, RowWork]], kept: Sequence[bool]) -> None:
    for (row, given), stays in zip(fed, kept, strict=True):
        runner.kv.commit(row, runner.kv.kv_len(row) + (len(given.tokens) if stays else 0))


def _plain_greedy(logits: Float32Array) -> int:
    """The likeliest token; as with the target's, one look finds any NaN: the first one counts as the largest."""
    token = int(logits.argmax())
    best = logits[token]
    if best != best:  # noqa: PLR0124 - only NaN is unequal to itself
        raise CheckFailedError(_NAN)
    return token


@cache
def _warn_of(drafter: str) -> None:
    _log.warning("drafter %s: drafts end where its logits are no numbers. Fix: run `specexport verify`.", drafter)


def _probability(logits: Float32Array, token: int) -> float:
    """Softmax probability of one token; 0 if the logits are no numbers."""
    peak = float(logits.max())
    if not math.isfinite(peak):
        return 0.0
    return math.exp(float(logits[token]) - peak) / float(np.exp(logits - peak).sum())
