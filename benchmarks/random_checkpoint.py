"""A checkpoint of random weights in the shape of a large model, for measuring builds of models that no index has.

    python benchmarks/random_checkpoint.py FOLDER --tokenizer engines/pair

The default is the shape of Qwen2.5-7B in bfloat16: 15.2 GB in four files. With --experts it is a Qwen3-MoE, whose
experts are --intermediate wide. What it generates means nothing. Weights are written one at a time; matrices are cut
from one block of noise, so that writing takes no longer than the disk.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NOISE = 1 << 26
RESIDUAL, HEAD = 0.25, 4.0
"""As in trained models, a layer adds little to what it was given, and logits are far apart: else a build's check would
say that int4 loses most of what there is to lose."""


class Writer:
    """Collects weights and writes a file whenever there are enough of them."""

    def __init__(self, folder: Path, shard_bytes: float) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self._at = 0
        self.index: dict[str, str] = {}
        self.total = 0

    def matrix(self, name: str, *shape: int, scale: float = 1.0) -> None:
        """Add noise of the size that keeps activations as they are, times ``scale``."""
        size, row = shape[0] * shape[1], shape[1]
        self._at = (self._at + 977) % (NOISE - row)  # no two matrices begin alike
        flat = self._noise.roll(-self._at).repeat(-(-size // NOISE))[:size]
        self._add(name, (flat.reshape(shape) * (scale * row**-0.5)).contiguous())

    def vector(self, name: str, size: int, value: float) -> None:
        """Add one value, repeated."""
        self._add(name, torch.full((size,), value, dtype=torch.bfloat16))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor
        self.total += tensor.numel() * tensor.element_size()
        if sum(held.numel() * held.element_size() for held in self._held.values()) > self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        name = f"model-{len(set(self.index.values())) + 1:05d}.safetensors"
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self.index |= dict.fromkeys(self._held, name)
        self._held = {}


def main() -> None:
    """Write configuration, tokenizer and weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="Folder with a tokenizer.json.")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--intermediate", type=int, default=18944)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--experts", type=int, default=0, help="Experts of a layer; 0 for a dense model.")
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--shard-gb", type=float, default=4.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    head_dim = args.hidden // args.heads
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": args.vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    if args.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": head_dim,
            "num_experts": args.experts,
            "num_experts_per_tok": args.experts_per_token,
            "moe_intermediate_size": args.intermediate,
            "norm_topk_prob": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    (args.folder / "tokenizer.json").write_bytes((args.tokenizer / "tokenizer.json").read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (args.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    writer = Writer(args.folder, args.shard_gb * 1e9)
    writer.matrix("model.embed_tokens.weight", args.vocab, args.hidden, scale=args.hidden**0.5)
    for layer in range(args.layers):
        stem = f"model.layers.{layer}"
        for name, width in (("q", args.heads), ("k", args.kv_heads), ("v", args.kv_heads)):
            writer.matrix(f"{stem}.self_attn.{name}_proj.weight", width * head_dim, args.hidden)
            if not args.experts:
                writer.vector(f"{stem}.self_attn.{name}_proj.bias", width * head_dim, 0.0)
            elif name != "v":
                writer.vector(f"{stem}.self_attn.{name}_norm.weight", head_dim, 1.0)
        writer.matrix(f"{stem}.self_attn.o_proj.weight", args.hidden, args.hidden, scale=RESIDUAL)
        if args.experts:
            writer.matrix(f"{stem}.mlp.gate.weight", args.experts, args.hidden)
        for mlp in [f"{stem}.mlp.experts.{i}" for i in range(args.experts)] or [f"{stem}.mlp"]:
            writer.matrix(f"{mlp}.gate_proj.weight", args.intermediate, args.hidden)
            writer.matrix(f"{mlp}.up_proj.weight", args.intermediate, args.hidden)
            writer.matrix(f"{mlp}.down_proj.weight", args.hidden, args.intermediate, scale=RESIDUAL)
        for name in ("input_layernorm", "post_attention_layernorm"):
            writer.vector(f"{stem}.{name}.weight", args.hidden, 1.0)
    writer.vector("model.norm.weight", args.hidden, 1.0)
    writer.matrix("lm_head.weight", args.vocab, args.hidden, scale=HEAD)
    writer.flush()
    index = {"metadata": {"total_size": writer.total}, "weight_map": writer.index}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{args.folder}: {writer.total / 1e9:.1f} GB in {len(set(writer.index.values()))} files.")


if __name__ == "__main__":
    main()
