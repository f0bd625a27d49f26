"""The page of metrics of a server that answers: what was refused, what was cancelled, what it says beside `usage`."""

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.wire import Wire

KEY = "key"
REFUSED = "specexport:requests_refused_total"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = ServerConfig(model_name="fake", api_keys=(KEY,), max_waiting=0, max_body_bytes=2000)
    with Served(lambda: fake_engine(2, step_seconds=0.005), config) as one:
        yield one


def page(served: Served) -> dict[str, float]:
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


def open_request(served: Served) -> Wire:
    client = Wire(served.port)
    body = {"prompt": "w1", "max_tokens": 390, "stream": True, "speculative": {"drafter": "none"}}
    client.post(body, Authorization=f"Bearer {KEY}")
    client.head()
    return client


def test_a_full_queue_and_clients_that_go_away(served):
    before = page(served)
    clients = [open_request(served) for _ in range(2)]
    busy = page(served)
    assert busy["vllm:num_requests_running"] + busy["vllm:num_requests_waiting"] == 2
    assert ask(served).status_code == 429
    for client in clients:
        client.socket.close()
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
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "completion_tokens",
        "spec_decode_num_draft_tokens": "drafted",
        "spec_decode_num_accepted_tokens": "accepted",
    }.items():
        counted = after[f"vllm:{name}_total"] - before[f"vllm:{name}_total"]
        assert counted == sum((usage | usage["speculative"])[key] for usage in usages) > 0
