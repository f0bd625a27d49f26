"""Whether a configuration counts its layers in one way, and names kinds of layers that its model has."""

import json
import re
from collections.abc import Iterable
from typing import Any

from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_LISTS = ("layer_types", "layers_block_type")
_COUNT = "num_hidden_layers"
_MORE_LAYERS = ("num_nextn_predict_layers",)
"""Layers behind the last one that guess tokens: their weights are numbered as if they were the model's."""
_NUMBERED = re.compile(r"(.*\blayers|.*\bh|.*\bblocks)\.(\d+)\.")
_FIX = "give the config.json that belongs to the weights."


def check_layer_lists(source: Source) -> None:
    """Refuse a ``config.json`` whose list of layers is longer or shorter than the number of layers that it names.

    transformers takes the list for some architectures, and then leaves out layers that the weights have.
    """
    try:
        config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the loader says what is wrong with it
        return
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    count = text.get(_COUNT) if isinstance(text, dict) else None
    for name in _LISTS if type(count) is int else ():
        kinds = text.get(name)
        if isinstance(kinds, list) and len(kinds) != count:
            raise CheckpointError(
                f"{source.name}: config.json counts its layers in two ways: {_COUNT} is {count}, and the length "
                f"of {name} is {len(kinds)}.",
                _FIX,
            )


def check_no_layer_left(source: Source, model: Any, left: Iterable[str]) -> None:
    """Refuse a model with fewer layers than its weights have; ``left`` names weights that it has no place for."""
    config = model.config.get_text_config()
    counts: dict[str, int] = {}
    for name, _ in model.named_parameters():
        if found := _NUMBERED.match(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    more = sum(getattr(config, name, 0) or 0 for name in _MORE_LAYERS)
    for name in sorted(left):
        found = _NUMBERED.match(name)
        if found and found[1] in counts and int(found[2]) >= counts[found[1]] + more:
            raise CheckpointError(
                f"{source.name}: config.json describes {counts[found[1]]} layers, and the weights have more, for "
                f"example {name}.",
                _FIX,
            )


def unknown_kind(config: Any, error: Exception) -> UnsupportedModelError | None:
    """The error for a model that failed because it has no layers of a kind that its configuration names."""
    kind = error.args[0] if isinstance(error, KeyError) and error.args else None
    if kind is None or kind not in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return None
    return UnsupportedModelError(
        f"{config.model_type} cannot be exported: its configuration names a layer of kind {kind!r}, and this "
        "architecture has none.",
        "check layer_types in config.json.",
    )
