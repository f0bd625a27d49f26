from collections.abc import Iterator

import pytest

from specexport_runtime.server.config import ServerConfig
from tests.support.serving import Served, fake_engine


@pytest.fixture(scope="module")
def fake_served() -> Iterator[Served]:
    """An engine of fakes behind a socket."""
    with Served(fake_engine, ServerConfig(model_name="fake")) as served:
        yield served
