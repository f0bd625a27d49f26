"""``/v1/responses`` with the official client: answers, typed events, forms, and what is refused by which name."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel

from specexport_runtime import SpecEngine
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.responses_schema import ResponseAnswer
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.openai_help import alone, client_of
from tests.support.servers.serving import TEMPLATE, Served
from tests.support.servers.stepper import Stepper

PATH = "/v1/responses"
INPUT = [
    {"role": "user", "content": "w3"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w4"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "w5 "}, {"type": "input_text", "text": "w6"}]},
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
DELTA = "response.output_text.delta"


@pytest.fixture(scope="module")
def chat_served(demo_bundle):
    def load():
        engine = SpecEngine.load(demo_bundle, max_num_seqs=2, num_threads=1, spin=False)
        engine._chat_template = TEMPLATE
        return engine

    with Served(load, ServerConfig(model_name="demo")) as served:
        yield served


def create(client, **parameters):
    extra = {
        name: parameters.pop(name)
        for name in ("seed", "top_k", "speculative", "stop", "cache_salt", "structured_outputs", "ignore_eos")
        if name in parameters
    }
    return client.responses.create(**{"model": "fake", "input": "w1 w2"} | parameters, extra_body=extra)


def events_of(text):
    """The events on the wire: each has a name, and the name is its type."""
    *events, nothing = text.split("\n\n")
    assert nothing == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_times(response):
    return {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}


def test_an_answer_is_that_of_the_rendered_prompt(client, fake_served):
    answer = create(
        client, input=INPUT, instructions="w1 w2", seed=3, max_output_tokens=12, metadata={"a": "b"}, top_k=2
    )
    result = alone(fake_served, "w1 w2 w3 w4 w5 w6", seed=3, max_tokens=12, top_k=2)
    assert answer.output_text == result.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert answer.id.startswith("resp_")
    assert item.id == f"msg_{answer.id.removeprefix('resp_')}"
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("w1 w2", {"a": "b"}, 12)
    assert (answer.store, answer.truncation, answer.tools, answer.parallel_tool_calls) == (False, "disabled", [], True)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (6, 12, 18)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert usage.speculative["drafted"] > 0


def test_an_answer_that_ends_is_completed(client, fake_served):
    whole = alone(fake_served, "w1 w2", temperature=0, max_tokens=40).text
    word = whole.split()[5]
    answer = create(client, temperature=0, max_output_tokens=40, stop=[word], speculative={"drafter": "none"})
    assert answer.usage.speculative["drafted"] == 0
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.output_text == whole[: whole.index(word)]
    assert answer.completed_at >= answer.created_at
    assert without_times(answer.to_dict())["output"][0]["status"] == "completed"


@pytest.mark.parametrize("extra", [{}, LOGPROBS | {"speculative": {"token_origins": True}}], ids=str)
def test_a_stream_tells_what_the_whole_answer_tells(client, fake_served, extra):
    body = {"input": INPUT, "seed": 4, "max_output_tokens": 20} | extra
    whole = patience.post(fake_served.url + PATH, json=body).json()
    answer = patience.post(fake_served.url + PATH, json=body | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    deltas = [event for event in events if event["type"] == DELTA]
    created, last = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created["id"] == last["id"]
    for response in (created, last, whole):
        ResponseAnswer.model_validate(response)
    (part,) = last["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [event["part"] for event in events if event["type"] == "response.content_part.done"] == [part]
    assert [item for event in deltas for item in event["logprobs"]] == part["logprobs"]
    assert [item for event in deltas for item in event.get("tokens", [])] == part.get("tokens", [])
    (wanted,) = whole["output"]
    wanted["id"] = last["output"][0]["id"]
    assert without_times(last) == without_times(whole)
    if extra:
        assert sum(event["drafted"] for event in deltas) == last["usage"]["speculative"]["drafted"]
        assert len(part["logprobs"]) == len(part["tokens"]) == 20


def test_log_probabilities_are_those_of_chats(client):
    answer = create(client, seed=3, max_output_tokens=9, **LOGPROBS)
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "w1 w2"}], seed=3, max_tokens=9, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    found = [item.to_dict() for item in answer.output[0].content[0].logprobs]
    assert found == [item.to_dict() for item in chat.choices[0].logprobs.content]
    assert answer.top_logprobs == 2
    assert create(client, max_output_tokens=2).output[0].content[0].logprobs == []


class Person(BaseModel):
    name: str
    age: int


FORMAT = {"type": "json_schema", "name": "person", "strict": True, "schema": Person.model_json_schema()}
FORMAT["schema"]["additionalProperties"] = False


def test_an_answer_is_parsed(chat_served):
    pytest.importorskip("llguidance")
    with client_of(chat_served) as client:
        common = {"model": "demo", "input": "# As JSON:\n", "max_output_tokens": 200, "extra_body": {"seed": 2}}
        answer = client.responses.parse(text_format=Person, **common)
        assert answer.status == "completed"
        assert isinstance(answer.output_parsed, Person)
        assert answer.text.format.type == "json_schema"
        assert answer.text.format.schema_["required"] == ["name", "age"]
        with client.responses.stream(text_format=Person, **common) as stream:
            (done,) = [event.parsed for event in stream if event.type == "response.output_text.done"]
            assert stream.get_final_response().output_parsed == done == answer.output_parsed
        plain = client.responses.create(text={"format": FORMAT}, **common)
        assert json.loads(plain.output_text) == answer.output_parsed.model_dump()
        loose = client.responses.create(**common | {"text": {"format": {"type": "json_object"}}})
        assert loose.output_text.startswith("{")
        extra = {"structured_outputs": {"choice": ["red", "green"]}}
        assert client.responses.create(**common | {"extra_body": extra}).output_text in ("red", "green")


def test_a_stream_that_fails_says_so():
    stepper = Stepper()
    with stepper.served as served, ThreadPoolExecutor(1) as pool:
        body = {"input": "w1", "stream": True, "max_output_tokens": 300}
        answer = pool.submit(patience.post, served.url + PATH, json=body)
        stepper.let(3)
        served.loop.call_soon_threadsafe(served.engine.stop_admitting)
        for request in list(served.engine._active):
            request.cancel()  # as a server does that may wait no longer
        stepper.wait_until_cancelled()
        stepper.finish()
        events = events_of(answer.result().text)
        wait_until(lambda: not served.engine.num_active)
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "draining")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    ResponseAnswer.model_validate(failed["response"])
