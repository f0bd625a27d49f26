"""Seconds to trace models of more and more layers of one kind; the first one of a process also loads the exporter.

python benchmarks/trace_layers.py [--layers 4 28 80]
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]


def main() -> None:
    """Print a line for each number of layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 28, 80])
    layers = parser.parse_args().layers

    from specexport.trace.check import trace_checkpoint
    from tests.support.models.tiny_models import make_model
    from tests.support.references.engine_harness import make_checkpoint

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    for count in (layers[0], *layers):
        checkpoint = make_checkpoint(make_model("Qwen2", sizes | {"vocab_size": 64, "num_hidden_layers": count}))
        begin = time.perf_counter()
        traced = trace_checkpoint(checkpoint)
        print(f"{count} layers: {time.perf_counter() - begin:.1f} s, {traced.whole or 'a few of each kind traced'}")


if __name__ == "__main__":
    main()
