"""Requests of every kind, from many clients at a time: no errors but 429, the text of each, the server's memory.

    python benchmarks/mixed_load.py BUNDLE [--requests 1000] [--clients 64] [--skip FEATURE]... [--json FILE]
                                    [--chat-template FILE]

``specexport serve`` is a process of its own, and so are its clients (``lean_clients.py``). Requests are drawn by --seed
from all features: streamed and whole, greedy and sampled by a seed, every endpoint, several choices, stop texts, shared
beginnings, drafters, log-probabilities of answers and prompts, forms (JSON schema, expression, choice), calls of tools,
and streams whose client leaves. Each feature is tried first: one that this server or bundle refuses ends the run with
the flag that leaves it out. A bundle without a chat template gets that of ``tools_chat.jinja``, in a folder of links to
its files; ``--chat-template`` gives any bundle another one.

A 429 is tried again after its ``Retry-After``; any other error is a problem. Each text must be that of the same request
alone, which is asked afterwards, one at a time. With int8 weights the texts and all log-probabilities are equal to the
last bit, or it is a problem; float sums depend on who shares a step, so that there differences are only told. When all
clients have left, no sequence may run or wait. The growth of the server's resident memory is that of a line through the
second half of its samples; it may not exceed --max-growth. Requests that were not sent after --minutes are problems.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from chat_bundle import TOOLS_TEMPLATE, with_chat_template
from common import DEMO_PROMPTS, read_prompts, report
from lean_clients import send_all

from specexport_runtime.bundle.opened import CHAT_TEMPLATE_NAME
from tests.support.serving import server

Body = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"name": "find", "description": "Find a person.", "parameters": SCHEMA}
CALLED = {"name": "find", "arguments": '{"name": "Ada", "age": 36}'}
SAMPLE_S = 0.2


class Mix:
    """Draws requests.

    Args:
        prompts: texts that prompts are cut from.
        seed: of all draws.
        longest: most tokens of an answer.
    """

    def __init__(self, prompts: list[str], seed: int, longest: int) -> None:
        self._draw = random.Random(seed)
        self._text = "\n\n".join(prompts)
        self._shared = [self._text[start : start + 700] for start in (0, 900)]
        self._longest = longest
        self.features: dict[str, Callable[[], Body]] = {
            "plain": self._completion,
            "several choices": lambda: self._completion() | {"n": 2},
            "stop texts": lambda: self._completion() | {"stop": ["\n\n", "return"]},
            "shared beginning": self._beginning,
            "drafters": self._drafted,
            "logprobs": lambda: self._completion() | {"logprobs": self._draw.randint(0, 3)},
            "echo": lambda: self._scored() | {"echo": True, "logprobs": 1, "max_tokens": self._draw.randint(0, 1)},
            "prompt_logprobs": lambda: self._scored() | {"prompt_logprobs": self._draw.randint(0, 3)},
            "structured": self._structured,
            "leave": self._leave,
            "chat": self._chat,
            "responses": self._response,
            "tools": self._tools,
            "responses with tools": self._response_tools,
        }

    def requests(self, count: int, features: list[str]) -> list[Body]:
        """As many requests, the features in turn, in an order that is drawn."""
        drawn = [{"feature": name, **self.features[name]()} for name in features * (count // len(features) + 1)]
        drawn = drawn[:count]
        self._draw.shuffle(drawn)
        return [self._placed(body) for body in drawn]

    def one(self, feature: str) -> Body:
        """A request that shows whether a feature is there."""
        return self._placed({"feature": feature, **self.features[feature](), "stream": False})

    def _placed(self, body: Body) -> Body:
        """A request with its path beside its body."""
        feature, leave_after = body.pop("feature"), body.pop("leave_after", None)
        path = CHAT if "messages" in body else RESPONSES if "input" in body else COMPLETIONS
        return {"feature": feature, "path": path, "body": body, "leave_after": leave_after}

    def _piece(self) -> str:
        start, length = self._draw.randrange(len(self._text) - 8), round(8 * 100 ** self._draw.random())
        return self._text[start : start + length] or "x"

    def _sampling(self) -> Body:
        streamed = {"stream": self._draw.random() < 0.5}
        if self._draw.random() < 0.5:
            return streamed | {"temperature": 0.0}
        return streamed | {"temperature": 0.8, "top_p": 0.95, "seed": self._draw.randrange(2**31)}

    def _tokens(self) -> int:
        return round(self._longest ** self._draw.random())

    def _completion(self) -> Body:
        return {"prompt": self._piece(), "max_tokens": self._tokens(), **self._sampling()}

    def _beginning(self) -> Body:
        return self._completion() | {"prompt": self._draw.choice(self._shared) + self._piece()}

    def _drafted(self) -> Body:
        drafter = self._draw.choice(["lookup", "none", None])
        drafting: Body = {"token_origins": self._draw.random() < 0.5} | ({"drafter": drafter} if drafter else {})
        return self._completion() | {"speculative": drafting}

    def _scored(self) -> Body:
        return self._completion() | {"stream": False}

    def _structured(self) -> Body:
        form = self._draw.choice(["schema", "object", "regex", "choice"])
        body = self._completion() | {"max_tokens": max(self._longest, 8)}
        if form in ("schema", "object"):
            named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
            return body | {"response_format": named if form == "schema" else {"type": "json_object"}}
        asked: Body = {"regex": "[a-z]{2,8} = [0-9]{1,6}"} if form == "regex" else {"choice": ["yes", "no", "perhaps"]}
        return body | {"structured_outputs": asked}

    def _leave(self) -> Body:
        body = self._completion() | {"stream": True, "max_tokens": 4 * self._longest, "ignore_eos": True}
        return body | {"leave_after": self._draw.randint(1, 2000)}

    def _messages(self) -> list[Body]:
        system = {"role": "system", "content": self._draw.choice(self._shared)}
        turns = [{"role": "user", "content": self._piece()}]
        if self._draw.random() < 0.5:
            turns += [{"role": "assistant", "content": self._piece()}, {"role": "user", "content": self._piece()}]
        return [system, *turns]

    def _chat(self) -> Body:
        body = {"messages": self._messages(), "max_tokens": self._tokens(), **self._sampling()}
        return body | ({"logprobs": True, "top_logprobs": 2} if self._draw.random() < 0.3 else {})

    def _response(self) -> Body:
        system, *turns = self._messages()
        body = {"input": turns, "instructions": system["content"], **self._sampling()}
        body["max_output_tokens"] = self._tokens()
        if self._draw.random() < 0.3:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        return body

    def _tools(self) -> Body:
        tools: Body = {"tools": [self._tool()], "tool_choice": self._draw.choice(["auto", "required"])}
        call = {"id": "call_1", "type": "function", "function": CALLED}
        more = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": self._piece()},
        ]
        body = {"messages": self._messages(), "max_tokens": 64, **self._sampling(), **tools}
        if self._draw.random() < 0.5:
            body["messages"] += more
        return body

    def _response_tools(self) -> Body:
        tool = self._tool()
        more: list[Body] = [
            {"type": "function_call", "call_id": "call_1", **CALLED},
            {"type": "function_call_output", "call_id": "call_1", "output": self._piece()},
        ]
        choice = self._draw.choice(["auto", "required", {"type": "function", "name": "find"}])
        body = {"input": self._messages(), "max_output_tokens": 64, **self._sampling(), "tool_choice": choice}
        if self._draw.random() < 0.5:
            body["input"] += more
        return body | {"tools": [{"type": "function", **tool["function"]}]}

    def _tool(self) -> Body:
        return {"type": "function", "function": {**TOOL, "strict": self._draw.random() < 0.5}}


class Memory:
    """Samples of a process's resident memory, taken by a thread until it is left."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.samples: list[tuple[float, float]] = []

    def __enter__(self) -> "Memory":
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            lines = self._status.read_text(encoding="ascii").splitlines()
            size = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
            self.samples.append((time.monotonic() - self._start, size))

    def growth(self) -> float:
        """Growth over the second half, of a line through its samples, as a share of where it begins."""
        half = self.samples[len(self.samples) // 2 :]
        if len(half) < 3:
            return 0.0
        slope, start = statistics.linear_regression(*zip(*half, strict=True))
        return slope * (half[-1][0] - half[0][0]) / (start + slope * half[0][0])


def refused(url: str, mix: Mix, features: list[str]) -> list[tuple[str, str]]:
    """Features that the server does not have, and what it says of them."""
    found = []
    for name in features:
        asked = mix.one(name)
        answer = httpx.post(url + asked["path"], json=asked["body"], timeout=120)
        if answer.status_code != 200:
            found.append((name, f"{answer.status_code}: {answer.text[:200]}"))
    return found


def gauge(url: str, name: str) -> float:
    """Sum of a metric's values."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def fill_rows(url: str, port: int, mix: Mix) -> None:
    """Write every cache row to its end: pages of memory are only resident once they were written."""
    rows = round(gauge(url, "specexport:max_num_seqs"))
    length = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["max_model_len"]
    ids = httpx.post(f"{url}/tokenize", json={"prompt": mix.one("plain")["body"]["prompt"]}, timeout=30).json()[
        "tokens"
    ]
    prompt = (ids * length)[: length - 8]
    bodies = [{"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "cache_salt": f"fill {i}"} for i in range(rows)]
    send_all(port, [{"path": COMPLETIONS, "body": body} for body in bodies], rows)


def left_at_the_end(url: str) -> dict[str, float]:
    """Sequences that still run or wait some seconds after the last client left, by the server's metrics."""
    end = time.monotonic() + 10
    while True:
        found = {name: gauge(url, name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")}
        if not any(found.values()) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def compare(requests: list[Body], crowd: list[Body], port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Each answer beside that of the same request alone."""
    chosen = [i for i, answer in enumerate(crowd) if "texts" in answer][: args.compare]
    alone = send_all(port, [requests[i] for i in chosen], 1, 60 * args.minutes)["answers"]
    different, furthest, unequal = [], 0.0, 0
    for i, answer in zip(chosen, alone, strict=True):
        if "texts" not in answer or "message" in answer:
            different.append({"request": requests[i], "alone": answer})
            continue
        if crowd[i]["texts"] != answer["texts"]:
            different.append({"request": requests[i], "got": crowd[i]["texts"], "alone": answer["texts"]})
            continue
        pairs = [(a, b) for a, b in zip(crowd[i]["logprobs"], answer["logprobs"], strict=True) if a is not None]
        furthest = max([furthest, *(abs(a - b) for a, b in pairs)])
        unequal += any(a != b for a, b in pairs)
    return {"compared": len(chosen), "different": different, "furthest": furthest, "unequal": unequal}


def is_exact(bundle: Path) -> bool:
    """Whether the bundle's steps have the same bits in any company."""
    recipe = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["recipe"]
    return bool(recipe.get("quantize") == "int8")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the bundle, with a chat template if it has none; what was seen."""
    if args.chat_template is None and (args.bundle / CHAT_TEMPLATE_NAME).exists():
        return load(args.bundle, args)
    with tempfile.TemporaryDirectory(dir=args.bundle.resolve().parent, prefix=".mixed-load-") as folder:
        place = Path(folder) / args.bundle.name
        return load(with_chat_template(args.bundle, place, args.chat_template or TOOLS_TEMPLATE), args)


def load(bundle: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve, send, compare; what was seen."""
    mix = Mix(read_prompts(args.prompts, 64), args.seed, args.max_tokens)
    unknown = sorted(set(args.skip) - set(mix.features))
    if unknown:
        raise SystemExit(f"there is no feature {unknown[0]!r}: {', '.join(mix.features)}")
    features = [name for name in mix.features if name not in args.skip]
    with server(bundle, "--max-waiting", str(args.max_waiting)) as served:
        url = f"http://127.0.0.1:{served.port}"
        if missing := refused(url, mix, features):
            told = "\n".join(f"  {name}: {why}" for name, why in missing)
            flags = " ".join(f"--skip {json.dumps(name)}" for name, _ in missing)
            raise SystemExit(f"this server refuses:\n{told}\nleave it out: {flags}")
        warm_up, requests = mix.requests(args.warm_up, features), mix.requests(args.requests, features)
        if args.fill:
            fill_rows(url, served.port, mix)
        send_all(served.port, warm_up, args.clients, 60 * args.minutes)
        with Memory(served.pid) as memory:
            found = send_all(served.port, requests, args.clients, 60 * args.minutes)
        left = left_at_the_end(url)
        compared = compare(requests, found["answers"], served.port, args)
    answers = found["answers"]
    wrong = [
        {"request": request, "answer": answer}
        for request, answer in zip(requests, answers, strict=True)
        if answer["status"] not in (200, 429) or "message" in answer
    ]
    return {
        "features": features,
        "skipped": args.skip,
        "seconds": found["seconds"],
        "by_status": Counter(answer["status"] for answer in answers),
        "left_by_clients": sum("left" in answer for answer in answers),
        "retries_on_429": sum(answer["retries"] for answer in answers),
        "tokens": sum(answer.get("tokens") or 0 for answer in answers),
        "errors": wrong,
        **compared,
        "left_at_the_end": left,
        "memory": memory.samples,
        "growth": memory.growth(),
    }


def rows_of(found: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    """The table."""
    memory = [mib for _, mib in found["memory"]] or [0.0]
    return [
        ("features", ", ".join(found["features"])),
        ("skipped", ", ".join(found["skipped"]) or "none"),
        (f"{args.requests} requests, {args.clients} clients, {args.max_waiting} may wait",
         f"{found['seconds']:.1f} s, {found['tokens'] / found['seconds']:.0f} tokens/s"),
        ("answers by status", ", ".join(f"{status}: {count}" for status, count in sorted(found["by_status"].items()))),
        ("  refused with 429 and tried again", str(found["retries_on_429"])),
        ("  clients that left", str(found["left_by_clients"])),
        ("  errors", str(len(found["errors"]))),
        ("compared with the request alone", str(found["compared"])),
        ("  texts that differ", str(len(found["different"]))),
        ("  answers whose log-probabilities differ", f"{found['unequal']}, by at most {found['furthest']:.1e}"),
        ("sequences left at the end", f"{sum(found['left_at_the_end'].values()):.0f}"),
        ("resident memory, first, most, last", f"{memory[0]:.1f}, {max(memory):.1f}, {memory[-1]:.1f} MiB"),
        ("growth over the second half", f"{found['growth']:.2%}"),
    ]  # fmt: skip


def main() -> None:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--chat-template", type=Path, help="Jinja template in place of the bundle's")
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=200, help="requests before the memory is watched")
    parser.add_argument("--no-fill", dest="fill", action="store_false", help="do not write every cache row first")
    parser.add_argument("--max-waiting", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer that is asked for")
    parser.add_argument("--compare", type=int, default=10**6, help="most answers that are compared")
    parser.add_argument("--skip", action="append", default=[], help="a feature to leave out; may be repeated")
    parser.add_argument("--minutes", type=float, default=20, help="longest time to send requests")
    parser.add_argument("--max-growth", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args)
    exact = is_exact(args.bundle)
    report(f"Mixed load on {args.bundle.name}, {'int8' if exact else 'float'}", rows_of(found, args), found, args.json)
    for wrong in [*found["errors"], *found["different"]][:5]:
        print(json.dumps(wrong)[:1500])
    unequal = exact and (found["different"] or found["unequal"])
    if found["errors"] or unequal or sum(found["left_at_the_end"].values()) or found["growth"] > args.max_growth:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
