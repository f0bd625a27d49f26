import hashlib
import hmac
import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from specexport_runtime.server.admission import host_name
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
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
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


@pytest.mark.parametrize(
    "path", ["/metrics", "/openapi.json", "/playground.json", "/v1/models", "/nothing", "/health/"]
)
def test_what_tells_of_the_model_needs_a_key(keyed, path):
    answer = patience.get(keyed.url + path)
    assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_of_the_api_needs_a_key(keyed):
    routes = keyed.app.openapi()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"} <= set(routes)
    for path in set(routes) - {"/health", "/ready"}:
        for method in routes[path]:
            assert patience.request(method, keyed.url + path, json=ASK).status_code == 401, (method, path)


def test_probes_need_no_key(keyed):
    for path in ("/health", "/ready"):
        assert patience.get(keyed.url + path).status_code == 200, path


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(keyed, key, scheme):
    answer = patience.post(f"{keyed.url}/v1/completions", json=ASK, headers={"Authorization": f"{scheme} {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer first-ke", "Bearer first-keyy", "Basic first-key", "first-key", "Bearer ÿ",
     "Bearer first-key, Bearer second-key-which-is-longer"],
)  # fmt: skip
def test_other_credentials_do_not_open(keyed, value):
    headers = {"Authorization": value.encode("latin1")}
    assert patience.post(f"{keyed.url}/v1/completions", json=ASK, headers=headers).status_code == 401


def test_two_credentials_do_not_open(keyed):
    headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer wrong")]
    assert patience.get(f"{keyed.url}/v1/models", headers=headers).status_code == 401


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


def test_a_key_is_in_no_text_of_the_settings(keyed):
    assert not any(key in repr(keyed.config) for key in KEYS)


def test_a_refused_body_is_not_waited_for(keyed):
    with Wire(keyed.port) as wire:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        wire.send(head + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
        assert wire.reply().status == 401


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.9.9.9:1", "[::1]:80"])
def test_names_of_this_machine_are_answered(fake_served, name):
    assert patience.get(f"{fake_served.url}/health", headers={"Host": name}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "localhost:80:80", "[::1", "",
             "localhost:x", "[::1]x"]
)  # fmt: skip
def test_other_names_are_not(fake_served, name):
    answer = patience.get(f"{fake_served.url}/v1/models", headers={"Host": name})
    assert (answer.status_code, code_of(answer)) == (421, "wrong_host")


@pytest.mark.parametrize("lines", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_there_must_be_one_name(fake_served, lines):
    with Wire(fake_served.port) as wire:
        wire.send(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        assert wire.reply().status == 421


def test_names_that_were_allowed_are_answered():
    with Served(fake_engine, ServerConfig(allowed_hosts=("Model.Example",), playground=False)) as served:
        assert patience.get(f"{served.url}/health", headers={"Host": "model.example:99"}).status_code == 200
        assert patience.get(f"{served.url}/health", headers={"Host": "other.example"}).status_code == 421
        assert patience.get(f"{served.url}/").status_code == 404


def test_with_a_key_the_name_does_not_matter(keyed):
    assert patience.get(f"{keyed.url}/health", headers={"Host": "evil.example"}).status_code == 200


def test_names_without_their_port():
    assert [host_name(name) for name in (b"A.b.:1", b"[::1]:2", b"[::1]", b"a:", b"::1")] == [
        "a.b", "[::1]", "[::1]", "a:", "::1",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp",
    "application/json; charset=utf-16", "",
])  # fmt: skip
def test_what_a_page_can_post_without_asking_is_refused(fake_served, kind):
    for path, methods in fake_served.app.openapi()["paths"].items():
        if "post" in methods:
            answer = patience.post(fake_served.url + path, content=json.dumps(ASK), headers={"Content-Type": kind})
            assert (answer.status_code, code_of(answer)) == (415, "not_json"), path


def test_a_body_without_a_type_is_refused(fake_served):
    with Wire(fake_served.port) as wire:
        wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        assert wire.reply().code == "not_json"


def test_a_charset_of_utf8_is_fine_and_compression_is_not(fake_served):
    url, content = f"{fake_served.url}/v1/completions", json.dumps(ASK)
    headers = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    assert patience.post(url, content=content, headers=headers).status_code == 200
    answer = patience.post(url, content=content, headers=headers | {"Content-Encoding": "gzip"})
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


def test_a_sane_request_id_is_kept(fake_served):
    answer = patience.get(f"{fake_served.url}/health", headers={"X-Request-Id": "abc_1.2-3"})
    assert answer.headers["x-request-id"] == "abc_1.2-3"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/b", "é"])
def test_another_gets_one_of_ours(fake_served, name):
    headers = {"X-Request-Id": name.encode("latin1")}
    given = [patience.get(f"{fake_served.url}/nothing", headers=headers).headers.get_list("x-request-id") for _ in "12"]
    assert all(len(ids) == 1 and len(ids[0]) == 32 for ids in given)
    assert given[0] != given[1]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_every_answer_is_guarded(fake_served, path):
    headers = patience.get(fake_served.url + path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'self'", "'none'")
    assert headers["cache-control"] == ("no-cache" if path == "/" else "no-store")
    assert "server" not in headers


def test_a_stream_is_guarded_and_not_kept(fake_served):
    answer = patience.post(f"{fake_served.url}/v1/completions", json=ASK | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["cache-control"] in ("no-store", "no-cache")
    assert len(answer.headers["x-request-id"]) == 32


def test_unknown_routes_and_methods_have_our_shape(fake_served):
    answer = patience.get(f"{fake_served.url}/v1/nothing")
    assert (answer.status_code, code_of(answer)) == (404, "not_found")
    answer = patience.request("DELETE", f"{fake_served.url}/v1/models")
    assert (answer.status_code, code_of(answer), answer.headers["allow"]) == (405, "method_not_allowed", "GET")
    assert patience.post(f"{fake_served.url}/v1/completions/", json=ASK).status_code == 404  # and no redirect


def test_the_schema_says_how_refusals_look(fake_served):
    schema = patience.get(f"{fake_served.url}/openapi.json").json()
    operations = [(path, operation) for path, methods in schema["paths"].items() for operation in methods.values()]
    assert len(operations) >= 7
    for path, operation in operations:
        content = operation["responses"]["4XX"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith("/ErrorBody"), path
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


def test_refusals_are_counted(fake_served):
    def counted() -> int:
        return fake_served.app.state.server.metrics.counts().refused.get("not_json", 0)

    before = counted()
    patience.post(f"{fake_served.url}/v1/completions", content="{}")
    assert counted() == before + 1
