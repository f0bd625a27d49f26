"""The declarations of the ops that keep a state, ``UnpaddedLinearAttention`` and ``UnpaddedCausalConv``.

A recurrence has no positions that could be forgotten, so drafts must not enter its state. Their inputs wait beside it,
*pending*, until they are accepted; then they enter the state at the beginning of the next step, before its tokens.
Rollback is arithmetic, as it is for a KV cache. ::

    state  |  pending: [ p0 p1 | p2 ]  +  tokens: [ t0 t1 | t2 t3 ]
              for good: p0 p1, then t0 t1 (no token is for good behind a draft)
              drafts:   p2, then t2 t3  ─▶ pending of the next step

``state_steps`` of a row are these four counts: pending entries for good, pending drafts, tokens for good, draft tokens.
Imports the standard library and the runtime's contract only.
"""

from specexport.ops.spec import OpAttribute, OpInput, OpSpec
from specexport_runtime.abi import CU_NEW_TOKENS, OP_DOMAIN, PAD_INDEX, ROW_STARTS, STATE_STEPS, UNPAD_INDEX

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
        OpInput("pending", "float32", ("B", 1, "S", "F")),
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
        OpInput("pending_out", "float32", ("B", 1, "S", "F")),
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
