"""One built engine with what a bundle needs to know of its checkpoint. Imports the manifest's classes only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.schema import from_json, map_paths, to_json

TOKENIZER_NAME = "tokenizer.json"


class EngineCheck(NamedTuple):
    """What the build's check found of an engine, in the worst of its graphs and steps."""

    max_abs_error: float  # largest difference from eager logits
    # of a quantized engine, share of the decided positions where its best token is the float model's; None: too few
    agreement: float | None = None
    # of a quantized engine, mean divergence of its distributions from the float model's, in nats
    divergence: float | None = None
    # that, over what the float model's distributions tell; see ``specexport.compile.closeness``
    lost: float | None = None
    # of a quantized engine's float model, on the built-in texts; None where it was not measured
    perplexity: float | None = None


@dataclass(frozen=True)
class BuiltModel:
    """A built target, draft or head."""

    entry: ModelEntry  # paths are relative to the model's own folder
    files: Mapping[str, FileEntry]  # engine files by path relative to that folder
    check: EngineCheck | None  # None if it was not checked
    tokenizer_json: bytes = field(repr=False)  # content of the checkpoint's ``tokenizer.json``
    chat_template: str | None  # Jinja source; None for a head, which has nothing of the rest either
    special_tokens: Mapping[str, str]  # text by name
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # ids that end a generation

    def to_json(self) -> dict[str, Any]:
        """JSON form; the tokenizer is a file beside it."""
        data: dict[str, Any] = to_json(self)
        del data["tokenizer_json"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], tokenizer_json: bytes) -> "BuiltModel":
        """Rebuild from :meth:`to_json` after a trip through JSON."""
        return from_json(cls, {**data, "tokenizer_json": tokenizer_json})


def entry_in_bundle(built: BuiltModel, role: str) -> ModelEntry:
    """The manifest entry with its paths relative to the bundle folder."""
    return map_paths(built.entry, lambda path: f"{role}/{path}")
