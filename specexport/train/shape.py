"""The size of a new head, from its target's."""

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from specexport.heads.config import HeadConfig, HeadKind, default_taps
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.executors.base import Int32Array

LARGE_VOCABULARY, DRAFT_VOCABULARY = 32_768, 16_384
MLP_RATIO = 3.2
"""Width of the MLP: the one layer of a head is most of its step, beside the LM head."""


def new_config(kind: HeadKind, target: Any, vocab_size: int, draft_vocab_size: int) -> HeadConfig:
    """A head of one layer for a target. An EAGLE-3 head has a norm for each hidden state that it reads.

    ``target`` is the target's configuration as transformers has it.
    """
    width, layers = int(target.hidden_size), int(target.num_hidden_layers)
    head_dim = 64 if width < 512 else 128
    heads = 2 ** max(1, math.ceil(math.log2(width / head_dim)))
    mlp = 128 * math.ceil(MLP_RATIO * width / 128)
    several = kind == "eagle3"
    return HeadConfig(
        kind=kind,
        layer_config={
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": int(getattr(target, "max_position_embeddings", None) or 32_768),
        },
        taps=tuple(sorted({max(0, tap) for tap in default_taps(layers)})) if several else (AFTER_NORM,),
        target_hidden_size=width,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=several,
        fc_norm=several,
        norm_output=not several,  # as the target's own, which an MTP module reads
    )


def draft_size(asked: int | None, vocab_size: int) -> int:
    """N, the tokens of a new head's LM head."""
    return min(asked or (DRAFT_VOCABULARY if vocab_size > LARGE_VOCABULARY else vocab_size), vocab_size)


def count_ids(texts: Iterable[Seq[int]], size: int, vocab_size: int, keep: Iterable[int]) -> Int32Array:
    """The tokens that a head's LM head has, int32 [size], ascending: the most frequent ones of the target's texts.

    Ids of ``keep`` stay, however often they were seen: they end a text.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    seen = sorted(counts, key=lambda token: (-counts[token], token))
    order = dict.fromkeys([*(token for token in keep if 0 <= token < vocab_size), *seen, *range(vocab_size)])
    return np.array(sorted(list(order)[:size]), np.int32)
