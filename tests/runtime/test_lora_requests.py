"""Requests with adapters over fakes that know with which adapter each cache entry was written: any mixture shows."""

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, make_draft, make_target
from tests.support.fakes.rounds import check_every_round

NAMES = (None, "one", "two", "three")


def make_engine(rows=4, **options):
    target = FakeExecutor(VOCAB, rows, 4096, num_adapters=3)
    return engine_of(
        target, make_tokenizer(), draft=make_draft("good", rows), max_model_len=MAX_MODEL_LEN, adapters=NAMES[1:],
        **options,
    )  # fmt: skip


def reference(prompt, count, adapter):
    target, tokens = FakeExecutor(VOCAB, 1, 64, num_adapters=3), list(prompt)
    for _ in range(count):
        tokens.append(int(target.logits_after(tokens, adapter=adapter).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("modes", [{}, {"unpad_kv": False}, {"unpad_input": False}])
def test_more_requests_than_rows_and_each_with_its_own(modes):
    engine, random = make_engine(**modes), np.random.default_rng(5)
    check_every_round(engine)
    prompts = [random.integers(0, VOCAB, random.integers(2, 40)).tolist() for _ in range(24)]
    names = [NAMES[i % 4] for i in range(24)]
    handles = [
        engine.submit(
            prompt, SamplingParams(max_tokens=10), lora=name, drafter=("draft-model", "lookup", "none")[i % 3]
        )
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    for prompt, name, handle in zip(prompts, names, handles, strict=True):
        assert handle.result().token_ids == reference(prompt, 10, NAMES.index(name))
    engine.check()
    engine.close()


def test_the_default_adapter_is_that_of_requests_that_name_none():
    engine, params = make_engine(lora="two"), SamplingParams(max_tokens=8)
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == reference([1, 2, 3], 8, 2)
    assert engine.generate([[1, 2, 3]], params, lora="one")[0].token_ids == reference([1, 2, 3], 8, 1)
    engine.close()


def test_the_fake_sees_an_entry_of_another_adapter():
    runner = ModelRunner(FakeExecutor(VOCAB, 1, 64, num_adapters=3))
    runner.step(0, [RowWork([1, 2, 3], 1, adapter=1)])
    runner.kv.commit(0, 3)
    with pytest.raises(SpecexportError, match="covers entries of another adapter"):
        runner.step(0, [RowWork([4], 1, adapter=2)])


def test_engines_without_adapters_refuse_them():
    engine = engine_of(make_target(), make_tokenizer(), max_model_len=MAX_MODEL_LEN)
    with pytest.raises(InvalidRequestError, match="there is no LoRA adapter 'one' to choose") as caught:
        engine.submit([1, 2], lora="one")
    assert "--lora-mode choose" in str(caught.value)
    engine.close()
