"""Servers of models that say what they are asked to, calls of functions and thoughts as well; and one such function."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import openai
from pydantic import BaseModel

from specexport_runtime.server.config import ServerConfig
from tests.support.fakes.chat_fakes import MARKERS, PLAIN, QWEN3, TEMPLATES, THINKS, echo_engine
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "Paris", "days": 3}'
THOUGHT = "<think>\nhm, {let me see}\n</think>\n\n"
SERVERS = {
    **{name: (template, MARKERS, {}) for name, template in TEMPLATES.items()},
    "json": (PLAIN, (), {"tool_call_parser": "json"}),
    "text markers": (TEMPLATES["hermes"], (), {}),
    "plain": (PLAIN, (), {}),
    "trims": (PLAIN.replace("m.content", "m.content | trim"), (), {}),
    "thinks": (THINKS, MARKERS, {}),
    "qwen3": (QWEN3, MARKERS, {}),
    "final channel": (  # as gpt-oss's own template writes what was said
        TEMPLATES["openai"].replace(
            "{%- else %}{{ '<|assistant|>' +", "{%- else %}{{ '<|assistant|><|channel|>final<|message|>' +"
        ),
        MARKERS,
        {},
    ),
    "thinks in text": (THINKS, (), {}),
    "always thinks": (THINKS.replace("enable_thinking is defined and not enable_thinking", "false"), MARKERS, {}),
    "thinks little": (THINKS, MARKERS, {"thinking_budget": 3}),
    "thinks little in text": (THINKS, (), {"thinking_budget": 3}),
    "plain and little": (PLAIN, (), {"thinking_budget": 3}),
    "talk": (
        PLAIN.replace("['system', 'user']", "['user']").replace("{%- else %}", "{%- elif m.role == 'assistant' %}"),
        (),
        {},
    ),
}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class Clients:
    """Clients by the names of ``SERVERS``, each of which begins when it is first asked for."""

    def __init__(self, start: Callable[[Any], Any]) -> None:
        self._start = start
        self.known: dict[str, tuple[openai.OpenAI, Served]] = {}

    def __call__(self, name: str) -> openai.OpenAI:
        if name not in self.known:
            template, markers, config = SERVERS[name]
            config = ServerConfig(model_name="echo", **config)
            served = self._start(Served(lambda: echo_engine(template, *markers), config))
            self.known[name] = self._start(client_of(served)), served
        return self.known[name][0]

    def served(self, name: str) -> Served:
        self(name)
        return self.known[name][1]


@contextlib.contextmanager
def tool_clients() -> Iterator[Clients]:
    """Clients whose servers are idle in the end."""
    with contextlib.ExitStack() as stack:
        clients = Clients(stack.enter_context)
        yield clients
        for _, served in clients.known.values():
            served.wait_until_idle()
