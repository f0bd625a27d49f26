"""Several keys on one server: turns, limits of each, priorities; and what a key alone gets of it: nothing."""

import json
from contextlib import ExitStack

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.wire import Wire

KEYS = ("key-of-a", "key-of-b")
LONG = {"prompt": "w1 w2", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "speculative": {"drafter": "none"}}
SHORT = LONG | {"prompt": "w3", "max_tokens": 2}


@pytest.fixture
def post():
    """Sends a request on a connection of its own, which is closed after the test."""
    with ExitStack() as stack:

        def send(served, body, key=None):
            wire = stack.enter_context(Wire(served.port))
            wire.post(body, **({} if key is None else {"Authorization": f"Bearer {key}"}))
            return wire

        yield send


def metric(served, name):
    page = patience.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def stepper():
    made = Stepper(ServerConfig(model_name="fake", api_keys=KEYS, max_requests_per_key=3, max_waiting=9), rows=2)
    with made.served:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(stepper):
    yield
    stepper.finish()
    assert not stepper.served.engine._held


def test_a_key_has_so_many_requests_and_no_more(stepper, post):
    """Each choice counts, a request is taken whole or not at all, and other keys are not concerned."""
    served, engine = stepper.served, stepper.served.engine
    first = post(served, LONG | {"n": 2}, KEYS[0])
    wait_until(lambda: engine.num_active == 2)
    refused = post(served, SHORT | {"n": 2}, KEYS[0]).reply()
    error = json.loads(refused.body)["error"]
    assert (refused.status, refused.code, error["type"], error["param"]) == (
        429, "rate_limit_exceeded", "rate_limit_error", None,
    )  # fmt: skip
    assert int(refused.headers["retry-after"]) >= 1
    assert KEYS[0] not in error["message"]
    never = post(served, SHORT | {"n": 4}, KEYS[0]).reply()
    assert (never.status, never.code, json.loads(never.body)["error"]["param"]) == (400, "limit_exceeded", "n")
    others = [post(served, SHORT, KEYS[1]) for _ in range(3)]
    wait_until(lambda: engine.num_active == 5)
    assert sorted(engine._held.values()) == [2, 3]
    stepper.allow(400)
    assert [wire.reply().status for wire in (first, *others)] == [200] * 4
    assert metric(served, "specexport:requests_refused_total") >= 2
    served.wait_until_idle()
    assert post(served, SHORT | {"n": 3}, KEYS[0]).reply().status == 200  # there is room again


def test_a_key_whose_texts_are_long_does_not_keep_another_waiting(stepper, post):
    served, engine = stepper.served, stepper.served.engine
    alone = post(served, LONG, KEYS[0])
    stepper.allow(200)
    text = json.loads(alone.reply().body)["choices"][0]["text"]
    stepper.finish()
    before = metric(served, "vllm:num_preemptions_total"), metric(served, "vllm:prompt_tokens_total")
    many = [post(served, LONG, KEYS[0]) for _ in range(3)]
    stepper.wait_until_queued(3)
    stepper.let(20)
    other = post(served, SHORT, KEYS[1])
    stepper.wait_until_queued(4)
    stepper.let(1)  # the step that was on its way when it came
    stepper.let(2)  # its prompt, which gives the first of its two tokens, and the other one
    assert other.reply().status == 200
    assert engine.num_active == 3
    stepper.allow(400)
    assert [json.loads(wire.reply().body)["choices"][0]["text"] for wire in many] == [text] * 3
    assert metric(served, "vllm:num_preemptions_total") == before[0] + 1
    assert metric(served, "vllm:prompt_tokens_total") == before[1] + 3 * 2 + 1
    usage = json.loads(post(served, SHORT, KEYS[0]).reply().body)["usage"]
    assert usage["prompt_tokens"] == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_priority_is_refused_unless_the_server_has_them(stepper, path):
    body = {"messages": [{"role": "user", "content": "w1"}]} if "chat" in path else {"prompt": "w1"}
    stepper.allow(100)
    for priority, code in (
        (0, "taken"), (None, "taken"), (-1, "unsupported_parameter"), (7, "unsupported_parameter"),
        (1.5, None), ("1", None), (True, None), (2**31, None),
    ):  # fmt: skip
        answer = patience.post(
            f"{stepper.url}/v1/{path}",
            json=body | {"priority": priority, "max_tokens": 1},
            headers={"Authorization": f"Bearer {KEYS[0]}"},
        )
        assert answer.status_code == (200 if code == "taken" else 400), priority
        if code != "taken":
            error = answer.json()["error"]
            assert error["param"] == "priority"
            assert code is None or error["code"] == code


def test_a_lower_priority_number_goes_first(post):
    """It takes the one row from the one that runs, which goes on after those of its own number."""
    made = Stepper(ServerConfig(model_name="fake", scheduling_policy="priority", max_waiting=9))
    with made.served as served:
        wires, ended = {}, []
        for name, body in {
            "long": LONG | {"priority": 1},
            "late": SHORT | {"priority": 2},
            "usual": SHORT,
            "urgent": SHORT | {"priority": -5},
        }.items():
            wires[name] = post(served, body)
            made.wait_until_queued(len(wires))
            if name == "long":
                made.let(2)
        for name in ("urgent", "usual", "long", "late"):
            made.allow(60 if name == "long" else 3)
            assert wires[name].reply().status == 200
            ended.append(name)
            if name != "long":  # the rounds that it was let have may last for what comes after it
                assert served.engine.num_active == 4 - len(ended)
        made.finish()


def test_several_keys_leave_each_other_places_in_the_queue():
    """Without a setting, too; with one key, or none, everything is for it."""
    assert ServerConfig(api_keys=KEYS, max_waiting=64).per_key_limit(8) == 56
    assert ServerConfig(api_keys=KEYS, max_waiting=0).per_key_limit(1) == 1
    assert ServerConfig(api_keys=KEYS, max_waiting=64, max_requests_per_key=3).per_key_limit(8) == 3
    assert ServerConfig(api_keys=KEYS[:1]).per_key_limit(8) is None
    assert ServerConfig().per_key_limit(8) is None
    assert ServerConfig(max_requests_per_key=5).per_key_limit(8) == 5  # all are one
    with Served(lambda: fake_engine(2), ServerConfig(api_keys=KEYS, max_waiting=4)) as served:
        assert served.engine.max_requests_per_owner == 5


@pytest.mark.parametrize("setting", [{"max_requests_per_key": 0}, {"scheduling_policy": "fair"}])
def test_bad_settings_are_named(setting):
    [(name, value)] = setting.items()
    with pytest.raises(InvalidRequestError, match=f"--{name.replace('_', '-')} is {value!r}"):
        ServerConfig(**setting)
