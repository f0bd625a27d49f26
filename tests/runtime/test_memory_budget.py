"""A budget for the memory of the KV cache: who may run, who waits, what goes, and what is refused."""

from contextlib import closing

import numpy as np
import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.decoding.memory_budget import SPARE_SHARE
from specexport_runtime.decoding.queue import MAX_PASSES
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import ENTRY_BYTES, FakeExecutor
from specexport_runtime.intake.checks import parse_bytes
from tests.support.cases.memory import needs_linux, resident_bytes
from tests.support.fakes import loop
from tests.support.fakes.engine import make_engine, make_tokenizer
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.rounds import check_every_round, opened

PAGE = 8 * ENTRY_BYTES
ROW = loop.CAPACITY * ENTRY_BYTES
SLACK = loop.CAPACITY - loop.MAX_MODEL_LEN


def text(step, length=30):
    return (np.arange(length) * step % loop.VOCAB).tolist()


def decoder_of(budget, rows=6, *, reuse=True, most=None, **options):
    """Of a target alone: a sequence of n tokens may need n + 16 entries, in pages of 8."""
    return loop.make_decoder(
        loop.make_target(rows, context=3), None, 0, budget=budget, reuses_prefixes=reuse, max_num_seqs=most, **options
    )


def add(decoder, prompt, tokens, *, scope="", pinned=False, owner=""):
    seq = loop.make_sequence(0, prompt, SamplingParams(max_tokens=tokens), scope=scope, is_pinned=pinned, owner=owner)
    decoder.add(seq)
    return seq


def finish(decoder, *sequences):
    while decoder.has_work:
        decoder.step()
        decoder.check()
        assert decoder.target.executor.resident_bytes <= decoder.load.kv_bytes_resident <= decoder.slots.memory.limit
    check_plain(decoder.target.executor, sequences)


def ask(decoder, prompt, tokens=6, **options):
    seq = add(decoder, prompt, tokens, **options)
    finish(decoder, seq)
    return seq.stats.cached_tokens


def test_more_sequences_run_than_have_their_full_length():
    """And those that do not fit wait in order: a short one does not overtake a long one."""
    decoder = decoder_of(2 * ROW, reuse=False)
    short = [add(decoder, text(i + 1, 4), 4) for i in range(5)]  # 3 pages each, of 20
    decoder.step()
    assert len(decoder.running) == 5
    assert decoder.load.kv_bytes_reserved == 5 * 3 * PAGE
    long, last = add(decoder, text(3, 30), 34), add(decoder, [1], 2)  # 10 pages, 3 pages
    decoder.step()
    assert decoder.running == short
    assert next(iter(decoder.scheduler.waiting)) is long
    finish(decoder, *short, long, last)
    assert long.stats.start_time < last.stats.start_time
    assert decoder.load.kv_bytes_reserved == 0


def test_what_does_not_fit_holds_back_no_other_owner_and_waits_for_few_of_them():
    decoder = decoder_of(int(1.3 * ROW), reuse=False)
    first = add(decoder, text(3, 30), 34, owner="c")  # 10 pages of 13
    decoder.step()
    long, own = add(decoder, text(5, 30), 34, owner="a"), add(decoder, [1], 2, owner="a")
    others = [add(decoder, [2 + number % 9], 2, owner="b") for number in range(40)]  # 3 pages each
    while not others[0].finish_reason:
        decoder.step()
        assert not own.num_generated
    while not long.num_generated:
        decoder.step()
    assert first.finish_reason
    assert MAX_PASSES <= sum(seq.num_generated > 0 for seq in others) <= MAX_PASSES + 1  # one had its turn
    finish(decoder, first, long, own, *others)


def test_memory_that_nobody_holds_goes_back_but_for_a_spare():
    decoder = decoder_of(4 * ROW, reuse=False)
    finish(decoder, *(add(decoder, text(i + 1, 8), 4) for i in range(4)))  # 2 pages each, of 40
    assert decoder.load.kv_bytes_resident == 4 * PAGE <= SPARE_SHARE * 4 * ROW
    given, release_pages = [], decoder.target.executor.release_pages
    decoder.target.executor.release_pages = lambda *args: (given.append(args), release_pages(*args))
    for _ in range(3):  # the spare is used again: nothing goes back and comes again
        finish(decoder, add(decoder, text(1, 8), 4))
    assert not given


def test_kept_texts_go_when_their_memory_is_wanted_the_oldest_first():
    decoder = decoder_of(2 * ROW)
    assert [ask(decoder, text(step)) for step in (3, 5, 7)] == [0, 0, 0]  # 5 pages each
    assert len(decoder.slots.kept) == 3
    assert ask(decoder, text(3)) == 29  # used again: no longer the oldest
    assert ask(decoder, text(11, 24), 30, scope=None) is None  # 9 pages of 20, so one text goes
    assert [ask(decoder, text(step)) for step in (7, 3)] == [29, 29]
    assert ask(decoder, text(5)) == 0


def test_a_text_is_taken_over_where_a_copy_has_no_room():
    """It loses its tail, which it would not where there is memory for both."""
    for budget, kept in ((ROW, 1), (3 * ROW, 2)):
        decoder = decoder_of(budget)
        ask(decoder, text(3, 60), 4)
        assert ask(decoder, [*text(3, 18), 1, 1]) == 18
        assert len(decoder.slots.kept) == kept
        assert ask(decoder, text(3, 60), 4) == (59 if kept == 2 else 18)


def test_a_pinned_text_keeps_its_memory():
    decoder = decoder_of(2 * ROW, most=3)
    ask(decoder, text(3), 4, pinned=True)
    pinned = decoder.load.kv_bytes_reserved
    assert pinned == 4 * PAGE
    # A sequence of full length fits beside it, two do not.
    sequences = [add(decoder, text(step), 34) for step in (5, 7)]
    decoder.step()
    assert [seq.row >= 0 for seq in sequences] == [True, False]
    finish(decoder, *sequences)
    assert ask(decoder, text(3), 4) == 29


def test_what_cannot_be_is_refused_when_the_engine_is_made():
    with pytest.raises(InvalidRequestError, match=r"kv_cache_memory_bytes is 9000, and one .* 64 tokens") as error:
        make_engine(kv_cache_memory_bytes=9000)
    row = 2 * 10 * PAGE  # of target and draft: 64 tokens and K + 1, in pages of 8
    assert error.value.hint == f"give {row} or more, or a max_model_len of up to 55."
    with closing(make_engine(kv_cache_memory_bytes=row)) as engine:
        assert engine.current_load().kv_bytes_budget == row


def test_an_engine_keeps_to_its_budget_and_tells_of_it():
    with closing(make_engine(kv_cache_memory_bytes="20KiB", max_num_seqs=2)) as engine:
        check_every_round(engine)
        loads = []
        params = SamplingParams(max_tokens=20)
        handles = [engine.submit([i], params, callback=lambda _: loads.append(engine.current_load())) for i in range(9)]
        for i, handle in enumerate(handles):
            assert handle.result(60).token_ids == loop.greedy_reference(loop.make_target(), [i], 20)
        assert all((0 < load.kv_usage <= 1) == (load.num_running > 0) for load in loads)
        assert max(load.num_running for load in loads) == 2
        assert all(load.kv_bytes_resident <= 20 << 10 for load in loads)
        engine.pin_prefix(text(3, 20))
        with pytest.raises(InvalidRequestError, match="kv_cache_memory_bytes leaves"):
            engine.pin_prefix(text(5, 60))
        engine.check()


def test_sizes():
    sizes = {1: 1, "4096": 4096, "2GiB": 2 << 30, "1.5 GB": 1_500_000_000, "3k": 3000, "3Ki": 3072, "7 MiB": 7 << 20}
    assert {given: parse_bytes(given, "size") for given in sizes} == sizes


@pytest.mark.parametrize("given", ["", "GiB", "-1", "0", 0, -5, True, "1e9", "2 GiBs", "1i", "0.2"])
def test_sizes_that_are_none(given):
    with pytest.raises(InvalidRequestError, match="size is"):
        parse_bytes(given, "size")


@needs_linux
def test_memory_really_goes_back(demo_bundle):
    """By what the system says is resident, which the engine's own count equals."""
    prompts = [[7 + i] * 100 for i in range(6)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with opened(demo_bundle, 6, max_model_len=400, kv_cache_memory_bytes="16MiB") as engine:
        executors = [engine.target, engine.draft]
        assert sum(map(resident_bytes, executors)) == 0
        loads, limit = [], 16 << 20
        seen = engine.submit([5] * 90, params, callback=lambda _: loads.append(sum(map(resident_bytes, executors))))
        results = engine.generate(prompts, params)
        seen.result()
        load = engine.current_load()
        assert 0 < max(loads) <= limit
        assert sum(map(resident_bytes, executors)) == load.kv_bytes_resident
        assert load.num_prefixes == 6
        engine.generate([[9] * 300] * 4, SamplingParams(max_tokens=50, ignore_eos=True), remember=False)
        assert engine.current_load().num_prefixes < 6
        assert sum(map(resident_bytes, executors)) == engine.current_load().kv_bytes_resident <= limit
        engine._loop.decoder.slots.clear()
        engine._loop.decoder.slots.memory.settle()
        assert sum(map(resident_bytes, executors)) <= SPARE_SHARE * limit
    with opened(demo_bundle, 6, max_model_len=400) as engine:
        assert [each.token_ids for each in engine.generate(prompts, params)] == [each.token_ids for each in results]


def test_a_budget_is_refused_by_name_where_no_memory_goes_back(demo_bundle):
    with pytest.raises(InvalidRequestError, match="kv_cache_memory_bytes is 1GiB") as error:
        SpecEngine.load(demo_bundle, kv_cache_memory_bytes="1GiB", unpad_kv=False)
    assert "ort-cpu on Linux, and unpad_kv" in error.value.hint


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        *zip(("none", "draft-model", "lookup", "self", "head"), (0.9, 0.0, 0.9, 0.0, 0.9), strict=True),
        ("suffix", 0.0),  # what it learned of others may give a seed other draws, with and without a budget
    ],
)
def test_every_drafter_gives_the_same_texts_within_a_budget(drafter, temperature):
    """Of two rows for up to six sequences, some of which begin alike."""
    prompts = [text(3, 24), [*text(3, 24), 1], text(5, 9), [*text(3, 20), 2, 2], text(7, 30), text(5, 12), [4]]
    params = [SamplingParams(max_tokens=6 + i, temperature=temperature, seed=i) for i in range(len(prompts))]
    found = []
    for budget in (None, 4 * ROW):
        parts = {
            "draft": loop.make_draft("good", 6) if drafter == "draft-model" else None,
            "head": FakeExecutor(loop.VOCAB, 6, loop.CAPACITY, reads_features=True) if drafter == "head" else None,
        }
        target = loop.make_target(6, num_gates=8 if drafter == "self" else 0, gives_features=drafter == "head")
        with closing(
            engine_of(target, make_tokenizer(), **parts, max_model_len=loop.MAX_MODEL_LEN, kv_cache_memory_bytes=budget)
        ) as engine:
            check_every_round(engine)
            for _ in range(2):  # the second time all of it is known, as far as it was kept
                results = engine.generate(prompts, params, drafter=drafter)
                found.append([result.token_ids for result in results])
            assert any(result.stats.drafted for result in results) == (drafter != "none")
            engine.check()
    assert found[0] == found[1] == found[2] == found[3]
