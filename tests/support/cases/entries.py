"""Manifest entries of tests, made and changed by the names of their fields, in whichever record those are."""

from dataclasses import fields, replace
from typing import Any

from specexport_runtime.bundle.entry import (
    AttentionEntry,
    DraftHeadEntry,
    EngineEntry,
    EngineLimits,
    Gates,
    ModelEntry,
    Parameters,
    SourceEntry,
)

PLAIN = ModelEntry(
    backend="ort-cpu", dtype="float32", vocab_size=17, max_positions=None,
    source=SourceEntry("tiny", "", "TinyForCausalLM"), parameters=Parameters(1, 1),
    attention=AttentionEntry((), "float32"), engine=EngineEntry("model.onnx", ()),
)  # fmt: skip
_RECORDS: dict[str, Any] = {
    "source": SourceEntry, "parameters": Parameters, "attention": AttentionEntry, "draft_head": DraftHeadEntry,
}  # fmt: skip
_OF_ENGINE: dict[str, Any] = {"gates": Gates, "limits": EngineLimits}
_HOMES = {name: home for home, kind in (_RECORDS | _OF_ENGINE).items() for name in kind._fields}
_HOMES |= {each.name: "engine" for each in fields(EngineEntry)}


def make_entry(**values: Any) -> ModelEntry:
    return changed(PLAIN, **values)


def changed(entry: ModelEntry, **values: Any) -> ModelEntry:
    """The entry with other values of fields; the KV cache keeps the model's dtype unless ``cache_dtype`` is one."""
    if "dtype" in values and entry.attention.cache_dtype == entry.dtype:
        values.setdefault("cache_dtype", values["dtype"])
    inner: dict[str, dict[str, Any]] = {}
    own = {name: value for name, value in values.items() if name in {each.name for each in fields(ModelEntry)}}
    for name in values.keys() - own.keys():
        inner.setdefault(_HOMES[name], {})[name] = values[name]
    whole, engine = own.pop("engine", entry.engine), inner.pop("engine", {})
    for home in _OF_ENGINE.keys() & inner.keys():
        before = getattr(whole, home) or EngineLimits((), 1, 1)
        engine.setdefault(home, before._replace(**inner.pop(home)))
    for home, changes in inner.items():
        own[home] = (getattr(entry, home) or DraftHeadEntry("eagle3"))._replace(**changes)
    return replace(entry, engine=replace(whole, **engine), **own)
