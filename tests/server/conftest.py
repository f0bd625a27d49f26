from collections.abc import Iterator

import openai
import pytest

from tests.support.servers.openai_help import client_of
from tests.support.servers.served import demo_served, fake_served
from tests.support.servers.serving import Served
from tests.support.servers.tool_servers import Clients, tool_clients

__all__ = ["demo_served", "fake_served"]


@pytest.fixture(scope="module")
def client(fake_served: Served) -> Iterator[openai.OpenAI]:
    with client_of(fake_served) as client:
        yield client


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with tool_clients() as clients:
        yield clients
