"""Tiny checkpoints of GPTQ, AWQ and compressed-tensors: random integers, packed here by the formats' own rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 32


def pack(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """int32 words of values [..., n · words, …] along ``axis``, the first value in the lowest bits."""
    moved = np.moveaxis(values.astype(np.int64), axis, -1)
    moved = moved.reshape(*moved.shape[:-1], -1, 32 // bits)
    words = (moved << np.arange(0, 32, bits)).sum(axis=-1)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def random_layer(
    method: str, shape: tuple[int, int], generator: np.random.Generator, bits: int = 4
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a layer [N, K], and its float weight."""
    width, depth = shape
    if method == "w8a8":
        codes = generator.integers(-127, 128, shape).astype(np.int8)
        scales = generator.uniform(0.001, 0.003, (width, 1)).astype(np.float32)
        return {"weight": codes, "weight_scale": scales}, codes * scales
    groups, middle = depth // GROUP, 1 << (bits - 1)
    codes = generator.integers(0, 1 << bits, shape)
    zeros = generator.integers(middle - 2, middle + 3, (width, groups))
    if method == "w4a16":
        zeros[:] = middle
    scales = (generator.uniform(0.1, 0.3, (width, groups)) / (1 << bits)).astype(np.float16)
    floats = (codes - np.repeat(zeros, GROUP, axis=1)) * np.repeat(scales.astype(np.float32), GROUP, axis=1)
    if method == "gptq":
        order = (np.arange(depth) // GROUP).astype(np.int32)
        tensors = {"qweight": pack(codes.T, bits, 0), "qzeros": pack(zeros.T - 1, bits, 1), "g_idx": order}
        tensors["scales"] = scales.T
    elif method == "awq":
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

        def reordered(values: np.ndarray) -> np.ndarray:
            return values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1)

        tensors = {"qweight": pack(reordered(codes.T), bits, 1), "qzeros": pack(reordered(zeros.T), bits, 1)}
        tensors["scales"] = scales.T
    else:
        tensors = {"weight_packed": pack(codes, bits, 1), "weight_scale": scales, "weight_shape": np.array(shape)}
        if method == "w4a16-asymmetric":
            tensors["weight_zero_point"] = pack(zeros, bits, 0)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, floats.astype(np.float32)


SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w4a16-asymmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w8a8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
}


def pack_checkpoint(folder: Path, method: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Replace the linear layers of a saved checkpoint by random packed ones, in place; returns their float weights."""
    from safetensors.numpy import load_file, save_file

    generator, floats = np.random.default_rng(seed), {}
    path = folder / "model.safetensors"
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(path).items():
        if tensor.ndim == 2 and ("_proj." in name or ".experts." in name):
            layer = name.removesuffix(".weight")
            parts, floats[name] = random_layer(method, (tensor.shape[0], tensor.shape[1]), generator)
            tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = SETTINGS[method]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return floats
