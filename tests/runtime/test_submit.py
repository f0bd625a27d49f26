"""Requests that come and go: queueing, cancelling, and failures that stay where they belong."""

import subprocess
import sys
from pathlib import Path

import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError, RequestFailedError
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import fail_at
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import LONG, expected, slow_down
from tests.support.fakes.watcher import Watcher, wait_for_rest


@pytest.fixture
def engine():
    engine = make_engine()
    check_every_round(engine)
    return engine


@pytest.fixture
def watcher(engine):
    watcher = Watcher()
    engine.add_observer(watcher)
    return watcher


def test_a_handle_streams_its_callback_gets_every_chunk_and_it_has_a_result(engine):
    heard = []
    handle = engine.submit("w1 w2", LONG, callback=heard.append)
    chunks = list(handle)
    assert heard == chunks
    assert [piece.token_id for chunk in chunks for piece in chunk.pieces] == expected([1, 2], 40)
    assert chunks[-1].finish_reason == "length"
    assert handle.result().token_ids == expected([1, 2], 40)
    assert handle.done


def test_more_requests_than_rows_run_in_order_of_arrival(engine):
    handles = [engine.submit([i], SamplingParams(max_tokens=5 + i)) for i in range(12)]
    results = [handle.result(120) for handle in handles]
    for i, result in enumerate(results):
        assert result.token_ids == expected([i], 5 + i)
    starts = [handle.request.stats.start_time for handle in handles]
    assert starts == sorted(starts)
    ends = [handle.request.stats.end_time for handle in handles]
    assert starts[4] > min(ends[:4])  # four rows
    assert all(0 < result.stats.queued_s < max(ends) - result.stats.submit_time for result in results)


def test_cancel_before_during_and_after(engine, watcher):
    started, go = slow_down(engine)
    running = [engine.submit([i], LONG) for i in range(4)]  # all rows
    waiting = engine.submit([9], LONG)
    assert started.wait(60)
    waiting.cancel()  # before it has a row
    for _ in range(2):
        running[0].cancel()  # in the middle
    go.set()
    assert waiting.result(30).finish_reason == "cancelled"
    assert waiting.result().token_ids == []
    cut = running[0].result(30)
    assert cut.finish_reason == "cancelled"
    assert cut.token_ids == expected([0], 40)[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40
    for i in (1, 2, 3):
        assert running[i].result(30).token_ids == expected([i], 40)
    running[1].cancel()  # afterwards
    assert running[1].result().finish_reason == "length"
    assert list(waiting)[-1].finish_reason == "cancelled"
    wait_for_rest(engine)
    assert watcher.reasons() == {"cancelled": 2, "length": 3}


@pytest.mark.parametrize("where", ["target", "draft"])
def test_an_engine_failure_ends_the_requests_in_flight_and_spares_later_ones(engine, watcher, where):
    fail_at(getattr(engine, where), 6)
    handles = [engine.submit([i], LONG) for i in range(6)]  # two of them wait
    failed = 0
    for i, handle in enumerate(handles):
        try:
            assert handle.result(120).token_ids == expected([i], 40)
        except RequestFailedError:
            failed += 1
            with pytest.raises(RequestFailedError, match="the device went away") as caught:
                list(handle)
            assert isinstance(caught.value.__cause__, RuntimeError)
    assert 1 <= failed <= 4
    wait_for_rest(engine)
    assert watcher.reasons() == {"error": failed, "length": 6 - failed}
    assert engine.generate([7], LONG)[0].token_ids == expected([7], 40)


def test_counters_start_anew_when_the_engine_was_idle(engine):
    for count in (20, 5):
        engine.generate("w1", SamplingParams(max_tokens=count), speculation=False)
        assert engine.times.rounds == engine.padding.accepted == count - 1  # the prompt's step gives the first token


def test_result_waits_no_longer_than_asked(engine):
    _, go = slow_down(engine)
    handle = engine.submit([1], LONG)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        handle.result(0.01)
    go.set()
    assert handle.result(120).token_ids == expected([1], 40)


def test_a_reference_that_holds_the_answer_is_copied_from(engine):
    answer = expected([1, 2], 40)
    with_it = engine.submit([1, 2], LONG, drafter="lookup", reference=[1, 2, *answer]).result(30)
    for empty in (None, "", []):
        without = engine.submit([1, 2], LONG, drafter="lookup", reference=empty).result(30)
        assert with_it.token_ids == without.token_ids == answer
        assert with_it.stats.rounds < without.stats.rounds


def test_references_are_checked(engine):
    with pytest.raises(InvalidRequestError, match="999 of the reference"):
        engine.submit([1], drafter="lookup", reference=[999])
    with pytest.raises(InvalidRequestError, match="does not copy"):
        engine.submit([1], reference=[1])
    with pytest.raises(InvalidRequestError, match="2 references"):
        engine.generate(["w1"], drafter="lookup", references=["w2", "w3"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "lookup", "num_speculative_tokens": 9}, "1 to 8"),
        ({"num_speculative_tokens": 3, "speculation": False}, "speculation is off"),
        ({"drafter": "none", "num_speculative_tokens": 2}, "drop one"),
    ],
)
def test_contradicting_drafters_are_refused(engine, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        engine.submit("w1", **options)


@pytest.mark.parametrize("drafter", ["draft-model", "chained"])
def test_a_bundle_without_a_draft_can_only_look_up(drafter):
    engine = make_engine(None)
    with pytest.raises(InvalidRequestError, match="use drafter 'lookup'"):
        engine.submit("w1", drafter=drafter)
    with pytest.raises(InvalidRequestError, match="no draft"):
        engine.generate("w1", num_speculative_tokens=4)
    assert engine.generate("w1", LONG)[0].stats.drafted == 0
    assert engine.submit("w1", LONG, drafter="lookup").result(30).token_ids == expected([1], 40)


def test_an_exception_while_text_is_made_ends_one_request(engine, monkeypatch):
    from specexport_runtime.requests.text import TextStream

    append = TextStream.append

    def broken(self, token):
        if token == expected([3], 40)[5]:
            raise LookupError("no such piece")
        return append(self, token)

    good = engine.submit([1], SamplingParams(max_tokens=1))
    good.result(30)
    monkeypatch.setattr(TextStream, "append", broken)
    with pytest.raises(RequestFailedError, match="no such piece") as caught:
        engine.submit([3], LONG).result(30)
    assert isinstance(caught.value.__cause__, LookupError)
    monkeypatch.undo()
    assert engine.generate([3], LONG)[0].token_ids == expected([3], 40)


def test_a_program_that_ends_does_not_wait_for_its_requests():
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.support.fakes.engine import make_engine
from specexport_runtime import SamplingParams
engine = make_engine()
execute = engine.target.execute
engine.target.execute = lambda *args: (time.sleep(0.05), execute(*args))[1]
handle = engine.submit([1], SamplingParams(max_tokens=60), speculation=False)
stream = iter(handle)
next(stream)
import atexit
atexit._run_exitfuncs()
assert handle.result(0).finish_reason == "cancelled", handle.result(0)
print("ended")
"""
    command = [sys.executable, "-c", script, Path(__file__).parents[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
