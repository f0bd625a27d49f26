"""Decoders whose drafter is a head on fakes: features hold the tokens that they are of, so a wrong feature shows."""

import gc

import numpy as np
import pytest

from specexport_runtime.drafters import head as head_module
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.loop import CAPACITY, VOCAB, greedy_reference, make_decoder, make_sequence, make_target, run

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


def check_cancelling(decoder, target, drafter, held):
    """A sequence that is cancelled leaves nothing behind, and its neighbours go on.

    Args:
        decoder: with three rows.
        target: its target's executor.
        drafter: its head.
        held: what the drafter keeps by sequence.
    """
    sequences = make_sequences(lambda _: 30, PROMPTS[:3])
    for seq in sequences:
        decoder.add(seq)
    for _ in range(3):
        decoder.step()
    decoder.cancel(sequences[0])
    while decoder.has_work:
        decoder.step()
        decoder.check()
        drafter.runner.kv.check()
    check_plain(target, sequences[1:])
    assert not drafter.runner.kv.num_committed
    del seq, sequences
    gc.collect()
    assert not held


def check_true_features(make_decoder_of, held, *, lookup, **sizes):
    """Where nothing is noisy every draft is right, whatever the chunks and the neighbours.

    Args:
        make_decoder_of: ``decoder_with`` for one kind of head, without noise.
        held: features that wait for the head, at most.
        lookup: copies are drafted too.
        sizes: for ``make_decoder_of``.
    """
    stages = ("lookup", "head") if lookup else ("head",)
    decoder, target, drafter = make_decoder_of(stages=stages, **sizes)
    drafter.max_backlog = 3
    sequences = make_sequences(lambda i: 4 + 5 * i)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "MAX_HELD", held)
        run(decoder, sequences)
    check_plain(target, sequences)
    if not lookup:
        drafted, accepted = totals(sequences)
        assert accepted == drafted > 0


class Forgetful(HeadDrafter):
    """Leaves other features in the place of true ones, as a drafter without catch-up does."""

    def note_features(self, sequence, start, features):
        super().note_features(sequence, start, features if start == 0 else np.full_like(features, 1.0))


def check_wrong_features(make_decoder_of):
    """The fakes can fail: features that are not the target's cost acceptance, and nothing else.

    Args:
        make_decoder_of: makes a decoder whose drafter is of a class.
    """
    rates = []
    for kind in (HeadDrafter, Forgetful):
        decoder, target, _ = make_decoder_of(kind)
        sequences = make_sequences(lambda _: 30)
        run(decoder, sequences)
        check_plain(target, sequences)
        drafted, accepted = totals(sequences)
        rates.append(accepted / drafted)
    assert rates[0] == 1.0
    assert rates[1] < 0.5


def check_sampling_alone(make_decoder_of):
    """Sampled text does not depend on the batch."""

    def make(i):
        return make_sequence(i, PROMPTS[i], SamplingParams(max_tokens=25, temperature=0.8, top_k=12), seed=i + 5)

    together = [make(i) for i in range(4)]
    run(make_decoder_of()[0], together)
    for i, seq in enumerate(together):
        alone = make(i)
        run(make_decoder_of()[0], [alone])
        assert seq.output == alone.output
        assert seq.stats.accepted == alone.stats.accepted > 0
