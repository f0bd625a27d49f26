"""Mixture-of-experts layers in a form that traces: transformers' batched products, or one operator a layer.

transformers calls a registered function for the experts of a layer, with what its router has decided. Whatever gates
its experts as ``specexport::Experts`` can becomes that operator, by what a module computes and not by its model. Others
keep the batched form, which copies the weights of its experts for every token.

Modules that do not ask this interface are answered by class: they loop over the experts that a step happens to need,
which cannot be traced, or compute all of them. Each is one function here, with the module's own routing around it.
Weights that an operator cannot take as they are stored are copied for every token too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specexport.ops.torch_ops  # noqa: F401 - registers torch.ops.specexport.experts
from specexport.ops.spec import EACH

BATCHED = "batched_mm"
GROUPED = "specexport"
_LARGEST_LIMIT = 1e4
_NARROW, _WIDE = 0.5, 5.0
_STEEP = 1e6  # a sigmoid that is a step

_SWIGLU = (0, 1.0, 0.0, 0.0)
"""Attributes of the operator."""


class Gating(NamedTuple):
    """How experts gate, in the operator's attributes."""

    interleaved: int
    alpha: float
    beta: float
    limit: float


_gatings: list[dict[int, Gating | None]] = []


@contextmanager
def make_experts_traceable(model: Any, *, grouped: bool) -> Iterator[None]:
    """Within the block, expert layers run without loops over data; ``grouped`` ones are ``specexport::Experts``."""
    with replace_expert_forwards(model, grouped=grouped):
        can = getattr(model, "_can_set_experts_implementation", None)
        with _use_implementation(model, grouped=grouped) if can is not None and can() else nullcontext():
            yield


@contextmanager
def _use_implementation(model: Any, *, grouped: bool) -> Iterator[None]:
    """The same for layers that ask transformers' interface."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _run_grouped_experts)
    before = model.config._experts_implementation
    _gatings.append({id(module): find_gating(module) for module in model.modules()} if grouped else {})
    model.set_experts_implementation(GROUPED if grouped else BATCHED)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
        _gatings.pop()


def _run_grouped_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered function: [T, H], and each token's experts [T, K] and their weights."""
    gating = _gatings[-1].get(id(module))
    if gating is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        output: Tensor = ALL_EXPERTS_FUNCTIONS[BATCHED](module, hidden_states, top_k_index, top_k_weights)
        return output
    name = "gate_up_proj" if module.has_gate else "up_proj"
    gate_up, down = getattr(module, name), module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = (getattr(module, f"{name}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    result: Tensor = torch.ops.specexport.experts(
        hidden_states,
        top_k_index.long(),
        top_k_weights.to(hidden_states.dtype),
        gate_up,
        biases[0],
        down,
        biases[1],
        *gating,
    )
    return result


def find_gating(module: Any) -> Gating | None:
    """How a module's experts gate, found by trying it; None for modules without experts and for other gates."""
    plain = not getattr(module, "has_post_expert_norm", False)
    if plain and getattr(module, "has_gate", None) is False and isinstance(getattr(module, "up_proj", None), Tensor):
        return _match_squared_relu(module)
    if (
        not plain
        or not getattr(module, "has_gate", False)
        or not all(isinstance(getattr(module, name, None), Tensor) for name in ("gate_up_proj", "down_proj"))
    ):
        return None
    width = int(module.gate_up_proj.shape[2 if module.is_transposed else 1])
    # Limits and factors are numbers that the module keeps.
    numbers = {float(value) for value in vars(module).values() if type(value) in (int, float)}
    numbers = {value for value in numbers if 0 < value < _LARGEST_LIMIT}
    generator = torch.Generator().manual_seed(21)
    noise = torch.randn(16, width, generator=generator)
    tried = torch.cat([noise * size for size in sorted({_NARROW, _WIDE, *(2 * number for number in numbers)})])
    with torch.no_grad():
        try:
            wanted = module._apply_gate(tried)
        except (RuntimeError, TypeError, ValueError):
            return None
        if wanted.shape != (len(tried), width // 2):
            return None
        kinds = product((0, 1), sorted({1.0, *numbers}), (0.0, 1.0), sorted({0.0, *numbers}))
        return next((kind for each in kinds if _matches(kind := Gating(*each), tried, wanted)), None)


def _match_squared_relu(module: Any) -> Gating | None:
    """Experts without a gate whose outputs are squared where they are positive, and 0 elsewhere."""
    tried = torch.linspace(-_WIDE, _WIDE, 64)
    with torch.no_grad():
        found = module.act_fn(tried)
    return Gating(EACH, _STEEP, 0.0, 0.0) if torch.equal(found, tried.relu().square()) else None


def _matches(kind: Gating, tried: Tensor, wanted: Tensor) -> bool:
    gate, up = (tried[:, ::2], tried[:, 1::2]) if kind.interleaved else tried.chunk(2, dim=1)
    if kind.limit > 0:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    found = gate * torch.sigmoid(kind.alpha * gate) * (up + kind.beta)
    return bool(torch.allclose(found, wanted.float(), rtol=1e-5, atol=1e-5))


def _sum_expert_outputs(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Of each token's own copies of its experts [T, K, I, H], and their last layers [T, K, H, I]: [T, H]."""
    column = x[:, None, :, None]
    given = down @ (torch.nn.functional.silu(gate @ column) * (up @ column))
    return (given[..., 0] * weights[..., None].to(x.dtype)).sum(1)


def _dbrx(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weights of all experts lie below each other; those of their last layers are turned."""
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (weight.view(shape)[top_k_index] for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    x = hidden_states.reshape(-1, module.hidden_size)
    return _sum_expert_outputs(x, top_k_weights, w1, v1, w2.transpose(2, 3)).view(hidden_states.shape)


def _longcat_flash(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The last experts hand their input on, and have no last layer."""
    routed = top_k_index < module.num_routed_experts
    ids = torch.where(routed, top_k_index, 0)
    gate, up = module.gate_up_proj[ids].chunk(2, dim=2)
    given = _sum_expert_outputs(hidden_states, torch.where(routed, top_k_weights, 0.0), gate, up, module.down_proj[ids])
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
        given = _sum_expert_outputs(rows, ones, gate, up, down[ids])
    return module.shared_expert(x) + given.view(-1, module.top_k, module.hidden_dim).sum(1), logits


_MODULES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "DbrxExperts": (_dbrx, lambda module: module.mlp.activation_fn),
    "LongcatFlashExperts": (_longcat_flash, lambda module: module.act_fn),
    "Llama4TextMoe": (_llama4, lambda module: module.experts.act_fn),
}
"""Class of a module to what stands for its forward pass, and where its activation is."""


@contextmanager
def replace_expert_forwards(model: Any, *, grouped: bool) -> Iterator[None]:
    """Within the block, such modules can be traced; ``grouped`` ones are ``specexport::Experts``."""
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
