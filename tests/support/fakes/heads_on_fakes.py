"""Decoders whose drafter is a head on fakes: features hold the tokens that they are of, so a wrong feature shows."""

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import CAPACITY, VOCAB, greedy_reference, make_decoder, make_sequence, make_target

PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2], [11, 5, 0, 1]]


def decoder_with(make_drafter, lookahead, noise=0.0, rows=4, *, fake=None, stages=("head",), max_chunk=512, **options):
    """A decoder, its target's executor and the drafter that ``make_drafter`` makes of the head's runner."""
    target = make_target(rows, gives_features=True)
    decoder = make_decoder(target, None, 0, max_chunk=max_chunk, **options)
    executor = FakeExecutor(VOCAB, rows, CAPACITY, noise=noise, reads_features=True, **(fake or {}))
    drafter = make_drafter(ModelRunner(executor, max_chunk=max_chunk))
    decoder.drafter.drafters["head"] = drafter
    decoder.plan = tuple(DraftStage(name, lookahead) for name in stages)
    return decoder, target, drafter


def make_sequences(tokens, prompts=PROMPTS):
    """A greedy sequence for each prompt; ``tokens`` gives the length of each by its number."""
    return [make_sequence(i, prompt, SamplingParams(max_tokens=tokens(i))) for i, prompt in enumerate(prompts)]


def check_plain(target, sequences):
    for seq in sequences:
        prompt = seq.tokens[: seq.num_prompt_tokens]
        assert seq.output == greedy_reference(target, prompt, seq.max_tokens)


def totals(sequences):
    return tuple(sum(getattr(seq.stats, name) for seq in sequences) for name in ("drafted", "accepted"))
