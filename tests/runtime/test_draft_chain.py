"""Greedy drafts whose steps follow each other on the device: one wait a draft, and everything else as without."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from specexport_runtime.drafters.draft_loop import open_drafts, run_drafts
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.cuda_sessions import Opened, open_cuda
from tests.support.fakes.heads_on_fakes import PROMPTS
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run
from tests.support.fakes.trt_fakes import PLUGIN, make_entry, open_fake

LOOKAHEAD = 4


def open_trt(folder: Path, patch: pytest.MonkeyPatch, model: FakeExecutor, **lowering: Any) -> Opened:
    del patch
    entry = make_entry(LOOKAHEAD, model.num_rows, draft=True, **lowering)
    executor, gpu, engine = open_fake(folder, entry, model)
    return Opened(executor, lambda: gpu.calls["synchronize"], lambda: len(engine.runs))


WAYS = {
    "ort-cuda": open_cuda,
    "trt native": open_trt,
    "trt plugin": lambda *args: open_trt(*args, lowering="plugin", inputs=PLUGIN),
}


@pytest.fixture(params=WAYS)
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    return lambda model: WAYS[request.param](tmp_path, monkeypatch, model)


def begun(row: int, prompt: list[int], params: SamplingParams | None = None, **options: Any) -> Any:
    seq = make_sequence(row, prompt, params or SamplingParams(max_tokens=30), **options)
    seq.row = row
    seq.commit([1])
    return seq


class Counted(NamedTuple):
    texts: list[Any]
    steps: int
    chained: int


def decode(executor: Any, params: Callable[[int], SamplingParams], **options: Any) -> Counted:
    steps = []
    for name in ("execute" if isinstance(executor, FakeExecutor) else "_execute", "enqueue"):
        inner = getattr(executor, name)
        setattr(executor, name, lambda *a, _inner=inner, _name=name, **o: (steps.append(_name), _inner(*a, **o))[1])
    sequences = [make_sequence(i, prompt, params(i), seed=i, **options) for i, prompt in enumerate(PROMPTS)]
    run(make_decoder(make_target(), executor, LOOKAHEAD), sequences)
    texts = [(seq.output, seq.stats.drafted, seq.stats.accepted, seq.stats.rounds) for seq in sequences]
    return Counted(texts, len(steps), steps.count("enqueue"))


def greedy(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=8 + 5 * i)


def mixed(i: int) -> SamplingParams:
    return greedy(i) if i % 2 else SamplingParams(max_tokens=14, temperature=0.9, top_k=9)


@pytest.mark.parametrize(("kind", "params"), [("good", greedy), ("good", mixed), ("adversarial", mixed)])
def test_texts_drafts_and_steps_are_those_without_chains(opened: Callable[..., Opened], kind: str, params: Any) -> None:
    expected = decode(make_draft(kind), params)
    assert expected.chained == 0
    found = decode(opened(make_draft(kind)).executor, params)
    assert (found.texts, found.steps) == (expected.texts, expected.steps)
    assert found.chained > found.steps // (2 if params is greedy else 8)


def test_a_draft_of_any_length_waits_once(opened: Callable[..., Opened]) -> None:
    gpu = opened(make_draft("good", 2))
    runner = ModelRunner(gpu.executor)
    drafter = ModelDrafter(runner, vocab_size=VOCAB)
    sequences = [begun(0, [3, 4]), begun(1, [5, 6, 7])]
    drafter.propose(sequences, [2, 2])
    drafter.commit(sequences)
    waits, launches = gpu.waits(), gpu.launches()
    proposals = drafter.propose(sequences, [LOOKAHEAD, LOOKAHEAD])
    assert [len(each.tokens) for each in proposals] == [LOOKAHEAD] * 2
    assert (gpu.waits() - waits, gpu.launches() - launches) == (1, LOOKAHEAD)
    drafter.commit(sequences)
    # The shorter draft sits out after its limit: two chains.
    waits = gpu.waits()
    proposals = drafter.propose(sequences, [2, LOOKAHEAD])
    assert [len(each.tokens) for each in proposals] == [2, LOOKAHEAD]
    assert gpu.waits() - waits == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_waits_twice_and_once_for_a_residual(opened: Callable[..., Opened], temperature: float) -> None:
    """Once for the draft of K steps, once for the target's; and for what is drawn where a sampled draft was refused."""
    target, draft = opened(make_target(1)), opened(make_draft("good", 1))
    decoder = make_decoder(target.executor, draft.executor, LOOKAHEAD)
    seq = make_sequence(0, [3, 4, 5], SamplingParams(max_tokens=60, temperature=temperature))
    decoder.add(seq)
    while seq.num_generated < 6:
        decoder.step()
    counts = target.executor.rows.counts
    for _ in range(6):
        before = target.waits() + draft.waits() - counts.waits, target.launches() + draft.launches()
        decoder.step()
        assert target.waits() + draft.waits() - counts.waits == before[0] + 2
        assert target.launches() + draft.launches() == before[1] + LOOKAHEAD + 1
    assert (counts.waits > 0) == (temperature > 0)
    assert draft.executor.rows.counts.waits == 0


def test_residuals_of_all_requests_are_one_wait(opened: Callable[..., Opened]) -> None:
    target, draft = opened(make_target()), opened(make_draft("good"))
    decoder = make_decoder(target.executor, draft.executor, LOOKAHEAD)
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=24, temperature=1.0)
        decoder.add(make_sequence(i, prompt, params, seed=i, acceptance=("block", "token")[i % 2]))
    rows, found, rounds, rejected = target.executor.rows, [], 0, 0
    residuals = rows.residuals
    rows.residuals = lambda asks: (found.append(len(asks)), residuals(asks))[1]
    while decoder.has_work:
        waits = rows.counts.waits
        events = decoder.step()
        assert rows.counts.waits <= waits + 1 or len(events) == 1
        rounds += 1
        rejected += sum(event.accepted < event.drafted for event in events)
    assert rejected > len(found) > rounds // 3
    assert max(found) > 2
    assert draft.executor.rows.counts.waits == 0


@pytest.mark.parametrize("what", ["exit", "cuts", "cut head"])
def test_what_looks_at_logits_in_between_is_not_chained(opened: Callable[..., Opened], what: str) -> None:
    gpu = opened(make_draft("good", 1))
    gpu.executor.enqueue = None
    params = SamplingParams(max_tokens=30, **({"temperature": 0.8, "top_p": 0.9} if what == "cuts" else {}))
    seq = begun(0, [3, 4], params, draft_exit=DraftExit(DraftExitParams(gamma=0.1)) if what == "exit" else None)
    drafts = open_drafts([seq], [3])
    head = SimpleNamespace(ids=np.arange(VOCAB), widen=lambda logits: logits) if what == "cut head" else None
    gpu.executor.set_head(head)
    run_drafts(ModelRunner(gpu.executor), drafts, VOCAB, lambda draft: RowWork(draft.list_tokens_since(0)[-1:], 1))
    assert drafts[0].tokens


def test_an_id_that_may_not_be_drafted_ends_a_chain_and_not_the_draft(opened: Callable[..., Opened]) -> None:
    """Ids from 9 on are drafted as 0, and what follows follows 0."""
    proposals = []
    for executor in (make_draft("good", 2), opened(make_draft("good", 2)).executor):
        drafter = ModelDrafter(ModelRunner(executor), vocab_size=9)
        found, kv_lens = [], []
        for turn in range(6):
            sequences = [begun(0, [3, 4, turn]), begun(1, [turn, 5])]
            found += [each.tokens for each in drafter.propose(sequences, [6, 5])]
            kv_lens += [drafter.runner.kv.kv_len(row) for row in (0, 1)]
            for row in (0, 1):
                drafter.release_row(row)
        proposals.append((found, kv_lens))
    assert proposals[0] == proposals[1]
    assert any(0 in tokens for tokens in proposals[0][0])


def test_a_nan_is_the_end_of_its_draft(opened: Callable[..., Opened]) -> None:
    gpu = opened(make_draft("good", 1))
    collect = gpu.executor._collect
    gpu.executor._collect = lambda: [np.full_like(ids, -1) if i == 1 else ids for i, ids in enumerate(collect())]
    seq = begun(0, [3, 4])
    drafter = ModelDrafter(ModelRunner(gpu.executor), vocab_size=VOCAB)
    (proposal,) = drafter.propose([seq], [4])
    assert proposal.error is None
    assert len(proposal.tokens) == 1
    assert drafter.runner.kv.kv_len(0) == len(seq.tokens) + 1


def test_a_chain_that_breaks_off_leaves_nothing_behind(opened: Callable[..., Opened]) -> None:
    gpu = opened(make_draft("same", 1))
    runner, model = ModelRunner(gpu.executor), make_draft("same", 1)
    gpu.executor.collect, collect = None, gpu.executor.collect
    with pytest.raises(TypeError):
        runner.chain(0, [RowWork([3, 4], 1)], [()] * 3)
    gpu.executor.collect = collect
    runner.kv.commit(0, 2)
    token = int(model.logits_after([3, 4]).argmax())
    np.testing.assert_array_equal(runner.step(0, [RowWork([token], 1)])[0], model.logits_after([3, 4, token]))
    runner.kv.commit(0, 3)
    (rows,) = runner.chain(0, [RowWork([5], 1)], [()])
    assert rows.token_ids == [int(model.logits_after([3, 4, token, 5]).argmax())]


def test_an_engine_that_does_not_chain_says_so() -> None:
    executor = make_draft("same", 1)
    assert not ModelRunner(executor).chains
    with pytest.raises(SpecexportError, match="cannot be chained"):
        executor.enqueue(fed=False)
    assert executor.collect() == []
