"""The files of the page at ``/``: what is sent, with which headers, and that it needs nothing from elsewhere."""

import re
from importlib import resources

import httpx
import pytest

from specexport_runtime.playground import routes
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.fakes.engine_of import engine_of
from tests.support.servers.serving import Served, fake_engine

PATHS = sorted(routes.PUBLIC_PATHS)
STATIC = resources.files("specexport_runtime.playground").joinpath("static")
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in STATIC.iterdir()}


def get(served, path, **headers):
    return patience.get(served.url + path, headers=headers)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_sent_with_its_type_and_headers(fake_served, path):
    answer = get(fake_served, path)
    assert answer.status_code == 200
    name = path.rpartition("/")[2] or "index.html"
    assert answer.text == TEXTS[name]
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-cache"


def test_a_file_that_is_known_is_not_sent_again(fake_served):
    first = get(fake_served, "/playground/main.js")
    tag = first.headers["etag"]
    assert get(fake_served, "/playground/style.css").headers["etag"] != tag
    for given in (tag, f'"other", W/{tag}', "*"):
        again = get(fake_served, "/playground/main.js", **{"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert get(fake_served, "/playground/main.js", **{"If-None-Match": '"other"'}).status_code == 200
    head = patience.request("HEAD", fake_served.url + "/playground/main.js")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(first.content))


@pytest.mark.parametrize(
    "path",
    [
        "/playground/", "/playground/index.html", "/playground/../routes.py", "/playground/%2e%2e/routes.py",
        "/playground/..%2f..%2fserver/config.py", "/playground/%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "/playground/..%5croutes.py", "/playground/main.js%00.css", "/playground//etc/passwd", "/static/main.js",
    ],
)  # fmt: skip
def test_no_other_path_reaches_a_file(fake_served, path):
    raw = httpx.URL(fake_served.url).copy_with(raw_path=path.encode())  # httpx would tidy the path up
    answer = patience.get(raw)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_the_page_needs_nothing_from_elsewhere():
    assert {path.rpartition("/")[2] or "index.html" for path in PATHS} == set(TEXTS)  # all that lies there is served
    for name, text in TEXTS.items():
        urls = set(re.findall(r"[a-z]+://[^\s\"'<>)]*|(?<=[\"'(])//[a-z][^\s\"'<>)]*", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, name  # a name, never fetched
        assert "@import" not in text, name
        assert "url(" not in text, name


def test_the_page_has_no_inline_code_or_style():
    page = TEXTS["index.html"]
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="playground/main.js">']
    assert "<script" + ' type="module" src="playground/main.js"></script>' in page
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)


def test_no_script_makes_markup_or_code_out_of_text():
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
            assert not re.search(markup, text), name
            assert not re.search(r"localStorage|sessionStorage|document\.cookie", text), name  # the key stays in memory


def test_what_the_page_is_told_of_a_bundle(fake_served):
    told = get(fake_served, "/playground.json")
    assert told.headers["content-type"] == "application/json"
    facts = told.json()
    drafters = {each["name"]: each for each in facts.pop("drafters")}
    assert facts == {
        "model": "fake", "max_model_len": 400, "max_tokens": 399, "chat": True, "max_speculative_tokens": 8,
        "auto": False, "default_drafter": "draft-model", "default_num_speculative_tokens": 4,
    }  # fmt: skip
    assert list(drafters) == ["draft-model", "head", "lookup", "self", "suffix", "chained", "auto"]
    assert drafters["lookup"] == {"name": "lookup", "num_speculative_tokens": 7, "obstacle": None}
    assert drafters["self"]["num_speculative_tokens"] is None
    assert drafters["self"]["obstacle"]


def test_a_bundle_without_draft_and_template():
    def plain():
        engine = fake_engine(chat_template=None)
        return engine_of(engine.target, engine.tokenizer, max_model_len=50, lookahead=3)

    with Served(plain, ServerConfig(model_name="plain", max_tokens=20)) as served:
        facts = get(served, "/playground.json").json()
    assert (facts["chat"], facts["default_drafter"], facts["max_tokens"]) == (False, None, 20)
    able = {each["name"]: each["num_speculative_tokens"] for each in facts["drafters"] if each["obstacle"] is None}
    assert able == {"lookup": 3, "suffix": 3, "auto": 3}


def test_a_model_that_is_loading(fake_served):
    state = fake_served.app.state.server
    engine, state.engine = state.engine, None
    try:
        answer = get(fake_served, "/playground.json")
        assert get(fake_served, "/").status_code == 200
    finally:
        state.engine = engine
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "loading"


def test_the_page_can_be_left_out_and_with_a_key_only_it_is_open():
    with Served(fake_engine, ServerConfig(playground=False)) as served:
        assert [get(served, path).status_code for path in ("/", "/playground.json", "/playground/main.js")] == [404] * 3
    with Served(fake_engine, ServerConfig(playground=False, api_keys=("secret",))) as served:
        assert get(served, "/").status_code == 401, "as any path that is not there"
    with Served(fake_engine, ServerConfig(api_keys=("secret",))) as served:
        assert {get(served, path).status_code for path in PATHS} == {200}
        assert get(served, "/playground.json").status_code == 401
        assert get(served, "/playground.json", Authorization="Bearer secret").status_code == 200
