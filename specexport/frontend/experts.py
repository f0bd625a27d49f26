"""Mixture-of-experts layers in a form that traces: transformers' batched products, or one operator a layer.

transformers calls a registered function for the experts of a layer, with what its router has decided. Whatever gates
its experts as ``specexport::Experts`` can becomes that operator, by what a module computes and not by its model.
Others keep the batched form, which copies the weights of its experts for every token.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specexport.ops.torch_experts  # noqa: F401 - registers torch.ops.specexport.experts
from specexport.frontend.expert_modules import answered_experts
from specexport.ops.experts import EACH

BATCHED = "batched_mm"
GROUPED = "specexport"
_LARGEST_LIMIT = 1e4
_NARROW, _WIDE = 0.5, 5.0
_STEEP = 1e6  # a sigmoid that is a step


class Gating(NamedTuple):
    """How experts gate, in the operator's attributes."""

    interleaved: int
    alpha: float
    beta: float
    limit: float


_gatings: list[dict[int, Gating | None]] = []


@contextmanager
def traceable_experts(model: Any, *, grouped: bool) -> Iterator[None]:
    """Within the block, expert layers run without loops that depend on data; afterwards they are as before.

    With ``grouped`` each is one ``specexport::Experts``, where that is what it computes.
    """
    with answered_experts(model, grouped=grouped):
        can = getattr(model, "_can_set_experts_implementation", None)
        with _implemented(model, grouped=grouped) if can is not None and can() else nullcontext():
            yield


@contextmanager
def _implemented(model: Any, *, grouped: bool) -> Iterator[None]:
    """The same for layers that ask transformers' interface."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _experts)
    before = model.config._experts_implementation
    _gatings.append({id(module): gating_of(module) for module in model.modules()} if grouped else {})
    model.set_experts_implementation(GROUPED if grouped else BATCHED)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
        _gatings.pop()


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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


def gating_of(module: Any) -> Gating | None:
    """How a module's experts gate, found by trying it; None for modules without experts and for other gates."""
    plain = not getattr(module, "has_post_expert_norm", False)
    if plain and getattr(module, "has_gate", None) is False and isinstance(getattr(module, "up_proj", None), Tensor):
        return _squared(module)
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


def _squared(module: Any) -> Gating | None:
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
