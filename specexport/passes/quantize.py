"""Quantization of linear layers: which passes ``--quantize`` asks for."""

from specexport.passes.base import CountingPass
from specexport_runtime.errors import RecipeError


def quantizing_passes(kind: str, *, lm_head: bool, operator: str = "", block: int = 0) -> list[CountingPass]:
    """The passes of ``kind`` ``"int8"`` or ``"int4"``; RecipeError if there is no such kind for such engines.

    ``operator`` is what makes int4 weights float in an engine, in blocks of ``block`` inputs that share a scale:
    ``"MatMulNBits"``, or ``"DequantizeLinear"`` before a product. Empty takes our own operators for CPUs, which
    quantize activations too; there ``lm_head`` also decides on the embedding.
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
