"""Quantization of linear layers: which passes an ``--quantize`` asks for."""

from specexport.passes.base import CountingPass
from specexport_runtime.errors import RecipeError


def quantizing_passes(kind: str, *, lm_head: bool) -> list[CountingPass]:
    """The passes of one kind of quantization.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        lm_head: whether the LM head is quantized too.

    Raises:
        RecipeError: there is no such kind.
    """
    if kind == "int8":
        from specexport.passes.quantize_int8 import Int8QuantizePass

        return [Int8QuantizePass(lm_head=lm_head)]
    if kind == "int4":
        from specexport.passes.quantize_int4 import Int4QuantizePass

        return [Int4QuantizePass(lm_head=lm_head)]
    raise RecipeError(f"there is no quantization {kind!r}.", "use int8 or int4.")
