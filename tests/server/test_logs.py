"""The line of each request: what is in it, what never is, and that nobody can forge one."""

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from specexport_runtime import SpecEngine
from specexport_runtime.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.log_format import JsonFormatter, TextFormatter, current_state, log_config, log_fields
from specexport_runtime.server.logs import AccessLog
from specexport_runtime.server.request_log import RequestLog
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.serving import MAX_MODEL_LEN, VOCAB, Served, fake_engine
from tests.support.servers.wire import Wire

KEY = "a-key-that-nobody-may-read-in-a-log"
SECRET = "w11"
Lines = Callable[[], list[dict[str, Any]]]


class Collect(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def collecting(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[list[str]]:
    logger, handler = logging.getLogger("specexport"), Collect(formatter)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with collecting(JsonFormatter()) as lines:
        yield lines


PLAIN = {"speculative": {"drafter": "none"}}


@pytest.fixture(scope="module")
def slow_served() -> Iterator[Served]:
    with Served(lambda: fake_engine(1, step_seconds=0.01), ServerConfig(model_name="slow")) as served:
        yield served


def line_of(lines: list[str], request_id: str) -> dict[str, Any]:
    """The one line of a request; it is written when the answer has been sent, so it may come a little later."""

    def found() -> list[dict[str, Any]]:
        return [line for line in map(json.loads, list(lines)) if line.get("request_id") == request_id]

    wait_until(found)
    (line,) = found()
    return line


def complete(served: Served, request_id: str, **body: Any) -> httpx.Response:
    body = {"prompt": f"w1 {SECRET}", "max_tokens": 6} | body
    return patience.post(f"{served.url}/v1/completions", json=body, headers={"X-Request-Id": request_id})


def test_the_line_of_a_completion(fake_served, logged):
    answer = complete(fake_served, "req-1", n=2, user="someone", temperature=1.0, seed=5)
    line = line_of(logged, "req-1")
    usage = answer.json()["usage"]
    expected = {
        "level": "info", "logger": "specexport.access", "message": "request", "method": "POST",
        "path": "/v1/completions", "status": 200, "client": "127.0.0.1", "model": "fake", "user": "someone",
        "streamed": False, "choices": 2, "generated_tokens": usage["completion_tokens"],
        "finish_reasons": list({choice["finish_reason"] for choice in answer.json()["choices"]}),
        **{name: usage["speculative"][name] for name in ("rounds", "drafted", "accepted")},
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert line["prompt_tokens"] == 4
    assert 0 <= line["queued_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    assert abs(datetime.fromisoformat(line["time"]).timestamp() - time.time()) < 60
    assert "error_code" not in line


def test_the_line_of_a_stream_comes_at_its_end(logged):
    engine, go = fake_engine(), threading.Event()
    execute = engine.target.execute

    def held(*args):
        assert go.wait(HANG_S)
        return execute(*args)

    engine.target.execute = held
    body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 9, "stream": True}
    headers = {"X-Request-Id": "stream-1"}
    with (
        Served(lambda: engine) as served,
        patience.stream("POST", f"{served.url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert not any("stream-1" in line for line in logged)
        go.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")
    line = line_of(logged, "stream-1")
    assert (line["status"], line["streamed"], line["path"]) == (200, True, "/v1/chat/completions")
    assert (line["generated_tokens"], line["finish_reasons"]) == (9, ["length"])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [({"max_tokens": "many"}, 400, None), ({"frobnicate": 1}, 400, "unknown_parameter"), ({"model": "x"}, 404, None)],
)
def test_the_line_of_a_refused_request_has_its_code(fake_served, logged, body, status, code):
    answer = complete(fake_served, "bad-1", **body)
    line = line_of(logged, "bad-1")
    error = answer.json()["error"]
    assert line["status"] == answer.status_code == status
    assert line["error_code"] == (error["code"] or error["type"])
    assert code in (None, line["error_code"])
    assert "prompt_tokens" not in line


def test_the_lines_of_messages_have_user_and_code(fake_served, logged):
    """Their errors have no codes of ours: the log has."""
    body = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2, "metadata": {"user_id": "someone"}}
    for name, more, code in (("msg-1", {}, None), ("msg-2", {"frobnicate": 1}, "unknown_parameter")):
        patience.post(f"{fake_served.url}/v1/messages", json=body | more, headers={"X-Request-Id": name})
        line = line_of(logged, name)
        assert line.get("error_code") == code
        assert line.get("user") == ("someone" if code is None else None)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_499(slow_served, logged, stream):
    body = {"prompt": "w1", "max_tokens": 300, "stream": stream, "model": "slow"} | PLAIN
    with Wire(slow_served.port) as client:
        client.post(body, X_Request_Id=f"gone-{stream}")
        if stream:
            client.head()
        else:
            wait_until(lambda: slow_served.engine.num_active)
    line = line_of(logged, f"gone-{stream}")
    assert line["status"] == 499
    assert line["finish_reasons"] == ["cancelled"]
    assert line["generated_tokens"] < 300
    slow_served.wait_until_idle()


def test_a_defect_is_told_without_the_texts_of_others(fake_served, logged, monkeypatch):
    from specexport_runtime.server import completions

    def broken(*args: Any) -> None:
        raise KeyError(f"the prompt was {SECRET}")

    monkeypatch.setattr(completions, "plan_completion", broken)
    answer = complete(fake_served, "defect")
    assert answer.status_code == 500
    wait_until(lambda: len([line for line in logged if "defect" in line]) >= 2)
    told, access = sorted((json.loads(line) for line in logged if "defect" in line), key=lambda line: line["time"])
    if told["logger"] == "specexport.access":
        told, access = access, told
    assert (access["status"], access["level"], access["error_code"]) == (500, "error", "internal_error")
    assert told["error"] == "KeyError"
    assert "in broken" in told["stack"]
    assert SECRET not in json.dumps(told)


def test_a_stream_that_fails_is_an_error_with_its_id(logged):
    def breaks_after_a_while() -> SpecEngine:
        engine = fake_engine()
        execute, steps = engine.target.execute, iter(range(5))

        def step(*args: Any) -> Any:
            if next(steps, None) is None:
                raise MemoryError(f"while it read {SECRET}")
            return execute(*args)

        engine.target.execute = step
        return engine

    own = Collect(JsonFormatter())
    logging.getLogger("specexport_runtime").addHandler(own)
    try:
        with Served(breaks_after_a_while) as served:
            answer = complete(served, "broken-stream", stream=True, max_tokens=50, speculative={"drafter": "none"})
            line = line_of(logged, "broken-stream")
    finally:
        logging.getLogger("specexport_runtime").removeHandler(own)
    assert answer.status_code == 200
    assert '"error"' in answer.text
    assert (line["level"], line["status"], line["error"]) == ("error", 200, "MemoryError")
    assert line["error_code"] == json.loads(answer.text.split("data: ")[-1])["error"]["code"]
    assert line["generated_tokens"] == 5
    step, told = [json.loads(text) for text in own.lines]
    assert (step["logger"], step["error"]) == ("specexport_runtime.decoding.loop", "MemoryError")
    assert (told["request_id"], told["error"]) == ("broken-stream", "RequestFailedError")
    assert "builtins.MemoryError" in told["stack"]
    assert SECRET not in "".join(own.lines)


def test_a_draft_that_is_never_accepted_is_one_warning(logged):
    def never_accepted() -> SpecEngine:
        return fake_engine(draft=FakeExecutor(VOCAB, 4, MAX_MODEL_LEN + 16, negate=True))

    with Served(never_accepted) as served:
        for _ in range(3):
            assert complete(served, "useless", max_tokens=40, temperature=0).status_code == 200
    told = [json.loads(line) for line in logged]
    [warning] = [line for line in told if line["level"] == "warning"]
    assert warning["logger"] == "specexport.server"
    assert "drafter draft-model: none of its first" in warning["message"]


def test_no_text_and_no_key_is_ever_logged():
    served = Served(fake_engine, ServerConfig(model_name="fake", api_keys=(KEY,)))
    with collecting(JsonFormatter(), logging.DEBUG) as lines, served:
        url = f"{served.url}/v1/completions"
        body = {"prompt": f"w1 {SECRET}", "max_tokens": 30, "stop": [SECRET + "x"]}
        given = {"Authorization": f"Bearer {KEY}"}
        text = patience.post(url, json=body, headers=given | {"X-Request-Id": "last"}).json()["choices"][0]["text"]
        assert len(text.split()) > 10
        patience.post(url, json=body | {"stop": 7}, headers=given)
        patience.post(url, json=body | {SECRET: 7}, headers=given)
        patience.post(url, content=f'{{"prompt": "{SECRET}', headers=given | {"Content-Type": "application/json"})
        patience.post(url, json=body, headers={"Authorization": f"Bearer {KEY}x"})
        patience.get(f"{served.url}/health?key={KEY}", headers={"X-Request-Id": "probe"})
        line_of(lines, "probe")
    page = "\n".join(lines)
    assert len(lines) >= 6
    assert KEY not in page
    assert SECRET not in page
    assert not any(word in page.replace("=", " ").replace('"', " ").split() for word in set(text.split()))


def test_probes_are_lines_only_when_asked_for(fake_served):
    for level, expected in ((logging.INFO, 0), (logging.DEBUG, 3)):
        with collecting(JsonFormatter(), level) as lines:
            for path in ("health", "ready", "metrics"):
                patience.get(f"{fake_served.url}/{path}")
            complete(fake_served, f"after-{level}")
            line_of(lines, f"after-{level}")
            assert len(lines) == 1 + expected


FORGED = 'w\n2026-01-01T00:00:00.000Z INFO    request status=200\r\x1b[31m\u2028{"level": "info"}\u202e\x00\ud800'


def record_of(level: int = logging.INFO, **told: Any) -> logging.LogRecord:
    record = logging.LogRecord("specexport.access", level, "", 0, "request", (), None)
    record.fields = told
    return record


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_line_stays_one_line(formatter):
    record = record_of(user=FORGED, path=FORGED, many=[FORGED])
    record.msg, record.args = "said %s", (FORGED,)
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert not any(ord(char) < 32 or char in "\x7f\u2028\u202e\ud800" for char in line)
    line.encode()
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["user"] == FORGED
    assert len(formatter.format(record_of(user="x" * 10_000))) < 500  # a long value is cut


def test_the_text_format():
    record = record_of(logging.WARNING, status=200, user='a "b" c', finish_reasons=["stop", "length"], streamed=True)
    record.created = 1_700_000_000.5
    assert TextFormatter().format(record) == (
        '2023-11-14T22:13:20.500Z WARNING request status=200 user="a \\"b\\" c" '
        "finish_reasons=stop,length streamed=true"
    )
    record.name, record.fields = "uvicorn.error", {}
    assert TextFormatter().format(record).endswith("request logger=uvicorn.error")
    assert log_fields(a=None, b=0, c="") == {"fields": {"b": 0, "c": ""}}


def test_exceptions_of_ours_keep_their_text_and_all_keep_their_causes():
    def raised(error: Exception, cause: Exception | None) -> dict[str, Any]:
        try:
            try:
                if cause is not None:
                    raise cause
            except Exception as first:
                raise error from first
            raise error
        except Exception as caught:
            info = (type(caught), caught, caught.__traceback__)
        record = logging.LogRecord("x", logging.ERROR, "", 0, "m", (), info)
        return json.loads(JsonFormatter().format(record))

    assert "private" not in json.dumps(raised(RequestFailedError("by MemoryError: private"), MemoryError("private")))
    line = raised(EngineDeadError("it was the engine"), MemoryError("private"))
    assert (line["error"], line["error_message"]) == ("EngineDeadError", "it was the engine")
    assert line["stack"].index("MemoryError") < line["stack"].index("EngineDeadError")
    assert "private" not in json.dumps(line)
    assert "error_message" not in raised(ValueError("private"), None)
    assert raised(InvalidRequestError("a", "b"), None)["error_message"] == "a Fix: b"


def test_every_line_of_a_request_has_its_id():
    def told(**own: str) -> dict[str, Any]:
        return json.loads(JsonFormatter().format(record_of(**own)))

    token = current_state.set({"request_id": "abc"})
    try:
        assert told()["request_id"] == "abc"
        assert told(request_id="its own")["request_id"] == "its own"
    finally:
        current_state.reset(token)
    assert "request_id" not in told()


def test_an_application_that_answers_nothing_is_logged(logged):
    async def raises(*args: Any) -> None:
        raise RuntimeError

    async def silent(*args: Any) -> None:
        return

    async def run(app: Any) -> None:
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": None}
        with contextlib.suppress(RuntimeError):
            await AccessLog(app)(scope, None, None)

    asyncio.run(run(raises))
    asyncio.run(run(silent))
    lines = [json.loads(line) for line in logged]
    assert [(line["status"], line["level"]) for line in lines] == [(500, "error"), (499, "info")]
    assert "client" not in lines[0]


def test_what_a_request_s_log_says_of_its_choices():
    """The first token is the first of any of them, and what never got a row has no time in the queue."""

    def choice(**times: float) -> Any:
        return type("Choice", (), {"stats": RequestStats(**times), "finish_reason": None, "error": None})()

    log = RequestLog(began=10.0)
    assert (log.generation(), log.queued_s, log.first_token_s) == ({}, None, None)
    log.follow([choice(submit_time=1.0, start_time=1.0)])
    assert (log.queued_s, log.first_token_s) == (None, None)
    log.follow(
        [choice(submit_time=1.0, start_time=1.0 + s, first_token_time=at) for s, at in ((0.25, 12.5), (0.5, 11.0))]
    )
    assert (log.queued_s, log.first_token_s) == (0.5, 1.0)
    assert log.finish_reasons == ["cancelled"]
    assert log.generation()["choices"] == 3


WRITE_LINES = """
import logging, logging.config
from specexport_runtime.server.log_format import log_config
for log_format in ("json", "text"):
    logging.config.dictConfig(log_config(log_format))
    for name in ("specexport.access", "specexport_runtime.costs.curves", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).info("a line of %s", name)
"""


def test_the_configuration_writes_lines_of_uvicorn_too():
    done = subprocess.run(
        [sys.executable, "-c", WRITE_LINES], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert all("a line of" in line for line in lines)
    assert [line.startswith("{") for line in lines] == [True] * 3 + [False] * 3  # of a request ours, not uvicorn's
    assert log_config("json")["disable_existing_loggers"] is False
