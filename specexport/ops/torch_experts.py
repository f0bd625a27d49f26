"""The torch form of ``specexport::Experts``: right when run, and shape-exact when traced.

Imports torch; import it only where torch is needed.
"""

import torch
from torch import Tensor

from specexport.ops.experts import EACH, EXPERTS


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


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


experts = torch.library.custom_op(
    f"{EXPERTS.domain}::{EXPERTS.torch_name}", _experts, mutates_args=(), schema=EXPERTS.torch_schema
)
"""``torch.ops.specexport.experts``; arguments and meaning as declared in ``experts``."""
experts.register_fake(_fake)
