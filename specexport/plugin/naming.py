"""Plugin names: a kernel's name, its element type, and all that is compiled in, so that a graph says what it needs.

A plugin then has no attributes, which TensorRT converts between ONNX, C++ and numpy (an int fails with numpy 2.4).
Example: ``ragged_attention_bfloat16_q32_h8_d128_x3db504f3_n4``. Imports the standard library only.
"""

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.kernels.signatures import MODEL_DTYPES, SIGNATURES, TensorArgument
from specexport.kernels.spec import KernelSpec
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

NAMESPACE = "specexport"
"""Namespace of the plugins; a node names it in its attribute ``plugin_namespace``."""


class _NamePart(NamedTuple):
    letter: str
    attribute: str
    encode: Callable[[Any], str]
    decode: Callable[[str], Any]


def _float_to_hex(number: float) -> str:
    """Bits of the nearest float32: a plugin's name cannot hold a point, and a rounded factor would be another one."""
    return struct.pack(">f", number).hex()


def _hex_to_float(text: str) -> float:
    return float(struct.unpack(">f", bytes.fromhex(text))[0])


_PARTS = (
    _NamePart("q", "num_heads", str, int),
    _NamePart("h", "kv_num_heads", str, int),
    _NamePart("d", "head_size", str, int),
    _NamePart("v", "v_head_size", str, int),
    _NamePart("x", "scale", _float_to_hex, _hex_to_float),
    _NamePart("w", "window", str, int),
    _NamePart("c", "softcap", _float_to_hex, _hex_to_float),
    _NamePart("n", "num_splits", str, int),
)
_FLAGS = ("tree", "sinks")
_BY_LETTER = {part.letter: part for part in _PARTS}
_DEFAULTS = {part.attribute: KernelSpec.__dataclass_fields__[part.attribute].default for part in _PARTS}
_NAME = re.compile(rf"({'|'.join(SIGNATURES)})_({'|'.join(MODEL_DTYPES)})((?:_[a-z][0-9a-f]+)*)((?:_(?:tree|sinks))*)")


def plugin_name(spec: KernelSpec) -> str:
    """Name of the plugin for a kernel, without defaults and ``new_tokens``: each profile has its own tiles of it."""
    defaults = _DEFAULTS | {"v_head_size": spec.head_size}
    parts = [
        f"{part.letter}{part.encode(getattr(spec, part.attribute))}"
        for part in _PARTS
        if getattr(spec, part.attribute) != defaults[part.attribute]
    ]
    return "_".join([spec.kernel, spec.dtype, *parts, *(flag for flag in _FLAGS if getattr(spec, flag))])


def plugin_spec(name: str) -> KernelSpec:
    """The kernel that a plugin's name stands for, the inverse of ``plugin_name``; CheckFailedError for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckFailedError(f"{name!r} is not the name of a plugin of this package.")
    kernel, dtype, parts, flags = match.groups()
    values = {}
    for text in parts.split("_")[1:]:
        part = _BY_LETTER.get(text[0])
        if part is None:
            raise CheckFailedError(f"{name!r} has a part {text!r} that no plugin has.")
        values[part.attribute] = part.decode(text[1:])
    return KernelSpec(kernel=kernel, dtype=dtype, **values, **dict.fromkeys(flags.split("_")[1:], True))


def plugin_names(ir_model: "ir.Model") -> list[str]:
    """Names of the plugins in a lowered graph, each once, in the graph's order."""
    found = (node for node in ir_model.graph if "plugin_namespace" in node.attributes)
    ours = (node.op_type for node in found if node.attributes["plugin_namespace"].as_string() == NAMESPACE)
    return list(dict.fromkeys(ours))


def graph_shape(item: TensorArgument) -> tuple[str | int, ...]:
    """Dimension words of a kernel's tensor in an engine: caches are [B, H, L, D] there, which is the same memory."""
    return tuple(word for word in item.shape if word != 1) if "L" in item.shape else item.shape
