"""Malformed requests over a real socket: no 500, no crash, no stuck row, and errors in OpenAI's shape."""

import itertools
import json
from collections.abc import Iterator

import pytest

from specexport_runtime.server.config import ServerConfig
from tests.support.cases import chance, patience
from tests.support.servers.fuzzing import fuzz
from tests.support.servers.malformed import KINDS, frame, malformed
from tests.support.servers.raw_http import Answer, RawRequest, problem_of, read_answers
from tests.support.servers.schema_requests import schema_requests
from tests.support.servers.serving import Served, fake_engine

CONFIG = ServerConfig(
    model_name="demo", max_body_bytes=2**17, body_timeout_s=0.4, request_timeout_s=30.0, max_tokens=200
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(fake_engine, CONFIG) as served:
        yield served


@pytest.mark.fuzz
def test_malformed_requests_are_refused_and_hurt_nobody(served: Served) -> None:
    report = fuzz(served, list(itertools.islice(malformed(chance.seed(1)), chance.many(300))))
    assert not report.problems, "\n".join(report.problems[:5])
    statuses = report.by_status()
    assert {"200", "400", "404", "405", "408", "413", "415", "none"} <= set(statuses), statuses
    assert len({kind for kind, _ in report.counts}) >= len(set(KINDS))


@pytest.mark.fuzz
@pytest.mark.whole  # it takes seconds to read the schema
def test_what_the_schema_allows_and_forbids(served: Served) -> None:
    openapi = patience.get(f"{served.url}/openapi.json").json()
    requests = schema_requests(openapi, chance.many(160), chance.seed(1))
    assert {request.kind for request in requests} == {"schema positive", "schema negative"}
    report = fuzz(served, requests)
    assert not report.problems, "\n".join(report.problems[:5])
    assert report.counts["schema positive", "200"] > 10, report.counts  # tools and roles have rules beyond a schema
    assert report.counts["schema negative", "400"] > 50, report.counts
    assert not report.counts["schema negative", "200"] > report.counts["schema negative", "400"], report.counts


def test_the_same_seed_sends_the_same_bytes() -> None:
    first, again, other = (list(itertools.islice(malformed(seed), 60)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


GOOD = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": "unknown_parameter"}}


@pytest.mark.parametrize(
    ("status", "kind", "body", "right"),
    [
        pytest.param(400, "application/json", json.dumps(GOOD), True, id="shape"),
        pytest.param(503, "application/json", json.dumps(GOOD), True, id="by-design"),
        pytest.param(500, "application/json", json.dumps(GOOD), False, id="defect"),
        pytest.param(400, "text/plain", "Invalid HTTP request received.", False, id="plain"),
        pytest.param(404, "application/json", '{"detail":"Not Found"}', False, id="fastapi"),
        pytest.param(400, "application/json", json.dumps({"error": GOOD["error"] | {"message": 1}}), False, id="types"),
        pytest.param(200, "application/json", '{"a":NaN}', False, id="nan"),
        pytest.param(200, "text/event-stream", 'data: {"a":1}\n\ndata: [DONE]\n\n', True, id="stream"),
        pytest.param(
            200, "text/event-stream", f"data: {json.dumps({'error': GOOD['error'] | {'type': 'server_error'}})}\n\n",
            False, id="defect-in-stream",
        ),
        pytest.param(200, "text/event-stream", "data: {\n\n", False, id="broken-stream"),
    ],
)  # fmt: skip
def test_the_judge_can_say_no(status: int, kind: str, body: str, right: bool) -> None:
    assert (problem_of(Answer(status, {"content-type": kind}, body.encode())) is None) == right


def test_a_server_that_fails_is_reported(served: Served) -> None:
    @served.app.get("/defect")
    def defect() -> None:
        raise RuntimeError("broken on purpose")

    report = fuzz(served, [RawRequest("defect", frame("/defect", method="GET"))])
    assert report.counts["defect", "500"] == 1
    assert len(report.problems) == 1
    assert "status 500" in report.problems[0]


def test_answers_are_read_as_they_are_framed() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    data += b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nxy"
    assert [(answer.status, answer.body) for answer in read_answers(data)] == [(200, b"abcde"), (404, b"xy")]


@pytest.mark.parametrize(
    "name", ["prompt", "stop", "speculative.num_speculative_tokens", "speculative.tree_size", "logit_bias", "messages"]
)
def test_an_object_in_place_of_a_value_is_named(served: Served, name: str) -> None:
    path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
    body = {"prompt": "w1", "max_tokens": 1} if name != "messages" else {"max_tokens": 1}
    *parents, last = name.split(".")
    value: dict[str, object] = {last: {"a": {"b": 1}}}
    for parent in parents:
        value = {parent: value}
    answer = patience.post(f"{served.url}{path}", json=body | value)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(name)
