"""The kinds of draft heads, and what goes through their records. A new one is a file of its own and a line here."""

from functools import reduce
from typing import Any

from specexport.checkpoint.source import Source, read_object
from specexport.heads import assistant, dflash, dflash2, dspark, eagle, hydra, medusa, mtp, mtp_modules
from specexport.heads.assistant_gguf import open_gguf_assistant
from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import CONFIG_NAME, HeadFiles, our_name, read_tensor_index
from specexport.heads.kind import HeadKind
from specexport.trace.export import TracedModel
from specexport_runtime.errors import UnsupportedModelError

KINDS: tuple[HeadKind, ...] = (
    hydra.KIND,
    medusa.KIND,
    assistant.KIND,
    mtp_modules.KIND,
    mtp.KIND,
    dspark.KIND,
    dflash2.KIND,
    dflash.KIND,
    eagle.EAGLE3,
    eagle.EAGLE,
)
"""Asked in this order whether files are theirs."""

_REFUSED = {
    "LiLiCorrDraftModel": "LiLiCorr",
    "LlamaForCausalLMEagle4": "EAGLE-4",
    "DeepseekV4DSparkModel": "DSpark with layers of DeepSeek-V4",
    "xpress": "Xpress, which drafts by Jacobi passes",
}
"""Heads that are known and cannot be imported, by their architectures and speculators' names, and what they are."""

_LOSSY = {
    "posterior_threshold": (None, 0, 0.0),
    "posterior_alpha": (None, 0, 0.0),
    "typical_acceptance_sampler_posterior_threshold": (None, 0, 0.0),
    "typical_acceptance_sampler_posterior_alpha": (None, 0, 0.0),
    "typical_acceptance": (None, False),
    "spec_decoding_acceptance_method": (None, "rejection_sampler"),
}
"""Settings of typical acceptance, by the names of FasterDecoding and vLLM, and the values that do not ask for it."""
_LOSSY_METHOD = {"accept_tolerance": (None, 0, 0.0), "verifier_accept_k": (None, 1)}
"""The same of speculators, for each of its methods."""


def find_kind(config: HeadConfig) -> HeadKind:
    """The record of a head's kind."""
    return next(kind for kind in KINDS if kind.name == config.kind)


def open_head(source: Source) -> HeadFiles:
    """Open a head's configuration and tensors; raises CheckpointError if one cannot be read."""
    if source.gguf_file is not None:
        return open_gguf_assistant(source)
    values = read_object(source, CONFIG_NAME)
    named = values.get("speculators_model_type")
    name_of = next((kind.our_name for kind in KINDS if named in kind.speculators), our_name)
    prefixes = ("model.", *(prefix for kind in KINDS for prefix in kind.prefixes))
    shapes, stored = read_tensor_index(source, lambda key: name_of(reduce(str.removeprefix, prefixes, key)))
    return HeadFiles(source.name, values, shapes, stored)


def read_config(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    """What a head computes; CheckpointError if it is another target's, UnsupportedModelError if unknown."""
    _refuse_known(files)
    _refuse_lossy(files)
    named = files.values.get("speculators_model_type")
    for kind in KINDS:
        if kind.recognizes(files) or named in kind.speculators:
            return kind.read(files, target)
    *others, last = (kind.called for kind in KINDS)
    hint = f"give {', '.join(others)} or {last}."
    if named is not None:
        raise UnsupportedModelError(f"{files.name}: heads of kind {named!r} cannot be imported.", hint)
    raise UnsupportedModelError(f"{files.name} has the tensors of no kind of head that is known.", hint)


def _refuse_known(files: HeadFiles) -> None:
    """Refuse by its name what is known and cannot be imported, before anything else is said of it."""
    config, named = files.values.get("speculators_config"), files.values.get("architectures")
    said = [files.values.get("speculators_model_type"), *(named if isinstance(named, list) else [])]
    said += [config.get("algorithm")] if isinstance(config, dict) else []
    for name in said:
        if isinstance(name, str) and name in _REFUSED:
            raise UnsupportedModelError(
                f"{files.name} is a head of kind {name!r} ({_REFUSED[name]}), which cannot be imported.",
                "give a DSpark, DFlash 2, DFlash or EAGLE-3 head.",
            )


def _refuse_lossy(files: HeadFiles) -> None:
    """Refuse settings that accept what the target would not have written."""
    typical = next((key for key, harmless in _LOSSY.items() if files.values.get(key) not in harmless), None)
    if typical is not None:
        raise UnsupportedModelError(
            f"{files.name} sets {typical} to {files.values[typical]}: typical acceptance takes tokens that the target "
            "did not choose.",
            f"take {typical} out of {CONFIG_NAME}: text must stay the target's.",
        )
    config = files.values.get("speculators_config") or {}
    methods = config.get("proposal_methods") or [] if isinstance(config, dict) else []
    for method in methods:
        for key, harmless in _LOSSY_METHOD.items():
            value = method.get(key) if isinstance(method, dict) else None
            if value not in harmless:
                raise UnsupportedModelError(
                    f"{files.name} sets {key} to {value}, which accepts tokens that the target did not choose.",
                    f"take {key} out of {CONFIG_NAME}: text must stay the target's.",
                )


def trace_head(head: Any, *, fixed_sizes: bool = False, group_experts: bool = False) -> TracedModel:
    """Trace a head (eval mode) to ONNX IR; ``fixed_sizes`` and ``groups_experts`` are the backend's."""
    return find_kind(head.head_config).trace(head, fixed_sizes=fixed_sizes, group_experts=group_experts)
