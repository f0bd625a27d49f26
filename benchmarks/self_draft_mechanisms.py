"""Three ways to run a target without some of its layers: gates, layer-skipping graphs, a chain of block engines.

python benchmarks/self_draft_mechanisms.py engines/demo-self
python benchmarks/self_draft_mechanisms.py engines/gemma --rounds 5 --steps 20

All start from the bundle's own target graph, leave out the same layers (every second one, attention and MLP), and run
one token on the same cache of 64 entries. Each way runs in a process of its own, one after another, ``--rounds`` times:

* gates: one session, each block in an ``If`` (what `build --self-draft` makes);
* graphs: a second session whose graph lacks the layers, over the target's prepacked weights, which both map;
* chain: a session for each block, all of them around one buffer with the hidden state.

"over target" is anonymous memory beyond that of a process with the ungated target alone, loaded the same way (for
"graphs": mapped too). Times are medians; of a change of layers: the first time, and back to layers used before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report, timed
from mechanism_graphs import MODEL, PACKED, cut_layers, split_blocks, write_graphs, write_packed
from mechanism_steps import Step, anonymous_bytes, measure, open_session

WAYS = ("target", "gates", "mapped target", "graphs", "chain")


def run_target(folder: Path, step: Step, args: argparse.Namespace, *, mapped: bool = False) -> dict[str, Any]:
    """The ungated target alone."""
    session = open_session(folder / (PACKED if mapped else MODEL), args.threads, mapped=mapped)
    step.arrays["logits"] = np.empty((1, session.get_outputs()[0].shape[1]), np.float32)
    io = step.bind(session)
    return measure(step, {"full": lambda: session.run_with_iobinding(io)}, args.steps)


def run_gates(folder: Path, step: Step, args: argparse.Namespace) -> dict[str, Any]:
    """One session; a change is another mask in its buffer."""
    session = open_session(folder / "gated.onnx", args.threads)
    step.arrays["logits"] = np.empty((1, session.get_outputs()[0].shape[1]), np.float32)
    gates = next(value.shape[0] for value in session.get_inputs() if value.name == "layer_mask")
    mask = step.arrays["layer_mask"] = np.ones(gates, bool)
    io = step.bind(session)
    off = np.isin(np.arange(gates) // 2, skipped_layers(gates // 2))

    def run(kept: np.ndarray) -> None:
        mask[:] = kept
        session.run_with_iobinding(io)

    change = timed(lambda: np.copyto(mask, ~off))[0]
    result = measure(step, {"full": lambda: run(np.ones(gates, bool)), "draft": lambda: run(~off)}, args.steps)
    return result | {"change_first_ms": 1e3 * change, "change_again_ms": 1e3 * timed(lambda: np.copyto(mask, off))[0]}


def run_graphs(folder: Path, step: Step, args: argparse.Namespace) -> dict[str, Any]:
    """Two sessions over one file of packed weights; a change is another graph and another session."""
    session = open_session(folder / PACKED, args.threads, mapped=True)
    step.arrays["logits"] = np.empty((1, session.get_outputs()[0].shape[1]), np.float32)
    io = step.bind(session)
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}
    layers = sum(value.name.startswith("k_cache.") for value in session.get_inputs())

    def change(skipped: tuple[int, ...]) -> tuple[Any, Any]:
        if skipped not in kept:
            path = folder / f"cut{len(kept)}.onnx"
            cut_layers(folder / PACKED, path, skipped)
            opened = open_session(path, args.threads, mapped=True)
            kept[skipped] = (opened, step.bind(opened))
        return kept[skipped]

    skipped = tuple(skipped_layers(layers))
    first, (draft, draft_io) = timed(lambda: change(skipped))
    result = measure(
        step,
        {"full": lambda: session.run_with_iobinding(io), "draft": lambda: draft.run_with_iobinding(draft_io)},
        args.steps,
    )
    return result | {"change_first_ms": 1e3 * first, "change_again_ms": 1e3 * timed(lambda: change(skipped))[0]}


def run_chain(folder: Path, step: Step, args: argparse.Namespace) -> dict[str, Any]:
    """A session a block; a change is another list of sessions. Each reads and writes the hidden state in one buffer."""
    plan = json.loads((folder / "chain.json").read_text(encoding="utf-8"))
    aliases = dict.fromkeys(plan["stream"], "hidden")
    head = open_session(folder / "head.onnx", args.threads)
    probe = step.bind(head)
    head.run_with_iobinding(probe)
    for value, found in zip(head.get_outputs(), probe.get_outputs(), strict=True):
        step.arrays[aliases.get(value.name, value.name)] = found.numpy().copy()
    blocks = []
    for number, layer in enumerate(plan["layers"]):
        session = open_session(folder / f"block{number}.onnx", args.threads)
        blocks.append((layer, session, step.bind(session, aliases)))
    tail = open_session(folder / "tail.onnx", args.threads)
    step.arrays["logits"] = np.empty((1, tail.get_outputs()[0].shape[1]), np.float32)
    ends = [(head, step.bind(head, aliases)), (tail, step.bind(tail, aliases))]

    def choose(skipped: set[int]) -> list[tuple[Any, Any]]:
        return [ends[0], *((session, io) for layer, session, io in blocks if layer not in skipped), ends[1]]

    def run(sessions: list[tuple[Any, Any]]) -> None:
        for session, io in sessions:
            session.run_with_iobinding(io)

    skipped = set(skipped_layers(len(blocks) // 2))
    first, draft = timed(lambda: choose(skipped))
    full = choose(set())
    result = measure(step, {"full": lambda: run(full), "draft": lambda: run(draft)}, args.steps)
    return result | {"change_first_ms": 1e3 * first, "change_again_ms": 1e3 * timed(lambda: choose(skipped))[0]}


def skipped_layers(num_layers: int) -> list[int]:
    """Every second layer."""
    return list(range(1, num_layers, 2))


def work(args: argparse.Namespace) -> None:
    """One way in this process: prints its figures as JSON, logits go to a file."""
    # Imports are no part of any difference.
    import onnx_ir as ir  # noqa: F401
    import onnxruntime  # noqa: F401

    import specexport.passes.residual_blocks  # noqa: F401

    ways = {
        "target": run_target,
        "gates": run_gates,
        "mapped target": lambda *given: run_target(*given, mapped=True),
        "graphs": run_graphs,
        "chain": run_chain,
    }
    before, step = anonymous_bytes(), Step()
    result = ways[args.way](args.folder, step, args)
    result["anonymous_mb"] -= before / 2**20
    for name, logits in result.pop("logits").items():
        np.save(args.folder / f"{args.way}.{name}.npy", logits)
    print(json.dumps(result))


def largest_difference(folder: Path, ways: tuple[str, ...], kind: str) -> float:
    """Largest difference of a logit between the ways."""
    first, *others = (np.load(folder / f"{way}.{kind}.npy") for way in ways)
    return max(float(np.abs(other - first).max()) for other in others)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("engines/demo"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        work(args)
        return
    with tempfile.TemporaryDirectory(dir=args.bundle.parent) as name:  # where weights can be linked, not copied
        folder = Path(name)
        target = json.loads((args.bundle / "manifest.json").read_text(encoding="utf-8"))["models"]["target"]["path"]
        write_graphs(args.bundle / target, folder)
        split_blocks(folder)
        write_packed(folder)
        command = [sys.executable, __file__, "--steps", str(args.steps), "--threads", str(args.threads)]
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                done = subprocess.run([*command, "--way", way, "--folder", name], check=True, stdout=subprocess.PIPE)
                runs[way].append(json.loads(done.stdout))
        same = {"full": largest_difference(folder, WAYS, "full")}
        same["draft"] = largest_difference(folder, ("gates", "graphs", "chain"), "draft")
    figures = {
        way: {key: (min if key.endswith("_ms") else median)([run[key] for run in found]) for key in found[0]}
        for way, found in runs.items()
    }
    rows = [(f"logits differ by at most, {kind} step", f"{value:.1e}") for kind, value in same.items()]
    for way, alone in (("gates", "target"), ("graphs", "mapped target"), ("chain", "target")):
        found = figures[way]
        over = found["anonymous_mb"] - figures[alone]["anonymous_mb"]
        rows += [
            (f"{way}: draft step", f"{found['draft_ms']:.3f} ms"),
            (f"{way}: full step", f"{found['full_ms']:.3f} ms ({alone} alone: {figures[alone]['full_ms']:.3f} ms)"),
            (f"{way}: memory over target", f"{over:.1f} MB (target: {figures[alone]['anonymous_mb']:.1f} MB)"),
            (f"{way}: change of layers", f"{found['change_first_ms']:.3f} ms, again {found['change_again_ms']:.4f} ms"),
        ]
    report(f"Self-drafting mechanisms, {args.bundle.name}", rows, {"figures": figures, "same": same}, args.json)


if __name__ == "__main__":
    main()
