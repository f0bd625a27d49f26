"""Token ids as a checkpoint's configuration states them: whole numbers, or nothing is built.

transformers passes over a ``generation_config.json`` that it cannot read, and takes what ends a text from elsewhere.
"""

import json
from collections.abc import Mapping
from typing import Any

from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ENDS, _BEGINS = "eos_token_id", "bos_token_id"


def check_stated_ids(source: Source) -> None:
    """Refuse a folder whose configuration files hold no JSON object, or state what is no token id for BOS or EOS."""
    if source.gguf_file is not None:
        return
    for name in (_CONFIG, _GENERATION):
        found = _read(source, name)
        places = {"": found, "text_config.": found.get("text_config")}
        for prefix, place in places.items():
            if isinstance(place, Mapping):
                _check(source, name, prefix + _ENDS, place.get(_ENDS), several=True)
                _check(source, name, prefix + _BEGINS, place.get(_BEGINS), several=False)
        if name == _GENERATION and found:
            _check_settings(source, found)


def _read(source: Source, name: str) -> Mapping[str, Any]:
    """A JSON file of the checkpoint; empty if there is none."""
    path = source.folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if name == _CONFIG:  # the loader says what is wrong with it
            return {}
        raise CheckpointError(
            f"{source.name}: {name} cannot be read ({type(error).__name__}: {error}).", f"fetch {name} again."
        ) from error
    if isinstance(found, dict):
        return found
    raise CheckpointError(f"{source.name}: {name} holds no JSON object.", f"fetch {name} again.")


def _check(source: Source, name: str, key: str, value: Any, *, several: bool) -> None:
    if value is None:
        return
    for each in value if several and isinstance(value, list) else [value]:
        if isinstance(each, int) and not isinstance(each, bool) and (each >= 0 or not several):
            continue
        raise CheckpointError(
            f"{source.name}: {key} in {name} is {json.dumps(value)[:80]}, which is no token id"
            + (", nor a list of them." if several else "."),
            "write whole numbers from 0 on, as in the model that it was made from, or remove the key.",
        )


def _check_settings(source: Source, found: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(found))
    except Exception as error:  # a value of another type than transformers computes with
        raise CheckpointError(
            f"{source.name}: {_GENERATION} cannot be used ({type(error).__name__}: {str(error)[:200]}).",
            f"put it right, or remove it and give {_ENDS} in {_CONFIG}.",
        ) from error
