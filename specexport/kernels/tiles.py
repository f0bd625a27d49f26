"""Device helpers: which row a token or tile belongs to, masked loads of cache entries, who sees what."""
# mypy: ignore-errors
# ruff: noqa: N803  (compile-time parameters are upper case, as Triton's users expect)

import triton
import triton.language as tl

BLOCK_B = tl.constexpr(64)
"""Rows looked at in one load while a row is searched."""


@triton.jit
def find_tile(cu_new_tokens, num_seqs, num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's row, the row's first token, its number of tokens, and the tile's first query within the row.

    The padding tokens are row ``num_seqs``. Row ``b`` owns the programs from ``cu[b]*GROUP // BLOCK_M + b`` on. That is
    at least as many as it has tiles, because ``floor(x + y) - floor(x) + 1 >= ceil(y)``, and needs no running sum;
    those beyond a row's last tile stay idle.
    """
    row, slot = 0, tl.program_id(0)
    for first in range(0, num_seqs, BLOCK_B):
        rows = first + tl.arange(0, BLOCK_B)
        ends = tl.load(cu_new_tokens + rows + 1, mask=rows < num_seqs, other=0)
        passed = (rows < num_seqs) & (ends * GROUP // BLOCK_M + rows + 1 <= slot)
        row += tl.sum(passed.to(tl.int32), 0)
    start = tl.load(cu_new_tokens + row)
    count = tl.load(cu_new_tokens + row + 1, mask=row < num_seqs, other=num_tokens) - start
    return row, start, count, (slot - start * GROUP // BLOCK_M - row) * BLOCK_M


@triton.jit
def find_token_rows(cu_new_tokens, num_seqs, tokens):
    """Row of each token of ``tokens``; ``num_seqs`` for padding tokens."""
    rows_of = tokens * 0
    for first in range(0, num_seqs, BLOCK_B):
        rows = first + tl.arange(0, BLOCK_B)
        ends = tl.load(cu_new_tokens + rows + 1, mask=rows < num_seqs, other=0)
        passed = (rows < num_seqs)[None, :] & (ends[None, :] <= tokens[:, None])
        rows_of += tl.sum(passed.to(tl.int32), 1)
    return rows_of


@triton.jit
def load_entries(base, entries, total, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Cache entries [N, BLOCK_D] of one row and head; 0 beyond ``D`` and, if ``MASKED``, at and beyond ``total``."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + entries[:, None] * D + columns[None, :]
    if MASKED:
        block = tl.load(pointers, mask=(entries < total)[:, None] & (columns < D)[None, :], other=0.0)
    elif D != BLOCK_D:
        block = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def count_ones(bits):
    """Set bits of each uint64, by adding neighbours: 2, 4, 8 bits wide, then across bytes."""
    bits = (bits & 0x5555555555555555) + ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits & 0x0F0F0F0F0F0F0F0F) + ((bits >> 4) & 0x0F0F0F0F0F0F0F0F)
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 0x7F).to(tl.int32)


@triton.jit
def sees_causal(entries, past, offsets, WINDOW: tl.constexpr):
    """[M, N] bool: entry at or before the query's own, and within ``WINDOW`` entries of it if that is positive."""
    query_at = (past + offsets)[:, None]
    seen = entries[None, :] <= query_at
    if WINDOW > 0:
        seen = seen & (entries[None, :] > query_at - WINDOW)
    return seen


@triton.jit
def sees_tree(entries, past, offsets, bits, WINDOW: tl.constexpr):
    """[M, N] bool: committed entries, and the step's own whose bit is set in the query's ``bits``; none is causal."""
    nodes = (entries - past)[None, :]
    shift = tl.minimum(tl.maximum(nodes, 0), 63)
    path = bits.to(tl.uint64)[:, None] >> shift.to(tl.uint64)
    causal = bits == 0
    ancestor = causal[:, None] | (((path & 1) != 0) & (nodes < 64))
    seen = (nodes < 0) | ((nodes <= offsets[:, None]) & ancestor)
    if WINDOW > 0:
        on_path = tl.where(nodes < 0, count_ones(path) - nodes, count_ones(path)) - 1
        distance = tl.where(causal[:, None], offsets[:, None] - nodes, on_path)
        seen = seen & (distance < WINDOW)
    return seen
