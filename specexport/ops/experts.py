"""The declaration of ``specexport::Experts``, a layer's experts behind their router.

Imports the standard library and the runtime's contract only.
"""

from specexport.ops.spec import OpAttribute, OpInput, OpSpec
from specexport_runtime.abi import OP_DOMAIN

EACH = 2
"""The value of ``interleaved`` where each output is a gate and what it gates."""

EXPERTS = OpSpec(
    domain=OP_DOMAIN,
    name="Experts",
    version=1,
    torch_name="experts",
    inputs=(
        OpInput("x", "model", ("T", "H")),
        OpInput("expert_ids", "int64", ("T", "K")),
        OpInput("expert_weights", "model", ("T", "K")),
        OpInput("gate_up", "model", ("E", "2*I or I", "H")),
        OpInput("gate_up_bias", "model", ("E", "2*I or I"), optional=True),
        OpInput("down", "model", ("E", "H", "I")),
        OpInput("down_bias", "model", ("E", "H"), optional=True),
    ),
    attributes=(
        # 1: outputs of gate_up are gate, up, gate, up …; 0: all gates come first; 2: each output is both
        OpAttribute("interleaved", "int", 0),
        OpAttribute("alpha", "float", 1.0),
        OpAttribute("beta", "float", 0.0),
        OpAttribute("limit", "float", 0.0),  # 0: none
    ),
    outputs=(OpInput("output", "model", ("T", "H")),),
)
"""What the experts of a token give, weighted as its router says. Expert ``e`` computes, of a token ``x``::

    gate, up = gate_up[e] · x + gate_up_bias[e]
    gate, up ← min(gate, limit), clamp(up, -limit, limit)      with a limit
    expert(x) = down[e] · (gate · sigmoid(alpha · gate) · (up + beta)) + down_bias[e]

where both are the same (2) and alpha is large, that is ``down[e] · relu(gate_up[e] · x)²``: an expert without a gate.
And the token's output is the sum of ``expert_weights[t, i] * expert_ids[t, i](x)``. How a router comes to its choice
and to its weights (softmax or sigmoid, groups, biases, normalisation, scale) is none of the operator's business, nor
are experts that every token has.
"""
