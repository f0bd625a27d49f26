"""The declarations of our ops: ``UnpaddedAttention``, those that keep a state, and ``Experts``.

The torch ops and their fakes (``torch_ops``), the ONNX schemas and the exporter's translation (``onnx_op``) and the
test of the argument order all derive from these tables, so an argument is added here and nowhere else. Imports the
standard library and the runtime's contract only.

A recurrence has no positions that could be forgotten, so drafts must not enter its state. Their inputs wait beside it,
*pending*, until they are accepted; then they enter the state at the beginning of the next step, before its tokens.
Rollback is arithmetic, as it is for a KV cache. ::

    state  |  pending: [ p0 p1 | p2 ]  +  tokens: [ t0 t1 | t2 t3 ]
              for good: p0 p1, then t0 t1 (no token is for good after a draft)
              drafts:   p2, then t2 t3  ─▶ pending of the next step

``state_steps`` of a row are these four counts: pending entries for good, pending drafts, tokens for good, draft tokens.
"""

from typing import Literal, NamedTuple

from specexport_runtime.abi import (
    CU_NEW_TOKENS,
    KV_LENS,
    OP_DOMAIN,
    OP_NAME,
    OP_VERSION,
    PAD_INDEX,
    ROW_ENDS,
    ROW_STARTS,
    ROW_TOTALS,
    STATE_STEPS,
    UNPAD_INDEX,
)

DIM_NAMES = {
    "T": "num_tokens",
    "B": "num_seqs",
    "Q": "max_new_tokens",
    "R": "num_logit_rows",
    "L": "kv_capacity",
    "P": "kv_span",
    "S": "num_pending",
}
"""Names of a graph's dynamic dimensions, by dimension word."""


class OpInput(NamedTuple):
    """One tensor argument.

    Attributes:
        name: argument name, the same in torch and in ONNX.
        dtype: ``"model"`` or a numpy dtype name.
        shape: dimension words of the contract, for readers.
        optional: True if the argument may be absent.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    optional: bool = False


class OpAttribute(NamedTuple):
    """One attribute; ``default`` None means that it must be given."""

    name: str
    kind: Literal["int", "float"]
    default: int | float | None = None


class OpSpec(NamedTuple):
    """An operator: inputs, then attributes, in the order that every form of it uses."""

    domain: str
    name: str
    version: int
    torch_name: str
    inputs: tuple[OpInput, ...]
    attributes: tuple[OpAttribute, ...]
    outputs: tuple[OpInput, ...]

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of inputs and attributes, in calling order."""
        return (*(item.name for item in self.inputs), *(item.name for item in self.attributes))

    @property
    def torch_schema(self) -> str:
        """The signature in torch's schema language, without the op's name."""
        inputs = [f"Tensor{'?' if item.optional else ''} {item.name}" for item in self.inputs]
        attributes = [f"{item.kind} {item.name}" for item in self.attributes]
        return f"({', '.join(inputs + attributes)}) -> ({', '.join('Tensor' for _ in self.outputs)})"


_STEP_INPUTS = (KV_LENS, CU_NEW_TOKENS, ROW_STARTS, ROW_ENDS, ROW_TOTALS, PAD_INDEX, UNPAD_INDEX)
_CACHES = (
    OpInput("k_cache", "model", ("B", 1, "H", "L", "D")),
    OpInput("v_cache", "model", ("B", 1, "H", "L", "Dv")),
)

UNPADDED_ATTENTION = OpSpec(
    domain=OP_DOMAIN,
    name=OP_NAME,
    version=OP_VERSION,
    torch_name="unpadded_attention",
    inputs=(
        OpInput("q", "model", ("T", "Hq*D")),
        OpInput("k", "model", ("T", "H*D"), optional=True),
        OpInput("v", "model", ("T", "H*Dv"), optional=True),
        *_CACHES,
        *(OpInput(step.name, step.dtype, step.shape) for step in _STEP_INPUTS),
        OpInput("sinks", "model", ("Hq",), optional=True),
        OpInput("slopes", "float32", ("Hq",), optional=True),
    ),
    attributes=(
        OpAttribute("num_heads", "int"),
        OpAttribute("kv_num_heads", "int"),
        OpAttribute("scale", "float"),
        OpAttribute("window", "int", -1),  # a token sees itself and the window-1 tokens before it; -1: all
        OpAttribute("softcap", "float", 0.0),  # scores become softcap*tanh(score/softcap); 0: off
        OpAttribute("causal", "int", 1),  # 0: a token also sees the tokens of its row that come after it in the step
    ),
    outputs=(
        OpInput("output", "model", ("T", "Hq*Dv")),
        OpInput("k_cache_out", "model", ("B", 1, "H", "L", "D")),
        OpInput("v_cache_out", "model", ("B", 1, "H", "L", "Dv")),
    ),
)
"""Append each row's new keys and values to its cache row, then attend to everything the row holds.

Row ``b`` owns tokens ``[cu_new_tokens[b], cu_new_tokens[b+1])``; token ``j`` of it is written to cache entry
``kv_lens[b] + j`` and sees entries ``0 … kv_lens[b] + j``, or, with ``causal`` 0, all entries up to the row's last new
token; a window bounds what lies before a token, never what lies after it. Entries at and beyond
``kv_lens[b] + (new tokens)`` are undefined afterwards (a row without tokens may have one token written there, and must
have room for it). ``row_starts``, ``row_ends``, ``row_totals``, ``pad_index`` and ``unpad_index`` say the same thing
for lowerings that work row by row.

With ``slopes`` (ALiBi, Press et al. 2022, section 3), ``slopes[h] * (entry - query)`` is added to each score of head
``h``, after scale and softcap: a bias of 0 for a token itself, and of ``-slopes[h]`` a token before that.

Without ``k`` and ``v`` nothing is appended: the caches are another model's, which has filled them. The last entries of
a row stand for its new tokens then, so that token ``j`` of ``n`` sees entries ``0 … kv_lens[b] - n + j``, and a window
counts from there. Where a row has fewer entries than tokens, the output means nothing.
"""

_STEP = tuple(
    OpInput(step.name, step.dtype, step.shape)
    for step in (STATE_STEPS, CU_NEW_TOKENS, ROW_STARTS, PAD_INDEX, UNPAD_INDEX)
)

LINEAR_ATTENTION = OpSpec(
    domain=OP_DOMAIN,
    name="UnpaddedLinearAttention",
    version=1,
    torch_name="unpadded_linear_attention",
    inputs=(
        OpInput("q", "float32", ("T", "Hq*Dk")),
        OpInput("k", "float32", ("T", "H*Dk")),
        OpInput("v", "float32", ("T", "H*Dv")),
        OpInput("decay", "float32", ("T", "H or H*Dk"), optional=True),
        OpInput("beta", "float32", ("T", "H"), optional=True),
        OpInput("state", "float32", ("B", 1, "H", "Dk", "Dv")),
        OpInput("pending", "float32", ("B", 1, "S", "Y")),
        *_STEP,
    ),
    attributes=(
        OpAttribute("num_heads", "int"),
        OpAttribute("kv_num_heads", "int"),
        OpAttribute("scale", "float"),
    ),
    outputs=(
        OpInput("output", "float32", ("T", "H*Dv")),
        OpInput("state_out", "float32", ("B", 1, "H", "Dk", "Dv")),
        OpInput("pending_out", "float32", ("B", 1, "S", "Y")),
    ),
)
"""Linear attention with a decay, with a delta rule, or both. A head with state ``S`` [Dk, Dv] does for each token::

    S ← exp(decay) · S                      decay of the head, or of each key channel; 1 without it
    S ← S + k ⊗ v                           without beta
    S ← S + beta · k ⊗ (v - Sᵀ k)           with it: the gated delta rule (Yang et al. 2024, eq. 10)
    output = scale · Sᵀ q

Mamba-2 (Dao and Gu 2024) is the second line with ``k = B``, ``v = Δ·x``, ``q = C`` and ``decay = Δ·A``; Mamba has a
head of one value for each channel. Head ``h`` reads query head ``h // (H / Hq)``. Pending entries are ``[q | k | v |
decay | beta]`` of a token. An idle row keeps its state and its pending entries.
"""

CAUSAL_CONV = OpSpec(
    domain=OP_DOMAIN,
    name="UnpaddedCausalConv",
    version=1,
    torch_name="unpadded_causal_conv",
    inputs=(
        OpInput("x", "float32", ("T", "C")),
        OpInput("weight", "float32", ("C", 1, "W")),
        OpInput("bias", "float32", ("C",), optional=True),
        OpInput("state", "float32", ("B", 1, "W-1", "C")),
        OpInput("pending", "float32", ("B", 1, "S", "C")),
        *_STEP,
    ),
    attributes=(OpAttribute("silu", "int", 0),),  # 1: the output goes through x·sigmoid(x)
    outputs=(
        OpInput("output", "float32", ("T", "C")),
        OpInput("state_out", "float32", ("B", 1, "W-1", "C")),
        OpInput("pending_out", "float32", ("B", 1, "S", "C")),
    ),
)
"""A convolution over a row's last W tokens, each channel by itself; the state is the W-1 inputs before a token."""

RECURRENCES = (LINEAR_ATTENTION, CAUSAL_CONV)

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
