"""Our attention kernels against attention in torch, float32, and their time against the bandwidth of a copy.

Bandwidth counts the keys and values that must be read, once for each KV head; a copy's counts bytes read plus written.
"""
# mypy: disable-error-code="no-any-unimported"

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from tests.gpu.conftest import Rows

pytestmark = pytest.mark.gpu
# Inputs are exact in their type; the weights before the second product and the result are rounded to it.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2}
_BESIDE = 3  # tokens after the last row's, which belong to no row


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: rows of (entries before, new tokens), heads, and how many parts the entries are split into."""

    rows: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_size: int
    splits: int = 1
    window: int = -1
    softcap: float = 0.0

    @property
    def name(self) -> str:
        """For the report."""
        rows = ", ".join(f"{past}+{new}" for past, new in self.rows[:5]) + (", …" if len(self.rows) > 5 else "")
        extra = f", window {self.window}" * (self.window > 0) + f", softcap {self.softcap:g}" * (self.softcap > 0)
        return f"rows {rows}; {self.heads}/{self.kv_heads} heads of {self.head_size}, {self.splits} splits{extra}"

    @property
    def capacity(self) -> int:
        """Entries of a cache row: some more than the longest row has."""
        return max(past + new for past, new in self.rows) + 7


CASES = (
    Case(rows=((17, 5), (0, 3), (40, 1), (33, 0)), heads=4, kv_heads=2, head_size=64),
    Case(rows=((300, 1), (5, 1), (0, 1), (511, 1)), heads=8, kv_heads=1, head_size=64, splits=4),
    Case(rows=((1000, 5), (1, 5), (517, 2), (0, 0), (64, 5)), heads=32, kv_heads=8, head_size=128, splits=8),
    Case(rows=((0, 130), (100, 37), (9, 1)), heads=8, kv_heads=8, head_size=128),
    Case(rows=((700, 5), (20, 5)), heads=16, kv_heads=2, head_size=80, splits=2),
    Case(rows=((700, 5), (20, 5)), heads=8, kv_heads=4, head_size=256, splits=3),
    Case(rows=((900, 5), (3, 4)), heads=8, kv_heads=2, head_size=128, window=100, softcap=20.0, splits=4),
    Case(rows=((4091, 5),) * 8, heads=32, kv_heads=8, head_size=128, splits=4),
)
TINY_CASE = Case(rows=((17, 5), (0, 3), (9, 1), (3, 0)), heads=4, kv_heads=2, head_size=16, splits=2)


def make_inputs(case: Case, dtype: str, device: str) -> "dict[str, Tensor]":
    """Random tensors of a step; NaN in every cache entry that holds nothing yet."""
    import torch

    torch.manual_seed(4)
    kind = getattr(torch, dtype)
    new = [count for _, count in case.rows]
    total, size = sum(new) + _BESIDE, case.head_size

    def normal(*shape: int) -> "Tensor":
        return torch.randn(*shape, device=device).to(kind)

    inputs = {
        "q": normal(total, case.heads * size),
        "k": normal(total, case.kv_heads * size),
        "v": normal(total, case.kv_heads * size),
        "k_cache": normal(len(new), 1, case.kv_heads, case.capacity, size),
        "v_cache": normal(len(new), 1, case.kv_heads, case.capacity, size),
        "kv_lens": torch.tensor([[past] for past, _ in case.rows], dtype=torch.int32, device=device),
        "cu_new_tokens": torch.tensor([0, *_running(new)], dtype=torch.int32, device=device),
    }
    for row, (past, _) in enumerate(case.rows):
        inputs["k_cache"][row, :, :, past:] = float("nan")
        inputs["v_cache"][row, :, :, past:] = float("nan")
    return inputs


def _running(counts: list[int]) -> list[int]:
    return [sum(counts[: i + 1]) for i in range(len(counts))]


def appended(case: Case, inputs: "dict[str, Tensor]", name: str) -> "Tensor":
    """The cache ``name`` ("k" or "v") with the step's entries written by plain indexing."""
    cache: Tensor = inputs[f"{name}_cache"].clone()
    start = 0
    for row, (past, new) in enumerate(case.rows):
        entries = inputs[name][start : start + new].view(new, case.kv_heads, case.head_size)
        cache[row, 0, :, past : past + new] = entries.transpose(0, 1)
        start += new
    return cache


def expected(case: Case, q: "Tensor", k_cache: "Tensor", v_cache: "Tensor", scale: float) -> "Tensor":
    """Attention of the step in float32, row by row: [tokens of rows, Hq*D]."""
    import torch

    outputs, start, group = [], 0, case.heads // case.kv_heads
    for row, (past, new) in enumerate(case.rows):
        if not new:
            continue
        queries = q[start : start + new].float().view(new, case.heads, -1).transpose(0, 1)
        keys, values = (
            cache[row, 0, :, : past + new].float().repeat_interleave(group, dim=0) for cache in (k_cache, v_cache)
        )
        scores = queries @ keys.transpose(1, 2) * scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = (torch.arange(new, device=q.device) + past)[:, None] - torch.arange(past + new, device=q.device)
        hidden = distance < 0
        if case.window > 0:
            hidden |= distance >= case.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        outputs.append((weights @ values).transpose(0, 1).reshape(new, -1))
        start += new
    return torch.cat(outputs)


def error_of(case: Case, dtype: str, device: str) -> float:
    """Run ``kv_append`` and ``ragged_attention``; the largest difference from torch's output.

    It is infinite if a cache differs, or if a token after the last row's has output.
    """
    from unittest import mock

    import torch

    from specexport.kernels import launch

    empty = torch.Tensor.new_empty

    def poisoned(self: "Tensor", *size: Any, **options: Any) -> "Tensor":
        tensor = empty(self, *size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    scale = case.head_size**-0.5
    inputs = make_inputs(case, dtype, device)
    caches = {name: appended(case, inputs, name) for name in ("k", "v")}
    rows = {name: inputs[name] for name in ("kv_lens", "cu_new_tokens")}
    launch.kv_append(*(inputs[name] for name in ("k", "v", "k_cache", "v_cache")), **rows)
    with mock.patch.object(torch.Tensor, "new_empty", poisoned):  # what is not written is seen
        output = launch.ragged_attention(
            inputs["q"], inputs["k_cache"], inputs["v_cache"], **rows, scale=scale, window=case.window,
            softcap=case.softcap, num_splits=case.splits, new_tokens=max(new for _, new in case.rows),
        )  # fmt: skip
    # Full-precision products in the reference: TF32 would be as wrong as what is checked.
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    right = expected(case, inputs["q"], caches["k"], caches["v"], scale)
    torch.backends.cuda.matmul.allow_tf32 = before
    same = all(_equal(inputs[f"{name}_cache"], caches[name]) for name in ("k", "v"))
    if not same or bool(output[len(right) :].any()):
        return float("inf")
    return float((output[: len(right)].float() - right).abs().max())


def _equal(one: "Tensor", other: "Tensor") -> bool:
    """Whether all entries are the same, NaN where NaN is."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", [TINY_CASE, *CASES], ids=lambda case: case.name)
def test_kernels_compute_attention(case: Case, dtype: str, rows: "Rows", device: str) -> None:
    if rows.tiny and (case is not TINY_CASE or dtype == "bfloat16"):
        pytest.skip("the interpreter takes long, and multiplies the bits of bfloat16 as integers")
    error, most = error_of(case, dtype, device), TOLERANCES[dtype]
    rows.right(f"kernels, {dtype}, {case.name}", f"largest error {error:.1e}", f"at most {most:.0e}", error <= most)
    assert not rows.wrong


NUM_SEQS, NEW_TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 8, 5, 32, 8, 128
PASTS = (4096, 8192, 16384)
COPY_TARGET, WORKING_SET = 0.8, 4  # of the copy bandwidth; times the size of the L2 cache

Tensors = Mapping[str, "Tensor"]


def case_of(past: int) -> Case:
    """The step of the target: B=8, 5 new tokens, 32 query heads on 8 KV heads of 128."""
    return Case(rows=((past, NEW_TOKENS),) * NUM_SEQS, heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE)


def filled(case: Case) -> "dict[str, Tensor]":
    """Inputs whose caches hold the step's entries already, the rest zero: no NaN for kernels that do not mask loads."""
    inputs = make_inputs(case, "bfloat16", "cuda")
    for name in ("k_cache", "v_cache"):
        inputs[name] = inputs[name].normal_()
    return inputs


def _chosen_splits(sm: int, past: int, multiprocessors: int) -> int:
    from specexport.kernels.spec import KernelSpec

    spec = KernelSpec(
        kernel="ragged_attention", dtype="bfloat16", num_heads=HEADS, kv_num_heads=KV_HEADS, head_size=HEAD_SIZE,
        new_tokens=NEW_TOKENS,
    )  # fmt: skip
    return spec.with_splits(sm, num_seqs=NUM_SEQS, kv_len=past, multiprocessors=multiprocessors).num_splits


def call(tensors: Tensors, splits: int) -> "Callable[[], Tensor]":
    """Our kernel on the inputs of a step, from :func:`filled`, to be called."""
    from specexport.kernels import launch

    def run() -> "Tensor":
        names = ("q", "k_cache", "v_cache", "kv_lens", "cu_new_tokens")
        return launch.ragged_attention(
            *(tensors[name] for name in names), scale=HEAD_SIZE**-0.5, num_splits=splits, new_tokens=NEW_TOKENS,
        )  # fmt: skip

    return run


def num_sets(bytes_of_one: int, cache_bytes: int) -> int:
    """Buffer sets to rotate among, so that each was evicted from the cache before it is read again; at least two."""
    return max(2, math.ceil(WORKING_SET * cache_bytes / bytes_of_one))


def time_rotating(calls: Sequence[Callable[[], object]], *, repeats: int = 20, warm_up: int = 3) -> tuple[float, str]:
    """Median milliseconds of one call, and how it was measured.

    All calls, the same work on different buffers, are recorded into one CUDA graph, which is replayed: so the time
    between launches is the GPU's, not Python's. Where recording fails they are launched one by one. ``repeats`` replays
    are timed, each by a pair of events, after ``warm_up`` others.
    """
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    replay, how = _record(calls)
    for _ in range(warm_up):
        replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times), how


def _record(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    import torch

    def run_all() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run_all()
    except Exception as error:  # some calls synchronize or allocate in ways that cannot be recorded
        torch.cuda.synchronize()
        return run_all, f"launched one by one ({type(error).__name__})"
    return graph.replay, "replayed from a graph"


def copy_bandwidth(num_bytes: int, cache_bytes: int) -> float:
    """GB/s of torch copying a buffer of ``num_bytes`` to another, bytes read plus bytes written."""
    import torch

    pairs = [
        (
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(),
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda"),
        )
        for _ in range(num_sets(2 * num_bytes, cache_bytes))
    ]
    calls = [lambda source=source, copy=copy: copy.copy_(source) for source, copy in pairs]
    milliseconds, _ = time_rotating(calls)
    return 2 * num_bytes / milliseconds / 1e6


@pytest.mark.parametrize("past", PASTS)
def test_time_of_attention(past: int, rows: "Rows", device: str) -> None:
    import torch

    if device == "cpu":
        pytest.skip("there is nothing to time")
    gpu = torch.cuda.get_device_properties(0)
    cache_bytes = int(getattr(gpu, "L2_cache_size", 0)) or 64 * 2**20
    case = case_of(past)
    num_bytes = NUM_SEQS * KV_HEADS * (past + NEW_TOKENS) * 2 * HEAD_SIZE * 2  # of all keys and values, bfloat16
    sets = [filled(case) for _ in range(num_sets(num_bytes, cache_bytes))]
    right = expected(case, sets[0]["q"], sets[0]["k_cache"], sets[0]["v_cache"], HEAD_SIZE**-0.5)
    chosen = _chosen_splits(10 * gpu.major + gpu.minor, past, gpu.multi_processor_count)
    ours, how = time_rotating([call(tensors, chosen) for tensors in sets])
    error = float((call(sets[0], chosen)()[: len(right)].float() - right).abs().max())
    assert error <= TOLERANCES["bfloat16"]
    copied, achieved = copy_bandwidth(num_bytes, cache_bytes), num_bytes / ours / 1e6
    what = f"attention, B={NUM_SEQS}, {NEW_TOKENS} new tokens, {past} past, bfloat16"
    rows.row(what, f"{1e3 * ours:.1f} us, {achieved:.0f} GB/s of KV bytes with {chosen} splits ({how})",
             milliseconds=ours, gb_per_s=achieved, splits=chosen)  # fmt: skip
    rows.reach(f"{what}: of the copy bandwidth ({copied:.0f} GB/s, read plus written)", f"{achieved / copied:.1%}",
               f"at least {COPY_TARGET:.0%}", achieved / copied >= COPY_TARGET, copy_gb_per_s=copied)  # fmt: skip
    others = {splits: time_rotating([call(tensors, splits) for tensors in sets])[0] for splits in (1, 2, 8, 16)}
    rows.row(f"{what}: other splits", ", ".join(f"{splits}: {1e3 * ms:.1f} us" for splits, ms in others.items()))
    torch.cuda.empty_cache()
