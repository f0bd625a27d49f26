"""Kernels of attention for packed queries over an unpadded KV cache: any number of new tokens a row.

``kv_append`` writes a step's keys and values into each row's cache, in place, and ``ragged_attention`` reads them. A
program takes one tile of one row's queries, one KV head and one part of the row's entries. The query heads that share a
KV head are stacked in the tile (``BLOCK_M`` rows hold tokens times heads), so each entry is loaded once for all of
them. The softmax is computed online in float32 [Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1], in base 2.
With several splits a program leaves its unnormalised sum and its (maximum, sum of weights) for ``combine_splits``
[Flash-Decoding, Dao et al. 2023].
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806  (compile-time parameters are upper case, as Triton's users expect)

import triton
import triton.language as tl

from specexport.kernels.tiles import find_tile, find_token_rows, load_entries, sees_causal, sees_tree

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scale_scores(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores in base 2: scaled, softcapped, times log2(e). tanh(x) is 1 - 2 / (exp(2x) + 1), which only saturates."""
    if SOFTCAP > 0:
        power = tl.exp2(scores * (2.0 * LOG2E * SCALE / SOFTCAP))
        scaled = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (power + 1.0))
    else:
        scaled = scores * (SCALE * LOG2E)
    return scaled


@triton.jit
def start_softmax(sinks, heads, valid, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Nothing seen yet; a sink is one more score, of the first split only."""
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    top = weight - float("inf")
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(tl.program_id(2) == 0, sink, top)
        weight += tl.where(tl.program_id(2) == 0, 1.0, 0.0)
    return acc, weight, top


@triton.jit
def attend_blocks(
    acc, weight, top, q, k_base, v_base, begin, stop, total, past, offsets, bits,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take entries [begin, stop) into ``acc`` [M, Dv], ``weight`` [M], ``top`` [M]; all are seen unless ``MASKED``."""
    for block in range(begin, stop, BLOCK_N):
        entries = block + tl.arange(0, BLOCK_N)
        keys = load_entries(k_base, entries, total, D, BLOCK_D, MASKED)
        scores = scale_scores(tl.dot(q, tl.trans(keys)), SCALE, SOFTCAP)
        if MASKED:
            if TREE:
                seen = sees_tree(entries, past, offsets, bits, WINDOW)
            else:
                seen = sees_causal(entries, past, offsets, WINDOW)
            # Causality alone would not hold back entries for which the cache has no room.
            scores = tl.where(seen & (entries < stop)[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet has top -inf, and -inf - -inf is no number.
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        weight = weight * rescale + tl.sum(weights, 1)
        values = load_entries(v_base, entries, total, DV, BLOCK_DV, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None])
        top = new_top
    return acc, weight, top


@triton.jit
def split_range(past, total, first_offset, last_offset, TREE, WINDOW, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Entries this program takes: [begin, unmasked) is seen by all of the tile's queries, [unmasked, stop) by some."""
    end = tl.minimum(past + last_offset + 1, total)
    begin = 0
    unmasked = tl.minimum(past + 1 + first_offset, end)
    if TREE:
        unmasked = tl.minimum(past, end)
    if WINDOW > 0:
        # A tree's queries may all be one step away from the committed entries.
        begin = past - WINDOW + 1
        if not TREE:
            begin += first_offset
        begin = tl.maximum(begin, 0) // BLOCK_N * BLOCK_N
        unmasked = begin
    blocks = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), NUM_SPLITS)
    begin += tl.program_id(2) * blocks * BLOCK_N
    stop = tl.minimum(begin + blocks * BLOCK_N, end)
    unmasked = tl.maximum(tl.minimum(unmasked, stop) // BLOCK_N * BLOCK_N, begin)
    return begin, unmasked, stop


@triton.jit
def store_result(
    acc, weight, top, tokens, heads, valid, num_tokens, output, partial_acc, partial_stats,
    HEADS, DV: tl.constexpr, BLOCK_DV: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write the tile: normalised to ``output``, or as it is to the split's part of the partial buffers."""
    columns = tl.arange(0, BLOCK_DV)
    mask = valid[:, None] & (columns < DV)[None, :]
    at = tokens.to(tl.int64) * HEADS + heads
    if NUM_SPLITS == 1:
        result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(output + at[:, None] * DV + columns[None, :], result.to(output.dtype.element_ty), mask=mask)
    else:
        at += tl.program_id(2).to(tl.int64) * num_tokens * HEADS
        tl.store(partial_stats + at * 2, top, mask=valid)
        tl.store(partial_stats + at * 2 + 1, weight, mask=valid)
        # Nothing was seen: combine_splits does not read the sum.
        tl.store(partial_acc + at[:, None] * DV + columns[None, :], acc, mask=mask & (weight > 0)[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "kv_capacity"])
def ragged_attention(
    q, k_cache, v_cache, kv_lens, cu_new_tokens, tree_mask, sinks,
    num_tokens, num_seqs, kv_capacity,
    output, partial_acc, partial_stats,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend. Grid (``num_tokens*GROUP // BLOCK_M + num_seqs + 1``, KV heads, splits)."""
    row, row_start, count, first = find_tile(cu_new_tokens, num_seqs, num_tokens, GROUP, BLOCK_M)
    # True of every real step; a builder that times kernels gives them meaningless numbers.
    is_sane = (row_start >= 0) & (row_start + count <= num_tokens) & (first >= 0)
    if is_sane & (first < count * GROUP):
        kv_head, is_row = tl.program_id(1), row < num_seqs
        index = first + tl.arange(0, BLOCK_M)
        offsets, heads = index // GROUP, kv_head * GROUP + index % GROUP
        valid, tokens = offsets < count, row_start + offsets
        past = tl.load(kv_lens + row, mask=is_row, other=0)
        total = tl.where(is_row, tl.minimum(past + count, kv_capacity), 0)  # padding tokens see nothing
        columns = tl.arange(0, BLOCK_D)
        q_at = (tokens.to(tl.int64) * (KV_HEADS * GROUP) + heads) * D
        queries = tl.load(q + q_at[:, None] + columns[None, :], mask=valid[:, None] & (columns < D)[None, :], other=0.0)
        TREE: tl.constexpr = tree_mask is not None
        bits = offsets
        if TREE:
            bits = tl.load(tree_mask + tokens, mask=valid, other=0)
        acc, weight, top = start_softmax(sinks, heads, valid, BLOCK_M, BLOCK_DV)
        last = tl.minimum((first + BLOCK_M - 1) // GROUP, count - 1)
        begin, unmasked, stop = split_range(past, total, first // GROUP, last, TREE, WINDOW, BLOCK_N, NUM_SPLITS)
        lane = (row.to(tl.int64) * KV_HEADS + kv_head) * kv_capacity
        k_base, v_base = k_cache + lane * D, v_cache + lane * DV
        acc, weight, top = attend_blocks(
            acc, weight, top, queries, k_base, v_base, begin, unmasked, total, past, offsets, bits,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SCALE, WINDOW, SOFTCAP, TREE, MASKED=False,
        )  # fmt: skip
        acc, weight, top = attend_blocks(
            acc, weight, top, queries, k_base, v_base, unmasked, stop, total, past, offsets, bits,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SCALE, WINDOW, SOFTCAP, TREE, MASKED=True,
        )  # fmt: skip
        store_result(
            acc, weight, top, tokens, heads, valid, num_tokens, output, partial_acc, partial_stats,
            KV_HEADS * GROUP, DV, BLOCK_DV, NUM_SPLITS,
        )  # fmt: skip


@triton.jit
def copy_tokens(
    source, cache, tokens, rows, entries, valid, capacity, KV_HEADS, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Copy one head of ``tokens`` [BLOCK_T] to ``entries`` of ``rows``, where ``valid``."""
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (columns < D)[None, :]
    read_at = (tokens.to(tl.int64) * KV_HEADS + head) * D
    write_at = ((rows.to(tl.int64) * KV_HEADS + head) * capacity + entries) * D
    block = tl.load(source + read_at[:, None] + columns[None, :], mask=mask, other=0.0)
    tl.store(cache + write_at[:, None] + columns[None, :], block, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "kv_capacity"])
def kv_append(  # the outputs are the cache inputs' own memory
    k, v, k_cache, v_cache, kv_lens, cu_new_tokens,  # noqa: ARG001
    num_tokens, num_seqs, kv_capacity,
    k_cache_out, v_cache_out,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write token ``j`` of row ``b`` to entry ``kv_lens[b] + j``. Grid (token blocks, KV heads)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = find_token_rows(cu_new_tokens, num_seqs, tokens)
    valid = (tokens < num_tokens) & (rows < num_seqs)
    start = tl.load(cu_new_tokens + rows, mask=valid, other=0)
    entries = tl.load(kv_lens + rows, mask=valid, other=0) + tokens - start
    # Of real steps only the capacity cuts anything; a builder that times kernels gives them meaningless numbers.
    valid = valid & (entries >= 0) & (entries < kv_capacity)
    copy_tokens(k, k_cache_out, tokens, rows, entries, valid, kv_capacity, KV_HEADS, D, BLOCK_D)
    copy_tokens(v, v_cache_out, tokens, rows, entries, valid, kv_capacity, KV_HEADS, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_splits(
    partial_acc, partial_stats, num_tokens, output,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Weigh each split's sum by exp2(its maximum - the overall one). Grid (tokens, query heads)."""
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
