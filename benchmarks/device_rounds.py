"""The host's share of sampled rounds whose logits stay on a GPU, without one: a driver that does nothing.

A round at K=4: four steps of a draft, a step of the target, and acceptance. Answers are numpy's, of rows about as
certain as a language model's; the time of the engines, of copies and of kernels is not in it.

python benchmarks/device_rounds.py
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report, timed

from specexport_runtime.executors import device_rows
from specexport_runtime.executors.device_rows import DeviceRows, Kernel, RowSampler
from specexport_runtime.executors.row_kernels import ARGUMENTS, FOUND, K_INLINE, RowAsk
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler

VOCAB, LOOKAHEAD = 151_936, 4
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "0.7, top-p 0.9, top-k 40, min-p 0.02": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
}


class IdleDriver:
    """Memory of the host, and nothing else."""

    runs_kernels, stream = True, 1

    def __init__(self) -> None:
        self._next = 0

    def allocate(self, num_bytes: int, _: str) -> int:
        """An address that nobody reads."""
        self._next += num_bytes
        return self._next

    def allocate_host(self, num_bytes: int) -> Any:
        """Zeros."""
        return np.zeros(num_bytes, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0


def make_rows(rng: np.random.Generator, count: int) -> Any:
    """Logits [count, V]."""
    ranks = rng.permuted(np.tile(np.arange(1, VOCAB + 1), (count, 1)), axis=1)
    return (-rng.uniform(1.4, 2.2, (count, 1)) * np.log(ranks) + rng.normal(0, 0.3, (count, VOCAB))).astype(np.float32)


def answer(sampler: RowSampler, step: int, logits: Any, asks: list[RowAsk]) -> None:
    """Put there what the kernels would find."""
    count = len(asks)
    found, ids, values = (
        np.zeros((count, FOUND)),
        np.zeros((count, K_INLINE), np.int32),
        np.zeros((count, K_INLINE), np.float32),
    )
    for i, (rule, uniform, token, _) in enumerate(asks):
        weights = np.exp((logits[i].astype(float) - logits[i].max()) / rule.temperature)
        running, total = weights.cumsum(), weights.sum()
        drawn = int(running.searchsorted(uniform * running[-1], side="right"))
        found[i, :5] = (
            logits[i].max(),
            total,
            drawn,
            weights[drawn] / total,
            weights[token] / total if token >= 0 else 0,
        )
        if rule.cuts:
            order = np.argsort(-logits[i], kind="stable")[:K_INLINE]
            enough = int((weights[order].cumsum() < rule.top_p * total).sum()) + 4 if rule.top_p else K_INLINE
            near = int((logits[i][order] >= logits[i].max() + rule.least).sum())
            kept = order[: min(enough, near, rule.top_k or K_INLINE)]
            found[i, 5], ids[i, : len(kept)], values[i, : len(kept)] = len(kept), kept, logits[i][kept]
    memory = sampler._step_buffers[step].found
    memory[: FOUND * count] = found.ravel()
    inline = memory[FOUND * count :]
    inline.view(np.int32)[: K_INLINE * count], inline.view(np.float32)[K_INLINE * count : 2 * K_INLINE * count] = (
        ids.ravel(),
        values.ravel(),
    )


def measure(distribution: dict[str, Any], batch: int, repeats: int) -> float:
    """Microseconds of a round."""
    rng, sampler = np.random.default_rng(3), Sampler(SamplingParams(**distribution), [1], VOCAB)
    target, draft = (RowSampler(IdleDriver(), VOCAB, batch) for _ in range(2))  # type: ignore[arg-type]
    draft.reserve(batch, LOOKAHEAD)
    target.reserve(batch * (LOOKAHEAD + 1), 0)
    target.residuals = lambda asks: [(0.5, 7)] * len(asks)  # type: ignore[method-assign]
    q = make_rows(rng, LOOKAHEAD + 1)
    p = q + rng.normal(0, 0.4, q.shape).astype(np.float32)
    streams = [RoundDraws(RandomStream(i)) for i in range(batch)]
    none = np.zeros(batch * (LOOKAHEAD + 1), np.int64)

    def draft_asks(step: int) -> list[RowAsk]:
        return [sampler.ask(s.peek(step).draft, VOCAB, slot=step * batch + i) for i, s in enumerate(streams)]

    def drafted() -> list[DeviceRows]:
        asks = [draft_asks(step) for step in range(LOOKAHEAD)]
        for step in range(LOOKAHEAD):
            draft.put(asks[step], 0, step=step)
        return [draft.collect(asks[step], none[:batch], step=step) for step in range(LOOKAHEAD)]

    def target_asks(tokens: list[list[int]]) -> list[RowAsk]:
        return [
            sampler.ask(s.peek(j).resample, VOCAB, token)
            for s, own in zip(streams, tokens, strict=True)
            for j, token in enumerate([*own, -1])
        ]

    def whole_round(*, is_answered: bool) -> None:
        steps = drafted()
        distributions = [[sampler.make_row_distribution(rows[i]) for rows in steps] for i in range(batch)]
        tokens = [
            [distribution.draw(s.peek(j).draft) for j, distribution in enumerate(own)]
            for s, own in zip(streams, distributions, strict=True)
        ]
        asks = target_asks(tokens)
        target.put(asks, 0)
        if not is_answered:
            answer(target, 0, q[np.arange(len(asks)) % (LOOKAHEAD + 1)], asks)
        rows = target.collect(asks, none)
        for i, s in enumerate(streams):
            own = [rows[i * (LOOKAHEAD + 1) + j] for j in range(LOOKAHEAD + 1)]
            RULES["block"](tokens[i], distributions[i], lambda j, o=own: sampler.make_row_distribution(o[j]), s)  # type: ignore[misc]

    drafted()
    for step in range(LOOKAHEAD):
        answer(draft, step, p[[step] * batch], draft_asks(step))
    whole_round(is_answered=False)
    return 1e6 * median(timed(lambda: whole_round(is_answered=True))[0] for _ in range(repeats))


def main() -> None:
    """Measure each distribution with one sequence and with eight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device_rows.load_kernels = lambda _: {name: Kernel(0, 128, 0) for name in ARGUMENTS}
    found = {
        name: [measure(distribution, batch, args.repeats) for batch in (1, 8)]
        for name, distribution in DISTRIBUTIONS.items()
    }
    rows = [
        (name, f"{one:.0f} us with one sequence, {eight:.0f} us with eight") for name, (one, eight) in found.items()
    ]
    report("The host's share of a sampled round, K=4", rows, found, args.json)


if __name__ == "__main__":
    main()
