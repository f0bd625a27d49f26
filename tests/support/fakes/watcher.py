"""Observers and listeners that note what they are told."""

import threading
from collections import Counter

from tests.support.cases.patience import wait_until


class Watcher:
    """Writes down what it hears, in order."""

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
    """Writes down what it hears."""

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
