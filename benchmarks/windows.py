"""Memory of the KV cache of a model that is mostly windows, with what lies before them given back and without.

    python benchmarks/windows.py FOLDER

Makes a checkpoint of random weights with the geometry of Gemma 3 270M (18 layers, of which 15 see 512 tokens; a small
vocabulary, which no cache depends on), builds it, and lets the runtime read a long text. Pages are counted by the
system (/proc/self/pagemap, Linux), so that other work on the machine does not disturb it.
"""

import argparse
import mmap
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import report

from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork

VOCAB = 4096
GEMMA_3_270M = {
    "vocab_size": VOCAB,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "max_position_embeddings": 32768,
}
DECODED = 16


def make_bundle(folder: Path, tokenizer: Path, length: int) -> Path:
    """Write a checkpoint of random weights, and build it in int8."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    torch.manual_seed(0)
    checkpoint, bundle = folder / "checkpoint", folder / f"bundle-{length}"
    Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA_3_270M)).save_pretrained(checkpoint)
    shutil.copy(tokenizer / "tokenizer.json", checkpoint)
    build_bundle(
        BuildRecipe(
            target=str(checkpoint), output=str(bundle), quantize="int8", max_model_len=length + DECODED, check=False
        )
    )
    return bundle


def resident_bytes(executor: OrtExecutor) -> int:
    """Bytes of the KV arena that are this process's own. What is read and was never written is a page of the system."""
    pages = 0
    with Path("/proc/self/pagemap").open("rb") as file:
        for memory in executor._memory.values():
            address, size = memory.array.ctypes.data, len(memory.mapping)
            file.seek(address // mmap.PAGESIZE * 8)
            flags = np.frombuffer(file.read(-(-size // mmap.PAGESIZE) * 8), np.uint64)
            pages += int(((flags >> np.uint64(63)) & (flags >> np.uint64(56)) & np.uint64(1)).sum())
    return pages * mmap.PAGESIZE


def read(path: Path, entry: ModelEntry, tokens: list[int], threads: int) -> tuple[int, int, list[int]]:
    """Read a text and go on from it; returns the most bytes that were resident, those at its end, and what followed."""
    capacity = len(tokens) + DECODED + 8
    with closing(OrtExecutor(path, entry, num_rows=1, kv_capacity=capacity, num_threads=threads)) as executor:
        runner = ModelRunner(executor)
        most, decoded = 0, [tokens[-1]]
        for start in range(0, len(tokens) - 1, runner.max_chunk):
            runner.prefill(0, tokens[start : min(start + runner.max_chunk, len(tokens) - 1)])
            most = max(most, resident_bytes(executor))
        for _ in range(DECODED):
            decoded += runner.step(0, [RowWork(decoded[-1:], 1)], "token_ids").tolist()
            runner.kv.commit(0, runner.kv.kv_len(0) + 1)
        return most, resident_bytes(executor), decoded


def main() -> None:
    """Build, read the text with windows and without, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint and the bundle go")
    parser.add_argument("--tokenizer", type=Path, default=Path("examples/demo_pair/target"))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bundle = make_bundle(args.folder, args.tokenizer, args.length)
    entry = load_bundle(bundle).manifest.models["target"]
    tokens = np.random.default_rng(0).integers(3, VOCAB, args.length).tolist()
    path = bundle / entry.engine.path
    most, end, text = read(path, entry, tokens, args.threads)
    all_most, all_end, all_text = read(
        path, replace(entry, attention=entry.attention._replace(windows=())), tokens, args.threads
    )
    rows = [
        (
            "layers with a window",
            f"{sum(window > 0 for window in entry.attention.windows)} of {len(entry.attention.layers)}",
        ),
        ("KV cache, nothing given back", f"{all_end / 1e6:.1f} MB"),
        ("KV cache, windows", f"{end / 1e6:.1f} MB = {end / all_end:.3f}x"),
        ("the most while the text is read", f"{most / 1e6:.1f} MB = {most / all_most:.3f}x"),
        ("the same tokens follow", str(text == all_text)),
    ]
    found = {"windows": [most, end], "all": [all_most, all_end], "same": text == all_text}
    report(f"Gemma 3 270M's geometry, {args.length} tokens", rows, found, args.json)


if __name__ == "__main__":
    main()
