"""Many threads use one engine at once; two engines in one process do not touch each other."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import EngineClosedError, RequestFailedError, SpecexportError
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.cases import chance
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import fail_at, greedy_reference, make_target
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import Listener, Watcher, wait_for_rest

THREADS = 12
EACH = 8
DRAFTERS = ("none", "lookup", "draft-model", "chained")


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def request(number):
    rng = random.Random(chance.seed(number))
    prompt = [rng.randrange(17) for _ in range(rng.randint(1, 30))]
    temperature = rng.choice([0.0, 0.8])
    params = SamplingParams(
        max_tokens=rng.randint(1, 25), temperature=temperature, seed=number, logprobs=rng.choice([None, 2]),
        repetition_penalty=rng.choice([1.0, 1.2]),
    )  # fmt: skip
    return RequestSpec(prompt, params, options={"drafter": rng.choice(DRAFTERS)})


@pytest.fixture(scope="module")
def alone():
    """What each request gives on an engine that serves nobody else."""
    engine = make_engine()
    return [
        engine.generate(spec.prompt, spec.params, **spec.options)[0] for spec in map(request, range(THREADS * EACH))
    ]


def same(tokens, logprobs, wanted):
    assert tokens == wanted.token_ids
    assert logprobs == wanted.logprobs


def by_submit(engine, number, wanted):
    spec = request(number)
    result = engine.submit(spec.prompt, spec.params, **spec.options).result(60)
    same(result.token_ids, result.logprobs, wanted)


def by_iteration(engine, number, wanted):
    spec = request(number)
    pieces = [p for chunk in engine.stream(spec.prompt, spec.params, **spec.options) for p in chunk.pieces]
    logprobs = None if wanted.logprobs is None else [piece.logprobs for piece in pieces]
    same([piece.token_id for piece in pieces], logprobs, wanted)


def by_generate(engine, number, wanted):
    spec = request(number)
    for result in engine.generate([spec.prompt, spec.prompt], spec.params, **spec.options):
        same(result.token_ids, result.logprobs, wanted)


def by_submit_all(engine, number, wanted):
    listeners = [Listener(), Listener()]
    for handle, listener in zip(engine.submit_all([request(number)] * 2, listeners), listeners, strict=True):
        assert listener.ended.wait(60)
        assert listener.done == [handle]
        same(handle.result(0).token_ids, handle.result(0).logprobs, wanted)
        assert listener.tokens == wanted.token_ids


def by_cancelling(engine, number, wanted):
    spec = request(number)
    handle = engine.submit(spec.prompt, spec.params, **spec.options)
    if number % 2:
        next(iter(handle), None)
    handle.cancel()
    result = handle.result(60)
    assert result.finish_reason in ("cancelled", "length")
    assert result.token_ids == wanted.token_ids[: len(result.token_ids)]


WAYS = (by_submit, by_iteration, by_generate, by_submit_all, by_cancelling)


def use(engine, thread, alone, start):
    start.wait(30)
    for i in range(EACH):
        number = thread * EACH + i
        WAYS[(thread + i) % len(WAYS)](engine, number, alone[number])
        load = engine.current_load()
        assert 0 <= load.num_running <= load.max_num_seqs
        assert 0 <= load.kv_entries <= load.kv_capacity


@pytest.mark.fuzz
def test_what_many_threads_ask_of_one_engine_at_once_is_what_each_gets_alone(alone):
    engine, watcher = make_engine(max_num_batched_tokens=40), Watcher()
    check_every_round(engine)
    engine.add_observer(watcher)
    start, stop = threading.Barrier(THREADS), threading.Event()
    refused = set()

    def ask():
        while not stop.is_set():
            engine.current_load()
            try:
                engine.check()
            except SpecexportError as error:  # busy, which is all that may be wrong
                refused.add("have not ended" in str(error))

    with ThreadPoolExecutor(THREADS + 1) as pool:
        asking = pool.submit(ask)
        users = [pool.submit(use, engine, thread, alone, start) for thread in range(THREADS)]
        try:
            for user in users:
                user.result(120)
        finally:
            stop.set()
        asking.result(30)
    assert refused == {True}
    engine.check()
    requests = sum(
        2 if WAYS[(t + i) % len(WAYS)] in (by_generate, by_submit_all) else 1
        for t in range(THREADS)
        for i in range(EACH)
    )
    assert sum(watcher.reasons().values()) == requests
    assert "error" not in watcher.reasons()


@pytest.mark.fuzz
def test_two_engines_in_one_process_do_not_touch_each_other(alone):
    """The same work at once, one of them failing and closing in the middle of it."""
    good, bad, start = make_engine(), make_engine(), threading.Barrier(5)
    fail_at(bad.target, 60)

    def ask(i):
        tokens = bad.submit([i % 17], SamplingParams(max_tokens=20)).result(60).token_ids
        assert tokens == greedy_reference(make_target(), [i % 17], 20)

    def spoil():
        start.wait(30)
        with pytest.raises(RequestFailedError, match="the device went away"):
            list(map(ask, range(30)))
        bad.close()

    with ThreadPoolExecutor(5) as pool:
        spoiler = pool.submit(spoil)
        for user in [pool.submit(use, good, thread, alone, start) for thread in range(4)]:
            user.result(120)
        spoiler.result(60)
    good.check()
    assert good.generate([1], SamplingParams(max_tokens=5))[0].token_ids == greedy_reference(make_target(), [1], 5)
    with pytest.raises(EngineClosedError):
        bad.submit([1])


@pytest.mark.parametrize("delay", [0, 3])
def test_closing_while_others_submit_gives_them_a_result_or_says_so(delay):
    engine, watcher = make_engine(), Watcher()
    engine.add_observer(watcher)
    closes, execute = [], engine.target.execute

    def checked(*args):
        assert not closes  # no step after the engines were released
        return execute(*args)

    engine.target.execute = checked
    engine.target.close = lambda: closes.append(True)
    start, ends = threading.Barrier(9), []

    def submit_until_closed(thread):
        start.wait(30)
        while True:
            try:
                handles = engine.submit_all([RequestSpec([thread], SamplingParams(max_tokens=9))] * 2)
            except EngineClosedError:
                return
            ends.extend([handle.result(60).finish_reason for handle in handles])  # never a hang

    def close():
        start.wait(30)
        threading.Event().wait(delay / 1000)
        engine.close()
        assert closes == [True]

    with ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(submit_until_closed, thread) for thread in range(6)] + [
            pool.submit(close) for _ in range(3)
        ]
        for job in jobs:
            job.result(60)
    assert set(ends) <= {"length", "cancelled"}
    assert closes == [True]
    assert sum(watcher.reasons().values()) == len(ends)
    wait_for_rest(engine)
    engine.check()


def test_two_real_engines_at_once(demo_bundle):
    prompts = ["def main():\n", "import os\n", "class Tree:\n"]
    params = SamplingParams(max_tokens=16)
    engines = [SpecEngine.load(demo_bundle, num_threads=1, spin=False, max_num_seqs=3) for _ in range(2)]
    wanted = [engines[0].generate(prompt, params)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(engines[i % 2].generate, prompts, params) for i in range(4)]
        for each in asked:
            assert [result.token_ids for result in each.result(60)] == wanted
    engines[0].close()
    assert engines[1].generate(prompts[0], params)[0].token_ids == wanted[0]
    engines[1].check()
    engines[1].close()
