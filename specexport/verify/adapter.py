"""Which LoRA adapter a bundle is verified with, and where its files are."""

from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.bundle.entry import AdapterEntry
from specexport_runtime.bundle.manifest import Manifest
from specexport_runtime.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from specexport.frontend.lora import LoraSource


class VerifiedAdapter(NamedTuple):
    """An adapter of a bundle's target."""

    entry: AdapterEntry
    source: "LoraSource | None"  # its files; None if they were not given

    @property
    def chosen(self) -> str | None:
        """Its name, where requests choose it; None where it is in the weights."""
        return self.entry.name if self.entry.use == "chosen" else None


def find_adapter(manifest: Manifest, asked: str | None) -> VerifiedAdapter | None:
    """The adapter asked for as ``"NAME"`` or ``"NAME=FOLDER"``; None asks for the merged one, if there is one.

    Raises InvalidRequestError if the bundle has no such adapter, CheckpointError if the folder holds another one or
    none.
    """
    adapters = {adapter.name: adapter for adapter in manifest.models["target"].adapters}
    if asked is None:
        merged = next((adapter for adapter in adapters.values() if adapter.use == "merged"), None)
        return None if merged is None else VerifiedAdapter(merged, None)
    name, _, folder = asked.partition("=")
    if name not in adapters:
        fix = f"give one of {', '.join(adapters)}." if adapters else "leave --lora out."
        raise InvalidRequestError(f"the bundle {manifest.name} has no LoRA adapter {name!r}.", fix)
    if not folder:
        return VerifiedAdapter(adapters[name], None)
    from specexport.frontend.lora import find_adapter as find

    source = find(name, folder)
    if source.sha256 != adapters[name].sha256:
        raise CheckpointError(
            f"--lora {asked} is not what this bundle was built with: its sha256 is {source.sha256[:16]}…, the manifest "
            f"records {adapters[name].sha256[:16]}… ({adapters[name].source}).",
            f"give the adapter {adapters[name].source} as it was at build time.",
        )
    return VerifiedAdapter(adapters[name], source)
