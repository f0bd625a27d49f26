"""The output of engines for a GPU against the CPU engine's, float32, of the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import numpy as np
import pytest

from specexport_runtime.bundle.quant_kinds import INT4
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tools.proof.steps import LOGIT_TOLERANCE, compare_steps, decode, random_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from tests.gpu.conftest import Engines, Rows

pytestmark = pytest.mark.gpu
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 4, 12, 64


class FirstDifference(NamedTuple):
    """How far two greedy texts agree."""

    equal: int  # tokens before the first difference
    total: int  # tokens compared
    # how much the reference prefers its own token to the other's at the first difference; None without one
    gap: float | None


@contextmanager
def same_codes() -> Iterator[None]:
    """Let builds for the CPU take the operator and the blocks of ``ort-cuda``."""
    with mock.patch.dict(INT4.backends, {"ort-cpu": INT4.backends["ort-cuda"]}):
        yield


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_logits_and_greedy_texts_are_the_cpu_engines(
    quantize: str | None, backend: "Engines", work: "Path", rows: "Rows"
) -> None:
    if quantize and backend.kind not in ("ort-cuda", "ort-cpu"):
        pytest.skip("no engine for the CPU has these codes")
    what = backend.kind + (f", {quantize}" if quantize else "")
    with type(backend)("ort-cpu", work, tiny=backend.tiny) as cpu, same_codes():
        reference = cpu.open(quantize=quantize)
        # Graphs with 16-bit weights, and one kernel at a time with int4.
        other = backend.open(graphs=quantize is None, quantize=quantize)
        check_logits(what, reference, other, rows)
        check_greedy(what, reference, other, rows)
    assert not rows.wrong


def check_logits(what: str, reference: Executor, other: Executor, rows: "Rows") -> None:
    """One row for each step of a prefill and ragged verify steps."""
    for found in compare_steps(reference, other):
        rows.right(
            f"{what}: logits of {found.name}",
            f"largest difference {found.max_abs:.2e}, {found.max_relative:.2e} of the largest logit; "
            f"same best token in {found.argmax_agreement:.0%} of {found.rows} rows",
            f"at most {LOGIT_TOLERANCE.largest:.1e} of it", found.passed,
        )  # fmt: skip


def check_greedy(what: str, reference: Executor, other: Executor, rows: "Rows") -> None:
    """Greedy texts of both: tokens that are equal, and by how little the reference decided where they part."""
    count = 16 if rows.tiny else NUM_TOKENS
    prompts = random_tokens(reference.vocab_size, NUM_PROMPTS, PROMPT_TOKENS, seed=5)
    ours, theirs = (decode(executor, prompts, count).outputs for executor in (reference, other))
    texts = [compare_texts(reference, *each) for each in zip(prompts, ours, theirs, strict=True)]
    same = sum(a == b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))
    gaps = [text.gap for text in texts if text.gap is not None]
    at = f"; the CPU engine's logit gap where they part: {', '.join(f'{gap:.1e}' for gap in gaps)}" if gaps else ""
    bound = _widest_gap(reference, other, prompts)
    rows.right(
        f"{what}: greedy, {NUM_PROMPTS} prompts x {count} tokens",
        f"{same} of {NUM_PROMPTS * count} tokens equal, {sum(text.equal for text in texts)} before the first "
        f"difference of their text{at}",
        f"all, or gaps up to {bound:.1e}", max(gaps, default=0.0) <= bound, equal=same,
    )  # fmt: skip


def compare_texts(
    reference: Executor, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> FirstDifference:
    """Where ``theirs`` leaves ``ours``, and by how little the reference decided there.

    ``reference`` wrote ``ours``, its greedy tokens after ``prompt``; its row 0 is used.
    """
    equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    if equal == len(ours):
        return FirstDifference(equal, len(ours), None)
    runner = ModelRunner(reference)
    before = [*prompt, *ours[:equal]]
    runner.prefill(0, before[:-1])
    logits = np.array(runner.step(0, [RowWork(before[-1:], 1)]))[0]
    return FirstDifference(equal, len(ours), float(logits[ours[equal]] - logits[theirs[equal]]))


def _widest_gap(reference: Executor, other: Executor, prompts: Sequence[Sequence[int]]) -> float:
    """Four times the largest logit difference after the prompts: rounding can turn over no wider gap than that."""
    largest = 0.0
    for prompt in prompts:
        logits = [_last_logits(executor, prompt) for executor in (reference, other)]
        largest = max(largest, float(np.abs(logits[0] - logits[1]).max()))
    return 4 * largest  # twice for two logits, and twice because a text is longer than its prompt


def _last_logits(executor: Executor, prompt: Sequence[int]) -> Float32Array:
    return np.array(ModelRunner(executor).step(0, [RowWork(list(prompt), 1)])[0], np.float32)
