"""One reading of a GGUF file's header, which takes seconds, and which transformers parses four times."""

import contextlib
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specexport.checkpoint.source import SMALLEST_SPLIT, Source
from specexport_runtime.errors import CheckpointError


def open_reader(source: Source) -> Any:
    """A ``gguf.GGUFReader`` of a GGUF file, split or not, mapped and not read; None for other checkpoints."""
    if source.gguf_file is None:
        return None
    readers = [_open_file(path) for path in source.files]
    for number, (path, reader) in enumerate(zip(source.files, readers, strict=True)):
        _check_part(path, reader, number, len(readers))
    first = readers[0]
    first.paths = {}
    for path, reader in zip(source.files, readers, strict=True):
        for tensor in reader.tensors:
            if first.paths.setdefault(tensor.name, path) is not path:
                raise CheckpointError(f"{source.name}: {tensor.name} is in two of its parts.", _ALL_PARTS)
    first.tensors = [tensor for reader in readers for tensor in reader.tensors]
    counted = read(first, "split.tensors.count")
    if len(readers) >= SMALLEST_SPLIT and counted is not None and counted != len(first.tensors):
        raise CheckpointError(
            f"{source.name} counts {counted} tensors in all parts, which hold {len(first.tensors)}.", _ALL_PARTS
        )
    return first


_LIST, _SIZE = struct.Struct("<IQ"), struct.Struct("<Q")  # what stands before a list and before a text
_ALL_PARTS = "fetch all parts of one and the same file."


def _check_part(path: Path, reader: Any, number: int, found: int) -> None:
    """See that a file is whole by its own count, or the part of a split one that its name says it is."""
    said, place = read(reader, "split.count"), read(reader, "split.no")
    count = 1 if said is None and found == 1 else said or 1
    if count != found:
        whole = "says of itself that it is whole" if count == 1 else f"says that it is one of {count} parts"
        named = "is named as a whole file" if found == 1 else f"is named as one of {found} parts"
        raise CheckpointError(
            f"{path.name} {named}, and {whole} (split.count).",
            "put all parts into one folder, under the names they were published with.",
        )
    if found >= SMALLEST_SPLIT and place != number:
        raise CheckpointError(
            f"{path.name} is named as part {number + 1}, and says that it is part {(place or 0) + 1} (split.no).",
            "put all parts into one folder, under the names they were published with.",
        )


def _open_file(path: Path) -> Any:
    import gguf

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf is not followed
        """Reads through a plain array, as views of a ``numpy.memmap`` cost twice as much; and lists at a stretch."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I" or sys.byteorder != "little":
                return super()._get_field_parts(orig_offs, raw_type)
            first = int(orig_offs) + _LIST.size
            kind, count = _LIST.unpack_from(self._plain.data, int(orig_offs))
            head, item = [np.array([kind], np.uint32), np.array([count], np.uint64)], self.gguf_scalar_to_np.get(kind)
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)][: 1 + bool(count)]
            if item is not None:
                items = list(self._get(first, item, count).reshape(-1, 1))
                size = count * np.dtype(item).itemsize
            elif kind == gguf.GGUFValueType.STRING:
                items, size = _read_strings(self._plain.data, first, count)
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            return _LIST.size + size, head + items, range(len(head), len(head) + len(items)), types

    class CheckedReader(PlainReader):
        """Says whether a file ends too early: it reads what could not be read, piece by piece."""

        _get_field_parts = gguf.GGUFReader._get_field_parts

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self._plain):
                raise EOFError
            return super()._get(offset, dtype, count, override_order)

    try:
        return PlainReader(path)
    except Exception as error:  # whatever a parser of binary data stumbles over
        fault = f"is no readable GGUF file ({type(error).__name__}: {str(error)[:200]})"
        with contextlib.suppress(Exception):
            try:
                CheckedReader(path)
            except EOFError:
                fault = f"ends after {path.stat().st_size:,} bytes, before what it lists"
        raise CheckpointError(f"{path.name} {fault}.", "fetch or convert the checkpoint again.") from error


def _read_strings(data: memoryview, place: int, count: int) -> tuple[list[memoryview], int]:
    """Texts one after the other, each after its length, and the bytes that they take with these."""
    found, start = [], place
    for _ in range(count):
        (size,) = _SIZE.unpack_from(data, place)
        place += _SIZE.size
        found.append(data[place : place + size])
        place += size
    if place > len(data):
        raise ValueError("a list ends after the file")
    return found, place - start


def read(reader: Any, key: str) -> Any:
    """The value of a key: a number, text, a bool, or a list of one kind of these; None if the file has no such key."""
    known = vars(reader).setdefault("known", {})  # there are 100,000 texts in some
    if key not in known:
        field = reader.fields.get(key)
        known[key] = None if field is None else field.contents()
    return known[key]


def architecture(reader: Any) -> str:
    """GGUF's own name of the model's architecture, which begins the keys of its settings; empty if it is not said."""
    return str(read(reader, "general.architecture") or "")


def list_mtp_blocks(reader: Any) -> range:
    """Numbers of the blocks that are MTP modules, after the target's layers: ``block_count`` counts them too."""
    arch = architecture(reader)
    count, modules = (read(reader, f"{arch}.{key}") or 0 for key in ("block_count", "nextn_predict_layers"))
    return range(max(0, count - modules), count)
