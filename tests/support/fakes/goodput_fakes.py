"""Cost curves and decoding in modelled time, for tests of the goodput controller."""

from specexport_runtime.costs.curves import CostCurves, LayerShares, StepCost
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import VOCAB, finish, goodput_length
from tests.support.fakes.requests import request_of

LOOKAHEAD = 8
CAPACITY = 600
GATES = 12


def step_cost(seconds, per_token=0.02, per_row=0.04):
    """``seconds`` for one token; more tokens and rows cost that share of it each."""
    return StepCost(seconds * (1 - per_row), seconds * per_token, row=seconds * (per_row - per_token))


def curves(draft=0.3, **options):
    return CostCurves(step_cost(0.010, **options), {"draft-model": step_cost(0.010 * draft)})


def make_sequences(count, names, max_tokens=200, prompt=6, params=None, **options):
    return [
        request_of(
            i, [(3 * i + j) % VOCAB for j in range(prompt)], params or SamplingParams(max_tokens=max_tokens),
            vocab_size=VOCAB, max_model_len=CAPACITY - LOOKAHEAD - 1,
            draft_plan=[DraftStage(name, LOOKAHEAD) for name in names], **{"adaptive": True, **options},
        )
        for i in range(count)
    ]  # fmt: skip


def model_decoder(lengths, target, draft, **options):
    drafters = {
        "lookup": LookupDrafter(),
        "draft-model": ModelDrafter(ModelRunner(draft), vocab_size=draft.vocab_size, max_backlog=32),
    }
    return Decoder(ModelRunner(target), ChainDrafter(drafters, lengths), lengths=lengths, **options)


def modelled_seconds(curve, target, draft):
    pairs = ((curve.target, target), (curve.drafters["draft-model"], draft))
    return sum(cost.seconds(call.num_tokens, call.num_seqs) for cost, executor in pairs for call in executor.calls)


def decode(draft_kind, count, *, lengths, names=("draft-model",), max_tokens=200, adaptive=True, curve=None):
    kinds = {"perfect": {}, "good": {"noise": 0.4}, "wrong": {"negate": True}}
    target = FakeExecutor(VOCAB, count, CAPACITY)
    draft = FakeExecutor(VOCAB, count, CAPACITY, **kinds[draft_kind])
    sequences = make_sequences(count, names, max_tokens, adaptive=adaptive, trace=True)
    finish(model_decoder(lengths, target, draft), sequences)
    return modelled_seconds(curve or curves(), target, draft), sequences


def gated_curves(draft=0.2):
    plain = curves(draft)
    return CostCurves(plain.target, plain.drafters, LayerShares(GATES // 2, 0.15, 0.01))


def make_decoder(target, draft, rows, *, cost_curves=None, **options):
    runner = ModelRunner(target, max_chunk=7)
    vocab = target.vocab_size
    drafters = {
        "lookup": LookupDrafter(),
        "draft-model": ModelDrafter(ModelRunner(draft), vocab_size=vocab, max_backlog=9),
        "self": SelfDrafter(runner, vocab_size=vocab),
    }
    lengths = goodput_length(cost_curves or gated_curves(), LOOKAHEAD, **drafters)
    return Decoder(runner, ChainDrafter(drafters, lengths), lengths=lengths, max_num_seqs=rows, **options)
