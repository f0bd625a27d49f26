"""Helpers for tests of the decoding loop on fake executors."""

from specexport_runtime.batch import ModelRunner
from specexport_runtime.decoder import Decoder, RoundEvent
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.none import NoDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.sequence import Sequence

VOCAB = 17
CAPACITY = 80
MAX_MODEL_LEN = 64


def make_target(rows: int = 4, **options: object) -> FakeExecutor:
    return FakeExecutor(VOCAB, rows, CAPACITY, **options)


def make_draft(kind: str, rows: int = 4) -> FakeExecutor:
    options = {
        "same": {},
        "good": {"noise": 0.4},
        "random": {"seed": 99},
        "adversarial": {"negate": True},
    }[kind]
    return FakeExecutor(VOCAB, rows, CAPACITY, **options)


def make_sequence(index: int, prompt: list[int], params: SamplingParams, **options: object) -> Sequence:
    return Sequence(index, prompt, params, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, **options)


def make_decoder(
    target: FakeExecutor,
    draft: FakeExecutor | None,
    lookahead: int,
    *,
    max_chunk: int = 512,
    max_num_seqs: int | None = None,
) -> Decoder:
    drafter = NoDrafter()
    if draft is not None:
        runner = ModelRunner(draft, max_chunk=max_chunk)
        drafter = ModelDrafter(runner, vocab_size=draft.vocab_size, max_backlog=lookahead + 1)
    return Decoder(ModelRunner(target, max_chunk=max_chunk), drafter, lookahead=lookahead, max_num_seqs=max_num_seqs)


def run(decoder: Decoder, sequences: list[Sequence]) -> list[RoundEvent]:
    for seq in sequences:
        decoder.add(seq)
    events = []
    while decoder.has_work:
        events += decoder.step()
        decoder.check()
        if isinstance(decoder.drafter, ModelDrafter):
            decoder.drafter.runner.kv.check()
    return events


def greedy_reference(target: FakeExecutor, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with no cache, no loop and no batch."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.logits_after(tokens).argmax()))
    return tokens[len(prompt) :]
