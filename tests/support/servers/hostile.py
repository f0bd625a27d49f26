"""Clients that cost a server much: what they send, and how they behave."""

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from tests.support.servers.wire import request

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
MiB = 2**20
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'developer' %}{% elif m.tool_calls %}<|a|>{{
m.tool_calls[0].function | tojson }}<|e|>{% else %}<|{{ m.role }}|>{{ m.content }}<|e|>{% endif %}{% endfor %}"""
"""Leaves texts out, as those of Llama 3.1 and Mistral do: content beside calls, and a role that it does not know."""


class Hostile(NamedTuple):
    """One kind of client.

    Attributes:
        requests: their bytes, sent in turn, each over a connection of its own.
        ending: ``"read"`` reads each answer; ``"leave"`` closes at once; ``"hold"`` keeps connections, and reads none.
            Those who wait for nothing come 200 times a second: limits of rates are a proxy's.
        clients: how many there are.
    """

    requests: tuple[bytes, ...]
    ending: str = "read"
    clients: int = 4


def hostile_clients(key: str) -> dict[str, Hostile]:
    """Every kind, all of them with one key; the first is no worse than others."""

    def ask(body: Any, path: str = COMPLETIONS) -> bytes:
        return request(body, path, Authorization=f"Bearer {key}")

    code, hello = "x = 1 " * 170_000, [{"role": "user", "content": "def f("}]
    chain = {"allOf": [{}, *({"$ref": f"#/allOf/{i}"} for i in range(700))]}
    long: dict[str, Any] = {"prompt": "def", "n": 16, "max_tokens": 900, "ignore_eos": True, "temperature": 1}
    chat = {"messages": hello, "n": 8, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **chain}}}
    deep = (b"[" * (MiB - 100), b"[" * 500_000 + b"]" * 500_000, b'{"a":' * 9000 + b"1" + b"}" * 9000)
    odd = (b'{"a":1,' * 100_000, b"[" + b"1," * 500_000 + b"1]", b"\xff" * 1000, b'{"prompt":"a","n":1e999}')
    return {
        "a fair neighbour": Hostile((ask({"prompt": "class A:\n", "n": 4, "max_tokens": 64, "temperature": 0.5}),)),
        "chains of references": Hostile((
            ask({"prompt": "a", "structured_outputs": {"json": chain}}),
            ask({"messages": hello, "tools": [tool], "tool_choice": "none"}, CHAT),
            ask({"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": chain}}}, RESPONSES),
            ask({"messages": hello, "max_tokens": 9, "tools": [{"name": "f", "input_schema": chain}]}, MESSAGES),
        )),
        "prompts that are too long": Hostile((
            ask({"prompt": code}), ask({"messages": [{"role": "user", "content": code}]}, CHAT),
            ask({"input": code}, RESPONSES), ask({"prompt": [code[:30_000]] * 32}),
            ask({"messages": [{"role": "user", "content": code}]}, f"{MESSAGES}/count_tokens"),
        )),
        "conversations in odd shapes": Hostile(tuple(
            ask({"messages": odd_turns(n), "max_tokens": 2}, CHAT) for n in (18, 36, 80, 700)
        )),
        "log-probabilities": Hostile((
            ask(chat | {"n": 16, "max_tokens": 40}, CHAT), ask(chat, CHAT),
            ask(long | {"max_tokens": 200, "logprobs": 20}),
        )),
        "forms that take long": Hostile(tuple(
            ask({"prompt": "a", "max_tokens": 2, "structured_outputs": form})
            for i in range(40) for form in (slow_form(i), {"choice": ["a", "b"]})
        )),
        "bodies without a key": Hostile((request(b" " * (MiB - 1), "/health"), request(b" " * (MiB - 1), "/ready"))),
        "long stop texts": Hostile((ask(long | {"stop": ["ab" * 127 + chr(65 + i) for i in range(16)]}),)),
        "texts to tokenize": Hostile((
            ask({"prompt": "a b" * (MiB // 3 - 50), "return_token_strs": True}, "/tokenize"),
            ask({"tokens": [7] * (MiB // 4)}, "/detokenize"),
        )),
        "slow heads": Hostile((b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",), "hold", 1100),
        "clients that leave": Hostile((
            ask({"prompt": code}), ask(long), ask(chat | {"stream": True}, CHAT),
            ask({"messages": odd_turns(80)}, CHAT),
        ), "leave"),
        "deep bodies": Hostile(tuple(ask(b'{"prompt":"\\u0041","metadata":' + part + b"}") for part in deep)),
        "requests as long as they may be": Hostile((ask(long | {"max_tokens": 1000}),)),
        "readers that stop": Hostile((ask(chat | {"stream": True, "n": 16, "max_tokens": 900}, CHAT),), "hold", 16),
        "malformed requests": Hostile((
            *map(ask, odd), b"GET  / HTTP/1.1\r\n\r\n",
            ask(b"{" + b",".join(b'"%d":1' % i for i in range(90_000)) + b"}"),
        )),
        "tools that are not used": Hostile(tuple(
            ask({"messages": hello, "tool_choice": "none", "max_tokens": 2, "tools": many_tools(size)}, CHAT)
            for size in (20, 75)
        )),
    }  # fmt: skip


def attack(port: int, hostile: Hostile, seconds: float) -> Counter[str]:
    """Be such clients of a server of this machine for so long; how often each status was answered."""
    statuses: Counter[str] = Counter()
    end = time.perf_counter() + seconds
    if hostile.ending == "hold":
        _hold(port, hostile, end)
        return statuses

    def client(number: int) -> None:
        while time.perf_counter() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(hostile.requests[number % len(hostile.requests)])
                part = status = b""
                while hostile.ending == "read" and not part.endswith((b"\r\n0\r\n\r\n", b"}")):
                    if not select.select([connection], [], [], max(0, end - time.perf_counter()))[0]:
                        break
                    if not (part := connection.recv(2**20)):
                        break
                    status = status or part[9:12]
                statuses[status.decode() or "none"] += 1
            number += 1
            time.sleep(0.02 if hostile.ending == "leave" else 0)

    threads = [threading.Thread(target=client, args=[i]) for i in range(hostile.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def _hold(port: int, hostile: Hostile, end: float) -> None:
    """Keep connections; one that the server closed or answered with an error is made anew."""
    with contextlib.ExitStack() as stack:
        held: list[socket.socket | None] = [None] * hostile.clients
        while time.perf_counter() < end:
            anew = 0
            for i, connection in enumerate(held):
                if connection is not None and (anew == 10 or _is_kept(connection)):
                    continue
                anew += connection is not None
                with contextlib.suppress(OSError):
                    made = held[i] = stack.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                    made.sendall(hostile.requests[i % len(hostile.requests)])
                    made.setblocking(False)
            time.sleep(0.05)


def _is_kept(connection: socket.socket) -> bool:
    try:
        kept = connection.recv(12, socket.MSG_PEEK)[9:12] == b"200"
    except BlockingIOError:
        return True
    except OSError:
        kept = False
    if not kept:
        connection.close()
    return kept


def odd_turns(count: int) -> list[dict[str, Any]]:
    """Content beside calls, and a role that few templates know."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}]
    for i in range(count):
        turns.append({"role": "assistant", "content": "c", "tool_calls": [call | {"id": f"c{i}"}]})
        turns.append({"role": "tool", "content": "r", "tool_call_id": f"c{i}"})
    return turns


def slow_form(number: int) -> dict[str, Any]:
    """A form that takes seconds to compile, and another one for each number."""

    def part(i: int, j: int) -> dict[str, Any]:
        name = f"p{i}_{j}_{number}"
        return {"type": "object", "properties": {name: {"type": "integer", "minimum": j}}, "required": [name]}

    either = {"anyOf": [{"$ref": "#"}, {"type": "null"}], "title": str(number)}
    return (
        {"json": {"allOf": [{"anyOf": [part(i, j) for j in range(4)]} for i in range(6)]}},
        {"regex": "(a|b)*" * 6000 + str(number)},
        {"json": {"anyOf": [either] * 700}},
        {"grammar": chain_of_rules(9000 + number)},
    )[number % 4]


def chain_of_rules(count: int) -> str:
    """A grammar of so many rules, each of which names the next one: as deep as a matcher's stack must be."""
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(count)) + f'r{count}: "b"'


def many_tools(fields: int) -> list[dict[str, Any]]:
    """As many functions as there may be, with so many parameters each."""
    properties = {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(fields)}
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(128)]
