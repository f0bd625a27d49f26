r"""Our bundle against other programs, with the same prompts and threads, in turns; each turn is a fresh process.

    python benchmarks/against_peers.py engines/qwen-pair --prompts code=C.jsonl,math=M.jsonl,chat=T.jsonl --chat \
        --peer ik-repacked=TARGET.gguf --peer llama=TARGET.gguf --peer llama-draft=TARGET.gguf,DRAFT.gguf \
        --peer llama-ngram=TARGET.gguf --peer genai=GENAI_MODEL --peer openvino=OPENVINO_MODEL \
        --llama-server BUILD/bin/llama-server --python ik=IK/bin/python --python genai=GENAI/bin/python

Ours runs twice: ``plain``, and ``default``, which is what no flag gives. GENAI_MODEL is what ``python -m
onnxruntime_genai.models.builder -m CHECKPOINT -o GENAI_MODEL -p int4 -e cpu`` makes. OPENVINO_MODEL is what
``optimum-cli export openvino -m CHECKPOINT --weight-format int8 OPENVINO_MODEL`` writes. llama.cpp is its own server,
compiled on this machine from the sources inside llama-cpp-python's (``cmake -S vendor/llama.cpp -B BUILD
-DCMAKE_BUILD_TYPE=Release && cmake --build BUILD --target llama-server``). ik_llama.cpp is the wheel
``ik-llama-cpp-python``. A peer that fails is told as such. ``equal`` counts the texts that are those of the same
program's plain decoding (of our own for ours).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import median, read_domains, report
from peers import OPEN

from specexport_runtime import SpecEngine

KINDS = tuple(kind for kind in OPEN if kind not in ("plain", "default"))


def parse_args() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bundle", type=Path)
    add("--peer", action="append", default=[], metavar="KIND=MODEL[,DRAFT]", help=", ".join(KINDS))
    add("--python", action="append", default=[], metavar="KIND=FILE", help="interpreter of the kinds that begin so")
    add("--llama-server", metavar="FILE", help="llama.cpp's server; default: the one on PATH", default="llama-server")
    add("--prompts", required=True, help="NAME=FILE,…: one domain each")
    add("--skip", type=int, default=0, help="prompts of each file that are left out")
    add("--num-prompts", type=int, default=4, help="of each domain")
    add("--chat", action="store_true", help="put prompts into the bundle's chat template")
    add("--batch-size", type=int, default=1)
    add("--tokens", type=int, default=64)
    add("--first", default="", help="lengths of prompts, whose time to the first token is wanted: 100,500,2000")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--json", type=Path)
    args = parser.parse_args()
    args.peer, args.python = (dict(each.split("=", 1) for each in given) for given in (args.peer, args.python))
    if unknown := args.peer.keys() - set(KINDS):
        parser.error(f"there is no peer {sorted(unknown)[0]!r}: {', '.join(KINDS)}.")
    return args


def read_job(args: argparse.Namespace) -> dict[str, Any]:
    """What every process gets: token ids by domain, and ids for the time to the first token."""
    engine = SpecEngine.load(args.bundle, num_threads=args.threads)

    def encode(text: str) -> list[int]:
        return engine.encode_chat([{"role": "user", "content": text}]) if args.chat else engine.encode(text)

    domains = read_domains(args.prompts, max(args.num_prompts, args.batch_size), args.skip)
    ids = {name: [encode(text) for text in texts] for name, texts in domains.items()}
    engine.close()
    if args.batch_size > 1:  # some programs need rows of one length: what is longer loses its end
        ids = {name: [row[: min(map(len, rows))] for row in rows] for name, rows in ids.items()}
    lengths = [int(length) for length in args.first.split(",") if length]
    long = [token for rows in ids.values() for row in rows for token in row]
    long *= -(-max(lengths, default=0) // len(long))
    context = max([len(row) + args.tokens for rows in ids.values() for row in rows] + [n + 1 for n in lengths])
    return {
        "domains": ids,
        "first": {str(length): long[:length] for length in lengths},
        "tokens": args.tokens,
        "batch": args.batch_size,
        "threads": args.threads,
        "llama_server": args.llama_server,
        "context": max(1024, context + 64),  # onnxruntime-genai refuses fewer than a sliding window
    }


def bytes_of(path: str) -> int:
    """Size of a file or of all files of a folder."""
    given = Path(path)
    return sum(each.stat().st_size for each in ([given] if given.is_file() else given.rglob("*")) if each.is_file())


def run_once(python: str, job: dict[str, Any]) -> dict[str, Any] | str:
    """What one process measured, or the last line of what it said when it failed."""
    program = str(Path(__file__).with_name("peers.py"))
    done = subprocess.run([python, program], check=False, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def describe(runs: list[dict[str, Any]], size: int, plain: dict[str, Any] | None) -> str:
    """Medians of a way."""
    parts = []
    for name, texts in runs[0]["texts"].items():
        speeds = [median(run["speeds"][name][what] for run in runs) for what in ("decode", "whole")]
        parts.append(f"{name} {speeds[0]:.1f} ({speeds[1]:.1f} with the prompt)")
        if plain is not None:
            parts[-1] += f", equal {sum(a == b for a, b in zip(texts, plain['texts'][name], strict=True))}/{len(texts)}"
    parts += [f"first token after {n}: {median(run['first'][n] for run in runs):.2f} s" for n in runs[0]["first"]]
    peak = median(run["peak_mib"] for run in runs)
    return "; ".join([*parts, f"peak {peak:.0f} MiB", f"loads in {median(run['load'] for run in runs):.1f} s"]) + (
        f"; files {size / 2**20:.0f} MiB"
    )


def main() -> None:
    """Run all in turns; print medians and ratios."""
    args = parse_args()
    common = read_job(args)
    models = {"plain": str(args.bundle), "default": str(args.bundle)} | args.peer
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in models}
    failed: dict[str, str] = {}
    for _ in range(args.repeats):
        for way, model in models.items():
            if way in failed:
                continue
            path, _, draft = model.partition(",")
            python = args.python.get(way) or args.python.get(way.split("-")[0], sys.executable)
            run = run_once(python, common | {"way": way, "path": path, "draft": draft})
            if isinstance(run, str):
                failed[way] = run
            else:
                found[way].append(run)
    rows = [(way, f"failed: {why}") for way, why in failed.items()]
    ran = {way: runs for way, runs in found.items() if way not in failed}
    for way, runs in ran.items():
        first = {"default": "plain"}.get(way, way.split("-")[0])
        size = sum(map(bytes_of, models[way].split(",")))
        rows.append((way, describe(runs, size, ran[first][0] if first in ran and first != way else None)))
    for name in common["domains"] if "default" in ran else ():
        speed = {way: [run["speeds"][name]["decode"] for run in runs] for way, runs in ran.items()}
        for ours in ("plain", "default"):
            others = [way for way in ran if way not in ("plain", "default")] + ["plain"] * (ours == "default")
            ratios = {way: [a / b for a, b in zip(speed[ours], speed[way], strict=True)] for way in others}
            rows += [
                (f"{name}: {ours} / {way}", f"{median(each):.2f}× ({', '.join(f'{x:.2f}' for x in each)})")
                for way, each in ratios.items()
            ]
    title = f"{args.bundle.name} against other programs, batch {args.batch_size}, {args.tokens} tokens"
    report(title, rows, {"runs": found, "failed": failed}, args.json)


if __name__ == "__main__":
    main()
