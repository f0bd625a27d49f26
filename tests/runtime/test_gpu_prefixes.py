"""Prefix reuse on GPU executors over their stand-ins: rows are kept, copied and exchanged on the device."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from specexport_runtime.abi import LayerGeometry
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.open import PLACES, find_engine_backend
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes import cuda_sessions as on_cuda
from tests.support.fakes.fed import check_conversation
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run
from tests.support.fakes.trt_fakes import PLUGIN, make_entry, open_fake

WAYS = ("ort-cuda", "native", "plugin")
LONG = (np.arange(30) * 7 % VOCAB).tolist()
OTHER = (np.arange(30) * 5 % VOCAB).tolist()


@pytest.fixture
def opened(monkeypatch, tmp_path):
    on_cuda.fake_ort(monkeypatch)

    def open_way(way, rows):
        if way == "ort-cuda":
            pair = [on_cuda.make_executor(num_rows=rows) for _ in range(2)]
            return SimpleNamespace(pair=pair, model=FakeExecutor(on_cuda.VOCAB, rows, 80))
        options = {"lowering": "plugin", "inputs": PLUGIN} if way == "plugin" else {}
        target, *_ = open_fake(tmp_path, make_entry(4, rows, **options), make_target(rows))
        draft, *_ = open_fake(tmp_path, make_entry(4, rows, draft=True, **options), make_draft("good", rows))
        return SimpleNamespace(pair=[target, draft], model=make_target(rows))

    return open_way


def decoder_of(opened, *, reuse=True, **options):
    return make_decoder(*opened.pair, 4, reuses_prefixes=reuse, **options)


def test_every_backend_keeps_prefixes():
    assert all(find_engine_backend(name).copies_rows for name in PLACES)


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_reads_only_what_is_new(opened, way):
    sequences = check_conversation(lambda reuse: decoder_of(opened(way, 2), reuse=reuse), LONG[:20])
    check_plain(opened(way, 2).model, sequences)


@pytest.mark.fuzz
@pytest.mark.parametrize("way", WAYS)
@examples(8, allow=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_crowds_of_related_prompts_get_the_texts_that_plain_engines_give(opened, way, data):
    made = opened(way, data.draw(st.integers(2, 4)))
    decoder = decoder_of(made)
    known = [LONG, OTHER]
    for _ in range(data.draw(st.integers(1, 4))):
        batch = []
        for i in range(data.draw(st.integers(1, 5))):
            begin = data.draw(st.sampled_from(known))
            prompt = [*begin[: data.draw(st.integers(1, min(len(begin), 45)))], *data.draw(st.lists(st.integers(0, 9)))]
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 6)))
            batch.append(make_sequence(i, prompt[:50], params, scope=""))
        run(decoder, batch)
        check_plain(made.model, batch)
        known += [seq.tokens for seq in batch]


def held(executor, row, count):
    """What the first entries of a row are: the next token tells, and it is not committed."""
    runner = ModelRunner(executor)
    runner.kv.restore(row, count)
    return np.array(runner.step(row, [RowWork([9], 1)])[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [(7, 4), (4, 7), (6, 0), (0, 5)])
def test_rows_are_copied_and_exchanged(opened, way, counts):
    made = opened(way, 4)
    (executor, _), texts = made.pair, (LONG[: counts[0]], OTHER[: counts[1]])
    runner = ModelRunner(executor)
    for row, text in zip((1, 3), texts, strict=True):
        runner.prefill(row, text)
    executor.swap_rows(1, 3, counts)
    for row, text in zip((3, 1), texts, strict=True):
        if text:
            executor.copy_row(row, 0, len(text))
            right = made.model.logits_after([*text, 9])
            np.testing.assert_array_equal(held(executor, 0, len(text)), right)
            np.testing.assert_array_equal(held(executor, row, len(text)), right)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moved", ["copied", "exchanged"])
def test_padding_of_later_steps_goes_behind_what_came_into_a_row(opened, way, moved):
    made = opened(way, 4)
    executor = made.pair[0]
    runner = ModelRunner(executor)
    runner.prefill(3, OTHER[:4])
    runner.prefill(1, LONG[:20])
    if moved == "copied":
        executor.copy_row(1, 3, 20)
    else:
        executor.swap_rows(1, 3, (20, 4))
    runner.kv.release(3)
    for count in (1, 5, 1):  # decode and verify steps of three rows run in the profile of four
        runner.step(0, [RowWork([5] * count, 1), IDLE, RowWork([6] * count, 1), IDLE][:4])
    np.testing.assert_array_equal(held(executor, 3, 20), made.model.logits_after([*LONG[:20], 9]))


def test_ort_cuda_exchanges_blocks_and_copies_only_what_there_is(opened):
    executor, _ = opened("ort-cuda", 3).pair
    copies = []
    executor.driver.copy_rows = lambda *sizes: copies.append(sizes[2])
    executor.swap_rows(0, 2, (9, 5))
    assert not copies
    executor.copy_row(0, 1, 9)
    sizes = [LayerGeometry(2, 16, 16), LayerGeometry(1, 24, 24)]  # heads of 20 are held as 24
    assert copies == [2 * 9 * each.kv_heads * each.k_dim for each in sizes for _ in "kv"]
