"""Random Llama checkpoints, written straight to disk in float16: no hub, no torch, and never twice in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float16Array = npt.NDArray[np.float16]
_POOL = (1 << 24) + 1021  # a prime number of random values: rows of a weight never begin at the same place twice
_STEP, _SHIFT = 5, 3  # next token = 5 t + 3: visits every id of a vocabulary whose size is a power of two


class LlamaSize(NamedTuple):
    """Sizes of a Llama: hidden size, feed-forward size, layers, query heads, KV heads, vocabulary, most positions."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int = 16384

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Number of weights, embedding and LM head apart."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


SIZES = {
    "tiny": LlamaSize(64, 128, 2, 4, 2, 256, 512),
    "small": LlamaSize(256, 768, 4, 4, 2, 4096),
    "large": LlamaSize(2048, 8192, 16, 32, 8, 32768),
}
"""``tiny`` for dry runs, ``small`` for comparisons, ``large`` (1.1 B parameters) for speed."""
DRAFT_LAYERS = {"tiny": 1, "small": 1, "large": 2}
"""Layers that the layer-skipping draft of a model keeps: the first ones."""


def next_tokens(tokens: Any, vocab: int) -> Any:
    """What a decisive model says after each token."""
    return (_STEP * tokens + _SHIFT) % vocab


class _Weights:
    """Random float16 numbers: slices of one pool, so that a billion of them take a second."""

    def __init__(self, seed: int, pool: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pool = self._random.standard_normal(pool, dtype=np.float32)

    def normal(self, rows: int, columns: int, deviation: float) -> Float16Array:
        """Normal numbers [rows, columns]; they repeat after the pool's size."""
        numbers = np.empty(rows * columns, np.float16)
        start, done = int(self._random.integers(len(self._pool))), 0
        while done < len(numbers):
            part = self._pool[start : start + len(numbers) - done]
            numbers[done : done + len(part)] = part * np.float32(deviation)
            start, done = 0, done + len(part)
        return numbers.reshape(rows, columns)

    def fresh(self, rows: int, columns: int, deviation: float) -> Float16Array:
        """Normal numbers [rows, columns] that do not repeat."""
        numbers = self._random.standard_normal((rows, columns), dtype=np.float32)
        return (numbers * np.float32(deviation)).astype(np.float16)


def make_tensors(size: LlamaSize, *, seed: int, decisive: bool) -> Iterator[tuple[str, Float16Array]]:
    """The weights of a Llama by name, one after another.

    A plain random model's best two tokens are often nearly equal, and then rounding decides. A ``decisive`` model's
    head is its embedding in another order, and its layers add little, so that one token follows another by a wide
    margin whatever kernels compute it. Its weights are as random and as many, so it takes the same time.
    """
    weights = _Weights(seed, min(_POOL, size.parameters | 1))
    hidden, wide, narrow = size.hidden, size.heads * size.head_size, size.kv_heads * size.head_size
    embedding = weights.fresh(size.vocab, hidden, 1.0 if decisive else 0.05)
    head = weights.fresh(size.vocab, hidden, 0.05)
    if decisive:
        ids = np.arange(size.vocab)
        head[next_tokens(ids, size.vocab)] = embedding * np.float16(0.05)
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", np.ones(hidden, np.float16)
    inside, outside = hidden**-0.5, (0.2 if decisive else 1.0) * hidden**-0.5
    for layer in range(size.layers):
        name = f"model.layers.{layer}"
        for part, rows, columns, deviation in (
            ("self_attn.q_proj", wide, hidden, inside),
            ("self_attn.k_proj", narrow, hidden, inside),
            ("self_attn.v_proj", narrow, hidden, inside),
            ("self_attn.o_proj", hidden, wide, outside),
            ("mlp.gate_proj", size.feed_forward, hidden, inside),
            ("mlp.up_proj", size.feed_forward, hidden, inside),
            ("mlp.down_proj", hidden, size.feed_forward, outside * (hidden / size.feed_forward) ** 0.5),
        ):
            yield f"{name}.{part}.weight", weights.normal(rows, columns, deviation)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", np.ones(hidden, np.float16)


def write_checkpoint(folder: Path, size: LlamaSize, tensors: dict[str, Float16Array]) -> None:
    """Write a Hugging Face folder: config, weights, a tokenizer of made-up words; ``config.json`` comes last."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {f"t{i}": i for i in range(size.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config_of(size)), encoding="utf-8")


def config_of(size: LlamaSize) -> dict[str, Any]:
    """``config.json`` of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def ensure_pair(folder: Path, name: str, *, decisive: bool, rate: float = 1.0, seed: int = 7) -> tuple[Path, Path]:
    """Write a target and its layer-skipping draft, unless they are there; returns the folders of both.

    ``name`` is one of ``SIZES``; ``decisive`` is told in :func:`make_tensors`. The draft of a decisive model says the
    target's next token after a share ``rate`` of the ids, and a wrong one after the others.
    """
    base = folder / f"{name}{'-decisive' if decisive else ''}"
    target, draft = base / "target", base / ("draft" if rate == 1 else f"draft-{rate:g}")
    if (target / "config.json").is_file() and (draft / "config.json").is_file():
        return target, draft
    size, kept = SIZES[name], DRAFT_LAYERS[name]
    tensors = dict(make_tensors(size, seed=seed, decisive=decisive))
    if not (target / "config.json").is_file():
        write_checkpoint(target, size, tensors)
    skipped = tuple(f"model.layers.{layer}." for layer in range(kept, size.layers))
    tensors = {key: value for key, value in tensors.items() if not key.startswith(skipped)}
    wrong = np.random.default_rng(seed).permutation(size.vocab)[: round((1 - rate) * size.vocab)]
    rows = next_tokens(wrong, size.vocab)
    tensors["lm_head.weight"][rows] = tensors["lm_head.weight"][np.roll(rows, 1)]
    write_checkpoint(draft, size._replace(layers=kept), tensors)
    return target, draft


def write_prompts(path: Path, vocab: int, *, count: int = 8, tokens: int = 32) -> None:
    """Prompts of made-up words, for the commands."""
    drawn = np.random.default_rng(13).integers(0, vocab, (count, tokens)).tolist()
    lines = (json.dumps({"prompt": " ".join(f"t{token}" for token in prompt)}) for prompt in drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
