"""Medusa heads' files: the names and the configuration of both dialects (Cai et al. 2024).

FasterDecoding numbers what a head is made of: ``{i}.{j}.linear.weight`` is its block j, ``{i}.{blocks}.weight`` its LM
head. vLLM has names: ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight``, and a ``token_map`` where the LM heads
have some tokens only.
"""

import re
from collections.abc import Mapping
from typing import Any

from specexport.heads.config import HeadConfig, MedusaShape
from specexport.heads.files import HeadFiles
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD
from specexport_runtime.errors import CheckpointError

TOKEN_MAP, ONE_LM_HEAD = "token_map", "lm_head.weight"
_NUMBERED = re.compile(r"(\d+)\.(\d+)\.(linear\.)?weight")
_NAMED = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|lm_heads\.(\d+))\.weight")
_CONFIG = "config.json"
_MOST_BLOCKS = 64
_ELSE = "give a head that was made for this target."
_LOSSY = {
    "posterior_threshold": (None, 0, 0.0),
    "posterior_alpha": (None, 0, 0.0),
    "typical_acceptance_sampler_posterior_threshold": (None, 0, 0.0),
    "typical_acceptance_sampler_posterior_alpha": (None, 0, 0.0),
    "typical_acceptance": (None, False),
    "spec_decoding_acceptance_method": (None, "rejection_sampler"),
}
"""Settings of typical acceptance, by the names of FasterDecoding and vLLM, and the values that do not ask for it."""


def lossy_setting(values: Mapping[str, Any]) -> str | None:
    """The first setting of a configuration that asks for typical acceptance; None without."""
    return next((key for key, harmless in _LOSSY.items() if values.get(key) not in harmless), None)


def is_medusa(files: HeadFiles) -> bool:
    """Whether a head's configuration or its tensors say that it is of this kind."""
    values = files.values
    if "speculators_model_type" in values:
        return False
    named = "medusa_num_heads" in values or values.get("model_type") == "medusa"
    return named or any(_NUMBERED.fullmatch(name) or _NAMED.fullmatch(name) for name in files.shapes)


def read_medusa(files: HeadFiles, *, target_hidden_size: int, vocab_size: int) -> HeadConfig:
    """What Medusa heads compute. The tensors say too how many there are: published files say too few.

    Raises CheckpointError if they were made for another target, or their configuration holds no sizes.
    """
    numbered = _is_numbered(files)
    found_heads, found_blocks = _count(files, numbered)
    num_heads = max(found_heads, _number(files, ("medusa_num_heads", "num_heads"), found_heads))
    num_blocks = _number(files, ("medusa_num_layers", *(() if numbered else ("num_hidden_layers",))), found_blocks)
    if not 1 <= num_heads <= MAX_LOOKAHEAD or num_blocks > _MOST_BLOCKS:
        raise CheckpointError(
            f"{files.name} has {num_heads} Medusa heads of {num_blocks} blocks; 1 to {MAX_LOOKAHEAD} of at most "
            f"{_MOST_BLOCKS} can be read.",
            "give the folder that holds their weights and their configuration.",
        )
    shape = MedusaShape(
        num_heads,
        num_blocks,
        bias=bool(num_blocks) and block_name(files, 0, 0, "bias") in files.shapes,
        one_lm_head=bool(files.values.get("original_lm_head", False)),
        logit_scale=_scale(files),
    )
    rows, width = _lm_head_size(files, shape, num_blocks, vocab_size, target_hidden_size)
    width = _number(files, ("hidden_size",), width)
    if width != target_hidden_size:
        raise CheckpointError(
            f"the head {files.name} reads hidden states of {width} values, and the target's have {target_hidden_size}.",
            _ELSE,
        )
    ids = files.shapes.get(TOKEN_MAP)
    vocab = _number(files, ("vocab_size",), vocab_size if ids else rows)
    if vocab != vocab_size:
        raise CheckpointError(
            f"the head {files.name} is for a vocabulary of {vocab} tokens, and the target has {vocab_size}.", _ELSE
        )
    draft_vocab = _number(files, ("truncated_vocab_size",), ids[0] if ids else vocab)
    return HeadConfig(
        kind="medusa",
        layer_config={"model_type": "medusa", "hidden_size": width, "num_hidden_layers": 0},
        taps=(AFTER_NORM,),
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        source_format="FasterDecoding" if numbered else "vLLM",
        medusa=shape,
    )


def block_name(files: HeadFiles, head: int, block: int, part: str) -> str:
    """The name in the files of the ``part``, ``"weight"`` or ``"bias"``, of a residual block's linear layer."""
    if _is_numbered(files):
        return f"{head}.{block}.linear.{part}"
    return f"blocks.{head}.layers.{block}.{part}"


def lm_head_name(files: HeadFiles, shape: MedusaShape, head: int) -> str:
    """The name in the files of a head's LM head."""
    if _is_numbered(files):
        return f"{head}.{shape.num_blocks}.weight"
    own = f"lm_heads.{head}.weight"
    return ONE_LM_HEAD if shape.one_lm_head and own not in files.shapes else own


def _is_numbered(files: HeadFiles) -> bool:
    return not any(_NAMED.fullmatch(name) for name in files.shapes)


def _count(files: HeadFiles, numbered: bool) -> tuple[int, int]:
    """How many heads the tensors are of, and how many blocks they have."""
    heads, blocks = 0, 0
    for name in files.shapes:
        if numbered and (match := _NUMBERED.fullmatch(name)):
            heads = max(heads, int(match[1]) + 1)
            blocks = max(blocks, int(match[2]) + 1 if match[3] else 0)
        elif match := _NAMED.fullmatch(name):
            heads = max(heads, int(match[1] or match[3]) + 1)
            blocks = max(blocks, int(match[2] or -1) + 1)
    return heads, blocks


def _lm_head_size(
    files: HeadFiles, shape: MedusaShape, num_blocks: int, vocab_size: int, hidden_size: int
) -> tuple[int, int]:
    """Rows and columns of the first LM head; the target's, where the files have none."""
    found = files.shapes.get(lm_head_name(files, shape, 0))
    if found is not None and len(found) == 2:
        return found[0], found[1]
    block = files.shapes.get(block_name(files, 0, 0, "weight")) if num_blocks else None
    return vocab_size, hidden_size if block is None else block[0]


def _number(files: HeadFiles, keys: tuple[str, ...], default: int) -> int:
    """The first of some keys of the configuration, a whole number."""
    key = next((key for key in keys if files.values.get(key) is not None), None)
    value = default if key is None else files.values[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 24:
        raise CheckpointError(f"{files.name}: {_CONFIG} has {value!r} for {key}, no size.", "fetch the head again.")
    return value


def _scale(files: HeadFiles) -> float:
    value = files.values.get("logit_scale", 1.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{files.name}: {_CONFIG} has {value!r} for logit_scale.", "fetch the head again.")
    return float(value)
