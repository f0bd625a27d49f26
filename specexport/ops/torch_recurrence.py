"""The torch forms of the ops that keep a state: correct on ragged rows when run, and shape-exact when traced.

Imports torch; import it only where torch is needed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specexport.ops.recurrence import CAUSAL_CONV, LINEAR_ATTENTION
from specexport.ops.spec import OpSpec

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

    return _run(advance, torch.cat(parts, 1), v.shape[1], state, pending, state_steps, cu_new_tokens)


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

    return _run(advance, x, x.shape[1], state, pending, state_steps, cu_new_tokens)


def _run(
    advance: Advance, x: Tensor, width: int, state: Tensor, pending: Tensor, state_steps: Tensor, cu_new_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Every row: what is for good, then the drafts, from the state behind that."""
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


def _register(spec: OpSpec, function: Callable[..., Any], width_of: str) -> Any:
    """The torch op of a recurrence; its output is as wide as the input ``width_of``."""

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(spec.argument_names, arguments, strict=True))
        output = torch.empty_like(given[width_of])
        return output, torch.empty_like(given["state"]), torch.empty_like(given["pending"])

    op = torch.library.custom_op(
        f"{spec.domain}::{spec.torch_name}", function, mutates_args=(), schema=spec.torch_schema
    )
    op.register_fake(fake)
    return op


linear_attention = _register(LINEAR_ATTENTION, _linear_attention, "v")
"""``torch.ops.specexport.unpadded_linear_attention``; arguments and meaning as declared in ``recurrence``."""
causal_conv = _register(CAUSAL_CONV, _causal_conv, "x")
"""``torch.ops.specexport.unpadded_causal_conv``, likewise."""
