"""The operators of ONNX Runtime left in engines for CPUs, each with why no token's bits depend on its company."""

import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from specexport_runtime.abi import OP_DOMAIN

MOVES = "It moves values, or computes integers and truth values: nothing is rounded."
ROUNDS_ONCE = "Each value is one operation of IEEE 754, correctly rounded: it has one result."
EACH = "Each value is computed by itself, by one formula wherever in a tensor it is."
WHOLE = "The same where the last axis has a multiple of 16 values, which lowering/ort_cpu.py sees to."
BY_ROW = "The last axis is worked through in an order that its length decides, for each token by itself."
BY_TOKEN = "Each row of a step by itself, and its tokens one after another."

LEFT: dict[str, dict[str, str]] = {
    MOVES: {
        "Abs": "jetmoe", "Cast": "deepseek_v3", "Clip": "mamba2", "Concat": "qwen3_next", "Constant": "mamba2",
        "ConstantOfShape": "deepseek_v3", "CumSum": "dflash", "Equal": "adapters", "Expand": "mamba2",
        "Floor": "jetmoe", "Gather": "llama", "GatherElements": "gptj", "GatherND": "falcon", "Greater": "mamba2",
        "GreaterOrEqual": "dflash", "Identity": "mamba2", "If": "mamba2", "LessOrEqual": "hydra", "Neg": "gptj",
        "NonZero": "adapters", "Not": "deepseek_v3", "Pad": "mamba2", "Range": "deepseek_v3", "ReduceMax": "adapters",
        "Relu": "opt", "Reshape": "llama", "ScatterElements": "deepseek_v3", "ScatterND": "deepseek_v3",
        "Shape": "mamba2", "Sign": "jetmoe", "Slice": "mamba2", "Split": "llama", "Squeeze": "llama", "Tile": "gptj",
        "TopK": "qwen3_moe", "Transpose": "mamba2", "Unsqueeze": "llama", "Where": "mamba2",
    },
    ROUNDS_ONCE: {
        "Add": "mamba2", "Div": "qwen3_next", "Mul": "llama", "Sub": "mamba2",
    },
    EACH: {
        "Exp": "kimi_linear", "FastGelu": "gpt2", "Gelu": "gemma3", "LinearAttentionGate": "mamba2", "Pow": "mamba2",
        "QuickGelu": "llama", "Reciprocal": "mamba2", "RotaryEmbedding": "dflash", "Sigmoid": "llama", "Sqrt": "mamba2",
        "Tanh": "gpt2",
    },
    WHOLE: {
        "Cos": "deepseek_v3", "Log": "kimi_linear", "Sin": "deepseek_v3",
    },
    BY_ROW: {
        "LayerNormalization": "opt", "LpNormalization": "gated layers", "RMSNormalization": "llama",
        "ReduceMean": "mamba2", "ReduceSum": "qwen3_next", "SkipLayerNormalization": "opt",
        "SkipSimplifiedLayerNormalization": "llama", "Softmax": "qwen3_moe",
    },
    BY_TOKEN: {
        "CausalConvWithState": "mamba2", "LinearAttention": "mamba2", "Scan": "mamba2",
    },
}  # fmt: skip
"""By reason, the operators, and where each can be seen: a tiny model, or a kind of engine.

``lowering/test_value_by_value.py`` tries what EACH, WHOLE and BY_ROW say, ``test_same_bits.py`` all of it in whole
models.
"""
HEADS = ("medusa", "hydra", "eagle3", "dflash")
"""Kinds of draft heads that ``heads/test_heads_bits.py`` reads."""
_CONTRIB = "com.microsoft"


def reason_of(operator: str) -> str | None:
    """Why an operator may stay; None for one that is not known."""
    return next((reason for reason, known in LEFT.items() if operator in known), None)


def operators_in(ir_model: Any) -> set[str]:
    """Operators of ONNX Runtime in a graph, in its branches, loops and functions."""

    own = {(function.domain, function.name) for function in ir_model.functions.values()}
    nodes = [node for each in (ir_model.graph, *ir_model.functions.values()) for node in each.all_nodes()]
    assert all(node.domain in ("", OP_DOMAIN, _CONTRIB) for node in nodes)
    return {node.op_type for node in nodes if node.domain != OP_DOMAIN and (node.domain, node.op_type) not in own}


def assert_known(ir_model: Any) -> None:
    unknown = sorted(name for name in operators_in(ir_model) if reason_of(name) is None)
    assert not unknown, (
        f"{unknown} compute in an engine for CPUs: tests/support/references/ort_operators.py must say why they may"
    )


def assert_left(path: Path, where: str) -> None:
    """The same of an engine as ONNX Runtime runs it; and what the table sees in ``where`` is there."""

    from tests.support.references.sessions import session_of

    written = ir.load(path)
    with tempfile.TemporaryDirectory() as folder:
        session_of(path, optimized=Path(folder, "model.onnx"))
        run = ir.load(Path(folder, "model.onnx"))
        assert_known(run)
    found = operators_in(written) | operators_in(run)
    gone = sorted(
        name for known in LEFT.values() for name, seen in known.items() if seen == where and name not in found
    )
    assert not gone, f"{gone} are no longer in {where}: they go from LEFT, or are seen elsewhere"


_PARALLEL = "layer 0 adds attention and MLP to the residual stream in parallel"
_SHARED_KEYS = "layer 0's attention is read beyond the residual stream"
OBSTACLES = {
    **dict.fromkeys(("phi", "gpt_neox", "cohere2", "gptj", "codegen", "falcon"), _PARALLEL),
    "gemma4": _SHARED_KEYS,
    "bart": "layer 0 passes the residual stream itself through LayerNormalization",
}
"""Why a model of tests/support/models/tiny_models.py cannot skip layers; every one that is not named here can."""
