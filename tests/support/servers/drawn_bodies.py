"""Bodies that a server may take, of all endpoints and all sizes, from a seed: most cost more than they look."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.servers.hostile import chain_of_rules
from tests.support.servers.malformed import frame
from tests.support.servers.raw_http import RawRequest

WORDS = ("x = 1 ", "def f(a, b):\n", "é", "日本語", "😀", "\u0000", "<|endoftext|>", '"', " ", "a" * 40, "İ")
PATTERNS = ("(a|b)*", "a?", "[a-z]{1,9}", r"\p{L}+", "(ab|a|b)+", ".", r"\d{2}")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}], [{"role": "developer", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}], [{"role": "assistant", "content": "c"}],
    [{"role": "assistant", "content": "c", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": ""}],
)  # fmt: skip


class Drawn:
    """Draws values whose JSON has about as many bytes as there are left."""

    def __init__(self, draw: random.Random, most: int) -> None:
        self.draw = draw
        self.size = int(2 ** draw.uniform(4, most.bit_length() - 1))  # as often small as large

    def range(self, each: int, most: int = 2**20) -> range:
        """As many numbers as there is room for parts of so many bytes."""
        return range(max(1, min(self.size // each, most)))

    def text(self) -> str:
        word = self.draw.choice(WORDS)
        return word * len(self.range(len(json.dumps(word)) - 2))

    def ids(self) -> list[int]:
        return [self.draw.randrange(4096) for _ in range(64)] * len(self.range(64 * 6))

    def prompt(self) -> Any:
        texts = [word * self.draw.randint(1, 30) for word in WORDS[:3]]
        return self.draw.choice([self.text(), self.ids(), texts, [self.ids()], [""]])

    def schema(self) -> Any:
        to = "$ref"
        return self.draw.choice([
            lambda: {"allOf": [{}, *({to: f"#/allOf/{i}"} for i in self.range(24))]},
            lambda: {"enum": [str(i) * 5 for i in self.range(30)]},
            lambda: {"anyOf": [{"properties": {f"p{i}": {"const": i}}} for i in self.range(70)]},
            lambda: {"anyOf": [{"anyOf": [{to: "#"}, {"type": "null"}]}] * len(self.range(50))},
            lambda: {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in self.range(30)}},
            lambda: {"type": "string", "pattern": self.draw.choice(PATTERNS) * len(self.range(10))},
            lambda: {to: "#/$defs/0", "$defs": {str(i): {"items": {to: f"#/$defs/{i + 1}"}} for i in self.range(40)}},
            lambda: json.loads('{"items":' * (deep := len(self.range(10, 400))) + "{}" + "}" * deep),
        ])()  # fmt: skip

    def form(self) -> Any:
        return self.draw.choice([
            lambda: {"json": self.schema()},
            lambda: {"regex": self.draw.choice(PATTERNS) * len(self.range(10))},
            lambda: {"choice": [f"{i:020}" for i in self.range(24)]},
            lambda: {"grammar": chain_of_rules(len(self.range(16)))},
            lambda: {"grammar": "start: " + " | ".join(f'"{i}"' for i in self.range(8))},
        ])()  # fmt: skip

    def tools(self) -> list[Any]:
        parameters = {"type": "object"} | self.schema()
        functions = [{"name": f"f{i}", "parameters": parameters} for i in self.range(2**14, 128)]
        return [{"type": "function", "function": function} for function in functions]

    def messages(self) -> list[Any]:
        turns = [turn for _ in self.range(120) for turn in self.draw.choice(TURNS)]
        return [*turns, {"role": "user", "content": self.text()}] if self.draw.random() < 0.3 else turns

    def some(self, **more: Callable[[], Any]) -> dict[str, Any]:
        found = more | {
            "stop": lambda: [self.draw.choice(WORDS) * 6 + chr(65 + i) for i in range(16)],
            "logit_bias": lambda: {str(i): 1.5 for i in self.range(9)},
            "stop_token_ids": lambda: list(self.range(5)),
            "metadata": lambda: {"a": [self.draw.choice([[], {}, {"a": 1}, "é"])] * len(self.range(4))},
            "speculative": lambda: {"reference": self.text()},
            "temperature": lambda: 1, "ignore_eos": lambda: True, "frequency_penalty": lambda: 1, "seed": lambda: 7,
        }  # fmt: skip
        return {name: found[name]() for name in self.draw.sample(list(found), self.draw.choice([0, 1, 2, 4]))}

    def choices(self) -> dict[str, Any]:
        more = {"stream": lambda: True, "prompt_logprobs": lambda: 20, "structured_outputs": self.form}
        found = {"n": self.draw.choice([1, 4]), "max_tokens": self.draw.choice([1, 8, 8, 60])}
        return found | self.some(**more)


def _completion(drawn: Drawn) -> Any:
    return {"prompt": drawn.prompt(), "logprobs": drawn.draw.choice([None, 20]), **drawn.choices()}


def _chat(drawn: Drawn) -> Any:
    tools = {"tools": drawn.tools(), "tool_choice": drawn.draw.choice(["none", "auto", "required"])}
    asked = drawn.draw.choice([tools, {"logprobs": True, "top_logprobs": 20}, {}])
    return {"messages": drawn.messages(), **asked, **drawn.choices()}


def _response(drawn: Drawn) -> Any:
    asked = drawn.draw.choice([drawn.text(), [{"role": "user", "content": "a"}] * len(drawn.range(40))])
    text = {"text": {"format": {"type": "json_schema", "name": "a", "schema": drawn.schema()}}}
    more = drawn.draw.choice([text, {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}])
    return {"input": asked, "max_output_tokens": drawn.draw.choice([16, 60]), **more}


def _message(drawn: Drawn) -> Any:
    turns = [drawn.text(), [{"type": "text", "text": "a"}] * len(drawn.range(40, 4096)), *drawn.range(120, 4096)]
    asked = [{"role": "user", "content": turn if isinstance(turn, (str, list)) else "hi"} for turn in turns]
    tool = {"name": "f", "input_schema": {"type": "object"} | drawn.schema()}
    tools = {"tools": [tool], "tool_choice": {"type": drawn.draw.choice(["any", "auto", "none"])}}
    form = {"output_config": {"format": {"type": "json_schema", "schema": drawn.schema()}}}
    return {"messages": asked, **drawn.draw.choice([tools, form, {}])}


def _tokenize(drawn: Drawn) -> Any:
    what = drawn.draw.choice([{"prompt": drawn.text()}, {"messages": drawn.messages(), "tools": drawn.tools()}])
    return what | {"return_token_strs": True}


ENDPOINTS: dict[str, Callable[[Drawn], Any]] = {
    "/v1/completions": _completion, "/v1/chat/completions": _chat, "/v1/responses": _response, "/tokenize": _tokenize,
    "/v1/messages": lambda drawn: {"max_tokens": 8, **_message(drawn)}, "/v1/messages/count_tokens": _message,
    "/detokenize": lambda drawn: {"tokens": drawn.ids()},
}  # fmt: skip


def drawn_bodies(seed: int, most: int, key: str) -> Iterator[RawRequest]:
    draw = random.Random(seed)
    head = (("Content-Type", b"application/json"), ("Authorization", f"Bearer {key}".encode()))
    while True:
        for path, make in ENDPOINTS.items():
            text = json.dumps(make(Drawn(draw, most)), ensure_ascii=draw.random() < 0.5)
            yield RawRequest(path, frame(path, text.encode(), headers=head))
