"""Kernels that draw tokens from rows of logits where they lie, by the host's rule: inverse running sum, ids ascending.

A row is cut into blocks. ``weigh`` and ``weigh_surplus`` sum the weights of each block, one program for each; one
program a row then finds the block of a draw and the id in it. All sums are float64, so that a draw differs from the
host's only where a uniform falls within rounding of a border. What a row asks for (``ROW_ASK`` numbers) and what is
found (``ROW_FOUND`` numbers) are float64 too. The names of both, and what the kernels are for, are in
``specexport_runtime.executors.row_kernels``.
"""
# mypy: ignore-errors
# ruff: noqa: N803, PLR0124  (a NaN is unequal to itself; compile-time parameters are upper case, as Triton's users expect)

import triton
import triton.language as tl


@triton.jit
def pick(weights, places, target):
    """The first place whose running sum exceeds ``target``, or, by rounding, the last; never one without weight."""
    above = (tl.cumsum(weights, 0) > target) & (weights > 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    first = tl.min(tl.where(above, places, 2147483647), 0)
    return tl.minimum(first, last)


@triton.jit
def weigh(logits, asks, tops, sums, pitch, blocks, ASK: tl.constexpr, BLOCK: tl.constexpr):
    """Top and sum of exp((x - top) / T) of a block, NaN if it holds NaN or +inf. Grid (rows, blocks)."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(asks + row * ASK)
    if temperature > 0:
        width = tl.load(asks + row * ASK + 1).to(tl.int32)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row.to(tl.int64) * pitch + ids, mask=ids < width, other=-float("inf"))
        broken = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0)
        top = tl.max(tl.where(values == values, values, -float("inf")), 0)
        # A block without any likely token has top -inf, and -inf - -inf is no number.
        shift = tl.where(top == -float("inf"), 0.0, top).to(tl.float64)
        total = tl.sum(tl.exp((values.to(tl.float64) - shift) / temperature), 0)
        tl.store(tops + row * blocks + block, top)
        tl.store(sums + row * blocks + block, tl.where(broken > 0, float("nan"), total))


@triton.jit
def draw(
    logits, asks, tops, sums, found, bins, token_ids, pitch, blocks, feeds,
    ASK: tl.constexpr, FOUND: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The token at a row's uniform, its probability and that of the asked one, and where a cut may lie. Grid (rows).

    With ``feeds`` 1 the token takes the place of the row's greedy one, which the next step is fed.
    """
    row = tl.program_id(0)
    ask, out = asks + row * ASK, found + row * FOUND
    temperature = tl.load(ask)
    if temperature > 0:
        width = tl.load(ask + 1).to(tl.int32)
        base = logits + row.to(tl.int64) * pitch
        parts = tl.arange(0, PARTS)
        is_part = parts < blocks
        part_tops = tl.load(tops + row * blocks + parts, mask=is_part, other=-float("inf"))
        part_sums = tl.load(sums + row * blocks + parts, mask=is_part, other=0.0)
        peak = tl.max(part_tops, 0).to(tl.float64)
        masses = part_sums * tl.exp((part_tops.to(tl.float64) - peak) / temperature)
        total = tl.sum(masses, 0)
        goal = tl.load(ask + 2) * total
        block = pick(masses, parts, goal)
        before = tl.sum(tl.where(parts < block, masses, 0.0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(base + ids, mask=ids < width, other=-float("inf")).to(tl.float64)
        weights = tl.exp((values - peak) / temperature)
        drawn = pick(weights, ids, goal - before)
        drawn_weight = tl.sum(tl.where(ids == drawn, weights, 0.0), 0)
        token = tl.load(ask + 3).to(tl.int32)
        is_token = (token >= 0) & (token < width)
        value = tl.load(base + token, mask=is_token, other=-float("inf")).to(tl.float64)
        # Where the cut begins: the k-th largest of the blocks' tops has k tokens at or above it.
        least = (peak + tl.load(ask + 4)).to(tl.float32).to(tl.float64)  # as the host compares
        count = tl.load(ask + 5).to(tl.int32)
        if (count > 0) & (count <= blocks):
            rank = tl.zeros((PARTS,), tl.int32)
            for part in range(0, blocks):
                rank += (tl.load(tops + row * blocks + part) > part_tops).to(tl.int32)
            kth = tl.min(tl.where(is_part & (rank < count), part_tops, float("inf")), 0).to(tl.float64)
            least = tl.maximum(least, kth)
        if feeds > 0:
            tl.store(token_ids + row, drawn.to(tl.int64))
        tl.store(out, peak)
        tl.store(out + 1, total)
        tl.store(out + 2, drawn.to(tl.float64))
        tl.store(out + 3, drawn_weight / total)
        tl.store(out + 4, tl.exp((value - peak) / temperature) / total)
        tl.store(out + 5, 0.0)
        tl.store(out + 6, least)
        tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.float64))


@triton.jit
def spread(
    logits, asks, found, bins, pitch,
    ASK: tl.constexpr, FOUND: tl.constexpr, BINS: tl.constexpr, PER_BIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a block's weights to bins of log-probability below the row's peak, for top-p. Grid (rows, blocks)."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, top_p = tl.load(asks + row * ASK), tl.load(asks + row * ASK + 6)
    if (temperature > 0) & (top_p > 0):
        width = tl.load(asks + row * ASK + 1).to(tl.int32)
        peak = tl.load(found + row * FOUND)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row.to(tl.int64) * pitch + ids, mask=ids < width, other=-float("inf")).to(tl.float64)
        below = (peak - values) / temperature
        weights = tl.exp(-below)
        places = tl.minimum(below / PER_BIN, BINS - 1.0).to(tl.int32)
        for place in range(0, BINS):
            mass = tl.sum(tl.where(places == place, weights, 0.0), 0)
            if mass > 0:
                tl.atomic_add(bins + row * BINS + place, mass)


@triton.jit
def gather(
    logits, asks, found, bins, few_ids, few_values, many_ids, many_values, pitch,
    ASK: tl.constexpr, FOUND: tl.constexpr, BINS: tl.constexpr, PER_BIN: tl.constexpr, BLOCK: tl.constexpr,
    K_INLINE: tl.constexpr, K_MAX: tl.constexpr,
):  # fmt: skip
    """Tokens that a cut may keep, with their logits, blocks in any order, and how many. Grid (rows, blocks)."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, cuts = tl.load(asks + row * ASK), tl.load(asks + row * ASK + 7)
    if (temperature > 0) & (cuts > 0):
        width = tl.load(asks + row * ASK + 1).to(tl.int32)
        least = tl.load(found + row * FOUND + 6)
        top_p = tl.load(asks + row * ASK + 6)
        if top_p > 0:
            places = tl.arange(0, BINS)
            running = tl.cumsum(tl.load(bins + row * BINS + places), 0)
            # A little more, so that what rounding adds to another order of the sum does not matter.
            goal = top_p * tl.load(found + row * FOUND + 1) * 1.000001
            place = tl.min(tl.where(running >= goal, places, BINS), 0)
            edge = tl.load(found + row * FOUND) - temperature * PER_BIN * (place + 1) * 1.000001
            least = tl.maximum(least, tl.where(place < BINS - 1, edge, -float("inf")))
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row.to(tl.int64) * pitch + ids, mask=ids < width, other=float("nan"))
        kept = values.to(tl.float64) >= least
        count = tl.sum(kept.to(tl.int32), 0)
        if count > 0:
            start = tl.atomic_add(found + row * FOUND + 5, count.to(tl.float64)).to(tl.int32)
            slots = start + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(few_ids + row * K_INLINE + slots, ids, mask=kept & (slots < K_INLINE))
            tl.store(few_values + row * K_INLINE + slots, values, mask=kept & (slots < K_INLINE))
            tl.store(many_ids + row.to(tl.int64) * K_MAX + slots, ids, mask=kept & (slots < K_MAX))
            tl.store(many_values + row.to(tl.int64) * K_MAX + slots, values, mask=kept & (slots < K_MAX))


@triton.jit
def residual(ask, rows, ids):
    """max(0, w q - p) of some ids; ``ask`` has T, V, peak and total of q, the same of p, w, one-hot p's id, uniform.

    ``rows`` has the addresses of q's logits and of p's.
    """
    target = tl.load(rows).to(tl.pointer_type(tl.float32))
    draft = tl.load(rows + 1).to(tl.pointer_type(tl.float32))
    width, token = tl.load(ask + 1).to(tl.int32), tl.load(ask + 9).to(tl.int32)
    values = tl.load(target + ids, mask=ids < width, other=-float("inf")).to(tl.float64)
    masses = tl.load(ask + 8) * (tl.exp((values - tl.load(ask + 2)) / tl.load(ask)) / tl.load(ask + 3))
    if token < 0:
        values = tl.load(draft + ids, mask=ids < tl.load(ask + 5).to(tl.int32), other=-float("inf")).to(tl.float64)
        masses -= tl.exp((values - tl.load(ask + 6)) / tl.load(ask + 4)) / tl.load(ask + 7)
    else:
        masses = tl.where(ids == token, 0.0, masses)
    return tl.maximum(masses, 0.0)


@triton.jit
def weigh_surplus(asks, rows, sums, blocks, RESIDUAL_ASK: tl.constexpr, BLOCK: tl.constexpr):
    """The residual of a block of ids. Grid (pairs of rows, blocks)."""
    pair, block = tl.program_id(0), tl.program_id(1)
    place = pair * RESIDUAL_ASK
    masses = residual(asks + place, rows + place, block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + pair * blocks + block, tl.sum(masses, 0))


@triton.jit
def draw_surplus(asks, rows, sums, found, blocks, RESIDUAL_ASK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The whole residual, and the token at the uniform of it. Grid (pairs)."""
    pair = tl.program_id(0)
    ask, parts = asks + pair * RESIDUAL_ASK, tl.arange(0, PARTS)
    masses = tl.load(sums + pair * blocks + parts, mask=parts < blocks, other=0.0)
    total = tl.sum(masses, 0)
    goal = tl.load(ask + 10) * total
    block = pick(masses, parts, goal)
    before = tl.sum(tl.where(parts < block, masses, 0.0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    masses = residual(ask, rows + pair * RESIDUAL_ASK, ids)
    tl.store(found + 2 * pair, total)
    tl.store(found + 2 * pair + 1, pick(masses, ids, goal - before).to(tl.float64))
