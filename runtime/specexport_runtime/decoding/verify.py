"""A step of the target, and what its logits say: of drafts, and of prompts that are scored."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from specexport_runtime.drafters.base import Drafter
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import NO_TOKEN, Float32Array, StepOutput, Want, argmax_ids
from specexport_runtime.executors.device_rows import DeviceRows
from specexport_runtime.executors.row_kernels import RowAsk, whole_row
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import Proposal
from specexport_runtime.requests.request import Request, RoundEvent
from specexport_runtime.sampling.accept import Verdict, accept_greedy, first_refused
from specexport_runtime.sampling.block import RULES, Chances, accept_block, find_chances, tested_places
from specexport_runtime.sampling.device import DeviceDistribution, Residual, find_masses
from specexport_runtime.sampling.distribution import Distribution
from specexport_runtime.sampling.logprobs import logprobs_of
from specexport_runtime.sampling.tree import TREE_RULES, accept_tree_greedy

Wanted = Want | Literal["rows"]
"""``"rows"``: logits stay on the device."""


def wanted(target: ModelRunner, requests: Sequence[Request], *, scores: bool) -> Wanted:
    """What a step must give for the requests that draft in it; ``scores``: prompts get log-probabilities."""
    if not scores and not any(req.needs_logits for req in requests):
        return "token_ids"  # all is greedy, and a GPU need not send logits: the argmax is taken beside them
    return "rows" if target.executor.keeps_rows and not scores else "logits"


def row_asks(req: Request, proposal: Proposal, width: int) -> list[RowAsk]:
    """What is asked of the rows of logits [K+1, ``width``] that test a draft, if they stay on the device."""
    drafted = proposal.tokens
    if proposal.branches:
        return [whole_row(width)] * (len(proposal.nodes) + 1)
    if req.sampler.is_greedy:
        return [whole_row(width)] * (len(drafted) + 1) if req.needs_logits else []
    asks = [req.sampler.ask(req.draws.peek(j).resample, width, token) for j, token in enumerate([*drafted, NO_TOKEN])]
    return asks if req.logprobs is None else [ask._replace(rule=ask.rule._replace(fetch=True)) for ask in asks]


def row_work(target: ModelRunner, req: Request, count: int, proposal: Proposal | None) -> RowWork:
    """``count`` tokens that the target has not seen, and the draft behind them."""
    kv_len = target.kv.kv_len(req.row)
    known = req.tokens[kv_len : kv_len + count]
    wanted = count if req.is_scored else 1
    if proposal is None:
        return RowWork(known, wanted, adapter=req.adapter)
    nodes, chain = proposal.nodes, len(proposal.tokens)
    # A root's parent is the newest token, which stands before the draft.
    parents = [place - branch.parent for place, branch in enumerate(proposal.branches, start=chain)]
    return RowWork(known + nodes, len(nodes) + wanted, drafts=len(nodes), adapter=req.adapter, parents=parents)


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
    want: Wanted,
) -> StepOutput | DeviceRows:
    """A step of the target that gives the drafter what it wants to know, and computes nothing of that otherwise."""
    executor = target.executor
    measured = [req for req in prompts if executor.num_gates and drafter.wants_similarity(req)]
    read = [req for req in requests if drafter.wants_features(req)] if executor.gives_features else []
    if not measured and not read:
        return _step(target, first_row, work, want)
    try:
        if measured:
            executor.measure_similarity(True)
        if read:
            executor.want_features(True)
        output = _step(target, first_row, work, want)
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
            # Of a prompt that ends here and has a draft behind it, the draft tokens are no part.
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


class PathOf(NamedTuple):
    """What stays of a tree that was tested."""

    request: Request
    start: int  # position of the first token of its row in the step
    places: list[int]  # in the step, of the row's tokens that stay


def path_of(event: RoundEvent, start: int, position: int) -> PathOf:
    """What stays of a tree, whose row began at token ``start`` of the step, and at ``position`` of its text."""
    req, path = event.request, range(event.accepted) if event.path is None else event.path[: event.accepted]
    # The draft's first node stands behind what was known of the text before the round.
    draft = start + len(req.tokens) - len(event.tokens) - position
    return PathOf(req, position, [*range(start, draft), *[draft + place for place in path]])


def note_paths(target: ModelRunner, drafter: Drafter, paths: Sequence[PathOf]) -> None:
    """Give the drafter the features of the tokens that stay of trees, from the last step."""
    for req, start, places in paths:
        if drafter.wants_features(req):
            drafter.note_features(req, start, target.executor.features[places])


def _step(target: ModelRunner, first_row: int, work: Sequence[RowWork], want: Wanted) -> StepOutput | DeviceRows:
    return target.step_rows(first_row, work) if want == "rows" else target.step(first_row, work, want)


def score_prompts(
    target: ModelRunner, prompts: Sequence[Request], scored: Mapping[int, int], output: StepOutput, first_row: int
) -> list[Request]:
    """Keep log-probabilities of prompts, ``scored`` tokens of each row; returns the requests that failed."""
    failed = []
    for req in prompts:
        if req.row in scored:
            begin = target.logit_starts[req.row - first_row]
            try:
                note_scores(req, target.kv.kv_len(req.row), output[begin : begin + scored[req.row]])
            except Exception as error:  # whatever it is, it concerns this request alone
                req.end("error", error)
                failed.append(req)
    return failed


def note_scores(req: Request, start: int, logits: Float32Array) -> None:
    """Keep the prompt's log-probabilities behind ``start``, from logits [n, V]; CheckFailedError for NaN or +inf."""
    if req.prompt_logprobs is None:
        return
    following = req.tokens[start + 1 : min(start + 1 + len(logits), req.num_prompt_tokens)]
    req.prompt_logprobs += logprobs_of(following, logits[: len(following)], req.params.prompt_logprobs or 0)


def greedy_ids(output: StepOutput | DeviceRows) -> list[int]:
    """The greedy token of each row of a step, ``NO_TOKEN`` for one with a NaN."""
    if isinstance(output, DeviceRows):
        return output.token_ids()
    ids: list[int] = (output if output.ndim == 1 else argmax_ids(output)).tolist()
    return ids


def accept_argmax(proposal: Proposal, greedy: Sequence[int]) -> Verdict:
    """Accept K draft tokens by the target's K+1 greedy tokens; CheckFailedError if the logits held a NaN."""
    if proposal.branches:
        verdict = accept_tree_greedy(proposal.nodes, proposal.parents, lambda place: greedy[place + 1])
    else:
        verdict = accept_greedy(proposal.tokens, greedy)
    if verdict.next_token == NO_TOKEN:
        raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
    return verdict


class RowDistributions:
    """What the target says behind one request's draft, by place, in rows that stay on a device from ``begin`` on."""

    def __init__(self, req: Request, drafted: Sequence[int], rows: DeviceRows, begin: int) -> None:
        self._sampler, self._drafted, self._rows, self._begin = req.sampler, drafted, rows, begin
        self._made: dict[int, Distribution] = {}
        self.chances: Chances | None = None  # of a draft that is accepted as a block

    def __call__(self, place: int) -> Distribution:
        """The distribution behind so many draft tokens."""
        distribution = self._made.get(place)
        if distribution is None:
            distribution = self._sampler.row_distribution(self._rows[self._begin + place], self._drafted[:place])
            self._made[place] = distribution
        return distribution


def accept_rows(req: Request, proposal: Proposal, rows: DeviceRows, distributions: RowDistributions) -> Verdict:
    """As :func:`accept_processed`, of rows [K+1] that stay on the device, by :func:`row_distributions`."""
    if req.sampler.is_greedy or proposal.branches:
        return accept_processed(req, proposal, rows.fetch())
    if distributions.chances is not None:
        return accept_block(proposal.tokens, proposal.distributions, distributions, req.draws, distributions.chances)
    return RULES[req.acceptance](proposal.tokens, proposal.distributions, distributions, req.draws)


def row_distributions(
    requests: Sequence[Request],
    proposals: Mapping[int, Proposal],
    rows: DeviceRows,
    starts: Sequence[int],  # where those of each cache row begin, from the first one of the step on
    first_row: int,
) -> dict[int, RowDistributions]:
    """By cache row, distributions of requests that :func:`row_asks` asked for; all residuals are found at once."""
    distributions: dict[int, RowDistributions] = {}
    asked: list[Residual] = []
    for req in requests:
        proposal, begin = proposals[req.row], starts[req.row - first_row]
        distributions[req.row] = distribution = RowDistributions(req, proposal.tokens, rows, begin)
        # One request rarely asks twice, and looking ahead costs more than that.
        if (
            len(requests) > 1
            and not rows.is_near
            and proposal.error is None
            and proposal.distributions
            and req.sampler.is_uncut
        ):
            with suppress(Exception):  # acceptance meets it again
                _ask_ahead(req, proposal.tokens, proposal.distributions, distribution, asked)
    find_masses(asked)
    return distributions


def _ask_ahead(
    req: Request,
    drafted: Sequence[int],
    drafts: Sequence[Distribution | None],
    distributions: RowDistributions,
    asked: list[Residual],
) -> None:
    """Ask for the residuals that a draft may end with."""
    draws = req.draws
    places: Iterable[tuple[int, float]]
    if req.acceptance == "token":
        place, _, token = first_refused(drafted, drafts, distributions, draws)
        places = [(place, 1.0)] if token is None else []
    else:
        distributions.chances = find_chances(drafted, drafts, distributions, draws)
        places = tested_places(distributions.chances.found, draws)
    for place, chance in places:
        if place == len(drafted):
            return
        target = distributions(place)
        if isinstance(target, DeviceDistribution) and (found := target.ask(drafts[place], chance)) is not None:
            asked.append(found)
        if chance == 1.0:
            return


def accept_processed(req: Request, proposal: Proposal, logits: Float32Array) -> Verdict:
    """Acceptance of raw ``logits`` [K+1, V] whose processing depends on the draft tokens before each row."""
    if proposal.branches:
        return _accept_tree(req, proposal, logits)
    drafted = proposal.tokens
    if req.sampler.is_greedy:
        targets: list[int] = []
        while len(targets) <= len(drafted) and targets == drafted[: len(targets)]:
            targets.append(req.sampler.greedy_token(logits[len(targets)], drafted[: len(targets)]))
        return accept_greedy(drafted, targets)
    return RULES[req.acceptance](
        drafted,
        proposal.distributions,
        lambda j: req.sampler.distribution(logits[j], drafted[:j]),
        req.draws,
    )


def _accept_tree(req: Request, proposal: Proposal, logits: Float32Array) -> Verdict:
    """As :func:`accept_processed`: each node's row of logits sees the tokens of its own path."""
    nodes, parents, sampler = proposal.nodes, proposal.parents, req.sampler

    def before(place: int) -> list[int]:
        return [nodes[each] for each in proposal.path_to(place)]

    if sampler.is_greedy:
        return accept_tree_greedy(nodes, parents, lambda place: sampler.greedy_token(logits[place + 1], before(place)))
    chain = proposal.distributions or [None] * len(proposal.tokens)
    drafted = [*chain, *[branch.distribution for branch in proposal.branches]]
    return TREE_RULES[req.acceptance](
        nodes, parents, drafted, lambda place: sampler.distribution(logits[place + 1], before(place)), req.draws
    )
