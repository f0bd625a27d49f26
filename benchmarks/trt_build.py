"""Build time, engine size and memory of TensorRT-RTX engines, by the profiles they hold. Needs no GPU.

    python benchmarks/trt_build.py                          # an 8-layer Llama of 32 M parameters, random weights
    python benchmarks/trt_build.py --checkpoint DIR --sm 89 --sm 120
    python benchmarks/trt_build.py --hidden-size 512 --hidden-size 1024 --only "1 sequence, prefill 64"

Each row is one build of one model in a process of its own, the builder's peak memory beside the size of its weights. A
second table tells where the memory was; models of several widths show how it grows.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETS = {
    # name: (max_num_seqs, max_num_tokens); prefill buckets begin at 64 tokens
    "1 sequence, prefill 64": (1, 64),
    "2 sequences, prefill 64": (2, 64),
    "1 sequence, prefill up to 512": (1, 512),
    "8 sequences, prefill up to 512": (8, 512),
    "32 sequences, prefill up to 2048": (32, 2048),
}
PARTS = ("own", "mapped")


def make_llama(folder: Path, hidden_size: int) -> None:
    """Write an 8-layer Llama in float16: heads of 64, two for each key/value head, vocabulary 8,192."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        vocab_size=8192,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(8192)}, unk_token="t0"))  # noqa: S106 - no password
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)  # noqa: S106


def build(checkpoint: Path, folder: Path, options: argparse.Namespace, seqs: int, tokens: int) -> dict[str, Any]:
    """Build one bundle; returns what ``build --json`` and ``inspect --json`` say."""
    specexport = [str(Path(sys.executable).with_name("specexport"))]
    architectures = [flag for sm in options.sm for flag in ("--sm", sm)]
    command = [*specexport, "build", str(checkpoint), "-o", str(folder), "--backend", "tensorrt-rtx", *architectures]
    command += ["--dtype", options.dtype, "--lookahead", str(options.lookahead)]
    command += ["--max-model-len", str(options.max_model_len), "--max-num-seqs", str(seqs)]
    command += ["--max-num-tokens", str(tokens), "--lowering", options.lowering, "--no-cache", "--json", "-q"]
    command += ["--self-draft"] if options.self_draft else []
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    shown = subprocess.run([*specexport, "inspect", str(folder), "--json"], check=True, capture_output=True, text=True)
    return {"build": json.loads(built.stdout), "inspect": json.loads(shown.stdout)}


def rows_of(name: str, result: dict[str, Any]) -> list[str]:
    """One Markdown row for each architecture."""
    model = result["inspect"]["models"]["target"]
    weights = model["parameters"]["total"] * 2
    rows = []
    for engine in model["engine"]["files"]:
        stored = result["inspect"]["files"][engine["path"]]["size"]
        report = engine["report"]
        size = report["engine_bytes"]
        copied = [profile["kv_copy_bytes"] for profile in report["profiles"]]
        kernels = ", ".join(str(profile["kernels"]) for profile in report["profiles"])
        profiles = model["engine"]["limits"]["profiles"]
        rows.append(
            f"| {name} | {engine['sm']} | {len(profiles)} | {report['build_seconds']:.1f} | "
            f"{size / 1e6:.0f}{'' if stored == size else f', {stored / 1e6:.1f} stored'} | {size / weights:.2f} | "
            f"{report['peak_memory_bytes'] / 1e6:.0f} | {report['peak_memory_bytes'] / weights:.1f} | "
            f"{engine['memory_bytes'] / 1e6:.0f} | "
            f"{min(copied) / 1e6:.0f}–{max(copied) / 1e6:.0f} | {kernels} |"
        )
    return rows


def memory_of(name: str, result: dict[str, Any]) -> list[str]:
    """One Markdown row for each architecture: MB of the builder's memory, in the order in which it grew.

    What was its own at the peak is what the kernel counted less the mapped pages: a sample could miss the peak.
    """
    model = result["inspect"]["models"]["target"]
    weights = model["parameters"]["total"] * 2
    rows = []
    for engine in model["engine"]["files"]:
        report = engine["report"]
        marks = report["memory"]
        mapped = marks["largest"]["mapped"]
        own = report["peak_memory_bytes"] - mapped
        cells = [f"{weights / 1e6:.0f}"]
        cells += [f"{marks[mark][part] / 1e6:.0f}" for mark in ("libraries", "network") for part in PARTS]
        cells += [f"{own / 1e6:.0f}", f"{mapped / 1e6:.0f}", f"{own / weights:.1f}"]
        rows.append(f"| {name} | {engine['sm']} | {' | '.join(cells)} |")
    return rows


def print_heads(heads: list[str]) -> None:
    """Begin a Markdown table whose first two columns are text."""
    print(f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * (len(heads) - 2)}")


def main() -> None:
    """Parse the command line, build, print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="model to build; default: the 8-layer Llama")
    parser.add_argument("--hidden-size", type=int, action="append", help="of the Llama; repeat for more [default: 512]")
    parser.add_argument("--sm", action="append", help="architecture; repeat for more [default: 89]")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=1000)
    parser.add_argument("--lowering", default="native-folded", help="native-folded or native [default: native-folded]")
    parser.add_argument("--self-draft", action="store_true", help="let the target leave out layers")
    parser.add_argument("--only", action="append", choices=list(SETS), help="profile sets to build [default: all]")
    options = parser.parse_args()
    options.sm = options.sm or ["89"]
    heads = ["profiles for", "GPU", "profiles", "build s", "engine MB", "/ weights", "peak MB", "/ weights"]
    print_heads([*heads, "activations MB", "KV copied a step MB", "kernels a profile"])
    memory: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = [options.checkpoint] if options.checkpoint else []
        for size in () if checkpoints else options.hidden_size or (512,):
            checkpoints.append(Path(scratch) / f"llama{size}")
            make_llama(checkpoints[-1], size)
        for checkpoint in checkpoints:
            for name in options.only or SETS:
                folder = Path(scratch) / "bundle"
                result = build(checkpoint, folder, options, *SETS[name])
                shutil.rmtree(folder)
                print("\n".join(rows_of(name, result)), flush=True)
                memory += memory_of(name, result)
    print()
    stages = [f"{stage}, {part}" for stage in ("libraries", "graph read", "peak") for part in PARTS]
    print_heads(["profiles for", "GPU", "weights MB", *stages, "own / weights"])
    print("\n".join(memory))


if __name__ == "__main__":
    main()
