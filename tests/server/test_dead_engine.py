"""What happens to an engine, and what probes, clients and metrics hear of it: at once, as `/ready` asks the engine."""

import asyncio
import errno
import logging
import threading
from pathlib import Path

import httpx
import pytest

from specexport_runtime import user_cache
from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.decoding.loop import MAX_FAILURES
from specexport_runtime.errors import SpecexportError
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig
from tests.support.cases.patience import HANG_S
from tests.support.fakes.submitted import raising
from tests.support.servers.serving import fake_engine

ASK = {"prompt": "w1 w2", "max_tokens": 30, "ignore_eos": True}


def lost_gpu(engine, monkeypatch):
    """In the middle of a text, and for good: TensorRT's cannot even clear a row."""
    execute, steps = engine.target.execute, [1, 2, 3]
    lost = engine.target.clear_row = raising(SpecexportError("cudaErrorIllegalAddress"))
    engine.target.execute = lambda *args: execute(*args) if steps and steps.pop() else lost()


def lost_session(engine, monkeypatch):
    engine.target.execute = raising(RuntimeError("CUDA failure 700"))


def out_of_memory(engine, monkeypatch):
    execute, errors = engine.target.execute, [MemoryError()]
    engine.target.execute = lambda *args: raising(errors.pop())() if errors else execute(*args)


def full_disk(engine, monkeypatch):
    """What steps cost, as they show, is all that a decoding thread writes."""
    monkeypatch.setattr(user_cache, "replace_file", raising(OSError(errno.ENOSPC, "No space left on device")))
    execute = engine.target.execute
    engine.target.execute = lambda *args: (user_cache.write_json(Path("costs.json"), {}), execute(*args))[1]


def defect(engine, monkeypatch):
    engine._loop.decoder.add = raising(RuntimeError("words of a prompt"))


def closed(engine, monkeypatch):
    engine.close()


def stuck(engine, monkeypatch):
    engine.stuck_after_s, engine.test_begins, engine.test_ends = 0.0, threading.Event(), threading.Event()
    engine.target.execute = lambda *_: engine.test_begins.set() or (engine.test_ends.wait(HANG_S) and None)


DEAD = (503, "dead"), (503, "dead"), 0.0
ALIVE = (200, "ok"), (200, "ready"), 1.0


@pytest.mark.parametrize(
    ("event", "asked", "codes", "seen", "last"),
    [
        (lost_gpu, 1, {"request_failed"}, DEAD, "engine_dead"),
        (lost_session, MAX_FAILURES, {"internal_error", "request_failed"}, DEAD, "request_failed"),
        (out_of_memory, 1, {"request_failed"}, ALIVE, None),
        (full_disk, 1, {None}, ALIVE, None),
        (defect, 1, {"engine_dead"}, DEAD, "engine_dead"),
        (closed, 0, set(), DEAD, "draining"),
        (stuck, 0, set(), DEAD, "timeout"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_probes_clients_and_metrics_hear_of_it(event, asked, codes, seen, last, caplog, monkeypatch):
    engine = fake_engine(rows=2)

    async def check():
        app = create_app(AsyncSpecEngine(engine), ServerConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask():
                answer = await client.post("/v1/completions", json=ASK)
                return answer.json().get("error", {}).get("code")

            async def probe():
                for path in ("/health", "/ready"):
                    answer = await client.get(path)
                    yield answer.status_code, answer.json()["status"]
                page = (await client.get("/metrics")).text
                yield next(
                    float(line.split()[-1]) for line in page.splitlines() if line.startswith("specexport:engine_up{")
                )

            assert await ask() is None
            assert tuple([each async for each in probe()]) == ALIVE
            event(engine, monkeypatch)
            assert {await ask() for _ in range(asked)} <= codes
            begun = asyncio.create_task(ask()) if event is stuck else None
            if begun is not None:
                await asyncio.to_thread(engine.test_begins.wait, HANG_S)
            assert tuple([each async for each in probe()]) == seen
            if begun is not None:
                engine.test_ends.set()
                await begun
            else:
                assert await ask() == last

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    if seen == DEAD:
        assert sum("The engine is dead" in record.getMessage() for record in caplog.records) == 1
    assert not any("words" in record.getMessage() for record in caplog.records)
    engine.close()
