"""Hydra heads' files: names and configuration as their authors write them (Ankner et al. 2024, zankner/Hydra).

``hydra_mlp.{i}.{j}`` is block j of head i. The first has two linear layers over all that the head reads side by side,
``linear`` and ``res_connection``; the others have one. ``hydra_lm_head.{i}`` is the head's LM head, with a bias. Where
the heads were trained with dropout layers, each of these counts too: blocks are 1, 3, 5, and the LM head is its part 1.
``prefix_embeding_layer`` (it is spelled so) is the decoder layer of Hydra++, with the target's own sizes.
"""

import re
from collections.abc import Mapping
from typing import Any

from specexport.heads.config import HeadConfig, HydraShape
from specexport.heads.files import CONFIG_NAME, HeadFiles
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

EMBEDDING, PREFIX = "input_embed_fn.weight", "prefix_embeding_layer."
UNREAD = re.compile(r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.\w+)")
"""The target's embedding, which is stored along, and tables that follow from the configuration."""
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_MOST_BLOCKS = 64
_ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""``hydra_head_arch``, and whether it has a prefix layer."""
_ELSE = "give a head that was made for this target."
_OTHERS = "give Hydra heads of the architecture 'mlp' or 'prefix-mlp', or another kind of head."


def is_hydra(files: HeadFiles) -> bool:
    """Whether a head's configuration or its tensors say that it is of this kind."""
    return "hydra_num_heads" in files.values or any(name.startswith("hydra_mlp.") for name in files.shapes)


def read_hydra(
    files: HeadFiles,
    *,
    num_layers: int,  # decoder layers of the target
    target_hidden_size: int,
    vocab_size: int,  # V of the target
    target_layer: Mapping[str, Any],  # configuration of the target's decoder layers
) -> HeadConfig:
    """What Hydra heads compute; the configuration of a prefix layer is a copy of ``target_layer``.

    Raises CheckpointError if they were made for another target, or their configuration holds no sizes, and
    UnsupportedModelError if their architecture cannot be imported.
    """
    has_prefix = _has_prefix(files)
    if not files.values.get("grounded_heads", any("res_connection" in name for name in files.shapes)):
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads that are not grounded (grounded_heads): they read no tokens.",
            _OTHERS,
        )
    found = [match for name in files.shapes if (match := _BLOCK.fullmatch(name))]
    counted = max((int(match[2]) for match in found if match[1] == "0"), default=-1)
    num_heads = max(max((int(match[1]) + 1 for match in found), default=0), _number(files, "hydra_num_heads", 1))
    num_blocks = _number(files, "hydra_num_layers", counted // _stride(files) + 1) - 1
    if not 1 <= num_heads <= MAX_LOOKAHEAD or not 0 <= num_blocks <= _MOST_BLOCKS:
        raise CheckpointError(
            f"{files.name} has {num_heads} Hydra heads of {num_blocks + 1} blocks; 1 to {MAX_LOOKAHEAD} of 1 to "
            f"{_MOST_BLOCKS + 1} can be read.",
            "give the folder that holds their weights and their configuration.",
        )
    rows, width = files.shapes.get(lm_head_name(files, 0, "weight"), (vocab_size, target_hidden_size))
    if width != target_hidden_size:
        raise CheckpointError(
            f"the head {files.name} reads hidden states of {width} values, and the target's have {target_hidden_size}.",
            _ELSE,
        )
    if rows != vocab_size:
        raise CheckpointError(
            f"the head {files.name} is for a vocabulary of {rows} tokens, and the target has {vocab_size}.", _ELSE
        )
    offset = _number(files, "hidden_state_offset", 0)
    if offset > num_layers:
        raise CheckpointError(
            f"the head {files.name} reads the hidden state {offset} layers before the last, and the target has "
            f"{num_layers}.",
            _ELSE,
        )
    plain = {"model_type": "hydra", "hidden_size": width, "num_hidden_layers": 0}
    return HeadConfig(
        kind="hydra",
        layer_config=_prefix_layer(files, target_layer) if has_prefix else plain,
        taps=(num_layers - offset if offset else AFTER_NORM,),
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        source_format="zankner",
        hydra=HydraShape(num_heads, num_blocks, _is_one_block(files, num_heads, num_blocks), has_prefix),
    )


def block_name(files: HeadFiles, head: int, block: int, part: str) -> str:
    """The name in the files of a part of a residual block, ``"linear.weight"`` for example; the first joins."""
    stride = _stride(files)
    return f"hydra_mlp.{head}.{block * stride + stride - 1}.{part}"


def first_block(files: HeadFiles, head: int, num_blocks: int) -> int:
    """Number of the first block behind the one that joins which is stored: of one that is run again, one may be."""
    stored = (at for at in range(1, num_blocks + 1) if block_name(files, head, at, "linear.weight") in files.shapes)
    return next(stored, 1)


def lm_head_name(files: HeadFiles, head: int, part: str) -> str:
    """The name in the files of the ``part``, ``"weight"`` or ``"bias"``, of a head's LM head."""
    plain = f"hydra_lm_head.{head}.{part}"
    behind_dropout = f"hydra_lm_head.{head}.1.{part}"
    return behind_dropout if behind_dropout in files.shapes else plain


def _stride(files: HeadFiles) -> int:
    """Modules that a block counts for."""
    return 2 if "hydra_mlp.0.1.res_connection.weight" in files.shapes else 1


def _has_prefix(files: HeadFiles) -> bool:
    found = any(name.startswith(PREFIX) for name in files.shapes)
    named = files.values.get("hydra_head_arch", "prefix-mlp" if found else "mlp")
    if named not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads of the architecture {named!r}, which cannot be imported.", _OTHERS
        )
    return _ARCHITECTURES[named]


def _is_one_block(files: HeadFiles, num_heads: int, num_blocks: int) -> bool:
    """Whether the blocks behind the first of each head hold the same values: their writer stores one of them again."""
    for head in range(num_heads):
        kept = first_block(files, head, num_blocks)
        for part in ("linear.weight", "linear.bias"):
            own = block_name(files, head, kept, part)
            copies = [block_name(files, head, at, part) for at in range(1, num_blocks + 1)]
            stored = [name for name in copies if name != own and name in files.shapes]
            if stored and (own not in files.shapes or not all(_equal(files, own, name) for name in stored)):
                return False
    return num_blocks > 1


def _equal(files: HeadFiles, one: str, other: str) -> bool:
    return files.shapes[one] == files.shapes[other] and bool((files.tensor(one) == files.tensor(other)).all())


def _prefix_layer(files: HeadFiles, target_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of the prefix layer: one layer of Llama's with the target's sizes. Refuses other layers."""
    kind = target_layer.get("model_type")
    if kind != "llama":
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads behind a prefix layer, which is one of Llama's with its target's sizes, and "
            f"this target's layers are of {kind}.",
            _ELSE,
        )
    return {**{key: value for key, value in target_layer.items() if value is not None}, "num_hidden_layers": 1}


def _number(files: HeadFiles, key: str, default: int) -> int:
    """A whole number of the configuration."""
    value = default if files.values.get(key) is None else files.values[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 24:
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has {value!r} for {key}, no size.", "fetch the head again.")
    return value
