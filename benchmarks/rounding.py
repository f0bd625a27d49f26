"""What 16-bit arithmetic and int4 weights for GPUs do to a checkpoint's logits, in eager transformers on a CPU.

python benchmarks/rounding.py examples/demo_pair/draft examples/demo_pair/target
python benchmarks/rounding.py --fused-only examples/demo_pair/target

Text, tolerances and measures are those of ``verify`` and of the build's check. Needs the export stack.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specexport.checkpoint import load_checkpoint
from specexport.compile.check import text_sequences
from specexport.compile.closeness import measure_closeness
from specexport.passes.block_make import extreme_blocks
from specexport.passes.symmetric_blocks import quantize_blocks
from specexport.rounding import UNIT_ROUNDOFF, logit_tolerance
from specexport.trace import reference_logits
from specexport.verify.checkpoint import widen_weights
from specexport.verify.tolerance import logit_scale

BLOCKS = (32, 64, 128)
_ROWS = 4096


def load(source: str, dtype: str) -> tuple[Any, list[list[int]]]:
    """A checkpoint and the texts that it reads."""
    checkpoint = load_checkpoint(source, dtype=dtype)
    texts = text_sequences(checkpoint.tokenizer_json, checkpoint.vocab_size, checkpoint.max_positions)
    return checkpoint, [text.tolist() for text in texts]


def report_arithmetic(source: str, dtype: str) -> None:
    """A line: eager logits in 16 bits against the same weights in float32, in units of the roundoff."""
    checkpoint, texts = load(source, dtype)
    found = np.concatenate(reference_logits(checkpoint, texts))
    widen_weights(checkpoint.model)
    wanted = np.concatenate(reference_logits(checkpoint, texts))
    layers = checkpoint.model.config.get_text_config().num_hidden_layers
    unit, limit = UNIT_ROUNDOFF[dtype], logit_tolerance(dtype, layers)
    errors = np.abs(found - wanted) / (logit_scale(wanted) * unit)
    worst = np.sqrt(np.square(errors).mean(axis=1)).max()
    print(
        f"{checkpoint.source}, {layers} layers, {dtype}: root mean square of the worst token {worst:.2f} u (limit "
        f"{limit.rms / unit:.1f}), largest {errors.max():.1f} u (limit {limit.largest / unit:.1f})"
    )


def symmetric(part: np.ndarray, block: int) -> np.ndarray:
    """What the codes of TensorRT's engines stand for, for weights [N, K]."""
    codes, scales = quantize_blocks(part.T, block)
    values = codes.astype(np.float32).reshape(len(scales), block, -1) * scales[:, None]
    found: np.ndarray = values.reshape(codes.shape).T
    return found


def fused_symmetric(part: np.ndarray, block: int, dtype: np.dtype) -> np.ndarray:
    """What ONNX Runtime's GPU kernel makes of codes without zero points, for weights [N, K]."""
    codes, scales = quantize_blocks(part.T, block, dtype)
    values = codes.astype(np.float32).reshape(len(scales), block, -1) * scales[:, None]
    return values.astype(dtype).astype(np.float32).reshape(codes.shape).T


def fused_asymmetric(part: np.ndarray, block: int, dtype: np.dtype) -> np.ndarray:
    """The same with zero points: it rounds zero times scale before it subtracts that."""
    codes, scales, zeros = extreme_blocks(part.reshape(len(part), -1, block))
    scales = scales.astype(dtype).astype(np.float32)
    shift = (zeros * scales).astype(dtype).astype(np.float32)
    values = codes.astype(np.float32) * scales[..., None] - shift[..., None]
    return values.astype(dtype).astype(np.float32).reshape(part.shape)


def report_int4(source: str, block: int, what: str, values_of: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """A line: weights rounded to int4 against the checkpoint, all else in float32."""
    checkpoint, texts = load(source, "float32")
    wanted = np.concatenate(reference_logits(checkpoint, texts))
    model = checkpoint.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:  # a tied head gets codes of its own
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % block == 0:
            weight = module.weight.detach().numpy()
            for start in range(0, len(weight), _ROWS):
                part = weight[start : start + _ROWS]
                part[:] = values_of(part, block)
    close = measure_closeness(np.concatenate(reference_logits(checkpoint, texts)), wanted)
    agreement = "too few decided" if close.agreement is None else f"{close.agreement:.0%}"
    print(f"{checkpoint.source}, int4 in blocks of {block}{what}: agreement {agreement}, lost {close.lost:.3f}")


def main() -> None:
    """Print the lines of each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--dtype", action="append", choices=list(UNIT_ROUNDOFF), help="16-bit types [default: both]")
    parser.add_argument("--fused-only", action="store_true", help="only int4 as ONNX Runtime's GPU kernel has it")
    options = parser.parse_args()
    for source in options.checkpoints:
        for name in options.dtype or UNIT_ROUNDOFF:
            dtype = ir.DataType[name.upper()].numpy()
            for block in BLOCKS if options.fused_only else ():
                for what, make in (("", fused_symmetric), (", zero points", fused_asymmetric)):
                    report_int4(source, block, f"{what}, {name} kernel", partial(make, dtype=dtype))
        if options.fused_only:
            continue
        for dtype in options.dtype or UNIT_ROUNDOFF:
            report_arithmetic(source, dtype)
        for block in BLOCKS:
            report_int4(source, block, "", symmetric)


if __name__ == "__main__":
    main()
