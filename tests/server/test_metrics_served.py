"""The page of metrics of a server that answers: what was refused, what was cancelled, what it says beside `usage`."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.serving import Served, fake_engine

KEY = "key"
REFUSED = "specexport:requests_refused_total"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = ServerConfig(model_name="fake", api_keys=(KEY,), max_waiting=0, max_body_bytes=2000)
    with Served(lambda: fake_engine(2, step_seconds=0.005), config) as one:
        yield one


def page(served: Served) -> dict[str, float]:
    """Sums over the labels of every sample, and each value of a label of its own."""
    text = patience.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine", "le")]
            for key in (sample.name, *(f"{sample.name}:{value}" for value in own)):
                found[key] = found.get(key, 0) + sample.value
    return found


def ask(served: Served, key: str = KEY, **body: object) -> httpx.Response:
    body = {"prompt": "w1", "max_tokens": 4} | body
    return patience.post(f"{served.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def gained(before: dict[str, float], after: dict[str, float], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix + ":"): after[name] - before.get(name, 0)
        for name in after
        if name.startswith(prefix + ":") and after[name] != before.get(name, 0)
    }


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"key": "wrong"}, 401, "invalid_api_key"),
        ({"frobnicate": 1}, 400, "unknown_parameter"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"prompt": "w1 " * 1000}, 413, "body_too_large"),
    ],
)
def test_a_refused_request_is_counted_once(served, body, status, reason):
    before = page(served)
    assert ask(served, **body).status_code == status
    after = page(served)
    assert gained(before, after, REFUSED) == {reason: 1}
    assert gained(before, after, "vllm:request_success_total") == {}


def open_request(served: Served) -> socket.socket:
    """A request that goes on until its connection is closed."""
    body = json.dumps({"prompt": "w1", "max_tokens": 390, "stream": True, "speculative": {"drafter": "none"}}).encode()
    client = socket.create_connection(("127.0.0.1", served.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    assert client.recv(100)
    return client


def test_a_full_queue_and_clients_that_go_away(served):
    before = page(served)
    clients = [open_request(served) for _ in range(2)]
    busy = page(served)
    assert busy["vllm:num_requests_running"] + busy["vllm:num_requests_waiting"] == 2
    assert ask(served).status_code == 429
    for client in clients:
        client.close()
    served.wait_until_idle()
    wait_until(lambda: page(served)["vllm:num_requests_running"] == 0)
    after = page(served)
    assert gained(before, after, REFUSED) == {"queue_full": 1}  # those who left were not refused
    assert gained(before, after, "vllm:request_success_total") == {"abort": 2}


def test_the_page_says_what_usage_says(served):
    before = page(served)
    usages = [ask(served, max_tokens=20, prompt=f"w{i} w{i}").json()["usage"] for i in range(3)]
    after = page(served)
    for name, key in {
        "vllm:prompt_tokens_total": "prompt_tokens",
        "vllm:generation_tokens_total": "completion_tokens",
    }.items():
        assert after[name] - before[name] == sum(usage[key] for usage in usages)
    for name, key in {
        "vllm:spec_decode_num_draft_tokens_total": "drafted",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    }.items():
        assert after[name] - before[name] == sum(usage["speculative"][key] for usage in usages) > 0
