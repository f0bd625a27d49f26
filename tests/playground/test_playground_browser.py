"""The page at ``/`` in a real browser: clicks, what they send, and what is shown of the answer."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.fakes.engine_of import engine_of
from tests.support.servers.serving import Served, fake_engine

pytestmark = pytest.mark.browser

PROMPT = 'def read_lines(path, *, encoding="utf-8"):\n    """Return the lines of a file without their line endings."""'
EVIL = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
KINDS = ("accepted", "corrected", "bonus", "target")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; nothing is downloaded."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("SPECEXPORT_REQUIRE_BROWSER") == "1":
            pytest.fail("SPECEXPORT_REQUIRE_BROWSER is 1, and there is no chromium in the path")
        pytest.skip("there is no chromium in the path")
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=sandbox)
        yield chromium
        chromium.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a server. In the end no request has gone elsewhere, and the console has no error.

    A status other than success is one for Chromium: tests that want one say which.
    """
    with _pages(browser) as open_one:
        yield open_one


@contextmanager
def _pages(browser: Any) -> Iterator[Open]:
    opened: list[tuple[Any, str, list[str], list[str], tuple[int, ...]]] = []
    titles: list[str] = []

    def open_one(served: Served, *, statuses: tuple[int, ...] = (), ready: bool = True, **context: Any) -> Any:
        page = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context)).new_page()
        page.set_default_timeout(60_000)
        urls: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        opened.append((page, served.url, urls, errors, statuses))
        page.goto(served.url)
        if ready:
            page.locator("#drafter option").first.wait_for(state="attached")
        return page

    try:
        yield open_one
    finally:
        for page, *_ in opened:
            titles.append(page.title())
            page.context.close()
    for _, url, urls, errors, statuses in opened:
        assert urls
        assert all(each.startswith(f"{url}/") for each in urls), urls
        wanted = tuple(f"server responded with a status of {status}" for status in statuses)
        assert [error for error in errors if not any(text in error for text in wanted)] == []
    assert "pwned" not in "".join(titles)


def run(page: Any, *, prompt: str | None = None, tokens: int = 64, wait: bool = True) -> None:
    """Fill the form and click on Run."""
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(tokens))
    page.click("#run")
    if wait:
        page.wait_for_selector("#run:enabled")


def shown_tokens(page: Any, column: str) -> list[dict[str, str]]:
    """Text and kind of each token on the page, and who drafted it if it was accepted."""
    nodes = "[...document.querySelectorAll(`#${column} [data-output] > .t`)]"
    js = f"column => {nodes}.map((t) => ({{text: t.textContent, kind: t.classList[1], drafter: t.dataset.drafter}}))"
    tokens = page.evaluate(js, column)
    return [{name: value for name, value in token.items() if value is not None} for token in tokens]


def stat(page: Any, column: str, name: str) -> str:
    return page.text_content(f"#{column} [data-stat={name}]")  # type: ignore[no-any-return]


def reported(
    served: Served, prompt: str, tokens: int, **speculative: Any
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Tokens with their origins, and the usage, of the same request sent by another client."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "speculative": {"token_origins": True} | speculative,
    }  # fmt: skip
    lines = patience.post(f"{served.url}/v1/completions", json=body).text.splitlines()
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]
    origins = [token for event in events for choice in event["choices"] for token in choice["tokens"]]
    return origins, events[-1]["usage"]


@pytest.fixture(scope="module")
def slow_served() -> Iterator[Served]:
    """Two rows, and a step of the target takes 50 ms: 300 tokens take seconds, whatever else the machine does."""
    with Served(lambda: fake_engine(2, step_seconds=0.05), ServerConfig(model_name="slow")) as served:
        yield served


@pytest.fixture
def ends(slow_served) -> list[str]:
    """How requests end."""
    reasons: list[str] = []

    class Watcher:
        def on_round(self, record: Any) -> None:
            pass

        def on_finish(self, sequence: Any) -> None:
            reasons.append(sequence.finish_reason)

    slow_served.engine.engine.add_observer(Watcher())
    return reasons


def test_a_click_runs_both_and_shows_where_each_token_came_from(demo_served, open_page):
    page = open_page(demo_served)
    assert page.text_content("#fact-model") == "demo"
    assert page.input_value("#drafter") == "auto"
    page.select_option("#drafter", "draft-model")  # what `auto` copies depends on the requests before
    run(page, prompt=PROMPT, tokens=64)

    origins, usage = reported(demo_served, PROMPT, 64, drafter="draft-model", num_speculative_tokens=4)
    drafts = usage["speculative"]
    assert {token["kind"] for token in origins} >= {"accepted", "corrected", "bonus"}  # else this shows little
    assert shown_tokens(page, "speculative") == origins
    plain = shown_tokens(page, "plain")
    assert {token["kind"] for token in plain} == {"target"}
    assert len(plain) == 64

    counts = {kind: int(page.text_content(f"[data-count={kind}]")) for kind in KINDS}
    assert counts == {kind: sum(token["kind"] == kind for token in origins) for kind in KINDS}
    assert sum(counts.values()) == usage["completion_tokens"] == 64
    assert counts["accepted"] == drafts["accepted"]
    assert page.text_content("#drafters") == f"draft-model {counts['accepted']}"
    assert page.locator("#chart g").count() == drafts["rounds"]
    assert page.locator("#chart g rect.accepted").count() == drafts["accepted"]
    acceptance = float(stat(page, "speculative", "acceptance").removesuffix(" %"))
    assert acceptance == pytest.approx(100 * drafts["acceptance_rate"], abs=0.051)
    assert float(stat(page, "speculative", "length")) == pytest.approx(drafts["mean_accepted_length"], abs=0.0051)
    assert (stat(page, "plain", "tokens"), stat(page, "plain", "rounds")) == ("64", "64")

    texts = ["".join(token["text"] for token in shown_tokens(page, column)) for column in ("speculative", "plain")]
    assert texts[0] == texts[1]
    assert page.text_content("#equal") == "✓ Both texts are equal"
    speeds = [float(stat(page, column, "speed").replace(",", "")) for column in ("speculative", "plain")]
    shown = float(page.text_content("#speedup").partition("×")[0])
    assert shown == pytest.approx(speeds[0] / speeds[1], rel=0.02, abs=0.02)
    assert page.text_content("#speculative .prompt") == PROMPT
    demo_served.wait_until_idle()


def test_a_token_tells_where_it_came_from_by_mouse_and_keyboard(fake_served, open_page):
    page = open_page(fake_served)
    run(page, prompt="w1 w2", tokens=40)
    assert page.is_hidden("#tip")
    token = page.locator("#speculative .t.accepted").first
    number = int(token.get_attribute("data-round"))
    token.hover()
    drafter = token.get_attribute("data-drafter")
    assert drafter in ("suffix", "draft-model")
    assert page.text_content("#tip").startswith(f"Accepted: drafted by {drafter}, and the target agreed")
    assert f"Round {number + 1}: " in page.text_content("#tip")
    assert f" accepted of {drafter}, " in page.text_content("#tip")
    assert page.get_attribute("#chart g.hot", "data-round") == str(number)
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")

    page.focus("#speculative [data-output]")
    for expected in range(3):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.index") == str(expected)
        assert f"token {expected + 1}" in page.text_content("#tip")
    assert "token 3" in page.text_content("#token-info")  # said aloud
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")

    page.locator("#chart g .accepted").first.hover()
    assert page.text_content("#tip").startswith("Round ")
    assert page.locator("#speculative .t.hot").count() > 1


def test_the_page_sums_up_by_drafter(demo_served, open_page):
    page = open_page(demo_served)
    page.select_option("#drafter", "chained")  # what `auto` copies depends on the requests before
    prompt = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n    return"
    run(page, prompt=prompt, tokens=64)
    origins, usage = reported(demo_served, prompt, 64, drafter="chained", num_speculative_tokens=4)
    assert shown_tokens(page, "speculative") == origins
    accepted = {name: counts["accepted"] for name, counts in usage["speculative"]["drafters"].items()}
    shown = dict(part.rsplit(" ", 1) for part in page.text_content("#drafters").split(", "))
    assert shown == {name: str(count) for name, count in accepted.items() if count}
    assert set(shown) == {"lookup", "draft-model"}
    demo_served.wait_until_idle()


def test_the_text_scrolls_to_what_is_chosen(fake_served, open_page):
    page = open_page(fake_served, viewport={"width": 700, "height": 700})
    run(page, prompt="w1 w2", tokens=300)
    top = "document.querySelector('#speculative [data-output]').scrollTop"
    assert page.evaluate(top) > 100  # it followed the end
    page.locator("#chart g").first.scroll_into_view_if_needed()
    page.locator("#chart g").first.click()
    assert page.evaluate(top) == 0
    page.locator("#chart g").last.click()
    assert page.evaluate(top) > 100
    page.focus("#speculative [data-output]")
    page.keyboard.press("ArrowRight")  # to the first token
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(top) < 100
    assert "token 1" in page.text_content("#tip")
    assert page.is_visible("#tip")


def test_numbers_are_live_and_stop_frees_the_row(slow_served, open_page, ends):
    page = open_page(slow_served)
    run(page, prompt="w1", tokens=300, wait=False)
    page.wait_for_selector("#speculative [data-index='20']")  # no wait_for_function: the page allows no eval
    assert page.get_attribute("#speculative", "data-phase") == "running"
    assert page.get_attribute("#plain", "data-phase") == "waiting"
    assert page.text_content("#plain [data-state]") == "waits its turn"
    for name in ("speed", "first", "acceptance", "length"):
        assert stat(page, "speculative", name)[0].isdigit(), name
    assert slow_served.engine.num_active == 1
    first = page.query_selector("#speculative .t")
    page.click("#stop")
    slow_served.wait_until_idle()
    assert ends[-1] == "cancelled"
    page.wait_for_selector("#run:enabled")
    assert page.text_content("#speedup") == "Stopped"
    assert page.text_content("#speculative [data-state]") == "stopped"
    assert first.is_visible()  # appended to, never drawn anew
    assert len(shown_tokens(page, "speculative")) < 300
    assert len(shown_tokens(page, "plain")) == 0
    assert page.is_hidden("#error")
    run(page, tokens=10)
    assert page.text_content("#equal") == "✓ Both texts are equal"
    ends.clear()
    run(page, tokens=300, wait=False)
    page.wait_for_selector("#speculative .t")
    page.goto("about:blank")  # as a page that is closed
    slow_served.wait_until_idle()
    assert ends == ["cancelled"]
    page.goto(slow_served.url)


def test_both_at_the_same_time_only_if_asked(slow_served, open_page, monkeypatch):
    page = open_page(slow_served)
    engine = slow_served.engine
    running: list[int] = []  # as each request comes
    submit_all = engine.submit_all
    monkeypatch.setattr(engine, "submit_all", lambda specs: running.append(engine.num_active) or submit_all(specs))
    assert "plain run comes second" in page.text_content("#order-note")
    run(page, prompt="w1", tokens=20)
    assert running == [0, 0]
    assert "while both ran" not in page.text_content("#speedup-note")
    running.clear()
    page.check("#together")
    assert "neither speed is its own" in page.text_content("#order-note")
    run(page, prompt="w1", tokens=20)
    assert running == [0, 1]
    assert "measured while both ran" in page.text_content("#speedup-note")
    running.clear()
    page.uncheck("#compare")
    assert page.is_disabled("#together")
    run(page, tokens=10)
    assert running == [0]
    assert page.is_hidden("#plain")
    assert page.text_content("#speedup").endswith("tokens/s")


def test_controls_send_what_they_say(fake_served, open_page):
    page = open_page(fake_served)
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#temperature", "0.8")
    page.fill("#top-p", "0.9")
    page.fill("#seed", "7")
    page.select_option("#drafter", "lookup")
    assert page.input_value("#lookahead") == "7"
    page.select_option("#lookahead", "3")
    assert page.locator("#drafter option[value=self]").is_disabled()
    run(page, prompt="w1 w2", tokens=12)
    both = {"model": "fake", "prompt": "w1 w2", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    both |= {"stream": True, "stream_options": {"include_usage": True}}
    drafts = {"drafter": "lookup", "num_speculative_tokens": 3, "token_origins": True}
    assert bodies == [
        both | {"speculative": drafts},
        both | {"speculative": {"drafter": "none", "token_origins": True}},
    ]
    assert page.text_content("#equal") == "Sampled: the texts may differ"

    bodies.clear()
    page.check("input[value=chat]", force=True)
    page.fill("#system", "w5")
    page.fill("#seed", "")
    page.fill("#prompt", "w3")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#plain[data-phase=done] [data-index='11']")
    assert bodies[0]["messages"] == [{"role": "system", "content": "w5"}, {"role": "user", "content": "w3"}]
    assert not {"prompt", "seed"} & set(bodies[0])
    assert page.locator(".prompt").count() == 0


def test_errors_are_shown_as_text(fake_served, open_page):
    page = open_page(fake_served, statuses=(400,))
    run(page, prompt="", tokens=8)
    assert page.text_content("#error-title") == "The server refused the request"
    assert "HTTP 400" in page.text_content("#error-detail")
    assert "request " in page.text_content("#error-detail")
    message = {"error": {"message": EVIL, "code": EVIL, "param": None, "type": "x"}}
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json=message))
    run(page, prompt="w1", tokens=8)
    assert page.text_content("#error-text") == EVIL
    page.unroute("**/v1/completions")
    broken = 'data: {"choices": [{"index": 0, "text": "a", "tokens": [{"text": "a", "kind": "target"}]}]}\n\n'
    late = f"{broken}data: {json.dumps(message)}\n\ndata: [DONE]\n\n"
    for body, title in ((broken, "The stream broke off"), (late, "The request failed")):
        page.route("**/v1/completions", lambda route, _, body=body: route.fulfill(status=200, body=body))
        run(page, prompt="w1", tokens=8)
        assert page.text_content("#error-title") == title
        page.unroute("**/v1/completions")
    run(page, prompt="w1", tokens=8)
    assert page.is_hidden("#error")
    assert page.locator("#error img, #error script").count() == 0


def test_text_of_the_model_and_of_the_prompt_is_never_markup(open_page):
    words = [f"{EVIL}{i}" for i in range(17)]

    def engine() -> SpecEngine:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return engine_of(FakeExecutor(17, 2, 80), tokenizer, draft=FakeExecutor(17, 2, 80), max_model_len=64)

    with Served(engine, ServerConfig(model_name="<b>model")) as served:
        page = open_page(served)
        assert page.text_content("#fact-model") == "<b>model"
        run(page, prompt=EVIL, tokens=12)
        assert page.text_content("#speculative .prompt") == EVIL
        assert EVIL in shown_tokens(page, "speculative")[0]["text"]
        page.locator("#speculative .t").first.hover()
        assert page.locator("#results script, #results [data-output] img, #tip *:not(div)").count() == 0


def test_a_key_is_asked_for_and_works(open_page):
    with Served(fake_engine, ServerConfig(model_name="fake", api_keys=("secret",))) as served:
        page = open_page(served, statuses=(401,), ready=False)
        page.wait_for_selector("#api-key:focus")
        assert page.text_content("#error-title") == "The server asks for an API key"
        page.fill("#api-key", "wrong")
        run(page, prompt="w1", tokens=8)
        assert page.is_visible("#error")
        page.fill("#api-key", "secret")
        page.press("#api-key", "Enter")
        page.wait_for_selector("#equal:visible")
        assert page.text_content("#equal") == "✓ Both texts are equal"
        assert page.is_hidden("#error")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


# Contrast of text by WCAG 2, of everything that is shown.
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.matches("button:disabled, option")) continue;
    const pair = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push(`${node.className || node.tagName} ${ratio.toFixed(2)} ${node.textContent.slice(0, 20)}`);
  }
  return low;
}"""


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (768, "light"), (1280, "dark")])
def test_it_fits_and_can_be_read(fake_served, open_page, scheme, width):
    page = open_page(fake_served, viewport={"width": width, "height": 800}, color_scheme=scheme)
    run(page, prompt="w1 " * 40, tokens=200)
    page.wait_for_selector("#equal:visible")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    clipped = (
        "[...document.querySelectorAll('dl, header, label, button')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    )
    assert page.evaluate(f"{clipped}.map((e) => e.className || e.tagName)") == []
    assert page.evaluate(CONTRAST) == []
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(shade.removeprefix("rgb(").partition(",")[0]) < 64) == (scheme == "dark")
    style = "getComputedStyle(document.querySelector(`.legend .t.${kind}`)).textDecorationStyle"
    lines = page.evaluate(f"(kinds) => kinds.map((kind) => {style})", list(KINDS))
    assert len(set(lines)) == 4  # kinds differ in shape, not in colour alone
