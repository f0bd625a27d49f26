"""Builds a Qwen3.5 of random weights with an MTP module that knows a part of what it writes, to be measured.

    python benchmarks/hybrid_mtp.py FOLDER --scale 0.2 --quantize int8
    python benchmarks/heads.py FOLDER/bundle --prompts demo=examples/demo_pair/prompts.jsonl --lookaheads 1 2 3

The target is that of ``benchmarks/hybrids.py``, with layers that do as much as ``--scale`` says: the less they do, the
more of its drafts are accepted. What a step takes does not depend on it.
"""

import argparse
from pathlib import Path

from hybrids import HIDDEN, LAYERS, make_checkpoint


def plant_module(folder: Path, scale: float) -> None:
    """Let the layers of a Qwen3.5 do less, and give it a module that hands embeddings to a layer like its last."""
    import torch
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    stored = {name: value * scale if name.endswith(ends) else value for name, value in stored.items()}
    last = f"model.layers.{LAYERS - 1}."
    module = {f"layers.0.{name.removeprefix(last)}": value.clone() for name, value in stored.items() if last in name}
    module |= {f"pre_fc_norm_{of}.weight": torch.zeros(HIDDEN) for of in ("embedding", "hidden")}
    module |= {"norm.weight": stored["model.norm.weight"].clone()}
    module |= {"fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)}
    save_file(stored | {f"mtp.{name}": value for name, value in module.items()}, folder / "model.safetensors")


def main() -> None:
    """Make the checkpoint, build it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint and the bundle go")
    parser.add_argument("--scale", type=float, default=0.2, help="how much the layers do")
    parser.add_argument("--tokenizer", type=Path, default=Path("examples/demo_pair/target"))
    parser.add_argument("--quantize", choices=["int8"], help="of the bundle")
    args = parser.parse_args()
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    checkpoint, bundle = args.folder / "checkpoint", args.folder / "bundle"
    make_checkpoint("qwen3_5", checkpoint, args.tokenizer)
    plant_module(checkpoint, args.scale)
    recipe = BuildRecipe(
        target=str(checkpoint), head="mtp", output=str(bundle), max_model_len=2048, lookahead=7, quantize=args.quantize
    )
    build_bundle(recipe, force=True)
    print(bundle)


if __name__ == "__main__":
    main()
