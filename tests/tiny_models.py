"""Makers of tiny random models, shared by the tests of the compiler."""

from pathlib import Path
from typing import Any

VOCAB = 320
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = BASE | {"num_key_value_heads": 2}


def make_tokenizer(folder: Path, vocab_size: int = VOCAB) -> None:
    """A byte-level tokenizer without merges: 3 special tokens, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (special + alphabet)[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    fast.save_pretrained(folder)


def make_llama(seed: int = 0, **overrides: Any) -> Any:
    """A random Llama with logits that spread."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return randomize(LlamaForCausalLM(LlamaConfig(**(GROUPED | overrides))), seed)


def randomize(model: Any, seed: int = 0) -> Any:
    """Redraw every weight so that logits spread over several units and no layer is near the identity or zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                weight.add_(0.2 * noise)
            else:
                weight.copy_(0.2 * noise)
    return model.eval()


def save_checkpoint(model: Any, folder: Path) -> Path:
    """Write ``model`` and a byte tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder
