"""The torch forms of our ops: correct on ragged rows when run, and shape-exact when traced.

Imports torch; import it only where torch is needed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specexport.ops.spec import CAUSAL_CONV, EACH, EXPERTS, LINEAR_ATTENTION, UNPADDED_ATTENTION, OpSpec


def _attend_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Attention of one row: q [n, H, g, D] over keys [H, past+n, D] and values [H, past+n, Dv]."""
    new = q.shape[0]
    scores = torch.einsum("nhgd,hld->hgnl", q, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query_at, key_at = torch.arange(past, past + new)[:, None], torch.arange(past + new)[None]
    if slopes is not None:
        scores = scores + (slopes.view(*q.shape[1:3], 1, 1) * (key_at - query_at)).to(scores.dtype)
    seen = (key_at <= query_at) if causal else torch.ones(new, past + new, dtype=torch.bool)
    if window > 0:
        seen &= key_at > query_at - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.view(*q.shape[1:3], 1, 1).expand(-1, -1, new, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hgnl,hld->nhgd", weights, values)


def _unpadded_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    cu_new_tokens: Tensor,
    row_starts: Tensor,  # noqa: ARG001 - for lowerings that work row by row
    row_ends: Tensor,  # noqa: ARG001
    row_totals: Tensor,  # noqa: ARG001
    pad_index: Tensor,  # noqa: ARG001
    unpad_index: Tensor,  # noqa: ARG001
    sinks: Tensor | None,
    slopes: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    window: int,
    softcap: float,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor]:
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "causal": bool(causal)}
    keys, values = k_cache.clone(), v_cache.clone()
    queries = q.view(len(q), kv_num_heads, num_heads // kv_num_heads, -1)
    output = q.new_zeros(len(q), num_heads * v_cache.shape[-1])
    bounds = cu_new_tokens.tolist()
    for row, kv_len in enumerate(kv_lens[:, 0].tolist()):
        tokens = slice(bounds[row], bounds[row + 1])
        count = bounds[row + 1] - bounds[row]
        past = kv_len if k is not None else max(kv_len - count, 0)
        end = past + count
        if k is not None and v is not None:
            keys[row, 0, :, past:end] = k[tokens].view(count, kv_num_heads, keys.shape[-1]).transpose(0, 1)
            values[row, 0, :, past:end] = v[tokens].view(count, kv_num_heads, values.shape[-1]).transpose(0, 1)
        seen_keys, seen_values = keys[row, 0, :, :end], values[row, 0, :, :end]
        attended = _attend_row(queries[tokens], seen_keys, seen_values, past, sinks, slopes, **how)
        output[tokens] = attended.flatten(1)
    return output, keys, values


def _fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = dict(zip(UNPADDED_ATTENTION.argument_names[1:], arguments, strict=True))
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    output = q.new_empty(q.shape[0], given["num_heads"] * v_cache.shape[-1])
    return output, torch.empty_like(k_cache), torch.empty_like(v_cache)


Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    pending: Tensor,
    state_steps: Tensor,
    cu_new_tokens: Tensor,
    row_starts: Tensor,  # noqa: ARG001 - for lowerings that work row by row
    pad_index: Tensor,  # noqa: ARG001
    unpad_index: Tensor,  # noqa: ARG001
    num_heads: int,
    kv_num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [part for part in (q, k, v, decay, beta) if part is not None]
    widths = [part.shape[1] for part in parts]

    def advance(before: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, *rest = given.split(widths)
        keys, values = key.view(kv_num_heads, -1, 1), value.view(kv_num_heads, 1, -1)
        queries = query.view(num_heads, -1).repeat_interleave(kv_num_heads // num_heads, 0)[:, :, None]
        after = before
        if decay is not None:
            after = after * rest[0].view(kv_num_heads, -1, 1).exp()
        if beta is not None:
            values = rest[-1].view(-1, 1, 1) * (values - (after * keys).sum(1, keepdim=True))
        after = after + keys * values
        return after, scale * (after * queries).sum(1).flatten()

    return _run_recurrence(advance, torch.cat(parts, 1), v.shape[1], state, pending, state_steps, cu_new_tokens)


def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    pending: Tensor,
    state_steps: Tensor,
    cu_new_tokens: Tensor,
    row_starts: Tensor,  # noqa: ARG001 - for lowerings that work row by row
    pad_index: Tensor,  # noqa: ARG001
    unpad_index: Tensor,  # noqa: ARG001
    silu: int,
) -> tuple[Tensor, Tensor, Tensor]:
    taps = weight[:, 0].T

    def advance(before: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([before, given[None]])
        output = (seen * taps).sum(0) + (0.0 if bias is None else bias)
        return seen[1:], torch.nn.functional.silu(output) if silu else output

    return _run_recurrence(advance, x, x.shape[1], state, pending, state_steps, cu_new_tokens)


def _run_recurrence(
    advance: Advance, x: Tensor, width: int, state: Tensor, pending: Tensor, state_steps: Tensor, cu_new_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Every row: what is for good, then the drafts, from the state after that."""
    states, waiting, output = state.clone(), pending.clone(), x.new_zeros(len(x), width)
    firsts = cu_new_tokens.tolist()
    for row, (settled, drafts, certain, drafted) in enumerate(state_steps.tolist()):
        own = x[firsts[row] : firsts[row] + certain + drafted]
        given, at = torch.cat([pending[row, 0, : settled + drafts], own]), state[row, 0]
        for i, entry in enumerate(given):
            at, attended = advance(at, entry)
            if i >= settled + drafts:
                output[firsts[row] + i - settled - drafts] = attended
            if i + 1 == settled + certain:
                states[row, 0] = at
        waiting[row, 0, : drafts + drafted] = given[settled + certain :]
    return output, states, waiting


def _fake_recurrence(spec: OpSpec, width_of: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The output is as wide as the input ``width_of``."""

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(spec.argument_names, arguments, strict=True))
        output = torch.empty_like(given[width_of])
        return output, torch.empty_like(given["state"]), torch.empty_like(given["pending"])

    return fake


def _experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    interleaved: int,
    alpha: float,
    beta: float,
    limit: float,
) -> Tensor:
    given = x.new_zeros(*expert_ids.shape, x.shape[1])
    for expert in expert_ids.unique().tolist():
        tokens, places = torch.where(expert_ids == expert)
        first, last = (None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias))
        both = torch.nn.functional.linear(x[tokens], gate_up[expert], first)
        if interleaved == EACH:
            gate, up = both, both
        else:
            gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        gated = gate * torch.sigmoid(alpha * gate) * (up + beta)
        given[tokens, places] = torch.nn.functional.linear(gated, down[expert], last)
    return (given * expert_weights[..., None]).sum(1)


def _register(spec: OpSpec, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """``torch.ops.specexport.<torch_name>``; arguments and meaning as declared in ``spec``."""
    op = torch.library.custom_op(
        f"{spec.domain}::{spec.torch_name}", function, mutates_args=(), schema=spec.torch_schema
    )
    op.register_fake(fake)
    return op


unpadded_attention = _register(UNPADDED_ATTENTION, _unpadded_attention, _fake)
linear_attention = _register(LINEAR_ATTENTION, _linear_attention, _fake_recurrence(LINEAR_ATTENTION, "v"))
causal_conv = _register(CAUSAL_CONV, _causal_conv, _fake_recurrence(CAUSAL_CONV, "x"))
experts = _register(EXPERTS, _experts, lambda x, *_: torch.empty_like(x))
