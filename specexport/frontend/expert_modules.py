"""Mixture-of-experts modules of transformers that do not ask its experts interface: answered by class.

They loop over the experts that a step happens to need, which cannot be traced, or compute all of them. Each is one
function here, with the module's own routing around it. Weights that an operator cannot take as they are stored are
copied for every token, as in transformers' batched form.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import specexport.ops.torch_experts  # noqa: F401 - registers torch.ops.specexport.experts

_SWIGLU = (0, 1.0, 0.0, 0.0)
"""Attributes of the operator."""


def _summed(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Of each token's own copies of its experts [T, K, I, H], and their last layers [T, K, H, I]: [T, H]."""
    column = x[:, None, :, None]
    given = down @ (torch.nn.functional.silu(gate @ column) * (up @ column))
    return (given[..., 0] * weights[..., None].to(x.dtype)).sum(1)


def _dbrx(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weights of all experts lie below each other; those of their last layers are turned."""
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (weight.view(shape)[top_k_index] for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    x = hidden_states.reshape(-1, module.hidden_size)
    return _summed(x, top_k_weights, w1, v1, w2.transpose(2, 3)).view(hidden_states.shape)


def _longcat_flash(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The last experts hand their input on, and have no last layer."""
    routed = top_k_index < module.num_routed_experts
    ids = torch.where(routed, top_k_index, 0)
    gate, up = module.gate_up_proj[ids].chunk(2, dim=2)
    given = _summed(hidden_states, torch.where(routed, top_k_weights, 0.0), gate, up, module.down_proj[ids])
    kept = torch.where(routed, 0.0, top_k_weights).sum(-1, keepdim=True)
    return given + hidden_states * kept.to(hidden_states.dtype)


def _llama4(module: Any, hidden_states: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """What the router says is a factor on what an expert reads: a row for each pair of a token and an expert."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    logits = torch.nn.functional.linear(x, module.router.weight)
    scores, ids = torch.topk(logits, module.top_k, dim=1)
    rows = (x[:, None] * torch.sigmoid(scores.float()).to(x.dtype)[..., None]).flatten(0, 1)
    ids, ones = ids.view(-1, 1), torch.ones_like(rows[:, :1])
    gate_up, down = (part.transpose(1, 2) for part in (module.experts.gate_up_proj, module.experts.down_proj))
    if grouped:
        given = torch.ops.specexport.experts(rows, ids, ones, gate_up, None, down, None, *_SWIGLU)
    else:
        gate, up = gate_up[ids].chunk(2, dim=2)
        given = _summed(rows, ones, gate, up, down[ids])
    return module.shared_expert(x) + given.view(-1, module.top_k, module.hidden_dim).sum(1), logits


_MODULES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "DbrxExperts": (_dbrx, lambda module: module.mlp.activation_fn),
    "LongcatFlashExperts": (_longcat_flash, lambda module: module.act_fn),
    "Llama4TextMoe": (_llama4, lambda module: module.experts.act_fn),
}
"""Class of a module to what stands for its forward pass, and where its activation is."""


@contextmanager
def answered_experts(model: Any, *, grouped: bool) -> Iterator[None]:
    """Within the block, such modules can be traced; afterwards they are as before.

    With ``grouped`` they are ``specexport::Experts``, where their weights are stored as that operator wants them.
    """
    answered = []
    for module in model.modules():
        if type(module).__name__ in _MODULES and type(module).__module__.startswith("transformers.models."):
            stand_in, activation_of = _MODULES[type(module).__name__]
            if _is_silu(activation_of(module)):
                module.forward = partial(stand_in, module, **({"grouped": grouped} if stand_in is _llama4 else {}))
                answered.append(module)
    try:
        yield
    finally:
        for module in answered:
            del module.forward


def _is_silu(activation: Any) -> bool:
    tried = torch.linspace(-8, 8, 65)
    return bool(torch.allclose(activation(tried), torch.nn.functional.silu(tried)))
