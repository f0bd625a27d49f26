"""Settings of a deployment: typed, checked, and refused before anything starts."""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.decoding import loop as loop_module
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import BundleError, EngineClosedError, EngineDeadError, InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.ray_serve import build_app, parse_settings
from specexport_runtime.ray_serve.affinity import is_overloaded, prompt_key, rank_replicas
from specexport_runtime.ray_serve.deployments import _remove_keys, make_application
from specexport_runtime.ray_serve.ingress import PrefixIngress, _relay
from specexport_runtime.ray_serve.replica import Replica, make_replica_config, run_asgi
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.server.app import create_app
from specexport_runtime.server.errors import as_api_error
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.fakes.engine_of import engine_of
from tests.support.servers.cluster import import_ray


def parse(bundle, environ=None, **more):
    return parse_settings({"bundle": str(bundle), **more}, environ or {})


def test_text_of_a_command_line_becomes_typed_settings(demo_bundle):
    settings = parse(
        demo_bundle, min_replicas="2", max_replicas="4", target_ongoing_requests="3.5",
        ray_actor_options='{"num_cpus": 2}', max_num_seqs="4", adaptive="false", max_waiting="9", playground="off",
        max_model_len="None", kv_cache_memory_bytes="2GiB", speculative_config='{"method": "ngram"}',
    )  # fmt: skip
    assert (settings.min_replicas, settings.max_replicas, settings.target_ongoing_requests) == (2, 4, 3.5)
    options = {
        "speculative_config": {"method": "ngram"},
        "kv_cache_memory_bytes": settings.engine.kv_cache_memory_bytes,
    }
    assert settings.engine.kv_bytes == 2 << 30
    assert settings.engine == EngineOptions(
        num_threads=2, spin=False, max_num_seqs=4, adaptive=False, share_threads=True, **options
    )
    assert settings.server.max_waiting == 9
    assert settings.server.playground is False
    assert settings.server.model_name == demo_bundle.name
    assert settings.num_rows == 4
    assert settings.ongoing_limit > 4 + 9
    values = parse(demo_bundle, share_threads="no", spin=True, speculative_config={"method": "ngram"}).engine
    assert (values.share_threads, values.spin, values.speculative_config) == (False, True, {"method": "ngram"})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_replica": 2}, ["num_replica", "num_replicas"]), ({"max_num_seq": 2}, ["did you mean 'max_num_seqs'"]),
        ({"drafters": "{}"}, ["'drafters'"]), ({"num_replicas": "two"}, ["num_replicas is 'two'", "an integer"]),
        ({"num_replicas": 0}, ["num_replicas is 0"]), ({"num_replicas": 1, "max_replicas": 2}, ["one of them"]),
        ({"min_replicas": 2}, ["without max_replicas"]),
        ({"min_replicas": 3, "max_replicas": 2}, ["min_replicas is 3"]),
        ({"routing": "random"}, ["balanced", "prefix"]), ({"spin": "maybe"}, ["spin is 'maybe'", "true or false"]),
        ({"ray_actor_options": "[1]"}, ["a JSON object"]), ({"api_keys": "secret"}, ["SPECEXPORT_API_KEYS"]),
        ({"host": "0.0.0.0"}, ["no API key"]), ({"health_check_period_s": 0}, ["more than 0"]),
        ({"upscale_delay_s": 1}, ["upscale_delay_s was given without max_replicas"]),
        ({"max_replicas": 2, "downscale_delay_s": -1}, ["downscale_delay_s is -1"]),
    ],
)  # fmt: skip
def test_what_is_refused(demo_bundle, more, words):
    with pytest.raises(InvalidRequestError) as refused:
        parse(demo_bundle, **more)
    for word in words:
        assert word in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError):
        parse(tmp_path)
    with pytest.raises(InvalidRequestError, match="bundle="):
        parse_settings({}, {})


def test_another_address_needs_a_key_of_the_environment(demo_bundle):
    settings = parse(demo_bundle, {"SPECEXPORT_API_KEYS": "one, two"}, host="0.0.0.0")
    assert settings.server.api_keys == ("one", "two")


def test_the_address_of_proxies_that_run_counts(demo_bundle, monkeypatch):
    ray = import_ray()
    client = SimpleNamespace(http_config=SimpleNamespace(host="0.0.0.0"))
    monkeypatch.setattr(ray.serve.context, "_get_global_client", lambda **_: client)
    monkeypatch.delenv("SPECEXPORT_API_KEYS", raising=False)
    with pytest.raises(InvalidRequestError, match=r"0\.0\.0\.0 can be reached"):
        build_app({"bundle": str(demo_bundle)})
    with pytest.raises(InvalidRequestError, match=r"0\.0\.0\.0 can be reached"):
        make_replica_config(parse(demo_bundle), needs_key=False)  # so does a replica
    monkeypatch.setenv("SPECEXPORT_API_KEYS", "secret")
    build_app({"bundle": str(demo_bundle)})
    assert make_replica_config(parse(demo_bundle), needs_key=False).host == "0.0.0.0"


def test_keys_are_not_part_of_what_ray_keeps(demo_bundle, monkeypatch):
    bare = _remove_keys(parse(demo_bundle, {"SPECEXPORT_API_KEYS": "secret"}, host="0.0.0.0"))
    assert bare.server.api_keys == ()
    monkeypatch.delenv("SPECEXPORT_API_KEYS", raising=False)
    with pytest.raises(InvalidRequestError, match="not set for its replicas"):
        make_replica_config(bare, needs_key=True)
    monkeypatch.setenv("SPECEXPORT_API_KEYS", "secret")
    assert make_replica_config(bare, needs_key=True).api_keys == ("secret",)


class Gate:
    def __init__(self, target):
        self._permits, self._execute = threading.Semaphore(0), target.execute
        self.waiting = threading.Semaphore(0)
        target.execute = self._pass

    def _pass(self, *args):
        self.waiting.release()
        assert self._permits.acquire(timeout=HANG_S)
        return self._execute(*args)

    def open(self, steps=1):
        self._permits.release(steps)


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray Serve's own
def test_a_replica_whose_decoding_thread_hangs_says_so_and_ends(demo_bundle, monkeypatch):
    """Neither loading nor a long prompt is taken for that."""
    now, ended = [0.0], []
    monkeypatch.setattr(loop_module, "monotonic", lambda: now[0])
    replica = Replica(parse(demo_bundle, stuck_after_s=10), needs_key=False)
    tokenizer = Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0"))
    engine = engine_of(FakeExecutor(17, 2, 200), tokenizer, max_model_len=150, max_num_batched_tokens=16)
    gate = Gate(engine.target)

    async def step():
        assert await asyncio.to_thread(gate.waiting.acquire, timeout=HANG_S)

    async def check():
        replica._end_process = ended.append
        now[0] = 100.0
        await replica.check_health()  # it is being loaded
        replica._engine = AsyncSpecEngine(engine)
        create_app(replica._engine, replica.config)
        request = await replica._engine.submit([3] * 100, SamplingParams(max_tokens=4, ignore_eos=True))
        for _ in range(5):  # a prompt of seven steps, each of which takes nearly as long as may be
            await step()
            await replica.check_health()
            now[0] += 9.0
            await replica.check_health()
            gate.open()
        await step()
        await replica.check_health()
        now[0] += 11.0
        with pytest.raises(EngineDeadError, match="1 requests are active"):
            await replica.check_health()
        await asyncio.to_thread(wait_until, lambda: ended)
        gate.open(100)
        await request.result()
        await replica.check_health()
        await replica._engine.aclose()
        with pytest.raises(EngineClosedError):
            await replica.check_health()

    asyncio.run(check())
    assert ended == [1]


@pytest.mark.parametrize(
    ("more", "deployments"),
    [
        ({"num_replicas": 2}, 1),
        ({"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 0, "look_back_period_s": "12.5"}, 1),
        ({"routing": "prefix"}, 2),
    ],
)
def test_ray_takes_the_options(demo_bundle, more, deployments):
    import_ray()
    from ray.serve._private.build_app import build_app as build

    built = build(make_application(parse(demo_bundle, max_num_seqs=4, max_waiting=9, **more)), name="app")
    assert len(built.deployments) == deployments
    (engine,) = [item for item in built.deployments if item.name == "engine"]
    assert engine.max_ongoing_requests > 4 + 9
    scaling = engine._deployment_config.autoscaling_config
    if "max_replicas" in more:
        assert (scaling.max_replicas, scaling.target_ongoing_requests) == (3, 4)
        assert (scaling.upscale_delay_s, scaling.look_back_period_s, scaling.downscale_delay_s) == (0, 12.5, 600)
    else:
        assert not scaling


def body(**fields):
    return json.dumps(fields).encode()


def test_later_turns_of_a_conversation_have_the_key_of_the_first():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*turns, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    other = [turns[0], {"role": "user", "content": "Good day"}]
    assert prompt_key(body(messages=turns), 99) == prompt_key(body(messages=later), 99)
    assert prompt_key(body(messages=turns), 99) != prompt_key(body(messages=other), 99)
    key = prompt_key(body(messages=turns), 99)  # responses are chats
    assert key == prompt_key(body(input=later), 99) == prompt_key(body(input="Hello", instructions="Be brief."), 99)
    assert key == prompt_key(body(input=later[1:], instructions="Be brief."), 99)
    assert key != prompt_key(body(input="Hello"), 99) != ""


def test_prompts_have_the_key_of_their_beginning():
    assert prompt_key(body(prompt="abcdef"), 3) == prompt_key(body(prompt=["abcxyz", "q"]), 3)
    assert prompt_key(body(prompt="abcdef"), 4) != prompt_key(body(prompt="abcxyz"), 4)
    assert prompt_key(body(prompt=[1, 2, 3]), 3) != prompt_key(body(prompt=[9, 2, 3]), 3)
    bad = [body(prompt=7), body(messages=[1]), body(input=[1]), body(prompt=[]), b"[" * 10**5]
    for nothing in (b"", b"{", b"[]", b"{}", *bad):
        assert prompt_key(nothing, 3) == ""


def test_a_lost_replica_moves_only_its_own_keys():
    replicas = [f"replica{i}" for i in range(5)]
    keys = [f"key{i}" for i in range(1000)]
    before = {key: rank_replicas(key, replicas)[0] for key in keys}
    after = {key: rank_replicas(key, [name for name in replicas if name != "replica2"])[0] for key in keys}
    assert min(Counter(before.values()).values()) > 140  # of 200
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == "replica2"]
    assert len({after[key] for key in moved}) == 4  # spread over all that are left


def test_overload_is_a_margin_over_the_shortest_queue():
    assert not is_overloaded(4, [0, 9], 4)
    assert is_overloaded(5, [0, 9], 4)
    assert not is_overloaded(None, [0], 0)
    assert not is_overloaded(50, [None, None], 4)


async def _collect(app, *, stop_after=None):
    stream = run_asgi(app, {"type": "http"}, b"body")
    found = []
    async for messages in stream:
        found.append(messages)
        if len(found) == stop_after:
            break
    await stream.aclose()
    return found


def test_what_ray_raises_is_told_in_openai_s_shape():
    ray = import_ray()

    async def answer(error):
        raise error
        yield []

    async def relay(error):
        try:
            await _relay(answer(error), None)
        except Exception as raised:
            return as_api_error(raised)

    full = ray.serve.exceptions.BackPressureError(num_queued_requests=9, max_queued_requests=9)
    for error, status, code in ((ray.exceptions.ActorDiedError(), 503, "replica_lost"), (full, 429, "queue_full")):
        told = asyncio.run(relay(error))
        assert (told.status, told.code) == (status, code)
        assert "Retry-After" in told.headers


class Handle:
    def __init__(self):
        self.options_seen, self.cancelled = [], False

    def options(self, **options):
        self.options_seen.append(options)
        return self

    def remote(self, *_):
        return self

    def cancel(self):
        self.cancelled = True

    async def __aiter__(self):
        await asyncio.sleep(60)
        yield []


@pytest.mark.parametrize("leave", ["disconnect", "deadline"])
def test_a_client_that_leaves_cancels_what_was_passed_on(demo_bundle, leave):
    import_ray()
    handle = Handle()
    ingress = PrefixIngress(parse(demo_bundle), handle, needs_key=False)
    messages = [{"type": "http.request", "body": body(prompt="abc")}]
    messages += [{"type": "http.disconnect"}] if leave == "disconnect" else []

    async def receive():
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "extensions": object()}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ingress._pass_on(scope, receive, None), 0.05 if leave == "deadline" else 30)

    asyncio.run(run())
    assert handle.cancelled
    assert handle.options_seen[-1]["session_id"] == prompt_key(body(prompt="abc"), 256)


def test_an_application_runs_on_a_body_that_was_read_elsewhere():
    async def app(scope, receive, send):
        request = await receive()
        await send({"type": "http.response.start", "status": 200})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": request["body"]})

    batches = asyncio.run(_collect(app))
    assert [message["type"] for batch in batches for message in batch][-1] == "http.response.body"
    assert [message for batch in batches for message in batch][-1]["body"] == b"body"


def test_closing_the_relay_ends_the_application():
    ended = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run():
        await _collect(app, stop_after=1)
        await asyncio.sleep(0)
        return list(ended)

    assert asyncio.run(run()) == [True]


def test_an_application_that_fails_fails_the_relay():
    async def app(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(_collect(app))
