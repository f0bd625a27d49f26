"""A target and a draft with two tokenizers, of bytes and of spaces and pieces; a token of both embeds the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from specexport.compile.draft_cuts import read_counting_texts
from specexport.compile.token_map import SharedTokens, VocabularySide, find_shared
from tests.support.models.tiny_models import calm, make_llama

SPACE = "▁"
TARGET_SPECIAL = ["<pad>", "<|text|>", "<|turn|>", "<tool>"]
DRAFT_SPECIAL = ["<unk>", "<bos>", "<eos>", "<end>", "<tool>"]
TEMPLATE = "{% for message in messages %}{{ message.content }}TURN{% endfor %}"
TARGET_SIZE, DRAFT_SIZE = 320, 520


def _trained(tokenizer: Any, size: int, special: list[str], alphabet: list[str]) -> dict[str, Any]:
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(read_counting_texts(None), trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


def target_tokenizer() -> Any:
    """Byte-level, as Qwen's and SmolLM2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, TARGET_SIZE, TARGET_SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def draft_tokenizer() -> Any:
    """With a sign for spaces and tokens for bytes, as Gemma's; a text begins with BOS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    first = Tokenizer(models.BPE(unk_token="<unk>"))
    first.normalizer = normalizers.Replace(" ", SPACE)
    model = _trained(first, DRAFT_SIZE - 256, DRAFT_SPECIAL, ["<", "s", ">"])
    names = [*DRAFT_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in model["vocab"] if name not in names]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE({name: at for at, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(DRAFT_SPECIAL)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", names.index("<bos>"))]
    )
    return tokenizer


def sides() -> tuple[VocabularySide, VocabularySide]:
    target, draft = target_tokenizer(), draft_tokenizer()
    return (
        VocabularySide(
            "target", target.to_str().encode(), target.get_vocab_size(), (2, 1), TEMPLATE.replace("TURN", "<|turn|>")
        ),
        VocabularySide(
            "draft", draft.to_str().encode(), draft.get_vocab_size(), (2, 3), TEMPLATE.replace("TURN", "<end>")
        ),
    )


def save_pair(folder: Path) -> SharedTokens:
    """Write both checkpoints, ``target`` and ``draft``; returns what they share."""
    import torch
    from transformers import PreTrainedTokenizerFast

    target, draft = sides()
    shared = find_shared(target, draft)
    assert shared is not None
    sizes = {"target": target.vocab_size, "draft": draft.vocab_size}
    ends = {"target": [2, 1], "draft": [2, 3]}
    models = {role: calm(make_llama(5, vocab_size=size, eos_token_id=ends[role]), 0.2) for role, size in sizes.items()}
    own = np.flatnonzero(shared.tokens.target_ids >= 0)
    theirs = shared.tokens.target_ids[own]
    with torch.no_grad():
        state = models["target"].state_dict()
        for name, weight in models["draft"].named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                weight[own] = state[name][theirs]
            else:
                weight.copy_(state[name])
    special = {
        "target": {"eos_token": "<|turn|>", "pad_token": "<pad>"},
        "draft": {"eos_token": "<eos>", "bos_token": "<bos>"},
    }
    for role, side in (("target", target), ("draft", draft)):
        models[role].save_pretrained(folder / role)
        from tokenizers import Tokenizer

        fast = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_buffer(side.tokenizer_json),
            chat_template=side.chat_template,
            **special[role],
        )
        fast.save_pretrained(folder / role)
    return shared
