"""Draws by the interpreted kernels and by the host, in a process of its own: Triton decides on import."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 75
"""Logits of a row; ids from ``USED`` on are padding."""
USED = 70
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0}, {"temperature": 0.1}, {"temperature": 5.0}, {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 0.5, "top_p": 0.01}, {"temperature": 1.3, "min_p": 0.2}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 4, "min_p": 0.02}, {"temperature": 1.2, "top_p": 0.6, "min_p": 0.01},
)  # fmt: skip


def make_rows(rng: np.random.Generator) -> np.ndarray:
    rows = [rng.normal(size=WIDTH) * scale for scale in (0.0, 0.3, 1, 4, 40)]
    rows += [rng.integers(-2, 3, WIDTH), np.where(rng.random(WIDTH) < 0.6, -np.inf, rng.normal(size=WIDTH))]
    certain, empty, broken, endless = np.full((4, WIDTH), -np.inf)
    certain[37], broken[:], broken[50], endless[:], endless[69] = 2.0, 1.0, np.nan, 0.5, np.inf
    return np.array([*rows, certain, empty, broken, endless], np.float32)


def shrink() -> None:
    """Short blocks, for the kernels and their caller."""
    from specexport_runtime.executors import device_rows, row_cuts, row_kernels

    small = {"BLOCK": 16, "PARTS": 8, "BINS": 16, "K_INLINE": 8, "K_MAX": 32}
    row_kernels.CONSTANTS.update(small)
    for name, value in (small | {"_INLINE_BYTES": 8 * small["K_INLINE"]}).items():
        setattr(device_rows, name, value)
    row_cuts.K_INLINE = small["K_INLINE"]


class Device:
    """A sampler on a played GPU, and the logits of one step."""

    def __init__(self, most: int = 16) -> None:
        from specexport_runtime.executors.device_rows import RowSampler
        from tools.proof.devices import HostGpu

        self.gpu = HostGpu(1 << 26)
        self.logits = self.gpu.view(self.gpu.allocate(4 * most * WIDTH, "logits"), (most, WIDTH), "float32").numpy()
        self.sampler = RowSampler(self.gpu, WIDTH, 4)

    def step(self, rows: np.ndarray, asks: Any) -> Any:
        self.logits[: len(rows)] = rows
        self.sampler.put(asks, int(self.logits.ctypes.data))
        self.gpu.synchronize()
        return self.sampler.collect(asks, rows.argmax(axis=1))


def is_at(masses: np.ndarray, token: int, uniform: float) -> bool:
    """Whether a uniform gives a token, or misses it by rounding only."""
    running = np.concatenate([[0.0], masses.cumsum()]) / masses.sum()
    return masses[token] > 0 and running[token] - 1e-12 <= uniform <= running[token + 1] + 1e-12


def dense(distribution: Any) -> np.ndarray:
    full = np.zeros(WIDTH)
    full[slice(len(distribution.probs)) if distribution.token_ids is None else distribution.token_ids] = (
        distribution.probs
    )
    return full


def distributions() -> None:
    """Draws, probabilities and errors of single rows, for all cuts."""
    from specexport_runtime.errors import SpecexportError
    from specexport_runtime.sampling.device import to_host
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sampling.sampler import Sampler

    rng, device = np.random.default_rng(1), Device()
    for number, given in enumerate(PARAMS):
        params, rows = SamplingParams(**given), make_rows(rng)
        sampler = Sampler(params, [1], USED)
        uniforms = [0.0, 1 - 2**-53, *rng.random(len(rows))][: len(rows)]
        tokens = rng.integers(0, USED, len(rows)).tolist()
        asks = [sampler.ask(u, WIDTH, token) for u, token in zip(uniforms, tokens, strict=True)]
        for i, row in enumerate(device.step(rows, asks)):
            try:
                expected = sampler.distribution(rows[i])
            except SpecexportError as error:
                try:
                    sampler.make_row_distribution(row)
                except SpecexportError as found:
                    assert (type(found), found.message) == (type(error), error.message)  # noqa: PT017
                    continue
                raise AssertionError(f"{given}, row {i}: no error") from error
            distribution, masses = sampler.make_row_distribution(row), dense(expected)
            where = f"{given}, row {i}"
            if "top_p" in given or "top_k" in given or "min_p" in given:
                np.testing.assert_allclose(dense(to_host(distribution)), masses, rtol=1e-12, err_msg=where)
            drawn = distribution.draw(uniforms[i])
            assert is_at(masses, drawn, uniforms[i]), f"{where}: {drawn} for {uniforms[i]}"
            for token in (tokens[i], drawn):
                np.testing.assert_allclose(distribution.probability(token), masses[token], rtol=1e-12, err_msg=where)
            np.testing.assert_allclose(distribution.top, masses.max(), rtol=1e-12, err_msg=where)
        if number < 3:  # nothing of these is fetched but broken rows
            assert device.sampler.counts.fetches == 3 * (number + 1)


def residuals() -> None:
    """max(0, w q - p) of two steps on two streams, the first of which is kept while others follow."""
    from specexport_runtime.sampling.accept import normalised, residual
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sampling.sampler import Sampler

    rng, target, draft = np.random.default_rng(2), Device(), Device()
    rows, others = make_rows(rng)[:8], make_rows(rng)[[3, 2, 2, 1, 4, 6, 5, 0]]
    others[6, rows[6] == -np.inf] = -np.inf
    for temperature, weight in ((1.0, 1.0), (0.7, 0.4)):
        sampler = Sampler(SamplingParams(temperature=temperature), [1], USED)
        uniforms = rng.random(len(rows)).tolist()
        kept = draft.step(others, [sampler.ask(0.5, USED - 6, slot=i) for i in range(len(others))])
        draft.step(rows, [sampler.ask(0.5, WIDTH)] * len(rows))
        asked = target.step(rows, [sampler.ask(u, WIDTH) for u in uniforms])
        for i in range(len(rows)):
            q, p = sampler.make_row_distribution(asked[i]), sampler.make_row_distribution(kept[i])
            expected = residual(sampler.distribution(rows[i]), sampler.distribution(others[i][: USED - 6]), weight)
            found = residual(q, p, weight)
            np.testing.assert_allclose(found.sum(), expected.sum(), rtol=1e-9, atol=1e-15)
            if expected.sum() > 1e-9:
                assert is_at(expected, normalised(q, found).draw(uniforms[i]), uniforms[i]), (temperature, i)
        # One of them is on the host.
        mixed = residual(sampler.make_row_distribution(asked[2]), sampler.distribution(others[2][: USED - 6]), weight)
        same = residual(sampler.distribution(rows[2]), sampler.make_row_distribution(kept[2]), weight)
        np.testing.assert_allclose(mixed, same, rtol=1e-12)


def twins() -> None:
    """What the numpy twin finds, which other tests run on."""
    from specexport.kernels import sampling
    from specexport_runtime.executors.row_kernels import ARGUMENTS, CONSTANTS, FOUND, ON_DEVICE, RowRule
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sampling.sampler import Sampler
    from tests.support.fakes import row_twin

    for name in ("BLOCK", "BINS", "K_INLINE", "K_MAX"):
        setattr(row_twin, name, CONSTANTS[name])
    rng = np.random.default_rng(3)
    rows, blocks = make_rows(rng)[:8], -(-WIDTH // 16)
    asks = np.array([
        [getattr(ask.rule if name in RowRule._fields else ask, name) for name in ON_DEVICE]
        for ask in [Sampler(SamplingParams(**given), [1], USED).ask(rng.random(), WIDTH, 3) for given in PARAMS[:8]]
    ])  # fmt: skip
    sizes = {
        "tops": 8 * blocks, "sums": 8 * blocks, "found": 8 * FOUND, "bins": 8 * 16, "few_ids": 64, "few_values": 64,
        "many_ids": 256, "many_values": 256, "token_ids": 8,
    }  # fmt: skip
    kinds = {"few_ids": np.int32, "many_ids": np.int32, "token_ids": np.int64}
    kinds |= dict.fromkeys(("tops", "few_values", "many_values"), np.float32)
    made = []
    for run in (run_interpreted, run_twin):
        memory: dict[str, Any] = {name: np.zeros(size, kinds.get(name, np.float64)) for name, size in sizes.items()}
        memory |= {"logits": rows.reshape(-1).copy(), "asks": asks.reshape(-1).copy()}
        memory |= {"pitch": WIDTH, "blocks": blocks, "feeds": 1}
        for name, grid in (("weigh", (8, blocks, 1)), ("draw", (8, 1, 1)), ("spread", (8, blocks, 1)),
                           ("gather", (8, blocks, 1))):  # fmt: skip
            names = getattr(sampling, name).arg_names[: len(ARGUMENTS[name])]
            run(
                name,
                grid,
                [memory.get(each, {"pitch": WIDTH, "blocks": blocks, "feeds": 1}.get(each)) for each in names],
            )
        made.append(memory)
    one, other = made
    np.testing.assert_array_equal(one["token_ids"], one["found"].reshape(8, FOUND)[:, 2])
    for name in ("tops", "sums", "found", "bins", "token_ids"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-12, atol=1e-300, err_msg=name)
    for i in range(8):
        count = int(one["found"].reshape(8, FOUND)[i, 5])
        for name, size in (("few_ids", 8), ("many_ids", 32)):
            found = [sorted(each[name].reshape(8, -1)[i][: min(count, size)].tolist()) for each in made]
            if count <= size:
                assert found[0] == found[1], (name, i)


def run_interpreted(name: str, grid: tuple[int, int, int], arguments: list[Any]) -> None:
    import torch

    from specexport.kernels import sampling
    from specexport_runtime.executors.row_kernels import CONSTANTS

    kernel = getattr(sampling, name)
    given = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arguments]
    kernel[grid](*given, **{key: CONSTANTS[key] for key in kernel.arg_names[len(given) :]})


def run_twin(name: str, grid: tuple[int, int, int], arguments: list[Any]) -> None:
    from tests.support.fakes import row_twin

    memory: dict[int, np.ndarray] = {}
    given = []
    for each in arguments:
        if isinstance(each, np.ndarray):
            memory[int(each.ctypes.data)] = each
            given.append(int(each.ctypes.data))
        else:
            given.append(each)

    def at(address: int, _: str) -> np.ndarray:
        start = max(known for known in memory if known <= address)
        return memory[start][(address - start) // memory[start].itemsize :]

    row_twin.KERNELS[name](at, grid, *given)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]
    from tests.support.references.kernel_worker import mend_interpreter

    mend_interpreter()
    np.seterr(all="ignore")  # the interpreter adds infinities where a GPU does
    shrink()
    for check in sys.argv[1:]:
        globals()[check]()
