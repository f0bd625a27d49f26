"""Values of a GGUF file's header."""

from typing import Any


def read(reader: Any, key: str) -> Any:
    """The value of a key: a number, text, a bool, or a list of one kind of these; None if the file has no such key."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def architecture(reader: Any) -> str:
    """GGUF's own name of the model's architecture, which begins the keys of its settings; empty if it is not said."""
    return str(read(reader, "general.architecture") or "")
