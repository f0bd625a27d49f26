"""No client holds up the others: hostile ones of each kind beside honest ones, and drawn bodies of all sizes.

What is measured of the event loop is the time of its own thread: other processes do not count. The scale that
``benchmarks/hostile_clients.py`` measures, ten honest clients in processes of their own, is not asserted here.
"""

import asyncio
import gc
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specexport_runtime import SpecEngine
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import chance
from tests.support.servers import serving
from tests.support.servers.drawn_bodies import drawn_bodies
from tests.support.servers.fuzzing import fuzz
from tests.support.servers.hostile import TEMPLATE, attack, hostile_clients
from tests.support.servers.loop_pieces import LONGEST_PIECE_S, Pieces, pieces_of
from tests.support.servers.raw_http import Answer, RawRequest, send
from tests.support.servers.wire import HEALTH, request

HOSTILE, *HONEST = (f"{i:032}" for i in range(4))
KINDS = hostile_clients(HOSTILE)
ATTACK_S = 0.8
PROBE = HEALTH[:-2] + b"Connection: close\r\n\r\n"

pytestmark = [pytest.mark.whole, pytest.mark.xdist_group("hostile clients")]


class Watched:
    """A server of the demo bundle on asyncio's own event loop, whose pieces are measured."""

    def __init__(self, served: serving.Served, pieces: Pieces) -> None:
        self.served, self.pieces = served, pieces
        self.right = self.ask(HONEST[0])

    def answer_to(self, asked: RawRequest) -> Answer:
        # As HTTP's libraries do when a connection ends without a word: it may have been the oldest of too many.
        (answer,) = send(self.served.port, asked) or send(self.served.port, asked)
        return answer

    def ask(self, key: str) -> str:
        body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
        data = request(body, Authorization=f"Bearer {key}", Connection="close")
        answer = self.answer_to(RawRequest("honest", data))
        assert answer.status == 200, answer
        return json.loads(answer.body)["choices"][0]["text"]

    def ask_until(self, key: str, over: threading.Event) -> list[float]:
        """Seconds of one honest client's answers, each of which must be right."""
        found = []
        while not found or not over.is_set():
            start = time.perf_counter()
            assert self.ask(key) == self.right
            found.append(time.perf_counter() - start)
        return found

    def probe_until(self, over: threading.Event) -> list[float]:
        found = []
        while not found or not over.wait(0.02):
            start = time.perf_counter()
            answer = self.answer_to(RawRequest("probe", PROBE))
            found.append(time.perf_counter() - start)
            assert answer.status == 200, answer
        return found

    def beside(self, kind: str | None) -> tuple[float, float]:
        """The longest seconds of an honest answer and of a probe, alone or beside a kind of client."""
        over = threading.Event()
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(self.ask_until, key, over) for key in HONEST]
            probed = pool.submit(self.probe_until, over)
            if kind is None:
                time.sleep(ATTACK_S)
            else:
                clients = min(KINDS[kind].clients, self.served.config.max_connections + 60)
                attack(self.served.port, KINDS[kind]._replace(clients=clients), ATTACK_S)
            over.set()
            self.served.wait_until_idle()
            return max(max(each.result()) for each in asked), max(probed.result())


@pytest.fixture(scope="module")
def watched(demo_bundle: Path) -> Iterator[Watched]:
    def load() -> SpecEngine:
        engine = SpecEngine.load(demo_bundle, max_num_seqs=8, num_threads=1, spin=False)
        engine._chat_template = TEMPLATE
        return engine

    config = ServerConfig(api_keys=(HOSTILE, *HONEST), tool_call_parser="json", max_connections=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "loop_factory", lambda: asyncio.SelectorEventLoop)
        with serving.Served(load, config) as served, pieces_of(served.thread_id) as pieces:
            gc.collect()
            gc.freeze()  # as a server's own process
            usual = gc.get_threshold()
            gc.set_threshold(700, 10, 2)  # the same; in tests more garbage lies about
            yield Watched(served, pieces)
            gc.set_threshold(*usual)


def test_the_meter_sees_what_holds_the_loop_and_not_what_others_do(watched: Watched) -> None:
    async def work(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def wait(seconds: float) -> None:
        time.sleep(seconds)  # as if another process had the core

    watched.pieces.take()
    watched.served.call(wait(0.2))
    assert watched.pieces.take().cpu_s < LONGEST_PIECE_S
    watched.served.call(work(0.06))
    longest = watched.pieces.take()
    assert longest.cpu_s >= 0.06
    assert "work" in longest.where
    assert Path(__file__).name in longest.where


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_client_holds_up_nobody(watched: Watched, kind: str) -> None:
    for _ in range(3):
        watched.pieces.take()
        answer_s, health_s = watched.beside(kind)
        longest = watched.pieces.take()
        # Of seconds on the clock a busy machine takes its part, and of a core's time who has the other half of it.
        if longest.cpu_s <= LONGEST_PIECE_S and health_s < 1 and answer_s < 5:
            return
    pytest.fail(f"{longest}; an honest answer took {answer_s:.1f} s, /health {health_s:.1f} s")


@pytest.mark.fuzz
@pytest.mark.parametrize(("most", "count"), [(2**15, 40), (2**20, 40)])
def test_no_body_holds_the_event_loop(watched: Watched, most: int, count: int) -> None:
    requests = list(itertools.islice(drawn_bodies(chance.seed(most), most, HOSTILE), chance.many(count)))
    report = fuzz(watched.served, requests, key=HONEST[0], pieces=watched.pieces)
    assert not report.problems, "\n".join(report.problems[:5])
    assert {"200", "400"} <= set(report.by_status()), report.by_status()
