"""Kernel that combines the splits' partial attention into the result."""
# mypy: ignore-errors
# ruff: noqa: N803  (compile-time parameters are upper case, as Triton's users expect)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def combine_splits(
    partial_acc, partial_stats, num_tokens, output,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Weigh each split's sum by exp2(its maximum - the overall one). Grid (tokens, query heads).

    A split that saw nothing has weight 0 and its sum is not read; where all saw nothing the output is 0.
    """
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits = tl.arange(0, BLOCK_S)
    parts = splits.to(tl.int64) * num_tokens * HEADS + at
    top = tl.load(partial_stats + parts * 2, mask=splits < NUM_SPLITS, other=-float("inf"))
    weight = tl.load(partial_stats + parts * 2 + 1, mask=splits < NUM_SPLITS, other=0.0)
    used = weight > 0
    highest = tl.max(top, 0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)  # -inf - -inf is no number
    factor = tl.where(used, tl.exp2(top - shift), 0.0)
    columns = tl.arange(0, BLOCK_DV)
    mask = used[:, None] & (columns < DV)[None, :]
    acc = tl.load(partial_acc + parts[:, None] * DV + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(weight * factor, 0)
    result = tl.sum(acc * factor[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + at * DV + columns, result.to(output.dtype.element_ty), mask=columns < DV)
