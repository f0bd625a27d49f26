"""Weights that GPTQ, AWQ and compressed-tensors pack into 32-bit words, as integers for ONNX Runtime's kernels.

=============  ========================================================  =====================================
format         words                                                     a weight
=============  ========================================================  =====================================
GPTQ           ``qweight`` [K / n, N], along K                           scale [g, N] * (code - zero [g, N])
AWQ            ``qweight`` [K, N / n], along N, in the order 0 2 4 6 …   the same
W4A16          ``weight_packed`` [N, K / n], along K                     scale [N, g] * (code - zero [N, g])
W8A8           ``weight`` int8 [N, K]                                    scale [N, 1] * code
=============  ========================================================  =====================================

The last two are of compressed-tensors. n is 32 / bits, g a group of inputs. GPTQ's first version stores zeros less one.
Everything here is numpy.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.passes.block_weight import BlockForm, Blocks, BlockWeight
from specexport_runtime.errors import CheckpointError

Words = npt.NDArray[np.int32]
Codes = npt.NDArray[np.uint8]
Tensors = Mapping[str, np.ndarray]

_AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Where the first, second, … value of a word is kept in it."""
_BLOCKS = (128, 64, 32, 16)  # that kernels take; a larger group is cut into these
_HOW_TO_CONVERT = "give the checkpoint that it was quantized from."


def unpack(words: Words, bits: int, axis: int) -> Codes:
    """Values of 32-bit words, the first in the lowest bits, one after the other along ``axis``."""
    moved = np.moveaxis(words, axis, -1).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = ((moved[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return np.moveaxis(values.reshape(*moved.shape[:-1], -1), -1, axis)


def gptq_weight(tensors: Tensors, settings: Mapping[str, Any], name: str) -> BlockWeight:
    """A weight of GPTQ; CheckpointError if its inputs are ordered (``desc_act``), or no kernel has its form."""
    bits, order = int(settings["bits"]), tensors.get("g_idx")
    _check_bits(bits, name)
    codes = unpack(tensors["qweight"], bits, 0).T  # [N, K]
    stored = unpack(tensors["qzeros"], bits, 1).T.astype(np.int16)  # [N, groups]
    if order is None and settings.get("desc_act"):
        raise CheckpointError(f"{name} has no g_idx, and desc_act says that it orders its inputs.", _HOW_TO_CONVERT)
    _check_order(order, codes.shape[1], stored.shape[1], name)
    _check_groups(settings, codes.shape[1], stored.shape[1], name)
    return _make_grouped_weight(
        "GPTQ", bits, codes, _gptq_zeros(stored, bits, settings, name), tensors["scales"].T, name
    )


def _gptq_zeros(stored: np.ndarray, bits: int, settings: Mapping[str, Any], name: str) -> np.ndarray | None:
    """Zeros of the codes; None for the middle, which is what ``sym`` means whichever way a file stores it."""
    middle = 1 << (bits - 1)
    if settings.get("sym") is True:
        if bool((stored == middle - 1).all() or (stored == middle).all()):
            return None
        odd = stored[(stored != middle - 1) & (stored != middle)]
        found = f"zero {odd[0]}" if odd.size else "both"
        raise CheckpointError(
            f"{name} is symmetric by its configuration (sym), where all stored zeros are {middle - 1} or all {middle}: "
            f"it has {found}.",
            "set sym to false in quantization_config if it was made so, or give the checkpoint it was quantized from.",
        )
    if settings.get("checkpoint_format", "gptq") == "gptq_v2":
        return stored
    return (stored + 1) & ((1 << bits) - 1)  # a stored -1 wraps to the largest code


def awq_weight(tensors: Tensors, settings: Mapping[str, Any], name: str) -> BlockWeight:
    """A weight of AWQ (GEMM): ``qweight``, ``qzeros``, ``scales``. As :func:`gptq_weight`."""
    bits = int(settings.get("bits", settings.get("w_bit", 4)))
    _check_bits(bits, name)
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"{name} is packed as AWQ's {version}; gemm is known.", _HOW_TO_CONVERT)
    order = np.array(_AWQ_ORDER[bits])

    def ordered(words: Words) -> Codes:
        values = unpack(words, bits, 1)
        return values.reshape(len(values), -1, len(order))[..., order].reshape(len(values), -1).T

    codes = ordered(tensors["qweight"])
    _check_groups(settings, codes.shape[1], tensors["scales"].shape[0], name)
    return _make_grouped_weight("AWQ", bits, codes, ordered(tensors["qzeros"]), tensors["scales"].T, name)


def compressed_weight(tensors: Tensors, name: str) -> BlockWeight:
    """A weight of compressed-tensors: ``weight_scale``, and ``weight_packed`` or an int8 ``weight``; else refused."""
    stored = tensors.get("weight_zero_point")
    if "weight_packed" not in tensors:
        weight = tensors["weight"]
        if weight.dtype != np.int8:
            raise CheckpointError(f"{name} holds {weight.dtype} weights, which no engine multiplies.", _HOW_TO_CONVERT)
        codes = (weight.astype(np.int16) + 128).astype(np.uint8)
        scales = _expand_to_outputs(tensors["weight_scale"], len(codes), name)
        zeros = None if stored is None else _expand_to_outputs(stored.astype(np.int16) + 128, len(codes), name)
        return _make_grouped_weight("int8", 8, codes, zeros, scales, name)
    width, depth = (int(size) for size in tensors["weight_shape"])
    scales = _expand_to_outputs(tensors["weight_scale"], width, name)
    _check_order(tensors.get("weight_g_idx"), depth, scales.shape[1], name)
    words = tensors["weight_packed"]
    bits = 32 // -(-depth // words.shape[1])
    _check_bits(bits, name)
    codes = unpack(words, bits, 1)[:, :depth]
    zeros = None
    if stored is not None:
        packed = stored.dtype == np.int32
        zeros = unpack(stored, bits, 0)[:width] if packed else stored.astype(np.int16) + (1 << (bits - 1))
        zeros = _expand_to_outputs(zeros, width, name)
    return _make_grouped_weight(f"int{bits}", bits, codes, zeros, scales, name)


def _expand_to_outputs(values: np.ndarray, width: int, name: str) -> np.ndarray:
    """[N, groups] of values [N, groups], [N] or one for all."""
    if values.size == 1:
        return np.full((width, 1), values.reshape(()))
    if values.ndim > 2 or len(values) != width:
        raise CheckpointError(
            f"{name} has scales or zeros of shape {list(values.shape)} for {width} outputs.", _HOW_TO_CONVERT
        )
    return values.reshape(width, -1)


def _check_order(order: np.ndarray | None, depth: int, num_groups: int, name: str) -> None:
    """Refuse groups that are no neighbours. An order of -1 throughout stands for none."""
    if order is None or bool((order == -1).all()):
        return
    if len(order) != depth:
        raise CheckpointError(
            f"{name} orders {len(order)} inputs and has {depth}: its bits are others than its configuration says.",
            _HOW_TO_CONVERT,
        )
    if not np.array_equal(order, np.arange(depth) // -(-depth // num_groups)):
        raise CheckpointError(
            f"{name} was quantized with desc_act: its groups are no neighbours, which no kernel here multiplies.",
            _HOW_TO_CONVERT,
        )


def _check_groups(settings: Mapping[str, Any], depth: int, groups: int, name: str) -> None:
    """Refuse groups of another size than the configuration says: either bits or groups are not what it says."""
    size = settings.get("group_size", settings.get("q_group_size"))
    if size is None:
        return
    wanted = 1 if int(size) <= 0 else -(-depth // int(size))
    if groups != wanted:
        raise CheckpointError(
            f"{name} has {groups} groups for {depth} inputs, and group_size is {size}: its bits or groups are others "
            "than its configuration says.",
            _HOW_TO_CONVERT,
        )


def _check_bits(bits: int, name: str) -> None:
    if bits not in (4, 8):
        raise CheckpointError(f"{name} has weights of {bits} bits; 4 and 8 are known.", _HOW_TO_CONVERT)


def _make_grouped_weight(
    kind: str, bits: int, codes: Codes, zeros: np.ndarray | None, scales: np.ndarray, name: str
) -> BlockWeight:
    """A weight of codes [N, K], zeros [N, groups] (None for the middle) and scales [N, groups]."""
    width, depth = codes.shape
    groups, middle = scales.shape[1], 1 << (bits - 1)
    group = depth // groups
    block = next((size for size in _BLOCKS if group % size == 0), 0)
    if group * groups != depth or not block:
        raise CheckpointError(
            f"{name} has {groups} groups for {depth} inputs; groups must be multiples of {_BLOCKS[-1]} inputs.",
            _HOW_TO_CONVERT,
        )
    spread = np.repeat(scales.astype(np.float32), group // block, axis=1)
    offsets = None
    if zeros is not None and not bool((zeros == middle).all()):
        # float16 or bfloat16 scales times a small integer: exact in float32
        offsets = spread * np.repeat(middle - zeros.astype(np.float32), group // block, axis=1)
    stored = codes.size * bits // 8 + scales.nbytes + (0 if zeros is None else zeros.size * bits // 8)
    contiguous = np.ascontiguousarray(codes)

    def read(rows: npt.NDArray[np.int64]) -> Blocks:
        return Blocks(contiguous[rows], spread[rows], None if offsets is None else offsets[rows])

    return BlockWeight(kind, BlockForm(bits, block, offsets is not None), (width, depth), stored, read)
