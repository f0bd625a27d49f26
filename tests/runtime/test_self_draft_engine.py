"""Self-drafting on a real engine: gates by pointer, one KV cache, greedy text as without drafts."""

from contextlib import closing

import numpy as np
import pytest

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerChoice, LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases import chance
from tests.support.cases.entries import changed
from tests.support.fakes.loop import finish
from tests.support.fakes.requests import request_of

TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "The sum of 12 and 30 is",
    "Once upon a time there was a small model that",
    "x",
)
LAYERS = 8


@pytest.fixture(scope="module")
def bundle(demo_bundle):
    return load_bundle(demo_bundle, max_num_seqs=3, max_model_len=128)


@pytest.fixture(scope="module")
def executor(bundle):
    return open_executor(bundle, "target", num_threads=1, spin=False)


@pytest.fixture(scope="module")
def prompts(bundle):
    return [bundle.tokenizer.encode(text).ids for text in TEXTS]


def decode(bundle, executor, prompts, lookahead, *, max_tokens=24, max_chunk=512, choices=(), **options):
    runner = ModelRunner(executor, max_chunk=max_chunk)
    drafter = SelfDrafter(runner, vocab_size=bundle.manifest.vocabulary.size)
    sequences = [
        request_of(
            i, prompt, SamplingParams(max_tokens=max_tokens), vocab_size=executor.vocab_size, max_model_len=128,
            draft_plan=(DraftStage("self", lookahead),) if lookahead else (),
            **{name: make() for name, make in options.items()},
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    for seq, choice in zip(sequences, choices, strict=False):
        drafter.choose(seq, choice)
    finish(Decoder(runner, ChainDrafter({"self": drafter})), sequences)
    runner.reset()
    return sequences


@pytest.fixture(scope="module")
def plain(bundle, executor, prompts):
    return [seq.output for seq in decode(bundle, executor, prompts, 0)]


def exit_early():
    return DraftExit(DraftExitParams(gamma=0.3, epsilon=0.1))


@pytest.mark.parametrize(
    ("lookahead", "rules", "options"),
    [
        (1, LayerRules(), {}),
        (8, LayerRules(), {"max_chunk": 5}),
        (6, LayerRules(threshold=None, period=2, keep_last=0), {"draft_exit": exit_early}),
        (6, LayerRules(threshold=0.5, period=None, keep_last=None), {"draft_exit": exit_early}),
    ],
)
def test_greedy_text_equals_plain_greedy(bundle, executor, prompts, plain, lookahead, rules, options):
    sequences = decode(bundle, executor, prompts, lookahead, layer_rules=lambda: rules, **options)
    assert [seq.output for seq in sequences] == plain
    assert sum(seq.stats.drafted for seq in sequences) > 0
    if rules == LayerRules():
        assert sum(seq.stats.accepted for seq in sequences) > 0
        assert all(seq.stats.layer_choice.can_draft for seq in sequences)


@pytest.mark.fuzz
def test_greedy_text_equals_plain_greedy_with_any_layers(bundle, executor, prompts, plain):
    random = np.random.default_rng(chance.seed(4))
    for probability in (0.0, 0.3, 0.8):
        masks = [random.random((2, LAYERS)) < probability for _ in prompts]
        choices = [LayerChoice(tuple(attention.tolist()), tuple(mlp.tolist())) for attention, mlp in masks]
        sequences = decode(bundle, executor, prompts, 4, choices=choices)
        assert [seq.output for seq in sequences] == plain
        # Where nothing is left of the model there is no draft.
        assert (sum(seq.stats.drafted for seq in sequences) > 0) == (probability > 0)


def test_similarity_of_a_prompt_does_not_depend_on_chunks_or_neighbours(bundle, executor, prompts):
    whole = decode(bundle, executor, prompts, 2, max_tokens=3)
    cut = decode(bundle, executor, prompts, 2, max_tokens=3, max_chunk=4)
    for i, one in enumerate(whole):
        [alone] = decode(bundle, executor, [prompts[i]], 2, max_tokens=3)
        found = one.stats.layer_choice
        for other in (cut[i].stats.layer_choice, alone.stats.layer_choice):
            assert (found.acs, found.mask.tolist()) == (other.acs, other.mask.tolist())
        assert -1 <= min(found.acs) <= max(found.acs) <= 1.000001
    assert len({seq.stats.layer_choice.acs for seq in whole}) == len(prompts)


def test_layers_are_set_by_pointer(executor, prompts):
    runner = ModelRunner(executor)
    work = [RowWork(prompts[0], 2)]
    everything = runner.step(0, work).copy()
    bindings = dict(executor._bindings)
    mask = np.ones(2 * LAYERS, np.bool_)
    mask[[2, 5, 6]] = False
    executor.set_layers(mask)
    some = runner.step(0, work).copy()
    executor.set_layers(None)
    again = runner.step(0, work).copy()
    assert dict(executor._bindings) == bindings  # nothing was bound anew
    assert np.abs(some - everything).max() > 0.01
    np.testing.assert_array_equal(again, everything)
    runner.reset()


def test_parts_that_are_off_leave_the_cache_alone(executor, prompts):
    runner, work = ModelRunner(executor), [RowWork(prompts[0][::-1], 1)]
    before = [cache[2].copy() for cache in executor._caches.values()]
    executor.set_layers(np.zeros(2 * LAYERS, np.bool_))
    runner.step(2, work)
    executor.set_layers(None)
    for cache, held in zip(executor._caches.values(), before, strict=True):
        np.testing.assert_array_equal(cache[2], held)
    runner.step(2, work)
    assert all((cache[2] != held).any() for cache, held in zip(executor._caches.values(), before, strict=True))
    runner.reset()


def test_similarity_is_there_when_it_was_wanted(executor, prompts):
    runner = ModelRunner(executor)
    work = [RowWork(prompts[0], 1), RowWork(prompts[1], 1)]
    logits = runner.step(0, work).copy()
    assert executor.similarity.shape == (LAYERS, 0)
    executor.measure_similarity(True)
    measured = runner.step(0, work).copy()
    similarity = executor.similarity
    executor.measure_similarity(False)
    np.testing.assert_array_equal(measured, logits)
    assert similarity.shape == (LAYERS, len(prompts[0]) + len(prompts[1]))
    assert similarity.dtype == np.float32
    assert 0 < np.abs(similarity).min() < np.abs(similarity).max() < 1.000001
    kept = similarity.copy()
    runner.step(0, work)
    assert executor.similarity.shape == (LAYERS, 0)
    executor.measure_similarity(True)
    runner.step(0, [RowWork(row.tokens[::-1], 1) for row in work])
    executor.measure_similarity(False)
    np.testing.assert_array_equal(similarity, kept)  # a copy
    assert (executor.similarity != kept).any()
    runner.reset()


@pytest.mark.parametrize(("role", "options"), [("draft", {}), ("target", {"unpad_kv": False})])
def test_drafts_and_padded_graphs_have_no_gates(bundle, role, options):
    with closing(open_executor(bundle, role, num_threads=1, spin=False, **options)) as executor:
        assert not executor.num_gates


@pytest.mark.parametrize("num_gates", [0, 14])
def test_a_manifest_that_says_otherwise_is_refused(bundle, num_gates):
    entry = bundle.manifest.models["target"]
    assert len(entry.engine.gates.kinds) == 2 * LAYERS
    wrong = changed(entry, kinds=("attention", "MLP") * (num_gates // 2))
    with pytest.raises(IncompatibleError, match=f"says {num_gates} gates"):
        OrtExecutor(bundle.folder / entry.engine.path, wrong, num_rows=1, kv_capacity=8, num_threads=1, spin=False)
