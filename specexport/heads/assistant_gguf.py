"""Gemma-4 assistants in GGUF files: a file of its own, with layers as the target's and two projections."""

from dataclasses import dataclass
from typing import Any

import torch

from specexport.checkpoint.gguf_layouts import GEMMA_NAMES, name_within
from specexport.checkpoint.gguf_reader import architecture, open_reader
from specexport.checkpoint.gguf_settings import GgufMetadata, read_gemma_settings
from specexport.checkpoint.source import Source
from specexport.heads.files import HeadFiles
from specexport_runtime.errors import CheckpointError

ARCHITECTURE = "gemma4-assistant"
_PROJECTIONS = {
    f"{place}.{name}_projection.weight": f"{name}_projection.weight"
    for place in ("nextn", "mtp")  # today's name, and an older one
    for name in ("pre", "post")
}
_BESIDE = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"} | _PROJECTIONS


@dataclass(frozen=True)
class _GgufAssistant(HeadFiles):
    """An assistant by the names of its folder."""

    tensors: dict[str, Any]

    def tensor(self, name: str) -> Any:
        """One tensor, as float32 in torch."""
        from gguf import dequantize

        found = self.tensors[name]
        return torch.from_numpy(dequantize(found.data, found.tensor_type).astype("float32")).view(self.shapes[name])


def is_assistant(source: Source) -> bool:
    """Whether a source is such a file."""
    return source.gguf_file is not None and architecture(open_reader(source)) == ARCHITECTURE


def open_gguf_assistant(source: Source) -> HeadFiles:
    """What its folder would say, and its tensors; CheckpointError for a file that does not say its settings."""
    reader = open_reader(source)
    metadata = GgufMetadata(reader)
    try:
        text = read_gemma_settings(metadata) | {"num_hidden_layers": metadata("block_count")}
    except (TypeError, ValueError, IndexError) as error:  # values of other types than they should have
        raise CheckpointError(
            f"{source.name}: its settings cannot be read ({type(error).__name__}: {error}).",
            "fetch or convert the file again.",
        ) from error
    values = {
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": metadata("embedding_length_out"),
        "use_ordered_embeddings": False,  # converters leave the groups out
    }
    found = {}
    for tensor in reader.tensors:
        name = _BESIDE.get(tensor.name)
        if tensor.name.startswith("blk."):
            _, block, rest = tensor.name.split(".", 2)
            own = name_within(GEMMA_NAMES, rest)
            name = own and f"layers.{block}.{own}"
        if name is not None:
            found[name] = tensor
    shapes = {name: metadata.there[tensor.name] for name, tensor in found.items()}
    return _GgufAssistant(source.name, values, shapes, {}, found)
