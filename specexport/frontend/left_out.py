"""Biases that a checkpoint has and its configuration does not: the model would do without them, in silence."""

import re
from collections.abc import Iterable
from typing import Any

from specexport.frontend.gguf_rows import Conversion
from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError

_BIAS = ".bias"
_GGUF_BIAS = re.compile(r"blk\.\d+\.(attn|ffn)_(q|k|v|qkv|output|up|gate|down)\.bias")


def check_no_bias_left(source: Source, model: Any, left: Iterable[str]) -> None:
    """Refuse a model without the biases that its weights in safetensors have; old quantizers write some that are zero.

    ``left`` names weights that the model has no place for.
    """
    modules = dict(model.named_modules())
    names = {name for name in left if name.endswith(_BIAS) and modules.get(name.removesuffix(_BIAS)) is not None}
    if not names:
        return
    from safetensors import safe_open

    for path in source.files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in sorted(names & set(file.keys())):
                    if bool(file.get_tensor(name).any()):
                        raise _refuse(source, name)


def check_no_gguf_bias_left(source: Source, reader: Any, model: Any, conversion: Conversion | None) -> None:
    """As :func:`check_no_bias_left`, of a GGUF file."""
    biases = [tensor for tensor in reader.tensors if _GGUF_BIAS.fullmatch(tensor.name) and tensor.data.any()]
    if not biases:
        return
    names = (conversion or Conversion(reader, model)).names
    for tensor in biases:
        if tensor.name not in names:
            raise _refuse(source, tensor.name)


def _refuse(source: Source, name: str) -> CheckpointError:
    return CheckpointError(
        f"{source.name} has a bias that its configuration leaves out, {name}.",
        "give the configuration that belongs to the weights, as with attention_bias or mlp_bias true.",
    )
