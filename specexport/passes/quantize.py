"""Quantization of linear layers: which passes an ``--quantize`` asks for."""

from specexport.passes.base import CountingPass
from specexport_runtime.errors import RecipeError


def quantizing_passes(kind: str, *, lm_head: bool, operator: str = "", block: int = 0) -> list[CountingPass]:
    """The passes of one kind of quantization.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        lm_head: whether the LM head is quantized too, and for ONNX Runtime on CPUs the embedding.
        operator: what makes int4 weights float in an engine: ``"MatMulNBits"``, or ``"DequantizeLinear"`` before a
            product; empty for operators of ONNX Runtime for CPUs, which quantize activations too.
        block: inputs that share a scale there.

    Raises:
        RecipeError: there is no such kind for such engines.
    """
    if kind == "int8" and not operator:
        from specexport.passes.quantize_int8 import Int8QuantizePass

        return [_experts(8), _blocks(per_token=True), Int8QuantizePass(lm_head=lm_head), *_embedding(lm_head)]
    if kind == "int4" and not operator:
        from specexport.passes.quantize_int4 import Int4QuantizePass
        from specexport.passes.quantize_int8 import Int8QuantizePass

        head = [Int8QuantizePass(lm_head=True, others=False)] if lm_head else []  # if it is still there
        return [_experts(4), _blocks(per_token=False), Int4QuantizePass(lm_head=lm_head), *head, *_embedding(lm_head)]
    if kind == "int4" and operator == "MatMulNBits":
        from specexport.passes.quantize_fused import Int4FusedPass

        return [Int4FusedPass(block=block, lm_head=lm_head)]
    if kind == "int4" and operator == "DequantizeLinear":
        from specexport.passes.quantize_weights import Int4WeightPass

        return [Int4WeightPass(block=block, lm_head=lm_head)]
    raise RecipeError(f"there is no quantization {kind!r} for this backend.", "use int8 or int4, or leave it out.")


def _experts(bits: int) -> CountingPass:
    from specexport.passes.quantize_experts import ExpertsQuantizePass

    return ExpertsQuantizePass(bits)


def _blocks(*, per_token: bool) -> CountingPass:
    from specexport.passes.quantize_sensitive import SensitiveBlocksPass

    return SensitiveBlocksPass(per_token=per_token)


def _embedding(wanted: bool) -> list[CountingPass]:
    from specexport.passes.quantize_embedding import EmbeddingQuantizePass

    return [EmbeddingQuantizePass()] if wanted else []
