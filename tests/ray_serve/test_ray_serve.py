"""Two replicas of a bundle after Ray Serve's proxy, on a cluster of this machine."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specexport_runtime.errors import SpecexportError
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.cluster import HEADERS, SETTINGS, Deployed, kill

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.whole, pytest.mark.xdist_group("ray")]  # one cluster

PROMPT = "def read_lines(path):"
PLAIN = {"speculative": {"drafter": "none"}}
REPLICA = "x-specexport-replica"


def stream_text(lines: Any) -> str:
    text, ended = "", False
    for line in lines:
        if line.startswith("data: "):
            ended = line == "data: [DONE]"
            if not ended:
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += "".join(choice["text"] for choice in choices)
    if not ended:
        raise httpx.RemoteProtocolError("the stream broke off")
    return text


def test_texts_through_ray_are_those_of_the_engine_alone(deployed, alone):
    answer = deployed.complete(PROMPT, 24)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == alone.text(PROMPT, 24)
    assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]  # once
    with deployed.stream(PROMPT, 40) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = list(answer.iter_raw())
    assert stream_text(b"".join(chunks).decode().splitlines()) == alone.text(PROMPT, 40)
    assert len(chunks) > 1  # it came as it was made


def test_both_replicas_answer(deployed):
    wanted, seen = set(deployed.describe(2)), set()

    def both() -> bool:
        """Ray may send the first sixteen to one of them."""
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: deployed.complete(f"x = {i}", 32), range(16)))
        assert {answer.status_code for answer in answers} == {200}
        seen.update(answer.headers[REPLICA] for answer in answers)
        return seen == wanted

    wait_until(both)


def test_the_key_is_asked_for_behind_the_proxy(deployed):
    answer = patience.post(f"{deployed.url}/v1/completions", json={"prompt": PROMPT})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert patience.get(f"{deployed.url}/ready").status_code == 200


def test_a_client_that_goes_away_frees_its_row(deployed):
    """A busy machine may notice late: one of five that leave at once must not have been decoded to the end."""
    for _ in range(5):
        with deployed.stream("def f(", 900, **PLAIN) as answer:
            name = answer.headers[REPLICA]
            before = deployed.describe_one(name)
            next(answer.iter_raw())
        wait_until(lambda name=name: not deployed.describe_one(name)["active"])
        rounds = deployed.describe_one(name)["rounds"] - before["rounds"]
        if before["active"] == 1 and rounds < 600:
            break
    assert before["active"] == 1
    assert rounds < 600, "it was not cancelled: all of it takes about 900"


def test_a_killed_replica_takes_only_its_own_requests_along(deployed, alone):
    jobs = [(f"def function_{i}(", 60 + 20 * (i % 4)) for i in range(24)]
    for job in jobs[:4]:
        alone.text(*job)  # so that no load of the engine alone falls into the time below
    replicas = deployed.describe(2)
    victim, survivor = sorted(replicas)

    def ask(job: tuple[str, int]) -> tuple[str | None, str | None]:
        name = None
        try:
            with deployed.stream(*job, **PLAIN) as answer:
                name = answer.headers.get(REPLICA)
                begun.append(name)
                return name, stream_text(answer.iter_lines()) if answer.status_code == 200 else None
        except httpx.HTTPError:
            return name, None

    begun: list[str | None] = []
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, job) for job in jobs]
        wait_until(lambda: begun.count(victim) >= 2)
        kill(replicas[victim]["pid"])
        answers = [future.result(HANG_S) for future in asked]

    failed = [job for job, (_, text) in zip(jobs, answers, strict=True) if text is None]
    assert failed, "nothing was in flight on the killed replica"
    assert len(failed) <= 8, "more failed than can have been in flight"
    assert all(name != survivor for name, text in answers if text is None)
    for job, (_, text) in zip(jobs, answers, strict=True):
        assert text in (None, alone.text(*job))
    for job in failed:  # the one that is left, or its successor, answers at once
        assert deployed.complete(*job).json()["choices"][0]["text"] == alone.text(*job)
    after = deployed.describe(2, without=(replicas[victim]["pid"],))
    assert survivor in after


def test_prompts_that_begin_alike_go_to_one_replica(deployed, demo_bundle, alone):
    from ray import serve

    from specexport_runtime.ray_serve import deploy

    settings = {**SETTINGS, "routing": "prefix", "prefix_chars": 12, "routing_margin": 100, "app_name": "by_prefix"}
    port = int(deployed.url.rpartition(":")[2])
    deploy({"bundle": str(demo_bundle), "num_replicas": 2, "port": port, **settings}, route_prefix="/prefix")
    try:
        app = Deployed(serve.get_deployment_handle("engine", "by_prefix"), f"{deployed.url}/prefix")
        names = {}
        for begin in [f"class Name{i:02d}" for i in range(24)]:  # each has a replica by chance
            if len(names) >= 6 and len(set(names.values())) == 2:
                break
            answers = [app.complete(begin + rest, 8) for rest in (":", "(Base):", ":\n    pass")]
            assert {answer.status_code for answer in answers} == {200}, answers[0].text
            (names[begin],) = {answer.headers[REPLICA] for answer in answers}
        assert len(set(names.values())) == 2  # other beginnings, other replicas
        with app.stream(PROMPT, 40) as answer:
            assert stream_text(answer.iter_lines()) == alone.text(PROMPT, 40)
        refused = patience.post(f"{app.url}/v1/completions", json={"prompt": 1}, headers=HEADERS)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert patience.post(f"{app.url}/v1/completions", json={"prompt": PROMPT}).status_code == 401
    finally:
        serve.delete("by_prefix")


def test_a_session_stays_with_one_replica_and_ends_before_it_does(deployed, demo_bundle, alone):
    from ray import serve

    from specexport_runtime.ray_serve import deploy

    settings = {**SETTINGS, "routing": "session", "routing_margin": 100, "app_name": "by_session"}
    settings["drain_timeout_s"] = HANG_S  # a busy machine needs more than seconds for the stream that is to end
    port = int(deployed.url.rpartition(":")[2])
    handle = deploy({"bundle": str(demo_bundle), "num_replicas": 2, "port": port, **settings}, route_prefix="/session")
    app = Deployed(handle, f"{deployed.url}/session")
    try:
        names = []
        for session in map(str, range(8)):
            headers = {**HEADERS, "X-Session-Id": session}
            body = {"prompt": PROMPT, "max_tokens": 2}
            answers = [patience.post(f"{app.url}/v1/completions", json=body, headers=headers) for _ in range(3)]
            assert len({answer.headers[REPLICA] for answer in answers}) == 1
            names.append(answers[0].headers[REPLICA])
        assert len(set(names)) == 2
        with app.stream(PROMPT, 300, **PLAIN) as answer:
            lines = answer.iter_lines()
            first = [next(lines), next(lines)]
            serve.delete("by_session", _blocking=False)
            assert stream_text([*first, *lines]) == alone.text(PROMPT, 300)
    finally:
        serve.delete("by_session")


def test_a_replica_that_cannot_start_says_why(deployed, demo_bundle):
    from specexport_runtime.ray_serve import deploy

    port = int(deployed.url.rpartition(":")[2])
    with pytest.raises(SpecexportError, match="max_model_len"):
        deploy({"bundle": str(demo_bundle), "port": port, "max_model_len": 10**6, "app_name": "bad"}, route_prefix="/b")
    from ray import serve

    serve.delete("bad")


def _stuckable() -> type:
    """A replica that can be told to hang. A class in a function is sent to Ray's processes as it is."""
    from specexport_runtime.ray_serve.deployments import _make_http_replica

    class Stuckable(_make_http_replica()):
        def hang(self):
            import threading

            self._engine.engine.target.execute = lambda *_, **__: threading.Event().wait()

    return Stuckable


def test_a_stuck_replica_is_replaced_and_its_requests_can_be_sent_again(deployed, demo_bundle, alone):
    """Its decoding thread hangs, and all else of the process lives."""
    from ray import serve

    from specexport_runtime.ray_serve import parse_settings
    from specexport_runtime.ray_serve.deployments import _remove_keys, engine_options

    more = {"bundle": str(demo_bundle), "ray_actor_options": {"num_cpus": 0.5}, "stuck_after_s": 5, "num_replicas": 2}
    settings = parse_settings({**SETTINGS, **more, "health_check_period_s": 0.5})
    served = serve.deployment(**engine_options(settings))(serve.ingress()(_stuckable()))
    application = served.bind(_remove_keys(settings), needs_key=True)
    app = Deployed(serve.run(application, name="stuck", route_prefix="/stuck"), f"{deployed.url}/stuck")
    try:
        before = app.describe(2)
        app.handle.hang.remote().result(timeout_s=HANG_S)
        answers: list[httpx.Response] = []

        def one_was_stuck() -> bool:
            """Ray may send eight in a row to the other replica."""
            with ThreadPoolExecutor(8) as pool:
                answers[:] = pool.map(lambda i: app.complete(PROMPT, 16 + i), range(8))
            assert {answer.status_code for answer in answers} <= {200, 500, 503}
            return any(answer.status_code != 200 for answer in answers)

        wait_until(one_was_stuck)
        texts = [answer.json()["choices"][0]["text"] if answer.status_code == 200 else None for answer in answers]
        after = app.describe(2)
        assert len(set(after) & set(before)) == 1
        answers = [app.complete(PROMPT, 16 + i).json()["choices"][0]["text"] for i in range(8)]
        assert answers == [alone.text(PROMPT, 16 + i) for i in range(8)]
        assert all(text in (None, answer) for text, answer in zip(texts, answers, strict=True))
    finally:
        serve.delete("stuck")


def test_ray_exports_the_metrics_of_every_replica(deployed):
    import ray

    names = set(deployed.describe(2))
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def all_counted() -> bool:
        lines = [line for line in patience.get(url).text.splitlines() if line.startswith("ray_vllm_generation_tokens")]
        counted = {name: float(line.split()[-1]) for name in names for line in lines if f'replica="{name}"' in line}
        return set(counted) == names and sum(counted.values()) > 0

    wait_until(all_counted)
    assert all_counted()
