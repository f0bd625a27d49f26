"""Decoders that choose the length of drafts."""

from specexport_runtime.costs.curves import CostCurves, LayerShares
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.packing.batch import ModelRunner
from tests.support.fakes.goodput_fakes import LOOKAHEAD, curves
from tests.support.fakes.loop import goodput_length

GATES = 12


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
