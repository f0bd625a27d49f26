"""Experts as one operator against batched products: reading a prompt and steps of 1 and 5 tokens, float and quantized.

    python benchmarks/random_checkpoint.py MODEL --tokenizer examples/demo_pair/target --layers 8 --hidden 512 \
        --intermediate 256 --heads 8 --kv-heads 2 --vocab 8192 --experts 32
    python benchmarks/moe.py MODEL --bundles FOLDER

The model above has 116 million parameters. Bundles are built if they are not there: float32 with batched products,
which copy the weights of its experts for every token, and with the operator, and what is named by --quantize. Steps of
all bundles are timed in turns, in one process. A step reads other tokens each time.
"""

import argparse
import time
from pathlib import Path
from typing import Any
from unittest import mock

from common import median, report, timed

from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork

BATCHED = "batched products"
_PAST, _PERIOD = 32, 211


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--bundles", type=Path, required=True, help="where bundles are, or are put")
    add("--quantize", default="int8", help="kind,…: built beside float32; empty for none")
    add("--prompt", type=int, default=256, help="tokens of the prompt that is read")
    add("--widths", default="1,5", help="new tokens of a step")
    add("--repeats", type=int, default=9)
    add("--json", type=Path)
    return parser.parse_args()


def build(checkpoint: Path, folder: Path, quantize: str, *, grouped: bool) -> Path:
    """The bundle in ``folder``, built if it is not there."""
    from specexport.backends.ort_cpu import OrtCpu
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    if not folder.exists():
        start = time.perf_counter()
        recipe = BuildRecipe(target=str(checkpoint), output=str(folder), quantize=quantize, check=False)
        with mock.patch.object(OrtCpu, "groups_experts", grouped):
            build_bundle(recipe, use_cache=False)
        print(f"built {folder.name} in {time.perf_counter() - start:.0f} s", flush=True)
    return folder


class Steps:
    """Timed steps of one target."""

    def __init__(self, folder: Path) -> None:
        self._target = load_engine_parts(folder, EngineOptions(max_num_seqs=1, adaptive=False)).target
        self._runner, self._at = ModelRunner(self._target), 0
        self.read(_PAST)

    def tokens(self, count: int) -> list[int]:
        """Tokens that were not the last ones."""
        self._at += count
        return [7 + (self._at + i) * 13 % _PERIOD for i in range(count)]

    def read(self, length: int) -> float:
        """Seconds to read a prompt."""
        self._runner.release_row(0)
        return timed(lambda: self._runner.prefill(0, self.tokens(length)))[0]

    def step(self, width: int) -> float:
        """Seconds of one step behind a short past."""
        self._runner.release_row(0)
        self._runner.prefill(0, self.tokens(_PAST))
        work = [RowWork(self.tokens(width), width, drafts=width - 1)]
        return timed(lambda: self._runner.step(0, work, "token_ids"))[0]

    def close(self) -> None:
        """Let the engine go."""
        self._target.close()


def main() -> None:
    """Build, time and print medians, with their ratio to batched products."""
    args = parse_args()
    args.bundles.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in args.quantize.split(",") if kind]
    folders = {BATCHED: build(args.checkpoint, args.bundles / "batched", "none", grouped=False)}
    folders |= {
        f"operator, {kind}": build(args.checkpoint, args.bundles / kind, kind, grouped=True)
        for kind in ["none", *kinds]
    }
    engines = {name: Steps(folder) for name, folder in folders.items()}
    seconds: dict[str, dict[str, list[float]]] = {}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            found = {f"reading {args.prompt}": engine.read(args.prompt)}
            found |= {f"step of {width}": engine.step(width) for width in map(int, args.widths.split(","))}
            for what, value in found.items():
                if repeat:  # the first is for bindings and memory
                    seconds.setdefault(what, {}).setdefault(name, []).append(value)
    for engine in engines.values():
        engine.close()
    rows: list[tuple[str, str]] = []
    record: dict[str, Any] = {"seconds": seconds}
    for what, ways in seconds.items():
        before = median(ways[BATCHED])
        for name, values in ways.items():
            rows.append((f"{what}: {name}", f"{1e3 * median(values):.1f} ms, {before / median(values):.2f}×"))
    report(f"Experts of {args.checkpoint.name}", rows, record, args.json)


if __name__ == "__main__":
    main()
