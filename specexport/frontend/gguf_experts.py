"""Experts of GGUF files, which hold a tensor of all gates of a layer, one of what these gate, and one behind both.

transformers has one parameter of the first two: one below the other or row by row in turn, and turned in some models.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.frontend.gguf_fields import architecture
from specexport.frontend.source import Source
from specexport_runtime.errors import UnsupportedModelError

_PARAMETER = re.compile(r"(?P<module>.+\.(?P<layer>\d+)\..*experts)\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?")
_TENSORS = {"gate_up": (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)), "down": (("ffn_down_exps",),)}
_OF_EXPERTS = re.compile(r"blk\.\d+\.(ffn_(gate|up|down|gate_up)_exps|ffn_(gate|up|down)\.\d+)\..+")


class Stack(NamedTuple):
    """What a parameter of all experts of a layer is made of."""

    names: tuple[str, ...]  # of the file's tensors, [E, N, K] each, or [E, N] of biases
    in_turn: bool  # their rows take turns
    turned: bool  # the parameter is [E, K, N]

    def row_order(self, num_experts: int, num_rows: int) -> npt.NDArray[np.int64]:
        """Where each of the parameter's rows is, if the tensors of so many rows an expert lie below each other."""
        rows = np.arange(len(self.names) * num_experts * num_rows).reshape(len(self.names), num_experts, num_rows)
        order: npt.NDArray[np.int64] = rows.transpose((1, 2, 0) if self.in_turn else (1, 0, 2)).ravel()
        return order


def holds_experts(reader: Any) -> bool:
    """Whether a GGUF file has experts; no reader, no file."""
    return reader is not None and any(_OF_EXPERTS.fullmatch(tensor.name) for tensor in reader.tensors)


def find_stacks(reader: Any, model: Any) -> dict[str, Stack]:
    """The parameters of a model that a file's experts make, by name."""
    there, found = {tensor.name for tensor in reader.tensors}, {}
    for name in model.state_dict():
        match = _PARAMETER.fullmatch(name)
        if match is None:
            continue
        module = model.get_submodule(match["module"])
        if not hasattr(module, "is_transposed"):
            continue
        kind = "bias" if match["bias"] else "weight"
        for parts in _TENSORS[match["part"]]:
            names = tuple(f"blk.{match['layer']}.{part}.{kind}" for part in parts)
            in_turn = match["part"] == "gate_up" and not module.is_concatenated
            if there.issuperset(names) and len(names) > in_turn:
                found[name] = Stack(names, in_turn, module.is_transposed and not match["bias"])
    return found


def check_experts(source: Source, reader: Any, stacks: Mapping[str, Stack]) -> None:
    """Refuse (``UnsupportedModelError``) a file with experts that are no parameters of its model."""
    read = {name for stack in stacks.values() for name in stack.names}
    for tensor in reader.tensors:
        if _OF_EXPERTS.fullmatch(tensor.name) and tensor.name not in read:
            raise UnsupportedModelError(
                f"{source.name} holds experts that cannot be read ({tensor.name} of {architecture(reader)}).",
                "give the Hugging Face checkpoint that the file was made from, or convert that with today's llama.cpp.",
            )
