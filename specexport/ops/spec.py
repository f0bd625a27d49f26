"""The one declaration of ``specexport::UnpaddedAttention``.

The torch op and its fake (``torch_op``), the ONNX schema and the exporter's translation (``onnx_op``) and the test of
the argument order all derive from this table, so an argument is added here and nowhere else. Imports the standard
library and the runtime's contract only.
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
        OpAttribute("causal", "int", 1),  # 0: a token also sees the tokens of its row that come behind it in the step
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
token; a window bounds what lies before a token, never what lies behind it. Entries at and beyond
``kv_lens[b] + (new tokens)`` are undefined afterwards (a row without tokens may have one token written there, and must
have room for it). ``row_starts``, ``row_ends``, ``row_totals``, ``pad_index`` and ``unpad_index`` say the same thing
for lowerings that work row by row.

With ``slopes`` (ALiBi, Press et al. 2022, section 3), ``slopes[h] * (entry - query)`` is added to each score of head
``h``, behind scale and softcap: a bias of 0 for a token itself, and of ``-slopes[h]`` a token before that.

Without ``k`` and ``v`` nothing is appended: the caches are another model's, which has filled them. The last entries of
a row stand for its new tokens then, so that token ``j`` of ``n`` sees entries ``0 … kv_lens[b] - n + j``, and a window
counts from there. Where a row has fewer entries than tokens, the output means nothing.
"""
