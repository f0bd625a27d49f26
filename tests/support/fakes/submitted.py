"""Requests that run long enough to be watched."""

import threading

from specexport_runtime import SamplingParams
from tests.support.fakes.loop import greedy_reference, make_target

LONG = SamplingParams(max_tokens=40)


def raising(error):
    def raise_it(*_, **__):
        raise error

    return raise_it


def expected(prompt, count):
    return greedy_reference(make_target(), prompt, count)


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
