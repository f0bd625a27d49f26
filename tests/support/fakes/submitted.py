"""Requests that run long enough to be watched, and observers and listeners that note what they are told."""

import threading
from collections import Counter
from functools import cache

from specexport_runtime import SamplingParams
from tests.support.cases.patience import wait_until
from tests.support.fakes.loop import greedy_reference, make_target

LONG = SamplingParams(max_tokens=40)


def raising(error):
    def raise_it(*_, **__):
        raise error

    return raise_it


def expected(prompt, count):
    return list(_expected(tuple(prompt), count))


@cache
def _expected(prompt, count):
    return greedy_reference(make_target(), list(prompt), count)


def slow_down(engine):
    """Events: a first step was made, which tells a test; and what all others wait for."""
    execute, started, go = engine.target.execute, threading.Event(), threading.Event()

    def held(*args):
        if started.is_set():
            assert go.wait(60)
        started.set()
        return execute(*args)

    engine.target.execute = held
    return started, go


class Watcher:
    def __init__(self):
        self.rounds, self.ended, self.order = [], [], []

    def on_round(self, record):
        self.rounds.append(record)
        self.order.append("round")

    def on_finish(self, sequence):
        assert sequence.finish_reason is not None
        self.ended.append(sequence)
        self.order.append("finish")

    def reasons(self):
        assert len({id(seq) for seq in self.ended}) == len(self.ended)  # nobody twice
        return Counter(seq.finish_reason for seq in self.ended)


class Listener:
    def __init__(self):
        self.tokens, self.chunks, self.done = [], [], []
        self.threads = set()
        self.ended = threading.Event()

    def on_chunk(self, chunk):
        assert not self.done
        self.threads.add(threading.current_thread().name)
        self.chunks.append(chunk)
        self.tokens += [piece.token_id for piece in chunk.pieces]

    def on_done(self, handle):
        assert handle.done
        self.threads.add(threading.current_thread().name)
        self.done.append(handle)
        self.ended.set()


def wait_for_rest(engine):
    """Wait until the decoding thread has nothing to do: a request has ended for its owner a moment before."""
    wait_until(lambda: not engine._loop._handles and engine._loop._ending is None)
