"""An agent's loop of tool calls against the server: time without kept prefixes, with them, and after a restart.

    python benchmarks/agent_loop.py engines/qwen-coder [--turns 20] [--json FILE]

Each turn the model must call a tool; its result, some lines of a file of the standard library, is sent back with all
that was said before. The restart needs ``--prefix-cache-dir``: the server is stopped in the middle of the loop.
"""

import argparse
import inspect
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import openai
from common import report
from serving import server

TOOL = {
    "type": "function",
    "function": {
        "name": "read_lines",
        "description": "Lines of a source file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "start": {"type": "integer"}},
            "required": ["path", "start"],
        },
    },
}


def run_turns(port: int, messages: list[Any], turns: range) -> list[dict[str, float]]:
    """Seconds, generated and cached tokens of each turn; ``messages`` grow."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    lines = inspect.getsource(textwrap).splitlines()
    told = []
    for turn in turns:
        start = time.perf_counter()
        answer = client.chat.completions.create(
            model="model",
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
        )
        seconds, usage = time.perf_counter() - start, answer.usage
        call = answer.choices[0].message.tool_calls[0]
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        text = "\n".join(lines[turn * 10 : turn * 10 + 10])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        cached = usage.prompt_tokens_details.cached_tokens
        told.append({"s": seconds, "prompt": usage.prompt_tokens, "cached": cached, "new": usage.completion_tokens})
    return told


def main() -> None:
    """Run the three loops and print their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    task = [{"role": "user", "content": "Read textwrap.py in pieces of ten lines, one call at a time, and find a bug."}]
    half, runs = args.turns // 2, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in (
            ("no kept prefixes", ["--no-enable-prefix-caching"]),
            ("kept prefixes", []),
            ("restart in the middle, prefixes on disk", ["--prefix-cache-dir", folder]),
            ("restart in the middle, nothing on disk", []),
        ):
            messages, told = list(task), []
            parts = [range(half), range(half, args.turns)] if "restart" in name else [range(args.turns)]
            for part in parts:
                with server(args.bundle, "--model-name", "model", *flags) as (port, _):
                    told += run_turns(port, messages, part)
            runs[name] = told
    rows = []
    for name, told in runs.items():
        spent, last = sum(turn["s"] for turn in told), told[-1]
        again = f"; turn {half + 1}: {told[half]['s']:.2f} s, {told[half]['cached']} of {told[half]['prompt']} reused"
        rows.append((name, f"{spent:.1f} s, last turn {last['s']:.2f} s at {last['prompt']} tokens{again}"))
    report("An agent's loop of tool calls", rows, {"runs": runs}, args.json)


if __name__ == "__main__":
    main()
