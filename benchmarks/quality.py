"""What quantizing costs: bundles of one model against its float32 bundle, token by token, on texts of yours.

    python benchmarks/quality.py engines/gemma3-270m engines/gemma3-270m-int8 --text README.md --text CODE.py

For each bundle: the change of perplexity; the mean Kullback-Leibler divergence of its next-token distributions from
the float bundle's, in nats; the share of tokens where both have the same best one; and its size on disk. Texts are read
in windows of 256 tokens. The divergence leaves out the first token of each window, where attention rests
(docs/quantization.md), and says it apart. Nothing is timed.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specexport.verify.perplexity import make_windows
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.cli.prompts import read_text
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork

WINDOW, CHUNK = 256, 64


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Of each row."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


class Reader:
    """The target of a bundle, and what it has lost so far."""

    def __init__(self, path: Path, num_threads: int | None) -> None:
        bundle = load_bundle(path, max_num_seqs=1, max_model_len=WINDOW + CHUNK)
        self.name, self.tokenizer = path.name, bundle.tokenizer
        self.vocab_size = bundle.manifest.models["target"].vocab_size
        self.megabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        self._runner = ModelRunner(open_executor(bundle, "target", num_threads=num_threads))
        self.loss = self.divergence = self.first = self.same = 0.0

    def read(self, start: int, tokens: list[int]) -> npt.NDArray[np.float64]:
        """Log probabilities [n, V] after each of ``tokens``, which follow ``start`` others."""
        if start == 0:
            self._runner.kv.release(0)
        found = log_softmax(self._runner.step(0, [RowWork(tokens, len(tokens))]))
        self._runner.kv.commit(0, start + len(tokens))
        return found

    def add(self, found: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], came: list[int], start: int) -> None:
        """Count what these tokens lost."""
        self.loss -= float(found[np.arange(len(came)), came].sum())
        lost = (np.exp(wanted) * (wanted - found)).sum(axis=-1)
        if start == 0:
            self.first += float(lost[0])
            lost[0] = 0
        self.divergence += float(lost.sum())
        self.same += float((found.argmax(axis=-1) == wanted.argmax(axis=-1)).sum())


def main() -> None:
    """Read the texts with all bundles, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="the float32 bundle")
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=4096, help="in all; texts get equal parts")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()

    readers = [Reader(path, args.threads) for path in (args.reference, *args.bundles)]
    part = args.max_tokens // len(args.text)
    windows = [
        window
        for path in args.text
        for window in make_windows(
            [read_text(path)],
            readers[0].tokenizer,
            vocab_size=readers[0].vocab_size,
            max_model_len=WINDOW,
            max_tokens=part,
        )
    ]
    count = 0
    for window in windows:
        for start in range(0, len(window) - 1, CHUNK):
            tokens = window[start : min(start + CHUNK, len(window) - 1)]
            came = window[start + 1 : start + 1 + len(tokens)]
            wanted = readers[0].read(start, tokens)
            readers[0].add(wanted, wanted, came, start)
            for reader in readers[1:]:
                reader.add(reader.read(start, tokens), wanted, came, start)
            count += len(tokens)
    print(f"{count} tokens, perplexity of {readers[0].name}: {math.exp(readers[0].loss / count):.3f}\n")
    print("| bundle | MB | perplexity | divergence, nats | of first tokens | same best token |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for reader in readers:
        change = math.expm1((reader.loss - readers[0].loss) / count)
        rest = reader.divergence / (count - len(windows))
        row = (f"{reader.megabytes:.0f}", f"{change:+.2%}", f"{rest:.4f}", f"{reader.first / len(windows):.2f}")
        print("| " + " | ".join((reader.name, *row, f"{reader.same / count:.1%}")) + " |")


if __name__ == "__main__":
    main()
