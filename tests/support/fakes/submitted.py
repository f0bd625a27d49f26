"""Requests that run long enough to be watched."""

import threading

from specexport_runtime import SamplingParams
from tests.support.fakes.loop import greedy_reference, make_target

LONG = SamplingParams(max_tokens=40)


def expected(prompt, count):
    return greedy_reference(make_target(), prompt, count)


def slow_down(engine, started: threading.Event, go: threading.Event):
    execute = engine.target.execute

    def held(*args):
        if started.is_set():
            assert go.wait(60)
        started.set()
        return execute(*args)

    engine.target.execute = held
