"""Random Q4_K weights in the shape of Qwen2.5-7B, with the tokenizer of a Qwen2.5 file: to time a build by its size.

python benchmarks/random_gguf.py engines/qwen/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf engines/qwen-7b-shape.gguf
specexport build engines/qwen-7b-shape.gguf --max-model-len 4096 --no-cache --json -o engines/qwen-7b-shape
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, VOCAB = 3584, 28, 28, 4, 18944, 151936
_BLOCK, _BYTES = 256, 144  # weights and bytes of a block of Q4_K: two halves, 12 bytes of scales, 128 of codes


def random_rows(draws: np.random.Generator, rows: int, columns: int) -> Any:
    """Blocks uint8 [rows, bytes] of weights around 0, about 1 / sqrt(columns) large."""
    blocks = draws.integers(0, 256, (rows, columns // _BLOCK, _BYTES), dtype=np.uint8)
    scale = 1.7 / np.sqrt(columns) / 7.5 / 32
    blocks[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    blocks[..., 8:12] = blocks[..., 4:8]  # minima as large as scales: codes are around 7.5
    blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17
    return blocks.reshape(rows, -1)


def main(source: Path, output: Path) -> None:
    """Write the file."""
    sizes = {"embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": MLP}
    sizes |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    writer, draws = gguf.GGUFWriter(output, "qwen2"), np.random.default_rng(0)
    for key, field in gguf.GGUFReader(source).fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, sizes.get(key.removeprefix("qwen2."), field.contents()), field.types[0], inner)

    def add(name: str, rows: int, columns: int = HIDDEN) -> None:
        quantized = gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(f"{name}.weight", random_rows(draws, rows, columns), raw_dtype=quantized)

    def fill(name: str, value: float, size: int = HIDDEN) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    add("token_embd", VOCAB)
    add("output", VOCAB)
    fill("output_norm.weight", 1)
    keys = HIDDEN // HEADS * KV_HEADS
    for block in (f"blk.{i}" for i in range(LAYERS)):
        for norm in ("attn_norm", "ffn_norm"):
            fill(f"{block}.{norm}.weight", 1)
        for name, rows in (("q", HIDDEN), ("k", keys), ("v", keys)):
            add(f"{block}.attn_{name}", rows)
            fill(f"{block}.attn_{name}.bias", 0, rows)
        add(f"{block}.attn_output", HIDDEN)
        for name in ("gate", "up"):
            add(f"{block}.ffn_{name}", MLP)
        add(f"{block}.ffn_down", HIDDEN, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
