"""Section 3, first half: our kernels against attention written out in torch, in float32."""
# mypy: disable-error-code="no-any-unimported"

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.needs import require_device
from tools.gpu_check_lib.rows import Verdict, judge

if TYPE_CHECKING:
    from torch import Tensor

# Inputs are exact in their type; the weights before the second product and the result are rounded to it.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2}
_BESIDE = 3  # tokens behind the last row's, which belong to no row


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


class Checked(NamedTuple):
    """Result of a case: its name, the largest error, its tolerance."""

    name: str
    error: float
    tolerance: float

    @property
    def verdict(self) -> Verdict:
        """Whether it is right; NaN is not."""
        return judge(self.error, at_most=self.tolerance)


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


def check_case(case: Case, dtype: str, *, device: str) -> Checked:
    """Run ``kv_append`` and ``ragged_attention`` and compare caches and output with torch's.

    A difference in a cache, or output for a token behind the last row's, counts as an infinite error.
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
    error = float((output[: len(right)].float() - right).abs().max())
    same = all(_equal(inputs[f"{name}_cache"], caches[name]) for name in ("k", "v"))
    if not same or bool(output[len(right) :].any()):
        error = float("inf")
    return Checked(f"{dtype}, {case.name}", error, TOLERANCES[dtype])


def _equal(one: "Tensor", other: "Tensor") -> bool:
    """Whether all entries are the same, NaN where NaN is."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_all(context: Context) -> None:
    """One row for each case and element type."""
    device = require_device(context)
    dtypes = list(TOLERANCES)
    if device == "cpu":
        dtypes.remove("bfloat16")
        words = "skipped: Triton's interpreter multiplies its bits as integers"
        context.recorder.row("kernels, bfloat16", words, verdict="skipped")
    cases = (TINY_CASE,) if context.tiny else CASES
    for case, dtype in ((case, dtype) for case in cases for dtype in dtypes):
        what = f"kernels, {dtype}, {case.name}"
        with context.part(what):
            if context.has_time(what, 2):
                found = check_case(case, dtype, device=device)
                value = f"largest error {found.error:.1e}" if found.error < float("inf") else "wrong entries or padding"
                target = f"at most {found.tolerance:.0e}"
                context.recorder.row(what, value, target=target, verdict=found.verdict, error=found.error)
