import hashlib
import hmac
import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from specexport_runtime.server import admission
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.servers.raw_http import problem_of_error
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.wire import Wire

KEYS = ("first-key", "second-key-which-is-longer")
ASK = {"prompt": "w1 w2", "max_tokens": 3}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served(fake_engine, ServerConfig(model_name="fake", api_keys=KEYS)) as served:
        yield served


def code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    if answer.request.url.path.startswith("/v1/messages"):  # Anthropic's, which have no codes
        assert problem_of_error(answer.content) is None
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == answer.json()["request_id"]
        return {"authentication_error": "invalid_api_key", "invalid_request_error": "not_json"}[error["type"]]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


def test_every_route_of_the_api_needs_a_key(keyed):
    routes = keyed.app.openapi()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"} <= set(routes)
    asked = [(method, path) for path in set(routes) - {"/health", "/ready"} for method in routes[path]]
    asked += [("GET", path) for path in ("/metrics", "/openapi.json", "/playground.json", "/nothing", "/health/")]
    for method, path in asked:
        answer = patience.request(method, keyed.url + path, json=ASK)
        assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key"), (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready"):  # a probe has no key
        assert patience.get(keyed.url + path).status_code == 200, path


@pytest.mark.parametrize(
    ("values", "status"),
    [([f"{scheme} {key}"], 200) for scheme, key in zip(("Bearer", "bearer"), KEYS, strict=True)]
    + [([value], 401) for value in (
        "", "Bearer", "Bearer first-ke", "Bearer first-keyy", "Basic first-key", "first-key", "Bearer ÿ",
        "Bearer first-key, Bearer second-key-which-is-longer",
    )]
    + [(["Bearer first-key", "Bearer wrong"], 401)],
)  # fmt: skip
def test_one_whole_key_opens_and_nothing_else_does(keyed, values, status):
    headers = [("Authorization", value.encode("latin1")) for value in values]
    assert patience.get(f"{keyed.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", KEYS[1])], 200),
        ([("x-api-key", KEYS[1][:-1])], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", f"Bearer {KEYS[1]}")], 401),
        ([("x-api-key", KEYS[0]), ("x-api-key", KEYS[1])], 401),
        ([("x-api-key", "any"), ("Authorization", f"Bearer {KEYS[0]}")], 200),  # this goes first
        ([("x-api-key", KEYS[0]), ("Authorization", "Bearer any")], 401),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(keyed, headers, status):
    assert patience.get(f"{keyed.url}/v1/models", headers=headers).status_code == status


def test_keys_see_nothing_of_each_others_prefixes(keyed):
    """Not even by a salt that looks like another key's scope."""
    digest = hashlib.sha256(KEYS[0].encode()).hexdigest()
    words = "w1 w2 w3 " * 30

    def cached(key, path, **body):
        answer = patience.post(keyed.url + path, json=body, headers={"Authorization": f"Bearer {key}"}).json()["usage"]
        return answer.get("prompt_tokens_details", answer.get("input_tokens_details"))["cached_tokens"]

    first, second = KEYS
    assert cached(first, "/v1/completions", prompt=words, max_tokens=1) == 0
    assert cached(first, "/v1/completions", prompt=words, max_tokens=1) > 80
    assert cached(first, "/v1/responses", input=words, max_output_tokens=1) > 80
    for salt in (None, f"{digest}/", digest, "/"):
        assert cached(second, "/v1/completions", prompt=words, max_tokens=1, cache_salt=salt) == 0
    assert cached(second, "/v1/responses", input=words, max_output_tokens=1, cache_salt="/") > 80  # its own


def test_every_key_is_compared_whichever_fits(keyed, monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    assert patience.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
    assert compared == [(32, 32)] * len(KEYS)
    assert not any(key in repr(keyed.config) for key in KEYS)  # what is logged of settings has none either


def test_a_refused_body_is_not_waited_for(keyed):
    with Wire(keyed.port) as wire:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        wire.send(head + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
        assert wire.reply().status == 401


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8000", "localhost.:1", "127.9.9.9:1", "[::1]:80"])
def test_names_of_this_machine_are_answered(fake_served, name):
    assert patience.get(f"{fake_served.url}/health", headers={"Host": name}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "localhost:80:80", "[::1", "",
             "localhost:x", "localhost:", "[::1]x"]
)  # fmt: skip
def test_other_names_are_not(fake_served, name):
    answer = patience.get(f"{fake_served.url}/v1/models", headers={"Host": name})
    assert (answer.status_code, code_of(answer)) == (421, "wrong_host")


def test_a_request_without_a_name_of_ours_or_with_two_is_refused(fake_served):
    for lines in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with Wire(fake_served.port) as wire:
            wire.send(b"GET /v1/models HTTP/1.1\r\n" + lines + b"\r\n")
            assert wire.reply().status == 421


@pytest.mark.parametrize("host", [b"", b"Host:\r\n", b"Host: 10.0.3.7:8017\r\n"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_probes_are_answered_by_whatever_name_they_come(fake_served, host, version):
    for path in (b"/health", b"/ready"):
        with Wire(fake_served.port) as wire:
            wire.send(b"GET " + path + b" HTTP/" + version + b"\r\n" + host + b"Connection: close\r\n\r\n")
            assert wire.reply().status == 200


def test_no_body_is_waited_for_that_no_route_reads(keyed):
    """Nor is one read without a key; the client is told at once, and not to go on."""
    paths = {path for path, methods in keyed.app.openapi()["paths"].items() if "post" in methods}
    assert paths == admission.BODY_PATHS
    key = b"Authorization: Bearer " + KEYS[0].encode() + b"\r\n"
    asked = [("POST", path, b"", 405) for path in ("/health", "/ready", "/")]
    asked += [("PUT", "/health", b"", 405), ("GET", "/health", b"", 200), ("POST", "/nothing", b"", 401)]
    asked += [("POST", "/nothing", key, 404), ("PUT", "/v1/completions", key, 405), ("GET", "/v1/models", key, 200)]
    for method, path, head, status in asked:
        with Wire(keyed.port) as wire:
            wire.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode() + head)
            wire.send(b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n{")
            assert wire.reply().status == status, (method, path)


def test_names_that_were_allowed_are_answered(keyed):
    with Served(fake_engine, ServerConfig(allowed_hosts=("Model.Example",), playground=False)) as served:
        assert patience.get(f"{served.url}/v1/models", headers={"Host": "model.example:99"}).status_code == 200
        assert patience.get(f"{served.url}/v1/models", headers={"Host": "other.example"}).status_code == 421
    # where a key is asked for, no name matters
    assert patience.get(f"{keyed.url}/health", headers={"Host": "evil.example"}).status_code == 200


def test_what_a_page_can_post_without_asking_is_refused(fake_served):
    """Only UTF-8 JSON is read, whatever the route; each refusal is counted."""
    refused = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None]
    refused += ["application/jsonp", "application/json; charset=utf-16", "application/json, text/plain", "text/json; x"]
    refused += ['application/json; p="x', "application/json; charset=utf-8, a=b"]
    paths = [path for path, methods in fake_served.app.openapi()["paths"].items() if "post" in methods]
    counts = fake_served.app.state.server.metrics.counts
    before = counts().refused.get("not_json", 0)
    for number, kind in enumerate(refused):
        path = paths[number % len(paths)]
        headers = {} if kind is None else {"Content-Type": kind}
        answer = patience.post(fake_served.url + path, content=json.dumps(ASK), headers=headers)
        assert (answer.status_code, code_of(answer)) == (415, "not_json"), (path, kind)
        assert "any web page may send them" in answer.json()["error"]["message"]
    assert len(refused) >= len(paths)
    assert counts().refused["not_json"] == before + len(refused)
    url = f"{fake_served.url}/v1/completions"
    for parameters in ('; charset="UTF-8"', ";charset=utf8;", "; odata=a; charset=us-ascii", '; p="x;charset=utf-16"'):
        headers = {"Content-Type": f"Application/JSON{parameters}"}
        assert patience.post(url, content=json.dumps(ASK), headers=headers).status_code == 200, parameters
    answer = patience.post(url, content=json.dumps(ASK), headers=headers | {"Content-Encoding": "gzip"})
    assert (answer.status_code, code_of(answer)) == (415, "compressed")


def test_no_page_of_another_origin_is_let_in(fake_served):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "content-type"}  # fmt: skip
    for answer in (
        patience.request("OPTIONS", f"{fake_served.url}/v1/completions", headers=asked),
        patience.get(f"{fake_served.url}/v1/models", headers={"Origin": "https://evil.example"}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert patience.request("OPTIONS", f"{fake_served.url}/v1/completions", headers=asked).status_code == 405


def test_a_sane_request_id_is_kept_and_another_gets_one_of_ours(fake_served):
    given = set()
    for name in ("abc_1.2-3", "", "a b", "x" * 65, "a/b", "é"):
        answer = patience.get(f"{fake_served.url}/nothing", headers={"X-Request-Id": name.encode("latin1")})
        [told] = answer.headers.get_list("x-request-id")
        assert told == name if name == "abc_1.2-3" else len(told) == 32
        given.add(told)
    assert len(given) == 6


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing", "/v1/completions"])
def test_every_answer_is_guarded(fake_served, path):
    streamed = {"method": "POST", "json": ASK | {"stream": True}} if path == "/v1/completions" else {"method": "GET"}
    headers = patience.request(url=fake_served.url + path, **streamed).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'self'", "'none'")
    assert headers["cache-control"] == ("no-cache" if path in ("/", "/v1/completions") else "no-store")
    assert len(headers["x-request-id"]) == 32
    assert "server" not in headers


def test_unknown_routes_and_methods_have_our_shape(fake_served):
    answer = patience.get(f"{fake_served.url}/v1/nothing")
    assert (answer.status_code, code_of(answer)) == (404, "not_found")
    answer = patience.request("DELETE", f"{fake_served.url}/v1/models")
    assert (answer.status_code, code_of(answer), answer.headers["allow"]) == (405, "method_not_allowed", "GET")
    assert patience.post(f"{fake_served.url}/v1/completions/", json=ASK).status_code == 404  # and no redirect


def test_the_schema_says_how_refusals_look(fake_served):
    schema = patience.get(f"{fake_served.url}/openapi.json").json()
    operations = [(path, operation) for path, methods in schema["paths"].items() for operation in methods.values()]
    assert operations
    for path, operation in operations:
        content = operation["responses"]["4XX"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith("/MessagesErrorBody" if "/messages" in path else "/ErrorBody"), path
        assert "422" not in operation["responses"], path


def test_a_defect_is_told_to_the_log_and_not_to_the_client(caplog):
    with Served(fake_engine) as served:

        async def boom(secret: int = 0) -> None:
            raise ValueError(f"secret {secret}")

        served.app.add_api_route("/boom", boom)
        with caplog.at_level(logging.ERROR, "specexport"):
            answer = patience.get(f"{served.url}/boom?secret=42", headers={"X-Request-Id": "the-id"})
            unreadable = patience.get(f"{served.url}/boom?secret=x")
            assert patience.get(f"{served.url}/health").status_code == 200
    assert (answer.status_code, code_of(answer)) == (500, "internal_error")
    assert "42" not in answer.text
    assert "Traceback" not in answer.text
    record = next(record for record in caplog.records if record.exc_info)
    assert record.fields["request_id"] == "the-id"
    assert isinstance(record.exc_info[1], ValueError)
    assert (unreadable.status_code, unreadable.json()["error"]["param"]) == (400, "query.secret")
