"""What malformed requests are made of: routes, parameters, values, headers, targets."""

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ROUTES = (
    COMPLETIONS, CHAT, RESPONSES, "/v1/models", "/v1/models/demo", "/health", "/ready", "/metrics", "/",
    "/openapi.json",
)  # fmt: skip
ROUTES += ("/playground.json", "/playground/main.js")
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PROPFIND", "BREW", "post")

NUMBERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "min_tokens")
NUMBERS += ("prompt_logprobs", "max_output_tokens")
TEXTS = ("model", "user", "suffix", "stop", "prompt", "messages", "stream", "stream_options", "logit_bias", "echo")
TEXTS += ("speculative", "response_format", "tools", "metadata", "reference", "ignore_eos", "no_such_parameter", "")
TEXTS += ("input", "instructions", "text", "include", "reasoning", "store", "previous_response_id")
TEXTS += ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
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
