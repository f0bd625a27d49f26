"""Section 2: the output of GPU engines against the CPU engine, float32, of the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np

from specexport_runtime.bundle.quant_kinds import INT4
from specexport_runtime.executors.base import Executor, Float32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.rows import judge

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of a logit for logits of magnitude up to 1, in proportion beyond; as in the build's own check."""

NUM_PROMPTS = 4
NUM_TOKENS = 64
PROMPT_TOKENS = 12


class FirstDifference(NamedTuple):
    """How far two greedy texts agree."""

    equal: int  # tokens before the first difference
    total: int  # tokens compared
    # how much the reference prefers its own token to the other's at the first difference; None without one
    gap: float | None


def compare_texts(
    reference: Executor, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> FirstDifference:
    """Where ``theirs`` leaves ``ours``, and by how little the reference decided there.

    ``reference`` wrote ``ours``, its greedy tokens behind ``prompt``; its row 0 is used.
    """
    equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    if equal == len(ours):
        return FirstDifference(equal, len(ours), None)
    runner = ModelRunner(reference)
    before = [*prompt, *ours[:equal]]
    runner.prefill(0, before[:-1])
    logits = np.array(runner.step(0, [RowWork(before[-1:], 1)]))[0]
    return FirstDifference(equal, len(ours), float(logits[ours[equal]] - logits[theirs[equal]]))


def check_outputs(context: Context, backend: str) -> None:
    """Logits of a prefill and of ragged verify steps, then greedy texts, of one backend and of the CPU engine."""
    context.require_backend(backend)
    from tools.gpu_check_lib.bundles import CPU, get_bundle, open_executor

    name = "tiny" if context.tiny else "small"
    reference = open_executor(get_bundle(context, name, CPU), "target", graphs=False, num_rows=NUM_PROMPTS)
    bundle = get_bundle(context, name, backend)
    other = open_executor(bundle, "target", graphs=True, num_rows=NUM_PROMPTS)
    dtype = bundle.manifest.models["target"].dtype
    with context.part(f"{backend}: logits"):
        check_logits(context, backend, reference, other, dtype)
    with context.part(f"{backend}: greedy texts"):
        check_greedy(context, backend, reference, other)
    other.close()
    reference.close()


def check_int4(context: Context, backend: str = "ort-cuda") -> None:
    """Logits and greedy texts of int4 engines against ONNX Runtime's CPU with the same codes, in float32."""
    context.require_backend(backend)
    from specexport_runtime.bundle.opened import load_bundle
    from tools.gpu_check_lib.bundles import CPU, PLANS, build, open_executor

    name, opened = "tiny" if context.tiny else "small", []
    for each in (CPU, backend):
        with same_codes():
            folder = context.work / "bundles" / f"{name}-{each}-int4"
            build(context.work, name, each, output=folder, quantize="int4")
        bundle = load_bundle(folder, max_num_seqs=PLANS[name].max_num_seqs)
        opened.append(open_executor(bundle, "target", graphs=False, num_rows=NUM_PROMPTS))
    what, (reference, other) = f"{backend}, int4", opened
    with context.part(f"{what}: logits"):
        check_logits(context, what, reference, other, bundle.manifest.models["target"].dtype)
    with context.part(f"{what}: greedy texts"):
        check_greedy(context, what, reference, other)
    for executor in opened:
        executor.close()


@contextmanager
def same_codes() -> Iterator[None]:
    """Let builds for the CPU take the operator and the blocks of ``ort-cuda``."""
    with mock.patch.dict(INT4.backends, {"ort-cpu": INT4.backends["ort-cuda"]}):
        yield


def check_logits(context: Context, backend: str, reference: Executor, other: Executor, dtype: str) -> None:
    """One row for each step of the script."""
    from tools.gpu_check_lib.steps import compare_steps

    for found in compare_steps(reference, other):
        bound = TOLERANCES[dtype] * max(1.0, found.scale)
        context.recorder.row(
            f"{backend}, {dtype}: logits of {found.what}",
            f"largest difference {found.largest:.2e} (logits up to {found.scale:.1f}); "
            f"same best token in {found.same_best} of {found.rows} rows",
            target=f"at most {bound:.1e}",
            verdict=judge(found.largest, at_most=bound),
            **found._asdict(),
        )


def check_greedy(context: Context, backend: str, reference: Executor, other: Executor) -> None:
    """Greedy texts of both: tokens that are equal, and by how little the reference decided where they part."""
    from tools.gpu_check_lib.forced import decode
    from tools.gpu_check_lib.steps import random_tokens

    count = 16 if context.tiny else NUM_TOKENS
    prompts = random_tokens(reference.vocab_size, NUM_PROMPTS, PROMPT_TOKENS, seed=5)
    ours, theirs = (decode(executor, prompts, count).outputs for executor in (reference, other))
    texts = [compare_texts(reference, *each) for each in zip(prompts, ours, theirs, strict=True)]
    same = sum(a == b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))
    gaps = [text.gap for text in texts if text.gap is not None]
    at = f"; the CPU engine's logit gap where they part: {', '.join(f'{gap:.1e}' for gap in gaps)}" if gaps else ""
    bound = _widest_gap(reference, other, prompts)
    context.recorder.row(
        f"{backend}: greedy, {NUM_PROMPTS} prompts x {count} tokens",
        f"{same} of {NUM_PROMPTS * count} tokens equal, {sum(text.equal for text in texts)} before the first "
        f"difference of their text{at}",
        target=f"all, or gaps up to {bound:.1e}",
        verdict=judge(max(gaps, default=0.0), at_most=bound),
        equal=same,
        total=NUM_PROMPTS * count,
        gaps=gaps,
    )


def _widest_gap(reference: Executor, other: Executor, prompts: Sequence[Sequence[int]]) -> float:
    """Four times the largest logit difference after the prompts: rounding can turn over no wider gap than that."""
    largest = 0.0
    for prompt in prompts:
        logits = [_last_logits(executor, prompt) for executor in (reference, other)]
        largest = max(largest, float(np.abs(logits[0] - logits[1]).max()))
    return 4 * largest  # twice for two logits, and twice because a text is longer than its prompt


def _last_logits(executor: Executor, prompt: Sequence[int]) -> Float32Array:
    return np.array(ModelRunner(executor).step(0, [RowWork(list(prompt), 1)])[0], np.float32)
