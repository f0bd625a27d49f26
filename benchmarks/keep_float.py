"""Builds an int8 bundle with some linear layers left in float32, and prints what perplexity that gives.

The text and the way to measure are those of `specexport verify`. Layers are named by a part of their weight's name; a
packed layer has that of its first part.

    python benchmarks/keep_float.py CHECKPOINT OUTPUT lm_head layers.17.mlp.down_proj --compare INT8 --compare FLOAT32
"""

import argparse
import math
from pathlib import Path
from typing import Any

from specexport.bench.prompts import read_prompts
from specexport.build.pipeline import build_bundle
from specexport.passes import quantize_int8
from specexport.passes.quantize_sites import find_sites
from specexport.recipe import BuildRecipe
from specexport.verify.perplexity import count_predicted, make_windows, score_engine
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.open import open_executor


def build(checkpoint: str, output: Path, layers: list[str]) -> None:
    """Build it. Recipes know no such choice, so the pass is shown fewer layers, and the cache is left out of it."""

    def fewer(*args: Any, **options: Any) -> list[Any]:
        sites = find_sites(*args, **options)
        kept = [site for site in sites if any(layer in str(site.weight.name) for layer in layers)]
        print("kept:", ", ".join(str(site.weight.name) for site in kept))
        return [site for site in sites if site not in kept]

    quantize_int8.find_sites = fewer  # type: ignore[assignment]
    recipe = BuildRecipe(target=checkpoint, output=str(output), quantize="int8", check=False)
    build_bundle(recipe, use_cache=False)


def measure(folder: Path) -> str:
    """Perplexity of a bundle's target."""
    bundle = load_bundle(folder, max_num_seqs=1)
    manifest = bundle.manifest
    vocab_size = min(entry.vocab_size for entry in manifest.models.values())
    texts = [prompt.text for prompt in read_prompts(())]
    windows = make_windows(texts, bundle.tokenizer, vocab_size=vocab_size, max_model_len=manifest.max_model_len)
    executor = open_executor(bundle._replace(max_model_len=max(map(len, windows))), "target")
    loss = score_engine(executor, windows, lookahead=manifest.lookahead).loss
    executor.close()
    return f"{folder}: {math.exp(loss):.3f} over {count_predicted(windows)} tokens"


def main() -> None:
    """Build and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output", type=Path)
    parser.add_argument("layers", nargs="+")
    parser.add_argument("--compare", type=Path, action="append", default=[])
    args = parser.parse_args()
    build(args.checkpoint, args.output, args.layers)
    for folder in (args.output, *args.compare):
        print(measure(folder), flush=True)


if __name__ == "__main__":
    main()
