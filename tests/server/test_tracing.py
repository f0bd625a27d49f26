"""Spans of requests: names and attributes by the conventions, real times, and no trace of the library without it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.server import tracing
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.serving import Served, fake_engine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch) -> Iterator[InMemorySpanExporter]:
    """A provider of this test's own; the process's stays as it was."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(sampler=DEFAULT_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield kept
    provider.shutdown()


def spans_of(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the one request, and those below it; it ends after its answer was sent, so maybe a little later."""
    wait_until(lambda: any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()))
    found = exporter.get_finished_spans()
    [server] = [span for span in found if span.kind is SpanKind.SERVER]
    return server, [span for span in found if span is not server]


def complete(served: Served, path: str = "completions", **body: Any) -> httpx.Response:
    headers = {"traceparent": PARENT, "X-Request-Id": "traced"} if body.pop("parent", False) else {}
    prompt: dict[str, Any] = {"prompt": "w1 w2"}
    if path == "chat/completions":
        prompt = {"messages": [{"role": "user", "content": "w1 w2"}]}
    return patience.post(f"{served.url}/v1/{path}", json={**prompt, "max_tokens": 12} | body, headers=headers)


def test_the_span_of_a_completion(fake_served, exporter):
    params = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.25, "presence_penalty": -0.5}
    answer = complete(fake_served, parent=True, **params)
    server, phases = spans_of(exporter)
    usage = answer.json()["usage"]
    assert server.name == "POST /v1/completions"
    assert server.instrumentation_scope.name == "specexport_runtime.server"  # FastAPI makes none of its own
    assert {span.name for span in phases} <= {"specexport.queue", "specexport.prefill", "specexport.decode"}
    assert server.parent.trace_id == int(PARENT.split("-")[1], 16) == server.context.trace_id
    assert server.parent.span_id == int(PARENT.split("-")[2], 16)
    expected = {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "url.path": "/v1/completions", "url.scheme": "http", "client.address": "127.0.0.1",
        "server.address": "127.0.0.1", "server.port": fake_served.port, "network.protocol.version": "1.1",
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "specexport",
        "gen_ai.request.model": "fake", "gen_ai.response.model": "fake", "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 12, **{f"gen_ai.request.{name}": value for name, value in params.items()},
        "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": (answer.json()["choices"][0]["finish_reason"],),
        "specexport.request_id": "traced",
        **{f"specexport.{name}": usage["speculative"][name] for name in ("rounds", "drafted", "accepted")},
    }  # fmt: skip
    assert {name: server.attributes.get(name) for name in expected} == expected
    assert server.status.status_code is StatusCode.UNSET
    assert "w1 w2" not in json.dumps(dict(server.attributes))


def test_every_name_of_the_conventions_exists(fake_served, exporter):
    known = {value for name, value in vars(gen_ai_attributes).items() if name.isupper()}
    complete(fake_served, "chat/completions", n=2, temperature=1.0)
    server, _ = spans_of(exporter)
    used = {name for name in server.attributes if name.startswith("gen_ai.")}
    assert used
    assert used <= known
    operations = {item.value for item in gen_ai_attributes.GenAiOperationNameValues}
    assert server.attributes["gen_ai.operation.name"] == "chat"
    assert set(tracing._OPERATIONS.values()) <= operations
    assert server.attributes["gen_ai.request.choice.count"] == 2


def test_phases_have_their_real_times(exporter):
    with Served(lambda: fake_engine(1, step_seconds=0.01), ServerConfig(model_name="slow")) as served:
        began = time.time_ns()
        complete(served, n=2, temperature=1.0, max_tokens=10, speculative={"drafter": "none"})
        ended = time.time_ns()
        server, phases = spans_of(exporter)
        sequences = {}
        for span in phases:
            assert span.parent.span_id == server.context.span_id
            # Two clocks are read one after the other, and a busy machine may do something in between.
            assert began - 1e9 < span.start_time <= span.end_time < ended + 1e9
            sequences.setdefault(span.attributes["specexport.choice"], {})[span.name] = span
    assert set(sequences) == {0, 1}
    for choice in sequences.values():
        queue, prefill, decode = (choice[f"specexport.{name}"] for name in ("queue", "prefill", "decode"))
        assert abs(queue.end_time - prefill.start_time) < 1000  # float seconds round to fractions of a microsecond
        assert abs(prefill.end_time - decode.start_time) < 1000
        assert decode.attributes["specexport.rounds"] >= 1
    first, second = sequences[0], sequences[1]
    assert second["specexport.queue"].end_time >= first["specexport.decode"].end_time  # one row
    steps = first["specexport.decode"].attributes["specexport.rounds"] - 1
    assert (first["specexport.decode"].end_time - first["specexport.decode"].start_time) >= 0.009e9 * steps


def test_a_refused_request_has_its_code_and_no_phases(fake_served, exporter):
    complete(fake_served, frobnicate=1)
    server, phases = spans_of(exporter)
    assert server.attributes["http.response.status_code"] == 400
    assert server.attributes["error.type"] == "unknown_parameter"
    assert server.status.status_code is StatusCode.UNSET  # the client's fault
    assert phases == []
    assert not any(name.startswith("gen_ai.") for name in server.attributes)


def test_a_failure_of_ours_is_an_error(exporter):
    def broken() -> Any:
        engine = fake_engine()

        def execute(*args: Any) -> None:
            raise MemoryError

        engine.target.execute = execute
        return engine

    with Served(broken) as served:
        assert complete(served).status_code == 500
        server, phases = spans_of(exporter)
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes["http.response.status_code"] == 500
    assert server.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert [span.name for span in phases] == ["specexport.queue", "specexport.prefill"]


def test_phases_that_a_sequence_came_to():
    def phases(**times: float) -> list[tuple[str, float, float]]:
        return tracing._list_phases(type("S", (), {"stats": RequestStats(submit_time=1.0, **times)})(), 9.0)

    assert phases(start_time=1.0, end_time=3.0) == [("queue", 1.0, 3.0)]
    assert phases(start_time=2.0) == [("queue", 1.0, 2.0), ("prefill", 2.0, 9.0)]
    assert phases(start_time=2.0, first_token_time=4.0)[1:] == [("prefill", 2.0, 4.0), ("decode", 4.0, 9.0)]


def test_the_log_line_names_the_trace(fake_served, exporter, caplog):
    with caplog.at_level("INFO", "specexport.access"):
        complete(fake_served, parent=True)
        complete(fake_served)  # when this is answered, the first has its line
    [record] = [record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == "traced"]
    assert record.fields["trace_id"] == PARENT.split("-")[1]


def test_spans_are_named_by_routes_and_probes_have_none(fake_served, exporter):
    for path in ("health", "ready", "metrics"):
        patience.get(f"{fake_served.url}/{path}")
    for path, name in (("/v1/models/fake", "GET /v1/models/{model_id:path}"), ("/no/such/thing/123", "GET")):
        patience.get(fake_served.url + path)
        server, _ = spans_of(exporter)
        assert (server.name, server.attributes["url.path"]) == (name, path)
        exporter.clear()


def test_choices_with_spans_are_bounded(fake_served, exporter):
    count = tracing.MAX_TRACED_SEQUENCES + 1
    complete(fake_served, prompt=["w1"] * count, max_tokens=2)
    server, phases = spans_of(exporter)
    assert len(server.attributes["gen_ai.response.finish_reasons"]) == count
    assert len(phases) <= 3 * tracing.MAX_TRACED_SEQUENCES


def test_what_is_not_sampled_costs_nothing(fake_served, monkeypatch):
    """Nor does anything where no provider is set up."""
    assert not tracing.is_set_up()
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_start", None)  # would raise
        assert complete(fake_served, parent=True).status_code == 200
    kept = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    finished: list[object] = []
    monkeypatch.setattr(tracing, "_finish", lambda *args: finished.append(args))
    for _ in range(2):  # when the second is answered, the first has ended
        assert complete(fake_served).status_code == 200
    assert finished == []
    assert kept.get_finished_spans() == ()


WITHOUT_THE_LIBRARY = """
import asyncio, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
from specexport_runtime.server.tracing import Tracing

async def app(scope, receive, send):
    print("served")

asyncio.run(Tracing(app)({"type": "http", "path": "/v1/completions", "state": {"log": object()}}, None, None))
assert "opentelemetry" not in sys.modules
"""


def test_it_works_without_the_library():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_LIBRARY], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert (done.returncode, done.stdout.strip()) == (0, "served"), done.stderr


def test_integers_that_do_not_fit_an_attribute_are_texts():
    assert tracing._as_attribute(2**63 - 1) == 2**63 - 1
    assert tracing._as_attribute(2**63) == str(2**63)
    assert tracing._as_attribute(0.5) == 0.5
