"""Quantization of linear layers: which passes an ``--quantize`` asks for."""

from specexport.passes.base import CountingPass
from specexport_runtime.errors import RecipeError


def quantizing_passes(kind: str, *, lm_head: bool, block: int = 0) -> list[CountingPass]:
    """The passes of one kind of quantization.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        lm_head: whether the LM head is quantized too.
        block: how engines take int4 weights: as ``DequantizeLinear`` before a product, with one scale for so many
            inputs; 0 as operators of ONNX Runtime for CPUs, which quantize activations too.

    Raises:
        RecipeError: there is no such kind for such engines.
    """
    if not block and kind == "int8":
        from specexport.passes.quantize_int8 import Int8QuantizePass

        return [Int8QuantizePass(lm_head=lm_head)]
    if not block and kind == "int4":
        from specexport.passes.quantize_int4 import Int4QuantizePass

        return [Int4QuantizePass(lm_head=lm_head)]
    if block and kind == "int4":
        from specexport.passes.quantize_weights import Int4WeightPass

        return [Int4WeightPass(block=block, lm_head=lm_head)]
    raise RecipeError(f"there is no quantization {kind!r} for this backend.", "use int8 or int4, or leave it out.")
