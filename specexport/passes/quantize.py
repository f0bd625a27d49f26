"""Quantization of linear layers: which passes an ``--quantize`` asks for."""

from specexport.passes.base import CountingPass
from specexport_runtime.errors import RecipeError


def quantizing_passes(kind: str, *, lm_head: bool, operator: str = "", block: int = 0) -> list[CountingPass]:
    """The passes of one kind of quantization.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        lm_head: whether the LM head is quantized too, and on CPUs the embedding.
        operator: what makes int4 weights float in an engine: ``"MatMulNBits"``, or ``"DequantizeLinear"`` before a
            product; empty for our own operators for CPUs, which quantize activations too.
        block: inputs that share a scale there.

    Raises:
        RecipeError: there is no such kind for such engines.
    """
    if kind in ("int8", "int4") and not operator:
        from specexport.passes.quantize_blocks import BlockQuantizePass
        from specexport.passes.quantize_experts import ExpertsQuantizePass

        bits = int(kind.removeprefix("int"))
        return [ExpertsQuantizePass(bits), BlockQuantizePass(bits, lm_head=lm_head)]
    if kind == "int4" and operator == "MatMulNBits":
        from specexport.passes.quantize_fused import Int4FusedPass

        return [Int4FusedPass(block=block, lm_head=lm_head)]
    if kind == "int4" and operator == "DequantizeLinear":
        from specexport.passes.quantize_weights import Int4WeightPass

        return [Int4WeightPass(block=block, lm_head=lm_head)]
    raise RecipeError(f"there is no quantization {kind!r} for this backend.", "use int8 or int4, or leave it out.")
