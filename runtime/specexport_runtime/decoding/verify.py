"""A step of the target, and what its logits say: of drafts, and of prompts that are scored."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from specexport_runtime.drafters.base import Drafter
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.executors.logit_rows import NO_TOKEN, LogitRows
from specexport_runtime.executors.row_kernels import RowAsk, ask_whole_row
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import Proposal
from specexport_runtime.requests.request import Request, RoundEvent
from specexport_runtime.sampling.accept import Verdict, accept_greedy, find_first_refused
from specexport_runtime.sampling.block import RULES, Chances, accept_block, find_chances, tested_places
from specexport_runtime.sampling.device import Residual, RowDistribution, find_masses
from specexport_runtime.sampling.distribution import Distribution
from specexport_runtime.sampling.logprobs import compute_logprobs
from specexport_runtime.sampling.tree import TREE_RULES, accept_tree_greedy


def make_row_asks(req: Request, proposal: Proposal, width: int) -> list[RowAsk]:
    """What is asked of the rows of logits [K+1, ``width``] that test a draft; nothing: the greedy tokens will do."""
    drafted = proposal.tokens
    if req.logprobs is None and req.sampler.is_plain_greedy:
        return []
    if proposal.branches or req.sampler.is_greedy:
        return [ask_whole_row(width)] * (len(proposal.nodes) + 1)
    asks = [req.sampler.ask(req.draws.peek(j).resample, width, token) for j, token in enumerate([*drafted, NO_TOKEN])]
    return asks if req.logprobs is None else [_with_fetch(ask) for ask in asks]


def _with_fetch(ask: RowAsk) -> RowAsk:
    return ask._replace(rule=ask.rule._replace(fetch=True))


def make_row_work(target: ModelRunner, req: Request, count: int, proposal: Proposal | None) -> RowWork:
    """``count`` tokens that the target has not seen, and the draft after them."""
    kv_len, width = target.kv.kv_len(req.row), target.executor.vocab_size
    known = req.tokens[kv_len : kv_len + count]
    scored = [ask_whole_row(width)] * count if req.is_scored else []
    if proposal is None:
        return RowWork(known, len(scored) or 1, adapter=req.adapter, asks=scored)
    nodes, chain = proposal.nodes, len(proposal.tokens)
    asks = make_row_asks(req, proposal, width)
    if scored:  # the last of these rows tests the draft's first token
        asks = [*scored[1:], _with_fetch(asks[0]), *asks[1:]] if asks else scored
    # A root's parent is the newest token, which stands before the draft.
    parents = [place - branch.parent for place, branch in enumerate(proposal.branches, start=chain)]
    wanted = len(nodes) + (len(scored) or 1)
    return RowWork(known + nodes, wanted, drafts=len(nodes), adapter=req.adapter, asks=asks, parents=parents)


def fit_branches(target: ModelRunner, req: Request, proposal: Proposal, entries: int) -> Proposal:
    """A draft without the branches that its row of ``entries`` has no room for; an error if the target takes none."""
    if not target.executor.takes_trees:
        error = SpecexportError("this target verifies no trees, and a draft has branches.", "draft chains.")
        return proposal._replace(branches=(), error=error)
    room = max(entries - len(req.tokens) - len(proposal.tokens), 0)
    return proposal if len(proposal.branches) <= room else proposal._replace(branches=proposal.branches[:room])


def run_target_step(
    target: ModelRunner,
    drafter: Drafter,
    requests: Sequence[Request],  # all that have tokens in the step
    prompts: Sequence[Request],  # of these, all with a chunk of their prompt
    trees: Collection[int],  # rows of which :func:`note_paths` gives the features, when it is known what stays
    first_row: int,
    work: Sequence[RowWork],
) -> LogitRows:
    """A step of the target that gives the drafter what it wants to know, and computes nothing of that otherwise."""
    executor = target.executor
    measured = [req for req in prompts if executor.num_gates and drafter.wants_similarity(req)]
    read = [req for req in requests if drafter.wants_features(req)] if executor.gives_features else []
    if not measured and not read:
        return target.step_rows(first_row, work)
    try:
        if measured:
            executor.measure_similarity(True)
        if read:
            executor.want_features(True)
        output = target.step_rows(first_row, work)
    finally:
        if measured:
            executor.measure_similarity(False)
        if read:
            executor.want_features(False)
    starts = [0]
    for row in work:
        starts.append(starts[-1] + len(row.tokens))
    if measured:
        similarity = executor.similarity
        for req in measured:
            begin = starts[req.row - first_row]
            # Of a prompt that ends here and has a draft after it, the draft tokens are no part.
            end = begin + min(len(work[req.row - first_row].tokens), len(req.tokens) - target.kv.kv_len(req.row))
            drafter.note_similarity(req, similarity[:, begin:end])
    if read:
        features = executor.features
        for req in read:
            if req.row in trees:
                continue
            begin, end = starts[req.row - first_row : req.row - first_row + 2]
            drafter.note_features(req, target.kv.kv_len(req.row), features[begin:end])
    return output


class KeptPath(NamedTuple):
    """What stays of a tree that was tested."""

    request: Request
    start: int  # position of the first token of its row in the step
    places: list[int]  # in the step, of the row's tokens that stay


def find_kept_path(event: RoundEvent, start: int, position: int) -> KeptPath:
    """What stays of a tree, whose row began at token ``start`` of the step, and at ``position`` of its text."""
    req, path = event.request, range(event.accepted) if event.path is None else event.path[: event.accepted]
    # The draft's first node stands after what was known of the text before the round.
    draft = start + len(req.tokens) - len(event.tokens) - position
    return KeptPath(req, position, [*range(start, draft), *[draft + place for place in path]])


def note_paths(target: ModelRunner, drafter: Drafter, paths: Sequence[KeptPath]) -> None:
    """Give the drafter the features of the tokens that stay of trees, from the last step."""
    for req, start, places in paths:
        if drafter.wants_features(req):
            drafter.note_features(req, start, target.executor.features[places])


def score_prompts(
    target: ModelRunner, prompts: Sequence[Request], scored: Mapping[int, int], rows: LogitRows, first_row: int
) -> list[Request]:
    """Keep log-probabilities of prompts, ``scored`` tokens of each row; returns the requests that failed."""
    failed = []
    for req in prompts:
        if req.row in scored:
            begin = target.logit_starts[req.row - first_row]
            try:
                note_scores(req, target.kv.kv_len(req.row), rows.fetch(begin, begin + scored[req.row]))
            except Exception as error:  # whatever it is, it concerns this request alone
                req.end("error", error)
                failed.append(req)
    return failed


def note_scores(req: Request, start: int, logits: Float32Array) -> None:
    """Keep the prompt's log-probabilities after ``start``, from logits [n, V]; CheckFailedError for NaN or +inf."""
    if req.prompt_logprobs is None:
        return
    following = req.tokens[start + 1 : min(start + 1 + len(logits), req.num_prompt_tokens)]
    req.prompt_logprobs += compute_logprobs(following, logits[: len(following)], req.params.prompt_logprobs or 0)


class TargetRows:
    """What the target says after one request's draft: the rows of logits of a step from ``begin`` on.

    The first row is after the text, and row i + 1 after node i of the draft.
    """

    def __init__(self, req: Request, proposal: Proposal, rows: LogitRows, begin: int) -> None:
        self._req, self._proposal, self._rows, self._begin = req, proposal, rows, begin
        self._made: dict[int, Distribution] = {}
        self.chances: Chances | None = None  # of a draft that is accepted as a block

    def _list_drafted_before(self, place: int) -> list[int]:
        """Draft tokens before a row: those of the node's own path."""
        proposal = self._proposal
        if not proposal.branches:
            return proposal.tokens[:place]
        nodes = proposal.nodes
        return [nodes[each] for each in proposal.path_to(place - 1)]

    def greedy(self, place: int) -> int:
        """The token of a row; CheckFailedError if its logits hold a NaN."""
        sampler = self._req.sampler
        if not sampler.is_plain:
            return sampler.greedy_token(self._rows[self._begin + place].fetch(), self._list_drafted_before(place))
        token = self._rows.token_ids[self._begin + place]  # one argmax serves all requests
        if token == NO_TOKEN:
            raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
        return token

    def distribution(self, place: int) -> Distribution:
        """The distribution of a row."""
        distribution = self._made.get(place)
        if distribution is None:
            row = self._rows[self._begin + place]
            distribution = self._made[place] = self._req.sampler.make_row_distribution(
                row, self._list_drafted_before(place)
            )
        return distribution

    def logits(self, path: Sequence[int] | None) -> Float32Array:
        """Raw logits [n, V], those after the nodes of ``path`` alone if there is one."""
        logits = self._rows.fetch(self._begin, self._begin + len(self._proposal.nodes) + 1)
        return logits if path is None else logits[[0, *[place + 1 for place in path]]]

    def list_residual_asks(self) -> list[Residual]:
        """The residuals that the draft may end with, of rows that a look at costs a wait."""
        req, proposal, draws = self._req, self._proposal, self._req.draws
        drafted, drafts = proposal.tokens, proposal.distributions
        if proposal.error is not None or not drafts or proposal.branches or not req.sampler.is_uncut:
            return []
        places: Iterable[tuple[int, float]]
        if req.acceptance == "token":
            place, _, token = find_first_refused(drafted, drafts, self.distribution, draws)
            places = [(place, 1.0)] if token is None else []
        else:
            self.chances = find_chances(drafted, drafts, self.distribution, draws)
            places = tested_places(self.chances.found, draws)
        asked: list[Residual] = []
        for place, chance in places:
            target = None if place == len(drafted) else self.distribution(place)
            if isinstance(target, RowDistribution) and (found := target.ask(drafts[place], chance)) is not None:
                asked.append(found)
            if target is None or chance == 1.0:
                break
        return asked


def accept(req: Request, proposal: Proposal, rows: TargetRows) -> Verdict:
    """How much of a draft stays, and what comes after it."""
    nodes = proposal.nodes
    if req.sampler.is_greedy:
        if proposal.branches:
            return accept_tree_greedy(nodes, proposal.parents, lambda place: rows.greedy(place + 1))
        return accept_greedy(nodes, rows.greedy)
    if proposal.branches:
        chain = proposal.distributions or [None] * len(proposal.tokens)
        drawn_from = [*chain, *[branch.distribution for branch in proposal.branches]]
        rule = TREE_RULES[req.acceptance]
        return rule(nodes, proposal.parents, drawn_from, lambda place: rows.distribution(place + 1), req.draws)
    if rows.chances is not None:
        return accept_block(nodes, proposal.distributions, rows.distribution, req.draws, rows.chances)
    return RULES[req.acceptance](nodes, proposal.distributions, rows.distribution, req.draws)


def make_target_rows(
    requests: Sequence[Request],
    proposals: Mapping[int, Proposal],
    rows: LogitRows,
    starts: Mapping[int, int],  # where those that test a draft begin, by cache row
) -> list[TargetRows]:
    """The rows of each request; where a look at one takes a wait, all residuals of the step are found at once."""
    found = [TargetRows(req, proposals[req.row], rows, starts[req.row]) for req in requests]
    # One request rarely asks twice, and looking ahead costs more than that.
    if len(requests) > 1 and not rows.is_near:
        asked: list[Residual] = []
        for each in found:
            with suppress(Exception):  # acceptance meets it again
                asked += each.list_residual_asks()
        find_masses(asked)
    return found
