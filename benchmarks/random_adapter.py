"""Write a LoRA adapter of random factors for a checkpoint, to measure with: what it makes of the model means nothing.

python benchmarks/random_adapter.py CHECKPOINT adapters/one --rank 16 --seed 1
"""

import argparse
import json
from pathlib import Path

ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def main() -> None:
    """Read the command line, write the adapter."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("checkpoint", help="folder or .gguf file")
    add("folder", type=Path)
    add("--rank", type=int, default=16)
    add("--targets", default=ALL, help="names of modules")
    add("--strength", type=float, default=0.02, help="size of what is added, over that of an average weight")
    add("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch
    from safetensors.torch import save_file

    from specexport.checkpoint import load_checkpoint

    model = load_checkpoint(args.checkpoint, stream=True).model
    names, generator = args.targets.split(","), torch.Generator().manual_seed(args.seed)
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.rsplit(".", 1)[-1] in names:
            width, depth = layer.weight.shape
            for side, shape in (("A", (args.rank, depth)), ("B", (width, args.rank))):
                scale = depth**-0.5 if side == "A" else args.strength * args.rank**-0.5
                noise = torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = scale * noise
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": args.rank, "lora_alpha": args.rank}
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.folder / "adapter_model.safetensors")
    text = json.dumps(config | {"bias": "none", "target_modules": names})
    (args.folder / "adapter_config.json").write_text(text, encoding="utf-8")
    size = sum(tensor.numel() for tensor in tensors.values())
    print(f"{args.folder}: {len(tensors) // 2} layers, {size / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
