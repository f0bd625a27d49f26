"""What transformers sees of a GGUF file: one reading of its header, and settings of more architectures."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from specexport.checkpoint.gguf_layouts import LAYOUTS, read_layout_settings
from specexport.checkpoint.gguf_reader import read
from specexport.checkpoint.source import Source

_HIDDEN = ("gpt-oss.rope.scaling.", *(f"tokenizer.ggml.{name}" for name in ("merges", "scores", "token_type")))
"""transformers fails at the first, which ``gguf_config`` reads; the others are long, and it does nothing with them."""
_TOKENS = "tokenizer.ggml.tokens"
_SETTINGS_LIKE = {"olmoe": "qwen2_moe"}
"""Architectures that transformers has models of and no table of settings, and whose table is theirs too."""


@contextmanager
def patch_gguf_readers(source: Source, reader: Any) -> Iterator[None]:
    """Within the block, ``gguf`` gives ``reader`` for the source's file; nothing changes without a reader."""
    if reader is None:
        yield
        return
    import gguf
    from transformers.integrations.gguf import reader as by_hand

    opens, path = gguf.GGUFReader, (source.folder / str(source.gguf_file)).resolve()
    shown = copy(reader)
    shown.fields = {key: value for key, value in reader.fields.items() if not key.startswith(_HIDDEN)}
    if (tokens := shown.fields.get(_TOKENS)) is not None:  # their number is all that is asked for, once each is read
        shown.fields[_TOKENS] = tokens._replace(parts=[(0,)], data=[0] * len(tokens.data), types=[0])

    def same(wanted: Any, *args: Any, **named: Any) -> Any:
        return shown if not args and not named and Path(wanted).resolve() == path else opens(wanted, *args, **named)

    reads, known = by_hand._read_metadata, {key: read(reader, key) for key in reader.fields}

    def read_patched_metadata(blob: Any, wanted: Any, kept: Any = ()) -> Any:
        if Path(wanted).resolve() != path or "general.architecture" not in known:
            return reads(blob, wanted, kept)
        shorter = {key: value if key in kept else _shorten_list(value) for key, value in known.items()}
        return shorter, known["GGUF.tensor_count"], next((each.field.offset for each in reader.tensors), 0)

    gguf.GGUFReader, by_hand._read_metadata = same, read_patched_metadata
    try:
        with _patch_architectures(reader):
            yield
    finally:
        gguf.GGUFReader, by_hand._read_metadata = opens, reads


def _shorten_list(value: Any) -> Any:
    """As transformers' own reading gives lists of texts that it was not asked for."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], str) else value


@contextmanager
def _patch_architectures(reader: Any) -> Iterator[None]:
    """Within the block, transformers knows the settings of files in ``_SETTINGS_LIKE`` and in ``LAYOUTS``."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.integrations import gguf as by_description

    described = by_description.GGUF_CONFIG_ARCHS
    tables, known = gguf_utils.GGUF_TO_TRANSFORMERS_MAPPING["config"], gguf_utils.GGUF_SUPPORTED_ARCHITECTURES
    added = {name: tables[like] for name, like in _SETTINGS_LIKE.items() if name not in tables}
    ours = {name: lambda *_: read_layout_settings(reader) for name in LAYOUTS.keys() - described.keys()}
    tables.update(added)
    known.extend(added)
    described.update(ours)
    try:
        yield
    finally:
        for name in added:
            del tables[name]
            known.remove(name)
        for name in ours:
            del described[name]
