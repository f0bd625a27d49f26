"""Servers that several folders of tests ask: fixtures, for their ``conftest.py``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport_runtime import SpecEngine
from specexport_runtime.server.config import ServerConfig
from tests.support.servers.serving import Served, fake_engine


@pytest.fixture(scope="module")
def demo_served(demo_bundle: Path) -> Iterator[Served]:
    """The demo bundle behind a socket; four rows, one thread."""

    def load() -> SpecEngine:
        return SpecEngine.load(demo_bundle, max_num_seqs=4, num_threads=1, spin=False)

    with Served(load, ServerConfig(model_name="demo")) as served:
        yield served


@pytest.fixture(scope="module")
def fake_served() -> Iterator[Served]:
    with Served(fake_engine, ServerConfig(model_name="fake")) as served:
        yield served
