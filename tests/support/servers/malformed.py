"""Malformed requests of many kinds, from a seed: the same seed gives the same bytes."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.servers.raw_http import RawRequest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (
    COMPLETIONS, CHAT, RESPONSES, "/v1/models", "/v1/models/demo", "/health", "/ready", "/metrics", "/",
    "/openapi.json", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip
ROUTES += ("/playground.json", "/playground/main.js")
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PROPFIND", "BREW", "post")

NUMBERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "min_tokens")
NUMBERS += ("prompt_logprobs", "max_output_tokens")
TEXTS = ("model", "user", "suffix", "stop", "prompt", "messages", "stream", "stream_options", "logit_bias", "echo")
TEXTS += ("speculative", "response_format", "tools", "metadata", "reference", "ignore_eos", "no_such_parameter", "")
TEXTS += ("input", "instructions", "text", "include", "reasoning", "store", "previous_response_id")
TEXTS += ("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "system", "thinking", "output_config")
SPECULATIVE = ("num_speculative_tokens", "drafter", "acceptance", "reference", "token_origins", "no_such_parameter")

# JSON values as texts: what json.dumps cannot write is sent too.
ODD_NUMBERS = ["1e999", "-1e999", "1" + "0" * 400, "9" * 5000, "-0", "-1", "0", "0.5", "1e308", "5e-324", "NaN"]
ODD_NUMBERS += [str(2**31), str(2**63), str(-(2**63)), "Infinity", "-Infinity", "1" * 20 + ".5", "01", "1.", "0x10"]
ODD_VALUES = [
    "null", "true", "false", '""', '"x"', "[]", "{}", "[[]]", "[null]", '[""]', '{"a":1}', '["a",1]', "[1e400]",
]  # fmt: skip
ODD_VALUES += ["[true]", r'"\ud800"', r'["\udfff a"]', r'{"\ud83d":1}', r'"\u0000"', '"\x00"']
ODD_VALUES += ["[-1]", f"[{2**31}]", f"[{2**63}]", f"[{2**200}]", "[1.5]", "[[1,2],[3]]", '[[1,"a"]]', '["w1",[1]]']
ODD_VALUES += ["[" + ",".join(["1"] * 3000) + "]", "[" + ",".join(['"a"'] * 200) + "]", "{" * 50 + "}" * 50]
ODD_VALUES += ['"' + "a" * 3000 + '"', '[{"role":"user"}]', '[{"role":"user","content":[{"type":"image_url"}]}]']
ODD_VALUES += ['[{"role":"x","content":"a"}]', '[{"role":"user","content":1}]', '[{"role":"user","content":""}]']
ODD_VALUES += [
    '[{"content":"a"}]', '[{"role":"user","content":"\\ud800"}]', '{"1":1e999}', '{"1":"x"}', '{"50256":-100}',
]  # fmt: skip
ODD_VALUES += ['[{"type":"function","name":"f"}]', '[{"type":"function","function":{"name":"f"}}]', '"required"']
ODD_VALUES += ['[{"type":"reasoning"}]', '[{"type":"function_call_output","call_id":"a","output":"b"}]']
ODD_VALUES += ['{"include_usage":1}', '{"-1":1}', '{"a":1}', '{"include_usage":true,"x":1}', '"' + "w1 " * 900 + '"']

TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json", "*/*")
TYPES += ("application/json; charset=utf-16", "application/json; charset=no-such", "application/json;;;", "a" * 900)

NAMES = ("X-Request-Id", "Authorization", "Accept", "Accept-Encoding", "Content-Encoding", "Expect", "Upgrade", "Range")
NAMES += ("Origin", "Referer", "Cookie", "traceparent", "tracestate", "baggage", "X-Forwarded-For", "TE", "Host")
HEADER_VALUES = (b"", b"\xff\xfe", b"Bearer \xe9\xe8", b"Basic !!!", b"a" * 9000, b"100-continue", b"websocket", b"h2c")
HEADER_VALUES += (b"bytes=-1", b"gzip", b"../../x", b"\x01\x02", b"evil.example", b"[::1", b"%0d%0a", b"Bearer", b"a,b")
HEADER_VALUES += (b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-ff", b"\t")

PATHS = ("//", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/%00", "/%ff", "*", "http://evil.example/v1/models")
PATHS += (
    "/v1/models/" + "a" * 3000, "/v1/models/%00", "/v1/models/a%2fb", "/v1/completions/", "/v1", "/v1/models/\u00e9",
)  # fmt: skip
PATHS += ("/static/..%2f..%2fconfig.py", "/static/%2e%2e/%2e%2e/config.py", "/?\xff", "/metrics?name[]=\x01")
PATHS += ("/v1/completions?" + "a=b&" * 500, "/static/", "/static/no-such.js", "/docs", "/v1/models/%F0%9F")


def malformed(seed: int) -> Iterator[RawRequest]:
    draw = random.Random(seed)
    while True:
        for kind in KINDS:
            yield kind(draw)


def valid_body(draw: random.Random, path: str) -> dict[str, Any]:
    length = draw.choice([1, 2, 3])
    if path == RESPONSES:
        return {"model": "demo", "max_output_tokens": length, "input": "w1 w2", "stream": draw.random() < 0.3}
    body: dict[str, Any] = {"model": "demo", "max_tokens": length}
    if path in (CHAT, MESSAGES):
        return body | {"messages": [{"role": "user", "content": "w1 w2"}]}
    return body | {"prompt": "w1 w2", "stream": draw.random() < 0.3}


def frame(
    path: str, body: bytes = b"", *, method: str = "POST",
    headers: tuple[tuple[str, bytes], ...] = (("Content-Type", b"application/json"),), length: bytes | None = None,
) -> bytes:  # fmt: skip
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogatepass")]
    if not any(name == "Host" for name, _ in headers):
        lines.append(b"Host: 127.0.0.1")
    lines += [name.encode() + b": " + value for name, value in headers]
    lines += [b"Connection: close", b"Content-Length: " + (str(len(body)).encode() if length is None else length)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _endpoint(draw: random.Random) -> str:
    return draw.choice((COMPLETIONS, COMPLETIONS, CHAT, RESPONSES, MESSAGES))


def _json(draw: random.Random, path: str) -> bytes:
    return json.dumps(valid_body(draw, path)).encode()


def random_bytes(draw: random.Random) -> RawRequest:
    return RawRequest("random bytes", draw.randbytes(draw.choice([1, 7, 100, 5000])), "settle")


def random_body(draw: random.Random) -> RawRequest:
    return RawRequest("random body", frame(_endpoint(draw), draw.randbytes(draw.choice([0, 1, 20, 3000]))))


def truncated(draw: random.Random) -> RawRequest:
    """JSON that ends early; its length says so, or not."""
    path = _endpoint(draw)
    body = _json(draw, path)
    cut = body[: draw.randrange(len(body))]
    if draw.random() < 0.9:
        return RawRequest("truncated JSON", frame(path, cut))
    return RawRequest("unfinished body", frame(path, cut, length=str(len(body)).encode()))


def flipped(draw: random.Random) -> RawRequest:
    """Valid JSON with a few other bytes."""
    path = _endpoint(draw)
    body = bytearray(_json(draw, path))
    for _ in range(draw.choice([1, 1, 3, 10])):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return RawRequest("flipped bytes", frame(path, bytes(body)))


def nested(draw: random.Random) -> RawRequest:
    depth = draw.choice([20, 500, 5000, 100_000])
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    value = opening * depth + "1" + closing * (depth if draw.random() < 0.8 else 0)
    name = draw.choice(TEXTS)
    body = value if draw.random() < 0.3 else f'{{"prompt":"w1","max_tokens":1,{json.dumps(name)}:{value}}}'
    return RawRequest("deep nesting", frame(_endpoint(draw), body.encode()))


def odd_number(draw: random.Random) -> RawRequest:
    return _with_value("odd number", draw, draw.choice(NUMBERS), draw.choice(ODD_NUMBERS))


def odd_value(draw: random.Random) -> RawRequest:
    """A value of another type, lone surrogates, NUL, long lists."""
    return _with_value("odd value", draw, draw.choice(NUMBERS + TEXTS * 2), draw.choice(ODD_VALUES))


def odd_speculative(draw: random.Random) -> RawRequest:
    value = draw.choice(ODD_VALUES + ODD_NUMBERS)
    return _with_value("odd speculative", draw, "speculative", f'{{"{draw.choice(SPECULATIVE)}":{value}}}')


def _with_value(kind: str, draw: random.Random, name: str, value: str) -> RawRequest:
    path = _endpoint(draw)
    body = valid_body(draw, path)
    body.pop(name, None)
    text = json.dumps(body)[:-1] + f", {json.dumps(name)}: {value}}}"
    return RawRequest(kind, frame(path, text.encode("utf-8", "surrogatepass")))


def wrong_encoding(draw: random.Random) -> RawRequest:
    """Compressed, UTF-16, latin-1, with a byte order mark, half a character."""
    path = _endpoint(draw)
    text = json.dumps(valid_body(draw, path) | {"user": "é€😀"}, ensure_ascii=False)
    kind, body = draw.choice(
        [
            (b"gzip", gzip.compress(text.encode(), mtime=0)), (b"gzip", text.encode()), (b"br", text.encode()),
            (b"identity", text.encode("utf-16")), (b"identity", text.encode("utf-8")[:-6] + b'"}'),
            (b"identity", text.encode("latin-1", "replace").replace(b"?", b"\xe9")),
            (b"identity", text.encode("utf-8-sig")), (b"", text.encode("utf-32")),
        ]
    )  # fmt: skip
    headers = (("Content-Type", b"application/json"), ("Content-Encoding", kind))
    return RawRequest("wrong encoding", frame(path, body, headers=headers))


def bad_chunks(draw: random.Random) -> RawRequest:
    """Chunked encoding gone wrong, and two opinions about the length."""
    path = _endpoint(draw)
    body = _json(draw, path)
    size = f"{len(body):x}".encode()
    chunks = draw.choice(
        [
            size + b"\r\n" + body + b"\r\n0\r\n\r\n", size + b"\r\n" + body, b"-5\r\n" + body + b"\r\n0\r\n\r\n",
            b"zz\r\n" + body, b"f" * 40 + b"\r\n" + body, b"\r\n\r\n",
            size + b";" + b"x" * 3000 + b"\r\n" + body + b"\r\n0\r\nX: y\r\n\r\n", b"1\r\n{\r\n" * 50 + b"0\r\n\r\n",
        ]
    )  # fmt: skip
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n".encode()
    head += b"Content-Type: application/json\r\n"
    extra = draw.choice([b"", b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: gzip\r\n"])
    return RawRequest("bad chunks", head + extra + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, "settle")


def bad_length(draw: random.Random) -> RawRequest:
    """A length that is none, or another one than that of the body."""
    path = _endpoint(draw)
    length = draw.choice([b"-1", b"abc", b"", b"99999999999999999999999", b"1e3", b"3", b"2000000", b"3, 3", b"0"])
    return RawRequest("bad length", frame(path, _json(draw, path), length=length), "settle")


def bad_headers(draw: random.Random) -> RawRequest:
    path = draw.choice(ROUTES)
    odd: tuple[tuple[str, bytes], ...] = tuple(
        (draw.choice(NAMES), draw.choice(HEADER_VALUES)) for _ in range(draw.choice([1, 1, 2, 5]))
    )
    odd += draw.choice([(), (), (("", b"x"),), ((" Folded", b"x\r\n y"),), (("A B", b"x"),), (("Nul", b"\x00"),)])
    post = path in (COMPLETIONS, CHAT, RESPONSES)
    headers = (("Content-Type", b"application/json"), *odd)
    body, method = (_json(draw, path), "POST") if post else (b"", "GET")
    return RawRequest("bad headers", frame(path, body, method=method, headers=headers), "settle")


def huge_headers(draw: random.Random) -> RawRequest:
    size = draw.choice([2000, 40_000, 200_000])
    if draw.random() < 0.3:
        return RawRequest("huge headers", frame("/" + "a" * size, method="GET"), "settle")
    many = tuple((f"X-{i}", b"v" * 20) for i in range(size // 30)) if draw.random() < 0.5 else (("X-Big", b"v" * size),)
    return RawRequest("huge headers", frame("/health", method="GET", headers=many), "settle")


def wrong_method(draw: random.Random) -> RawRequest:
    method, path = draw.choice(METHODS), draw.choice(ROUTES)
    body = _json(draw, path) if draw.random() < 0.3 else b""
    return RawRequest("wrong method", frame(path, body, method=method), "settle", head=method == "HEAD")


def wrong_type(draw: random.Random) -> RawRequest:
    path, kind = _endpoint(draw), draw.choice(TYPES)
    return RawRequest("wrong type", frame(path, _json(draw, path), headers=(("Content-Type", kind.encode()),)))


def odd_path(draw: random.Random) -> RawRequest:
    """Targets that are no route: traversal, NUL, another host's."""
    return RawRequest("odd path", frame(draw.choice(PATHS), method=draw.choice(["GET", "POST"])), "settle")


def odd_version(draw: random.Random) -> RawRequest:
    """HTTP 0.9, 1.0, 2, TLS, and request lines that are none."""
    data = draw.choice(
        [
            b"GET /health\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"GET  /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"GET /health HTTP/1.1\nHost: 127.0.0.1\nConnection: close\n\n", b"\r\n" * 50,
            b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        ]
    )  # fmt: skip
    return RawRequest("odd version", data, "settle")


def pipelined(draw: random.Random) -> RawRequest:
    """Several requests at once, the last one noise."""
    path = _endpoint(draw)
    one = frame(path, _json(draw, path)).replace(b"Connection: close\r\n", b"")
    tail = draw.choice([draw.randbytes(50), b"GET", frame("/health", method="GET"), b"\r\n\r\n", one[:-5]])
    return RawRequest("pipelined", one * draw.choice([1, 2, 4]) + tail, "settle")


def hung_up(draw: random.Random) -> RawRequest:
    """A client that goes away: in the middle of its request, or right after it, streaming or not."""
    path = _endpoint(draw)
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 200}
    body = json.dumps(valid_body(draw, path) | {"stream": draw.random() < 0.5} | length).encode()
    data = frame(path, body)
    cut = len(data) if draw.random() < 0.5 else draw.randrange(len(data))
    return RawRequest("hung up", data[:cut], "abort")


KINDS: tuple[Callable[[random.Random], RawRequest], ...] = (
    random_bytes, random_body, truncated, flipped, nested, odd_number, odd_value, odd_speculative, wrong_encoding,
    bad_chunks, bad_length, bad_headers, huge_headers, wrong_method, wrong_type, odd_path, odd_version, pipelined,
    hung_up, odd_number, odd_value,
)  # fmt: skip
