"""The search for layers that drafts leave out: readings, promises and the search itself, on fakes."""

import itertools

import numpy as np
import pytest

from specexport.bench.layer_agreement import PIECE, AgreementReader, WrittenText, tokens_a_round
from specexport.bench.layer_costs import LayerCosts, measure_costs
from specexport.bench.layer_search import LayerSearch
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner

VOCAB, LAYERS = 13, 3
COSTS = LayerCosts((7.0, 7.5, 8.0), (1.0, 2.0) * 2)


def executor(**options):
    return FakeExecutor(VOCAB, 12, 80, context=4, num_gates=2 * LAYERS, gate_noise=1.2, **options)


def greedy_texts(target):
    texts = []
    for number in range(11):
        tokens = [(5 * number + 3 * i) % VOCAB for i in range(1 + number)]
        own = []
        for _ in range(1 + (7 * number) % 17):
            own.append(int(target.logits_after([*tokens, *own]).argmax()))
        texts.append(WrittenText(tokens, own))
    return texts


def masks_of(*bits):
    return [np.array([bool(each >> i & 1) for i in range(2 * LAYERS)]) for each in bits]


def test_chances_are_those_of_drafts_behind_the_targets_own_tokens():
    target = executor()
    reader = AgreementReader(ModelRunner(target), greedy_texts(target))
    assert reader.num_tokens == sum(1 + (7 * number) % 17 for number in range(11))
    masks = masks_of(0b111111, 0b101101, 0b000011)
    for _ in range(2):  # again from the ends of the prompts
        for mask, chances in zip(masks, reader.agree(masks), strict=True):
            for text, own in zip(sorted(greedy_texts(target), key=lambda t: len(t.written)), chances, strict=True):
                drafted = [
                    int(target.logits_after([*text.prompt, *text.written[:i]], tuple(mask.tolist())).argmax())
                    for i in range(len(text.written))
                ]
                assert own.tolist() == [float(a == b) for a, b in zip(drafted, text.written, strict=True)]
    assert target.masks[-1] is None
    assert 0 < np.concatenate(reader.agree(masks[1:2])[0]).mean() < 1


def test_chances_of_sampled_texts_are_what_the_distributions_have_in_common():
    target, temperature = executor(), 0.7
    texts = [WrittenText([1, 2, 3], [4, 5, 6, 7, 8, 9]), WrittenText([2], [2])]
    (mask,) = masks_of(0b011011)
    (chances,) = AgreementReader(ModelRunner(target), texts, temperature).agree([mask])

    def distribution(tokens, mask=None):
        powers = np.exp(target.logits_after(tokens, mask) / temperature)
        return powers / powers.sum()

    for text, own in zip(reversed(texts), chances, strict=True):
        for place, chance in enumerate(own):
            known = [*text.prompt, *text.written[:place]]
            wanted = np.minimum(distribution(known), distribution(known, tuple(mask.tolist()))).sum()
            assert chance == pytest.approx(wanted, abs=1e-5)


def test_the_similarity_is_the_mean_over_the_prompts():
    target = executor()
    texts = greedy_texts(target)
    reader = AgreementReader(ModelRunner(target, max_chunk=3), texts)
    known = [token for text in texts for token in text.prompt[:-1]]
    np.testing.assert_allclose(reader.similarity, target.similarity_of(known).mean(axis=1), rtol=1e-6)
    assert AgreementReader(ModelRunner(executor()), [WrittenText([3], [4])]).similarity == []


def test_expected_tokens_are_the_mean_over_all_places():
    chances = [np.array([1.0, 0.5, 1.0, 0.0]), np.array([1.0])]
    # One token: five places; two: three; three: two; four: one; five: nowhere.
    wanted = [1.0, 1 + 3.5 / 5]
    wanted.append(wanted[-1] + (0.5 + 0.5 + 0.0) / 3)
    wanted.append(wanted[-1] + (0.5 + 0.0) / 2)
    wanted.append(wanted[-1])
    wanted.append(wanted[-1])
    assert tokens_a_round(chances, 5) == pytest.approx(wanted)


def test_a_promise_is_the_best_of_all_lengths():
    mask = np.array([True, True, False, False])
    assert COSTS.draft(mask) == 4.0
    promise = COSTS.promise(mask, [1.0, 1.9, 2.7])
    assert promise == (7 * 2.7 / (8 + 2 * 4), 2, 2.7)
    assert COSTS.promise(mask, [1.0, 1.1, 1.1]) == (7 * 1.1 / (7.5 + 4), 1, 1.1)
    assert LayerCosts((1.0,), (5.0, 5.0)).draft(np.array([True, False])) == 1 / 20


def test_steps_are_timed_with_all_parts_of_a_kind_left_out():
    target = executor()
    runner = ModelRunner(target)
    AgreementReader(runner, greedy_texts(target))
    costs = measure_costs(runner, [1, 2, 3], 2)
    assert (len(costs.verify), len(costs.parts)) == (3, 2 * LAYERS)
    assert set(target.masks[-5:]) == {None, (False, True) * LAYERS, (True, False) * LAYERS}
    assert runner.kv.kv_len(0) == 0, "nothing of it is committed"


def additive(seed, kinds):
    """A judge by which each part has its price and its loss, and the losses of neighbours add up to more."""
    random = np.random.default_rng(seed)
    loss, price = random.uniform(0, 0.3, len(kinds)) ** 2, random.uniform(0.5, 1.5, len(kinds)) / len(kinds)
    costs = LayerCosts((1.0, 1.05, 1.1, 1.15, 1.2), tuple(price))

    def judge(masks):
        found = []
        for mask in masks:
            off = np.flatnonzero(~mask & np.array([bool(kind) for kind in kinds]))
            chance = np.exp(-4 * loss[off].sum() - 0.1 * (np.diff(off) == 1).sum())
            found.append(costs.promise(mask, np.cumsum([chance**k for k in range(5)])))
        return found

    return judge


KINDS = ("attention", "MLP") * 4 + ("attention", "")


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_of_all_choices_or_nearly(seed):
    judge = additive(seed, KINDS)
    search = LayerSearch(KINDS, judge)
    found = search.run()
    every = [np.array([*bits, False]) for bits in itertools.product((False, True), repeat=9)][1:-1]
    best = max(promise.speedup for promise in judge(every))
    assert found.promise.speedup >= 0.99 * best
    assert found.mask.any()
    assert not found.mask[-1], "what is not there is not on"
    assert search.num_tried < 120
    again = LayerSearch(KINDS, judge).run()
    assert again.mask.tolist() == found.mask.tolist()


def test_what_is_proposed_is_judged_and_beats_what_is_worse():
    kinds = ("attention", "MLP") * 3
    odd = np.array([True, False, False, True, True, False])

    def judge(masks):
        known = [bool((mask == odd).all()) for mask in masks]
        return [COSTS.promise(np.ones(4, bool), [1.0, 1.9 if it else 1.1, 1.9 if it else 1.1]) for it in known]

    assert LayerSearch(kinds, judge).run([odd]).mask.tolist() == odd.tolist()


def test_nothing_and_everything_are_no_choices():
    one_layer = LayerSearch(("attention", "MLP"), additive(0, ("attention", "MLP"))).run()
    assert one_layer.mask.tolist() in ([True, False], [False, True])
    assert PIECE <= 8
