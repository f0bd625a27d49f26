"""Tokens drawn on the device: the kernels against numpy and their times, and sampled texts against the host's."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.device_rows import DeviceRows, RowSampler
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.row_kernels import RowAsk
from specexport_runtime.sampling.accept import residual
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler
from tools.proof.devices import HostGpu
from tools.proof.steps import Decoded, decode, random_tokens

if TYPE_CHECKING:
    from tests.gpu.conftest import Engines, Rows

pytestmark = pytest.mark.gpu
VOCAB, TINY_VOCAB = 151_936, 1_200
LOOKAHEAD = 4
HOST_US = {1: 200.0, 8: 400.0}
"""Most microseconds of the host a round, waits left out, by sequences at a time."""
BYTES = 20_000
"""Most bytes to the host, a round and sequence."""
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=0.7, top-p 0.9, top-k 40, min-p 0.02": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
}
CASES = (*DISTRIBUTIONS.values(), {"temperature": 0.1}, {"temperature": 5.0}, {"temperature": 1.0, "min_p": 0.05})


class Steps:
    """Logits of one engine's steps that are made up, on a driver, and what draws from them."""

    def __init__(self, driver: GpuDriver, vocab: int, most: int) -> None:
        self.driver, self.vocab = driver, vocab
        self.address = driver.allocate(4 * most * vocab, "logits")
        self._memory = driver.allocate_host(4 * most * vocab)
        self._logits = self._memory.view(np.float32).reshape(most, vocab)
        self.sampler = RowSampler(driver, vocab, 8)
        self.waited = 0.0

    def load(self, rows: Any) -> None:
        """Put logits [R, V] on the device."""
        self._logits[: len(rows)] = rows
        self.driver.copy_in(self.address, int(self._memory.ctypes.data), 4 * len(rows) * self.vocab)
        self.driver.synchronize()

    def draw(self, asks: Sequence[RowAsk]) -> DeviceRows:
        """What is found in the first rows."""
        self.sampler.put(asks, self.address)
        start = time.perf_counter()
        self.driver.synchronize()
        self.waited += time.perf_counter() - start
        return self.sampler.collect(asks, np.zeros(len(asks), np.int64))

    def close(self) -> None:
        """Give the memory back."""
        self.sampler.close()
        self.driver.free_host(self._memory)
        self.driver.free(self.address)


def make_logits(rng: np.random.Generator, count: int, vocab: int) -> Any:
    """Rows about as certain as a language model's: float32 [``count``, ``vocab``]."""
    ranks = rng.permuted(np.tile(np.arange(1, vocab + 1), (count, 1)), axis=1)
    steepness = rng.uniform(1.4, 2.2, (count, 1))
    return (-steepness * np.log(ranks) + rng.normal(0, 0.3, (count, vocab))).astype(np.float32)


@pytest.mark.usefixtures("proof")
def test_draws_on_the_device_are_numpys(rows: "Rows", device: str) -> None:
    if device == "cpu":
        driver: Any = HostGpu()
    else:
        from specexport_runtime.executors.cuda_driver import CudaDriver

        driver = CudaDriver()
    vocab = TINY_VOCAB if rows.tiny else VOCAB
    target, draft = steps = [Steps(driver, vocab, 8 * (LOOKAHEAD + 1)) for _ in range(2)]
    check_draws(rows, target, draft)
    time_rounds(rows, target, draft)
    for each in steps:
        each.close()
    driver.close()
    assert not rows.wrong


def check_draws(rows: "Rows", target: Steps, draft: Steps) -> None:
    """Draws, probabilities, cuts and residuals against numpy, row by row."""
    rng, vocab, count = np.random.default_rng(3), target.vocab, LOOKAHEAD + 1
    draws = wrong = masses = 0
    worst = 0.0
    for given in CASES[:3] if rows.tiny else CASES:
        sampler = Sampler(SamplingParams(**given), [1], vocab)
        q = make_logits(rng, count, vocab)
        p = q + rng.normal(0, 0.4, q.shape).astype(np.float32)
        q[1, :500], q[2, 5:9] = -np.inf, q[2].max()
        uniforms, tokens = rng.random(count).tolist(), rng.integers(0, vocab, count).tolist()
        target.load(q)
        draft.load(p)
        kept = draft.draw([sampler.ask(u, vocab, slot=i) for i, u in enumerate(uniforms)])
        asked = target.draw([sampler.ask(u, vocab, t) for u, t in zip(uniforms, tokens, strict=True)])
        for i in range(count):
            distribution, host, other = (
                sampler.make_row_distribution(asked[i]),
                sampler.distribution(q[i]),
                sampler.distribution(p[i]),
            )
            drawn = distribution.draw(uniforms[i])
            draws, wrong = draws + 1, wrong + (drawn != host.draw(uniforms[i]))
            for token in (drawn, tokens[i]):
                right = host.probability(token)
                worst = max(worst, abs(distribution.probability(token) - right) / max(right, 1e-300))
            for weight in (1.0, 0.4):
                found = residual(distribution, sampler.make_row_distribution(kept[i]), weight)
                mass = float(residual(host, other, weight).sum())
                worst = max(worst, abs(float(found.sum()) - mass) / max(mass, 1e-12))
                masses += 1
    rows.right(
        f"draws: kernels against numpy, V={vocab}",
        f"{draws - wrong} of {draws} tokens equal; probabilities and {masses} residuals off by up to {worst:.1e}",
        "all, at most 1e-9", not wrong and worst <= 1e-9,
    )  # fmt: skip


def time_rounds(rows: "Rows", target: Steps, draft: Steps) -> None:
    """Steps of draws, and whole rounds of K draws, a test and what follows from it: the host's share, and bytes."""
    rng, vocab = np.random.default_rng(4), target.vocab
    for name, given in list(DISTRIBUTIONS.items())[: 1 if rows.tiny else None]:
        sampler = Sampler(SamplingParams(**given), [1], vocab)
        for count in (1, LOOKAHEAD + 1, *(() if rows.tiny else (8 * (LOOKAHEAD + 1),))):
            target.load(make_logits(rng, min(count, 5), vocab)[np.arange(count) % 5])
            asks = [sampler.ask(float(rng.random()), vocab, 3) for _ in range(count)]
            wall = median_us(lambda asks=asks: target.draw(asks), 3 if rows.tiny else 50)
            rows.row(f"draws: {count} rows, {name}", f"{wall:.0f} us, its wait included", us=wall)
        for batch, most in list(HOST_US.items())[: 1 if rows.tiny else None]:
            round_of(rows, name, sampler, (target, draft), batch, most)


def round_of(rows: "Rows", name: str, sampler: Sampler, steps: tuple[Steps, Steps], batch: int, most: float) -> None:
    """One row: rounds of ``batch`` sequences over logits that stay the same."""
    target, draft = steps
    rng, vocab, rounds = np.random.default_rng(5), target.vocab, 2 if rows.tiny else 40
    q = make_logits(rng, LOOKAHEAD + 1, vocab)
    p = q + rng.normal(0, 0.4, q.shape).astype(np.float32)
    target.load(q[np.arange(batch * (LOOKAHEAD + 1)) % (LOOKAHEAD + 1)])
    draft.load(p[np.arange(batch) % (LOOKAHEAD + 1)])
    streams = [RoundDraws(RandomStream(i)) for i in range(batch)]
    spent, waited = [], []
    before = [(each.sampler.counts.bytes, each.sampler.counts.fetches) for each in steps]
    for _ in range(rounds):
        target.waited = draft.waited = 0.0
        start, later = time.perf_counter(), [_timed_waits(each) for each in steps]
        distributions: list[list[Any]] = [[] for _ in streams]
        tokens: list[list[int]] = [[] for _ in streams]
        for j in range(LOOKAHEAD):
            asks = [sampler.ask(s.peek(j).draft, vocab, slot=j * 8 + i) for i, s in enumerate(streams)]
            for i, row in enumerate(draft.draw(asks)):
                distributions[i].append(sampler.make_row_distribution(row))
                tokens[i].append(distributions[i][-1].draw(streams[i](j).draft))
        asks = [
            sampler.ask(s.peek(j).resample, vocab, token)
            for i, s in enumerate(streams)
            for j, token in enumerate([*tokens[i], -1])
        ]
        drawn = target.draw(asks)
        for i, stream in enumerate(streams):
            own = [drawn[i * (LOOKAHEAD + 1) + j] for j in range(LOOKAHEAD + 1)]
            RULES["block"](tokens[i], distributions[i], lambda j, o=own: sampler.make_row_distribution(o[j]), stream)
            stream.end_round()
        total = time.perf_counter() - start
        waited.append(target.waited + draft.waited + sum(each() for each in later))
        spent.append(1e6 * (total - waited[-1]))
    moved = [each.sampler.counts.bytes - old for each, (old, _) in zip(steps, before, strict=True)]
    fetched = sum(each.sampler.counts.fetches - old for each, (_, old) in zip(steps, before, strict=True))
    size, host = sum(moved) / rounds / batch, float(np.median(spent))
    what = f"draws: a round of K={LOOKAHEAD}, {name}, batch {batch}"
    rows.reach(what, f"{host:.0f} us of the host beside {1e6 * float(np.median(waited)):.0f} us of waits",
               f"at most {most:.0f} us", host <= most)  # fmt: skip
    rows.reach(f"{what}: to the host", f"{size:.0f} bytes a sequence; {fetched} rows fetched in {rounds} rounds",
               f"at most {BYTES}", size <= BYTES)  # fmt: skip


def _timed_waits(steps: Steps) -> Callable[[], float]:
    """Count the seconds of waits that a sampler makes by itself from here on; ends when it is called."""
    seconds, inner = [0.0], steps.driver.synchronize

    def wait() -> None:
        start = time.perf_counter()
        inner()
        seconds[0] += time.perf_counter() - start
        steps.sampler.counts.waits += 1

    steps.sampler.wait = wait  # type: ignore[method-assign]

    def end() -> float:
        del steps.sampler.wait
        return seconds[0]

    return end


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def test_sampled_texts_are_those_drawn_on_the_host(engines: "Engines", rows: "Rows") -> None:
    if engines.kind == "ort-cpu":
        pytest.skip("it draws on the host")
    most = engines.most_rows
    target, draft = (engines.open(role, num_rows=most) for role in ("target", "draft"))
    for name in list(DISTRIBUTIONS)[: 1 if rows.tiny else None]:
        for batch in (2,) if rows.tiny else (1, most):
            compare_texts(rows, f"{engines.kind}: sampled, {name}", target, draft, batch, DISTRIBUTIONS[name])
    assert not rows.wrong


def compare_texts(
    rows: "Rows", what: str, target: Executor, draft: Executor, batch: int, sampling: dict[str, Any]
) -> None:
    """Texts with seeds, and what a round costs each way."""
    count, prompts = 4 if rows.tiny else 48, random_tokens(target.vocab_size, batch, 12, seed=6)

    def sample(tokens: int) -> Decoded:
        return decode(target, prompts, tokens, draft=draft, lookahead=LOOKAHEAD, sampling=sampling)

    sample(8)  # the first rounds record graphs and allocate what rows are kept in
    before = _counts(target, draft)
    on_device = sample(count)
    moved, fetched = (new - old for new, old in zip(_counts(target, draft), before, strict=True))
    target.keeps_rows = draft.keeps_rows = False
    to_host = sample(count)
    target.keeps_rows = draft.keeps_rows = True
    equal = sum(
        one == other
        for texts in zip(on_device.outputs, to_host.outputs, strict=True)
        for one, other in zip(*texts, strict=True)
    )
    total, rounds = batch * count, max(on_device.rounds, 1)
    ms = [1e3 * found.seconds / max(found.rounds, 1) for found in (on_device, to_host)]
    rows.right(
        f"{what}, batch {batch}, K={LOOKAHEAD}",
        f"{equal} of {total} tokens as drawn on the host; {on_device.host_us:.0f} us of the host a round "
        f"(on the host {to_host.host_us:.0f}); round {ms[0]:.2f} ms (on the host {ms[1]:.2f}); "
        f"{moved / rounds / batch:.0f} bytes a sequence and round, {fetched} rows fetched; acceptance "
        f"{on_device.acceptance or 0:.2f}",
        "all equal", equal == total, host_us=on_device.host_us, host_us_before=to_host.host_us, ms=ms,
    )  # fmt: skip


def _counts(*executors: Any) -> tuple[int, int]:
    found = [executor.rows.counts for executor in executors]
    return sum(each.bytes for each in found), sum(each.fetches for each in found)
