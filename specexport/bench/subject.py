"""What is measured, and on what: the bundle and the machine."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.bench.methods import LoadKey
from specexport_runtime.bundle.draft_layers import DraftLayers, load_draft_layers
from specexport_runtime.bundle.entry import NO_GATES, ModelEntry
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.drafters.base import HEAD
from specexport_runtime.drafters.model import DRAFT_MODEL
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_adapter

if TYPE_CHECKING:
    from specexport_runtime.engine import SpecEngine

_VERSIONS = ("specexport", "numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers")


@dataclass(frozen=True)
class Subject:
    """A bundle, or what a test has in its place."""

    name: str  # in reports
    has_draft: bool  # it has a draft model
    lookahead: int  # largest K it was built for
    details: Mapping[str, Any]  # names and hashes of its parts, for the record
    load: "Callable[[LoadKey], SpecEngine]"
    has_gates: bool = False  # the target can draft with some of its layers, as it is asked by default
    has_head: bool = False  # it has a draft head
    takes_trees: bool = False  # drafts may have branches
    first: str = ""  # of several bundles the one that stands for their target

    @property
    def draft_abilities(self) -> dict[str, Any]:
        """As ``resolve_methods`` takes it."""
        return {"has_draft": self.has_draft, "has_gates": self.has_gates, "has_head": self.has_head}

    @property
    def own_drafter(self) -> str | None:
        """The drafter that its own model is for, a draft model or a head; None for a target alone."""
        return DRAFT_MODEL if self.has_draft else HEAD if self.has_head else None


def open_subject(folder: Path, options: EngineOptions) -> Subject:
    """A bundle to measure; its files are checked when an engine is loaded."""
    manifest = load_manifest(folder)
    check_adapter(options.lora, manifest.models["target"].chosen_adapters)

    def load(key: LoadKey) -> "SpecEngine":
        from specexport_runtime.engine import SpecEngine

        return SpecEngine.load(
            folder,
            options,
            unpad_kv=key.unpad_kv,
            unpad_input=key.unpad_input,
            max_num_seqs=key.max_num_seqs,
            share_threads=True,
            enable_prefix_caching=False,  # repeats would measure what the run before left
        )

    details = _describe(manifest) | ({} if options.lora is None else {"lora": options.lora}) | {
        "max_model_len": options.max_model_len or manifest.max_model_len, "threads": options.num_threads,
        "max_num_batched_tokens": options.max_num_batched_tokens, "spin": options.spin,
    }  # fmt: skip
    has_draft, has_head = "draft" in manifest.models, "head" in manifest.models
    has_gates = can_draft_itself(manifest, load_draft_layers(folder, manifest))
    target = manifest.models.get("target")
    return Subject(
        manifest.name, has_draft, manifest.lookahead, details, load, has_gates, has_head,
        takes_trees=target is not None and target.takes_trees,
    )  # fmt: skip


def can_draft_itself(manifest: Manifest, layers: DraftLayers | None) -> bool:
    """Whether a search, or the default rules of self-drafting, can leave out some of its layers."""
    from specexport_runtime.requests.layer_choice import LayerRules

    if layers is not None:
        return True
    target = manifest.models.get("target")
    gates = NO_GATES if target is None else target.engine.gates
    try:
        LayerRules().check_layers(len(gates.kinds) // 2)
    except InvalidRequestError:
        return False
    return True


def _describe(manifest: Manifest) -> dict[str, Any]:
    """Names and hashes of a bundle's parts; no machine paths."""
    models = {}
    for role, entry in manifest.models.items():
        engine = manifest.files.get(entry.engine.path)
        models[role] = {
            "source": entry.source.name,
            "source_sha256": entry.source.sha256,
            "backend": entry.backend,
            "dtype": entry.dtype,
            "num_parameters": entry.parameters.total,
            "num_layers": len(entry.attention.layers),
            "quantize": entry.quantize,
            "vocab_size": entry.vocab_size,
            "head_size": entry.lm_head_rows,
            "feature_size": entry.engine.feature_size,
            "engine_bytes": _engine_bytes(manifest, entry),
            "built_for": [built.sm for built in entry.engine.files],
            "engine_sha256": None if engine is None else engine.sha256,
        }
    return {
        "name": manifest.name,
        "build_key": manifest.build_key,
        "models": models,
        "tokenizer_sha256": manifest.vocabulary.tokenizer_sha256,
        "lookahead": manifest.lookahead,
    }


def _engine_bytes(manifest: Manifest, entry: ModelEntry) -> int:
    """Of its engine with the weights; of the first one, where there is one for each GPU architecture."""
    parts = (manifest.files.get(name) for name in (entry.engine.path, f"{entry.engine.path}.data"))
    return sum(part.size for part in parts if part is not None)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load, memory (bytes) and versions: what a figure depends on."""
    from specexport_runtime.machine import available_cores, memory_bytes, processor_fields, read_versions

    total, free, limit = memory_bytes()
    return {
        "cpu": processor_fields().get("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "load_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_bytes": min(total, limit) if limit is not None else total,
        "memory_free_bytes": free,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": read_versions(_VERSIONS),
    }
