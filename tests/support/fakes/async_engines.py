"""Engines of fakes in an event loop, and gates that hold their steps, for tests."""

import asyncio
import math
import threading
from contextlib import contextmanager
from functools import cache

from specexport_runtime import AsyncRequest, SamplingParams, SpecEngine
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import greedy_reference, make_target
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.watcher import wait_for_rest

LONG = SamplingParams(max_tokens=40)
ENDLESS = SamplingParams(max_tokens=60)
LONG_TEXT = " ".join(["w1"] * 900)  # tokenized on another thread


def expected(prompt: list[int], count: int) -> list[int]:
    return list(_expected(tuple(prompt), count))


@cache
def _expected(prompt: tuple[int, ...], count: int) -> list[int]:
    return greedy_reference(make_target(), list(prompt), count)


def ids_of(chunks) -> list[int]:
    return [piece.token_id for chunk in chunks for piece in chunk.pieces]


class Gate:
    def __init__(self, engine: SpecEngine) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._allowed = math.inf
        execute = engine.target.execute

        def held(*args):
            with self._changed:
                self._begun += 1
                assert self._changed.wait_for(lambda: self._begun <= self._allowed, 60)
            return execute(*args)

        engine.target.execute = held

    def shut(self) -> None:
        self._allowed = self._begun

    def open(self, steps: float = math.inf) -> None:
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    async def holds(self) -> None:
        async with asyncio.timeout(60):
            while self._begun <= self._allowed:
                await asyncio.sleep(0.001)


@contextmanager
def engine_at_rest():
    """An engine that checks itself, and has nothing running or waiting in the end."""
    engine = make_engine()
    check_every_round(engine)
    yield engine
    assert_at_rest(engine)
    engine.close()


def assert_at_rest(engine: SpecEngine) -> None:
    wait_for_rest(engine)
    decoder = engine._loop.decoder
    assert not decoder.has_work
    decoder.check()
    assert all(row is None for row in decoder.slots.placed)


async def ends(request: AsyncRequest) -> str:
    """How a request that nobody may wait for ended."""
    async with asyncio.timeout(60):
        while not request.done:
            await asyncio.sleep(0.001)
    return request.handle.result(0).finish_reason


async def collect(chunks) -> list:
    return [chunk async for chunk in chunks]


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)
