"""The LoRA adapters of a build: found, fitted to the target, and merged or kept as products of their own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.entry import AdapterEntry
from specexport_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from specexport.checkpoint.lora import LoraSource
    from specexport.checkpoint.lora_fit import LoraAdapter
    from specexport.passes.low_rank import Adapter


class LoadedAdapters(NamedTuple):
    """The adapters of a loaded target."""

    all: "tuple[LoraAdapter, ...]" = ()
    chosen: "tuple[LoraAdapter, ...]" = ()  # by requests; a merged adapter is in the weights by now
    products: "tuple[Adapter, ...]" = ()  # what each chosen one adds to the layers of a traced graph


def find_adapters(recipe: BuildRecipe) -> "tuple[LoraSource, ...]":
    """The adapters of a recipe, hashed and their configurations checked (CheckpointError)."""
    from specexport.checkpoint.lora import find_adapter

    return tuple(find_adapter(name, folder) for name, folder in recipe.lora)


def bind_adapters(checkpoint: Any, sources: "Sequence[LoraSource]", *, merge: bool) -> LoadedAdapters:
    """Fit adapters to a loaded checkpoint; ``merge`` adds them to its weights. CheckpointError if one cannot."""
    if not sources:
        return LoadedAdapters()
    from specexport.checkpoint.lora import find_adapter
    from specexport.checkpoint.lora_fit import low_ranks, merge_adapter, read_adapter

    adapters = tuple(read_adapter(source, checkpoint.model) for source in sources)
    for source in sources:  # from here on their files are watched
        if find_adapter(source.name, str(source.folder)).sha256 != source.sha256:
            raise CheckpointError(f"{source.where} changed while it was read.", "build again.")
    if merge:
        for adapter in adapters:
            merge_adapter(checkpoint, adapter)
        return LoadedAdapters(adapters)
    return LoadedAdapters(adapters, adapters, tuple(map(low_ranks, adapters)))


def describe_adapters(adapters: "Sequence[LoraAdapter]", *, chosen: bool) -> tuple[AdapterEntry, ...]:
    """What a manifest says of adapters."""
    use: Literal["chosen", "merged"] = "chosen" if chosen else "merged"
    return tuple(
        AdapterEntry(each.source.name, each.source.source, each.source.sha256, each.rank, use) for each in adapters
    )
