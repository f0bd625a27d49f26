"""Kernel that writes a step's packed keys and values into each row's cache, in place."""
# mypy: ignore-errors
# ruff: noqa: N803  (compile-time parameters are upper case, as Triton's users expect)

import triton
import triton.language as tl

from specexport.kernels.tiles import find_token_rows


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
    """Write token ``j`` of row ``b`` to entry ``kv_lens[b] + j``. Grid (token blocks, KV heads).

    Padding tokens, and tokens for which a row has no room left, are written nowhere.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = find_token_rows(cu_new_tokens, num_seqs, tokens)
    valid = (tokens < num_tokens) & (rows < num_seqs)
    start = tl.load(cu_new_tokens + rows, mask=valid, other=0)
    entries = tl.load(kv_lens + rows, mask=valid, other=0) + tokens - start
    # Of real steps only the capacity cuts anything; a builder that times kernels gives them meaningless numbers.
    valid = valid & (entries >= 0) & (entries < kv_capacity)
    copy_tokens(k, k_cache_out, tokens, rows, entries, valid, kv_capacity, KV_HEADS, D, BLOCK_D)
    copy_tokens(v, v_cache_out, tokens, rows, entries, valid, kv_capacity, KV_HEADS, DV, BLOCK_DV)
