"""The ablation of self-drafting (ASD, Metel et al. 2024): plain decoding against drafts made by each set of rules.

python benchmarks/self_drafting.py deep-bundle --threads 2 --period 2 --lookahead 6
python benchmarks/self_drafting.py gemma-bundle --baseline ungated-gemma-bundle --no-draft-exit

All ways decode each prompt in turn, in an order that moves on from prompt to prompt, so that a slow stretch of the
machine falls on all of them. Memory is that of fresh processes. The paper's figures are those of its ablation on
CodeLlama 13B: its setting, not this machine's.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from common import DEMO_PROMPTS, describe_machine, median, read_prompts

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.requests.draft_exit import DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules

MEMORY_FIELDS = {"resident": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}

COLUMNS = (
    "rules",
    "tokens/s",
    "over plain",
    "paper",
    "acceptance",
    "accepted length",
    "drafted",
    "attention, MLP kept",
    "same text",
)


class Way(NamedTuple):
    """One way to decode: its name, its rules (None: plain decoding), the paper's speedup."""

    name: str
    rules: LayerRules | None
    paper: float | None


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("bundle", type=Path)
    add("--prompts", type=Path, default=DEMO_PROMPTS)
    add("--num-prompts", type=int, default=10)
    add("--tokens", type=int, default=128)
    add("--lookahead", type=int, default=6, help="K, the longest draft")
    add("--threshold", type=float, default=0.985, help="alpha")
    add("--period", type=int, default=3, help="m of rule 1")
    add("--keep-last", type=int, default=2, help="l of rule 2")
    add("--draft-exit", action=argparse.BooleanOptionalAction, default=True, help="adaptive draft exit")
    add("--gamma", type=float, default=DraftExitParams().gamma, help="its threshold in the first round")
    add("--repeats", type=int, default=5)
    add("--threads", type=int, default=2)
    add("--spin", action=argparse.BooleanOptionalAction, default=True, help="idle threads spin")
    add("--baseline", type=Path, help="bundle without gates: the target alone, for memory")
    add("--memory", action=argparse.BooleanOptionalAction, default=True)
    add("--memory-of", choices=["plain", "self"], help=argparse.SUPPRESS)
    add("--json", type=Path)
    return parser.parse_args()


def ways(args: argparse.Namespace) -> list[Way]:
    """Plain decoding, and the four sets of rules in the order of the paper's table."""
    alpha, period, last = args.threshold, args.period, args.keep_last
    return [
        Way("plain", None, None),
        Way("CS only", LayerRules(alpha, None, None), 1.307),
        Way("CS + rule 2", LayerRules(alpha, None, last), 1.340),
        Way("rules 1 and 2", LayerRules(None, period, last), 1.179),
        Way("all three", LayerRules(alpha, period, last), 1.443),
    ]


def drafting(way: Way, args: argparse.Namespace) -> dict[str, Any]:
    """What the engine is told."""
    if way.rules is None:
        return {"speculation": False}
    ends = DraftExitParams(gamma=args.gamma) if args.draft_exit else False
    return {
        "drafter": "self",
        "num_speculative_tokens": args.lookahead,
        "layer_rules": way.rules,
        "draft_exit": ends,
    }


def load(args: argparse.Namespace) -> SpecEngine:
    """The engine for one sequence."""
    return SpecEngine.load(
        args.bundle, enable_prefix_caching=False, max_num_seqs=1, num_threads=args.threads, spin=args.spin
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decode every prompt every way, ``--repeats`` times."""
    engine = load(args)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    prompts = read_prompts(args.prompts, args.num_prompts)
    chosen = ways(args)
    for way in chosen:  # bindings and memory
        engine.generate(prompts[0], params, **drafting(way, args))
    seconds: dict[str, list[float]] = {way.name: [0.0] * args.repeats for way in chosen}
    outputs: dict[str, list[list[int]]] = {way.name: [[] for _ in prompts] for way in chosen}
    stats: dict[str, list[Any]] = {way.name: [None] * len(prompts) for way in chosen}
    for repeat in range(args.repeats):
        for index, prompt in enumerate(prompts):
            turn = (repeat + index) % len(chosen)
            for way in chosen[turn:] + chosen[:turn]:
                result = engine.generate(prompt, params, **drafting(way, args))[0]
                seconds[way.name][repeat] += len(result.token_ids) / result.stats.tokens_per_second
                outputs[way.name][index] = result.token_ids
                stats[way.name][index] = result.stats
    tokens = sum(map(len, outputs["plain"]))
    rows = []
    for way in chosen:
        row: dict[str, Any] = {"way": way.name, "tokens_per_second": median(tokens / s for s in seconds[way.name])}
        if way.rules is not None:
            pairs = zip(seconds["plain"], seconds[way.name], strict=True)
            row |= {"speedups": [plain / own for plain, own in pairs], "paper": way.paper, "rules": asdict(way.rules)}
            row["speedup"] = median(row["speedups"])
            row |= summarize(stats[way.name])
            row["identical"] = sum(own == plain for own, plain in zip(outputs[way.name], outputs["plain"], strict=True))
        rows.append(row)
    engine.close()
    return {"rows": rows, "num_prompts": len(prompts), "tokens": tokens, "seconds": seconds}


def summarize(stats: list[Any]) -> dict[str, Any]:
    """Acceptance over all prompts, what the drafts kept, the similarities."""
    drafted, accepted, rounds = (
        sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted", "draft_rounds")
    )
    choices = [s.layer_choice for s in stats]
    acs = [choice.acs for choice in choices if choice.acs]
    return {
        "acceptance": accepted / drafted if drafted else None,
        "mean_accepted_length": 1 + accepted / rounds if rounds else None,
        "mean_drafted": drafted / rounds if rounds else None,
        "mixers_kept": [sum(choice.mixers) for choice in choices],
        "mlp_kept": [sum(choice.mlp) for choice in choices],
        "num_layers": choices[0].num_layers,
        "acs": [sum(column) / len(acs) for column in zip(*acs, strict=True)],
        "removed_attention": [choice.removed_attention for choice in choices],
        "removed_recurrences": [choice.removed_recurrences for choice in choices],
    }


def memory_of(args: argparse.Namespace) -> dict[str, int]:
    """Memory of this process in bytes after it loaded the bundle and decoded two prompts one way (Linux)."""
    engine = load(args)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    way = ways(args)[-1 if args.memory_of == "self" else 0]
    for prompt in read_prompts(args.prompts, 2):
        engine.generate(prompt, params, **drafting(way, args))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return {name: 1024 * int(values[key]) for name, key in MEMORY_FIELDS.items()}


def compare_memory(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Memory of plain decoding and of self-drafting, and of the baseline bundle, each in a process of its own."""
    given = [value for value in sys.argv[1:] if value != str(args.bundle)]
    runs = {"plain": (args.bundle, "plain"), "self-drafting": (args.bundle, "self")}
    if args.baseline is not None:
        runs = {"target alone (baseline bundle)": (args.baseline, "plain"), **runs}
    found = {}
    for name, (bundle, kind) in runs.items():
        command = [sys.executable, __file__, str(bundle), *given, "--memory-of", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Print the tables."""
    machine = record["machine"]
    print(f"\n### Self-drafting, {args.bundle.name}, {record['num_prompts']} prompts x {args.tokens} tokens, greedy\n")
    exits = f"draft exit from gamma {args.gamma:g}" if args.draft_exit else "no draft exit"
    print(f"{machine['cpu']}, {args.threads} threads, load {machine['load_1min']:.1f}; K = {args.lookahead}, {exits}; ")
    print(f"alpha {args.threshold:g}, m {args.period}, l {args.keep_last}; medians of {args.repeats}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for row in record["rows"]:
        if "rules" not in row:
            print(f"| {row['way']} | {row['tokens_per_second']:.1f} | 1 | 1 | | | | | |")
            continue
        mean = [sum(row[key]) / len(row[key]) for key in ("mixers_kept", "mlp_kept")]
        print(
            f"| {row['way']} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f}x | {row['paper']:.3f}x "
            f"| {_or_dash(row['acceptance'], '.3f')} | {_or_dash(row['mean_accepted_length'], '.2f')} "
            f"| {_or_dash(row['mean_drafted'], '.2f')} | {mean[0]:.1f}, {mean[1]:.1f} of {row['num_layers']} "
            f"| {row['identical']} of {record['num_prompts']} |"
        )
    acs = record["rows"][-1]["acs"]
    print(f"\nSimilarity by layer (mean over prompts): {', '.join(f'{value:.4f}' for value in acs)}")
    memory = record.get("memory", {})
    if memory:
        first = next(iter(memory.values()))
        print(f"\n| memory, MB | {' | '.join(MEMORY_FIELDS)} | resident over the first |")
        print(f"|{' --- |' * (len(MEMORY_FIELDS) + 2)}")
        for name, row in memory.items():
            cells = " | ".join(f"{row[key] / 1e6:.1f}" for key in MEMORY_FIELDS)
            print(f"| {name} | {cells} | {row['resident'] / first['resident'] - 1:+.1%} |")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    """Measure and print; or, in a process of its own, report memory."""
    args = parse_args()
    if args.memory_of:
        print(json.dumps(memory_of(args)))
        return
    record = {"command": sys.argv, "machine": describe_machine(), **measure(args)}
    if args.memory:
        record["memory"] = compare_memory(args)
    show(args, record)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
