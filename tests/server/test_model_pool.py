"""Several models behind one server, each opened when it is asked for."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.server import model_pool
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.model_pool import ModelPool
from specexport_runtime.server.models import no_such_model
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.openai_help import async_client_of, client_of
from tests.support.servers.pools import GIB, Opened, ServedPool, make_model, make_pool, write_bundles
from tests.support.servers.wire import Wire

ASK = {"prompt": "w1 w2 w3", "max_tokens": 8, "temperature": 0}
LONG = ASK | {"max_tokens": 300, "ignore_eos": True}
NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_bundles(tmp_path_factory.mktemp("bundles"), *NAMES)


@pytest.fixture
def serve(bundles: dict[str, Path]) -> Iterator[Callable[..., ServedPool]]:
    """Starts servers of the three models; the last one alone is there at a time."""
    running: list[ServedPool] = []

    def start(*names: str, opened: Opened | None = None, config: ServerConfig | None = None, **limits) -> ServedPool:
        served = ServedPool({name: bundles[name] for name in names or NAMES}, opened or Opened(), config, **limits)
        running.append(served)
        return served.__enter__()

    yield start
    for served in running:
        served.__exit__()


def post(served: ServedPool, path: str = "/v1/completions", **body: object):
    return patience.post(served.url + path, json=(ASK if path == "/v1/completions" else {}) | body)


def refusal(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def text_of(name: str, **options) -> str:
    with make_model(name) as engine:
        return engine.generate(ASK["prompt"], SamplingParams(max_tokens=8, temperature=0), **options)[0].text


def test_clients_in_turns_between_two_models_get_the_texts_of_each(serve):
    served = serve("cat", "dog")
    plain = {name: text_of(name, drafter="none") for name in ("cat", "dog")}
    assert plain["cat"] != plain["dog"]

    async def turns(client: openai.AsyncOpenAI, first: int) -> None:
        for turn in range(6):
            name = ("cat", "dog")[(first + turn) % 2]
            answer = await client.completions.create(model=name, **ASK)
            assert (answer.model, answer.choices[0].text) == (name, plain[name])

    async def ask() -> None:
        async with async_client_of(served) as client:
            await asyncio.gather(*(turns(client, i) for i in range(8)))

    assert served.open_models() == []
    asyncio.run(ask())
    assert sorted(served.opened.names) == ["cat", "dog"]  # each once
    served.wait_until_idle()


ROUTES = {
    "/v1/completions": ASK, "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/v1/responses": {"input": "w1", "max_output_tokens": 2}, "/tokenize": {"prompt": "w1"},
    "/detokenize": {"tokens": [1]},
}  # fmt: skip


def test_every_route_goes_by_the_model(serve):
    served = serve()
    for path, body in ROUTES.items():
        assert refusal(post(served, path, **body, model="cow")) == (404, "model_not_found"), path
        assert refusal(post(served, path, **body)) == (400, "missing_required_parameter"), path
        assert refusal(post(served, path, **body, model=7)) == (400, "invalid_type"), path
        assert refusal(post(served, path, **body, model="dog", frobnicate=1)) == (400, "unknown_parameter"), path
        long = {key: "w1 " * 1500 if key in ("prompt", "input") else value for key, value in body.items()}
        assert refusal(post(served, path, **long, model="cow")) == (404, "model_not_found"), path
        assert post(served, path, **body, model="dog").status_code == 200, path
    assert served.opened.names == ["dog"]
    facts = [patience.get(served.url + f"/playground.json{query}") for query in ("?model=owl", "", "?model=cow")]
    assert [answer.json().get("model") for answer in facts] == ["owl", "cat", None]
    assert facts[2].status_code == 404
    foreign = patience.get(f"{served.url}/playground.json?model=dog", headers={"Sec-Fetch-Site": "cross-site"})
    assert refusal(foreign) == (403, "cross_origin")


def test_models_are_listed_without_being_opened(serve):
    served = serve()
    with client_of(served) as client:
        assert {model.id: model.max_model_len for model in client.models.list()} == dict.fromkeys(NAMES, 200)
        assert client.models.retrieve("owl").root == "owl"
        with pytest.raises(openai.NotFoundError, match="only 'cat', 'dog', 'owl'"):
            client.models.retrieve("cow")
    assert patience.get(f"{served.url}/ready").status_code == 200
    assert served.opened.names == []
    post(served, model="owl")
    found = patience.get(f"{served.url}/v1/models").json()["data"]
    assert [model["max_model_len"] for model in found] == [200, 200, 400]  # the fakes' own, once it is open


def test_a_refusal_names_some_models_of_many():
    assert no_such_model("cow", [str(i) for i in range(20)]).message.endswith("'14', '15' and 4 more.")


def test_adapters_are_models_of_their_bundle(tmp_path):
    bundles = write_bundles(tmp_path, "base", adapters=("sql", "poems"))
    with ServedPool(bundles, Opened(adapters=("sql", "poems"))) as served:
        listed = [model["id"] for model in patience.get(f"{served.url}/v1/models").json()["data"]]
        assert listed == ["base", "sql", "poems"]
        asked = {}, {"model": "base"}, {"model": "sql"}  # with one bundle a request need not say
        answers = [post(served, **named).json() for named in asked]
        assert [answer["model"] for answer in answers] == ["base", "base", "sql"]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] != texts[2]
    with pytest.raises(InvalidRequestError, match="'sql' would name a model"):
        make_pool(bundles | write_bundles(tmp_path, "more", adapters=("sql",)))


def page(served: ServedPool) -> dict[tuple[str, str], float]:
    """Samples without more labels by name and model; a family that is there twice is an error."""
    found, families = {}, list(text_string_to_metric_families(patience.get(f"{served.url}/metrics").text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        for sample in family.samples:
            if set(sample.labels) == {"model_name", "engine"} or "reason" in sample.labels:
                key = sample.name, sample.labels["model_name"] + sample.labels.get("reason", "")
                assert key not in found
                found[key] = sample.value
    return found


def test_a_model_that_rests_is_closed_and_opened_again(serve):
    served = serve(idle_unload_s=0.05)
    texts = [post(served, model=name).json()["choices"][0]["text"] for name in ("cat", "dog")]
    wait_until(lambda: not served.open_models())
    assert ("specexport:engine_up", "cat") not in page(served)
    assert texts == [post(served, model=name).json()["choices"][0]["text"] for name in ("cat", "dog")]
    assert served.opened.names == ["cat", "dog"] * 2
    found = page(served)  # goes on counting
    assert found["vllm:generation_tokens_total", "cat"] == 16
    assert found["vllm:request_generation_tokens_count", "cat"] == 2
    assert found["vllm:generation_tokens_total", "owl"] == 0
    post(served, model="dog", max_tokens=9999)
    assert page(served)["specexport:requests_refused_total", "dogcontext_length_exceeded"] == 1


def test_a_model_that_answers_is_not_closed(serve):
    served = serve("cat", opened=Opened(0.01), idle_unload_s=0.02)
    with client_of(served) as client:
        body = ASK | {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
        chunks = list(client.completions.create(model="cat", **body, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.opened.names == ["cat"]


def test_memory_closes_the_model_that_rested_the_longest(serve):
    served = serve(memory=int(2.5 * GIB))
    for name, then in (("cat", "cat"), ("dog", "cat dog"), ("cat", "cat dog"), ("owl", "cat owl"), ("dog", "dog owl")):
        assert post(served, model=name).status_code == 200
        assert " ".join(sorted(served.open_models())) == then
    assert served.opened.names == ["cat", "dog", "owl", "dog"]


def test_without_room_a_request_waits_for_a_model_to_rest_and_others_go_on(serve, monkeypatch):
    served = serve("cat", "dog", opened=Opened(0.002), memory=int(1.5 * GIB))
    with Wire(served.port) as wire:
        wire.post(LONG | {"model": "cat", "stream": True})
        wire.until(b"data: ")
        answers: list[int] = []
        waiting = threading.Thread(target=lambda: answers.append(post(served, model="dog").status_code))
        waiting.start()
        wait_until(lambda: served.pool._models["dog"].change is not None)
        assert post(served, model="cat", max_tokens=1).status_code == 200  # is not held up by who waits
        wire.until(b"[DONE]")
        waiting.join()
        assert answers == [200]
        wire.post(LONG | {"model": "dog", "stream": True})
        wire.until(b"data: ")
        monkeypatch.setattr(model_pool, "PATIENCE_S", 0.05)
        refused = post(served, model="cat")
        assert refusal(refused) == (503, "no_memory")
        assert "--memory" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        wire.until(b"[DONE]")
    assert post(served, model="cat").status_code == 200


def test_one_that_never_fits_is_refused_at_the_start(bundles):
    with pytest.raises(InvalidRequestError, match=r"--memory is 512.0 MiB, and .*cat may take 1.00 GiB"):
        make_pool(bundles, memory=GIB // 2)


def test_an_opening_that_fails_is_tried_again_but_not_by_each_of_a_flood(serve, monkeypatch, caplog):
    opened = Opened()
    opened.failing.add("cat")
    served = serve("cat", "dog", opened=opened)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            answer = post(served, model="cat")
            assert refusal(answer) == (503, "model_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
    assert opened.names == ["cat"]
    assert "cat is broken" in str(caplog.records[-1].exc_info[1])
    assert "broken" not in answer.text
    assert post(served, model="dog").status_code == 200
    assert patience.get(f"{served.url}/ready").status_code == 200
    opened.failing.clear()
    served.pool._models["cat"].retry_at = 0  # as if the time had passed
    assert post(served, model="cat").json()["choices"][0]["text"] == text_of("cat")
    assert opened.names == ["cat", "dog", "cat"]


def test_requests_wait_for_their_model_alone_and_clients_may_leave(serve):
    opened = Opened()
    opened.held["cat"] = threading.Event()
    served = serve("cat", "dog", opened=opened, config=ServerConfig(max_waiting=2), idle_unload_s=30)
    model = served.pool._models["cat"]
    wires = [Wire(served.port) for _ in range(4)]  # as many as an engine of two rows takes
    for wire in wires:
        wire.__enter__()
        wire.post(ASK | {"model": "cat"})
    wait_until(lambda: model.leases.total() == 4)
    assert refusal(post(served, model="cat")) == (429, "queue_full")
    assert post(served, model="dog").status_code == 200
    for wire in wires[:3]:
        wire.reset()
    wait_until(lambda: model.leases.total() == 1)
    opened.held["cat"].set()
    assert json.loads(wires[3].reply().body)["choices"][0]["text"] == text_of("cat")
    assert opened.names == ["cat", "dog"]
    for wire in wires:
        wire.__exit__(None, None, None)


def test_a_model_that_nobody_waits_for_any_more_opens_and_rests(serve, caplog):
    opened = Opened()
    opened.held["cat"] = threading.Event()
    served = serve("cat", opened=opened, idle_unload_s=0.05, config=ServerConfig(thinking_budget=8))
    with Wire(served.port) as wire:
        wire.post(ASK | {"model": "cat"})
        wait_until(lambda: opened.names)
        wire.reset()
    opened.held["cat"].set()
    wait_until(lambda: served.pool._models["cat"].phase == "open")
    wait_until(lambda: served.pool._models["cat"].phase == "closed")
    assert opened.names == ["cat"]
    assert "--thinking-budget has no effect: this model (cat)" in caplog.text


def test_a_request_that_waits_too_long_is_told_so(serve):
    opened = Opened()
    opened.held["cat"] = threading.Event()
    served = serve("cat", opened=opened, config=ServerConfig(request_timeout_s=0.05))
    assert refusal(post(served, model="cat")) == (504, "request_timeout")
    opened.held["cat"].set()


def test_a_drain_ends_what_waits_and_finishes_what_runs(serve):
    opened = Opened(0.002)
    opened.held["dog"] = threading.Event()
    served = serve("cat", "dog", opened=opened)
    with Wire(served.port) as running, Wire(served.port) as waiting:
        running.post(LONG | {"model": "cat", "stream": True})
        running.until(b"data: ")
        waiting.post(ASK | {"model": "dog"})
        wait_until(lambda: "dog" in opened.names)
        served.app.state.server.draining = True
        assert served.call(served.pool.drain(60))
        reply = waiting.reply()
        assert (reply.status, reply.code) == (503, "draining")
        running.until(b"[DONE]")
    assert refusal(post(served, model="cat")) == (503, "draining")
    assert patience.get(f"{served.url}/ready").json()["status"] == "draining"
    assert served.pool.has_work_aside  # it opens still
    opened.held["dog"].set()
    wait_until(lambda: not served.pool.has_work_aside)


def test_an_end_in_a_hurry_limits_what_is_closed_already(serve, monkeypatch):
    closing, may_close, closed = threading.Event(), threading.Event(), []
    close = SpecEngine.close

    def slow(engine: SpecEngine) -> None:
        closing.set()
        assert may_close.wait(patience.HANG_S)
        closed.append(engine.flush_s)
        close(engine)

    monkeypatch.setattr(SpecEngine, "close", slow)
    served = serve("cat", "dog", idle_unload_s=0.02)
    assert post(served, model="cat").status_code == 200
    assert closing.wait(patience.HANG_S)
    served.call(served.pool.drain(60))
    served.pool.limit_flush(0.5)
    may_close.set()
    wait_until(lambda: closed)
    assert closed == [0.5]


def test_who_waits_for_a_model_that_closes_has_it_hurry(serve, monkeypatch):
    closing, close, seen = threading.Event(), SpecEngine.close, []

    def slow(engine: SpecEngine) -> None:
        closing.set()
        wait_until(lambda: engine.flush_s < SpecEngine.flush_s)
        seen.append(engine.flush_s)
        close(engine)

    monkeypatch.setattr(SpecEngine, "close", slow)
    served = serve("cat", "dog", idle_unload_s=0.02)
    assert post(served, model="cat").status_code == 200
    assert closing.wait(patience.HANG_S)
    monkeypatch.setattr(SpecEngine, "close", close)
    assert post(served, model="cat").status_code == 200
    assert seen == [model_pool.HURRY_S]


def test_one_dead_engine_asks_for_the_end_and_the_others_go_on(serve):
    served = serve("cat", "dog", idle_unload_s=0.02)
    assert post(served, model="cat").status_code == 200
    served.pool._models["cat"].state.engine.engine._loop._failures = 3
    assert patience.get(f"{served.url}/health").json() == {"status": "dead"}
    assert post(served, model="dog").status_code == 200
    wait_until(lambda: served.open_models() == ["cat"])  # which stays to be seen
    assert patience.get(f"{served.url}/ready").status_code == 503
    served.pool._models["cat"].state.engine.engine._loop._failures = 0


def test_options_that_fit_one_model_alone_are_refused(bundles, tmp_path):
    for options, message in (
        ({"lora": "sql"}, "no LoRA adapter 'sql'"), ({"max_model_len": 201}, "cat allows 2 to 200"),
        ({"suffix_file": tmp_path / "file"}, "--suffix-file is one file"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=message):
            ModelPool(bundles, ServerConfig(), EngineOptions(**options))


def test_the_log_names_the_model(serve, caplog):
    served = serve(config=ServerConfig(max_tokens=10))
    with caplog.at_level(logging.INFO, "specexport.access"):
        post(served, model="owl")
        post(served, model="dog", max_tokens=11)
    lines = [record.fields for record in caplog.records if record.name == "specexport.access"]
    assert [(line["model"], line["status"]) for line in lines] == [("owl", 200), ("dog", 400)]
