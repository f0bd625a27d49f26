"""What the configuration of a DFlash head says, in the dialects of its authors (z-lab) and of speculators.

z-lab has its own keys in ``dflash_config``, some of them at the top level; ``target_layer_ids`` counts layers whose
*output* is read. speculators has them at the top level; ``aux_hidden_state_layer_ids`` counts hidden states.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specexport_runtime.errors import CheckpointError, UnsupportedModelError

ARCHITECTURE = "DFlashDraftModel"
_SLIDING = "sliding_attention"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "projector_type": (None, "dflash"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "markov_rank": (None, 0),
    "selector_rank": (None, 0),
    "conv_kernel_size": (None, 0),
}
"""Keys of variants (DSpark, Domino, DFlash 2, windows and sinks of other writers): the values that ask for none."""


class Said(NamedTuple):
    """A configuration, and whose it is."""

    name: str  # of the head, in reports
    values: Mapping[str, Any]  # ``config.json``


_AGAIN = "give the complete head, with the config.json that belongs to its weights."


def is_dflash(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a DFlash head, in the dialect of its authors."""
    named = values.get("architectures")
    return (isinstance(named, list) and ARCHITECTURE in named) or "dflash_config" in values


def read_layer(said: Said, layer: Mapping[str, Any]) -> dict[str, Any]:
    """What its layers' configuration has besides that of other heads: which have windows.

    Raises UnsupportedModelError if it has windows, and does not say where.
    """
    default = layer.get("model_type") not in ("qwen2", "qwen3")  # the others have no such switch
    windows = bool(layer.get("use_sliding_window", default))
    if layer.get("use_sliding_window") and layer.get("layer_types") is None:
        raise UnsupportedModelError(
            f"{said.name} sets use_sliding_window and has no layer_types that say which layers have a window.", _AGAIN
        )
    return {"use_sliding_window": windows}


def read_block(
    said: Said, layer: Mapping[str, Any], num_draft_layers: int, vocab_size: int
) -> tuple[int, int, tuple[bool, ...]]:
    """Block size, mask token, and which layers are causal.

    ``layer`` configures the head's layers. Raises CheckpointError if a value is out of range or a needed one is
    missing, and UnsupportedModelError if it is a variant that computes something else.
    """
    for key, plain in _PLAIN.items():
        value = _value(said, key, layer.get(key))
        if value not in plain:
            raise UnsupportedModelError(
                f"{said.name} sets {key} to {value!r}, a variant of DFlash that cannot be imported.",
                "give a plain DFlash head, or an EAGLE-3 or P-EAGLE head.",
            )
    size = _value(said, "block_size", 16)
    if not _is_whole(size) or size < 2:
        raise CheckpointError(
            f"{said.name}: block_size is {size!r}; a block has 2 tokens or more, the newest and one to guess.", _AGAIN
        )
    mask = _value(said, "mask_token_id")
    if not _is_whole(mask) or not 0 <= mask < vocab_size:
        raise CheckpointError(
            f"{said.name}: mask_token_id is {mask!r}, no token of {vocab_size}; a DFlash head reads it in the place "
            "of each token that it guesses.",
            _AGAIN,
        )
    return size, mask, _causal_layers(said, layer, num_draft_layers)


def read_layer_ids(said: Said) -> tuple[str, Any, int]:
    """Which layers of the target feed it: the key that says so, its value, and what to add for hidden states.

    Raises CheckpointError if nothing says so.
    """
    for key, shift in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        ids = _value(said, key)
        if ids is not None:
            return key, ids, shift
    raise CheckpointError(f"{said.name}: target_layer_ids, the target's layers that it reads, are not given.", _AGAIN)


def _causal_layers(said: Said, layer: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Layers with a window are causal, unless something else is said; the others never are."""
    types = layer.get("layer_types") or ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count:
        raise CheckpointError(f"{said.name}: layer_types is {types!r}, and there are {count} layers.", _AGAIN)
    told = [_value(said, key) for key in ("causal", "is_causal")]
    for value in told:
        if value is not None:
            return (bool(value),) * count
    non_causal = bool(said.values.get("sliding_window_non_causal", False))
    return tuple(kind == _SLIDING and not non_causal for kind in types)


def _value(said: Said, key: str, default: Any = None) -> Any:
    """A value of ``dflash_config``, or else of the top level."""
    inner = said.values.get("dflash_config")
    for values in (inner if isinstance(inner, dict) else {}, said.values):
        if values.get(key) is not None:
            return values[key]
    return default


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
