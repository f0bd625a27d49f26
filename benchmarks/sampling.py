"""Time of drawing and acceptance in a round, without a model: by the library of operators, and by numpy.

A round at K=4: four draft tokens are drawn, each from a row of logits, and tested by up to five rows of the target. The
library looks at no row after a refused token; numpy processes all five, so that runs compare.

With ``--bundle`` the rows are a real target's, after the last five tokens of a prompt.

python benchmarks/sampling.py --bundle engines/demo
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import median, report, timed

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.host_rows import HostRows
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.distribution import Distribution, sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream
from specexport_runtime.sampling.sampler import Sampler

ROWS = 5
VOCAB_SIZES = (4096, 32_000, 262_144)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.95, penalties": {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def make_logits(kind: str, vocab_size: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """[ROWS, vocab_size] logits: ``peaked`` as a model's (a Zipf-like head over a noisy floor), or plain noise."""
    if kind != "peaked":
        return (float(kind.removeprefix("noise ")) * rng.normal(size=(ROWS, vocab_size))).astype(np.float32)
    logits = 2.5 * rng.normal(size=(ROWS, vocab_size))
    for row in logits:
        head = rng.choice(vocab_size, 200, replace=False)
        row[head] += 16.0 - 2.0 * np.log(np.arange(1, 201))
    return logits.astype(np.float32)


def bundle_logits(path: Path, prompt: str) -> npt.NDArray[np.float32]:
    """[ROWS, V] logits of a bundle's target after the last ROWS tokens of ``prompt``."""
    bundle = load_bundle(path, max_num_seqs=1)
    executor = open_executor(bundle, "target")
    logits = ModelRunner(executor).step(0, [RowWork(bundle.tokenizer.encode(prompt).ids, ROWS)]).copy()
    executor.close()
    return logits


def milliseconds(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Medians over ``repeats``, in turns, of the mean of enough calls to fill a fifth of a second."""
    for function in functions:
        function()
    calls = [max(3, int(0.2 / timed(function)[0])) for function in functions]

    def several(function: Callable[[], object], count: int) -> float:
        return timed(lambda: [function() for _ in range(count)])[0] / count

    turns = [[several(*each) for each in zip(functions, calls, strict=True)] for _ in range(repeats)]
    return [1e3 * median(times) for times in zip(*turns, strict=True)]


def measure(kind: str, logits: npt.NDArray[np.float32], setting: str, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    rng = np.random.default_rng(0)
    vocab_size = logits.shape[1]
    draft_logits = (logits + 0.5 * rng.normal(size=logits.shape)).astype(np.float32)
    params = SamplingParams(temperature=0.8, **SETTINGS[setting])
    prompt = rng.integers(0, vocab_size, 300).tolist()
    sampler, alone = (Sampler(params, prompt, vocab_size) for _ in range(2))
    alone._near[vocab_size] = None  # numpy cuts
    stream = RandomStream(1)
    target, draft = HostRows(vocab_size, 1), HostRows(vocab_size, 1)

    def by_library() -> Verdict:
        drafts: list[Distribution] = []
        for j in range(ROWS - 1):
            (row,) = draft.collect([sampler.ask(stream.draws(j).draft, vocab_size, slot=j)], draft_logits[j : j + 1])
            drafts.append(sampler.make_row_distribution(row, []))
        drafted = [distribution.draw(stream.draws(j).draft) for j, distribution in enumerate(drafts)]
        asks = [sampler.ask(stream.draws(j).resample, vocab_size, token) for j, token in enumerate([*drafted, -1])]
        rows = target.collect(asks, logits)
        return RULES["block"](
            drafted, drafts, lambda j: sampler.make_row_distribution(rows[j], drafted[:j]), stream.draws
        )

    def by_numpy() -> Verdict:
        drafts = [alone.distribution(row, []) for row in draft_logits[: ROWS - 1]]
        drafted = [sample_token(distribution, stream.draws(j).draft) for j, distribution in enumerate(drafts)]
        rows = [alone.distribution(row, drafted[:j]) for j, row in enumerate(logits)]
        return RULES["block"](drafted, drafts, rows.__getitem__, stream.draws)

    if by_library() != by_numpy():
        raise SystemExit(f"{kind}, {setting}: another token is drawn.")
    library_ms, numpy_ms = milliseconds([by_library, by_numpy], repeats)
    kept = [len(sampler.distribution(row).probs) for row in logits]
    return {
        "logits": kind,
        "vocab_size": vocab_size,
        "setting": setting,
        "mean_kept_tokens": sum(kept) / ROWS,
        "library_ms": library_ms,
        "numpy_ms": numpy_ms,
    }


def main() -> None:
    """Measure every combination of logits, vocabulary and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bundle", type=Path, help="take the rows from this bundle's target instead")
    parser.add_argument("--prompt", default="Question: How many legs do three spiders and two birds have?\nAnswer:")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.bundle is not None:
        sources = [(args.bundle.name, bundle_logits(args.bundle, args.prompt))]
    else:
        kinds = [(kind, size) for size in VOCAB_SIZES for kind in ("peaked", "noise 1", "noise 3")]
        sources = [(kind, make_logits(kind, size, np.random.default_rng(0))) for kind, size in kinds]
    results = [measure(kind, logits, setting, args.repeats) for kind, logits in sources for setting in SETTINGS]
    rows = [
        (
            f"V={r['vocab_size']}, {r['logits']} logits, {r['setting']}",
            f"{r['library_ms']:.3f} ms a round; by numpy {r['numpy_ms']:.3f}, "
            f"{r['numpy_ms'] / r['library_ms']:.1f} times as long; {r['mean_kept_tokens']:.0f} kept",
        )
        for r in results
    ]
    report("Logits processing, drawing and acceptance", rows, {"rows": ROWS, "results": results}, args.json)


if __name__ == "__main__":
    main()
