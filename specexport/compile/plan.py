"""What is known before any model is loaded: the parts of a bundle, their checkpoints, and what decides each engine."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specexport.backends.base import PartRecipe
from specexport.backends.registry import find_backend
from specexport.compile.built import TOKENIZER_NAME
from specexport.compile.draft_cuts import (
    HeadCut,
    LayerPrune,
    check_head_size,
    check_num_layers,
    hash_texts,
    read_counting_texts,
)
from specexport.compile.draft_trial import MIN_BYTES, DraftTrial
from specexport.compile.fingerprint import BUNDLE_ROOT, ENGINE_ROOT, HEAD_ROOT, hash_sources, hash_values, tool_versions
from specexport.compile.lora import find_adapters
from specexport.compile.model import Reductions, needs_calibration, require_export_stack
from specexport.compile.part import ModelSource
from specexport.compile.token_map import VocabularySide, check_shared
from specexport.recipe import AUTO, FULL, MTP, BuildRecipe, resolve_parts, resolve_settings


class EngineKey(NamedTuple):
    """All that decides an engine: two of the same key are the same, whatever bundles they are of."""

    sources: str  # hash of our own sources that make it
    tools: Mapping[str, str]  # versions
    checkpoint: str  # hash of its files
    backend: str
    role: str
    dtype: str
    quantize: str
    options: Mapping[str, Any]  # what else of the recipe the backend builds in
    trust_remote_code: bool
    full_check: bool  # an engine is kept with what its check found
    measured_on: str = ""  # hash of the built-in texts, where something of it is measured on them
    rope_len: int | str = 0  # of rotary tables that depend on the length
    adapters: tuple[str, ...] = ()  # hashes
    chooses_adapters: bool = False
    head: Mapping[str, str] = {}  # of a target, the head that it gives features to; of a head, its target
    draft: Mapping[str, Any] = {}  # what a draft is cut down by, and what it is cut for

    def hash(self) -> str:
        """Name of the engine in the cache."""
        return hash_values(self._asdict())


class BuildPlan(NamedTuple):
    """What is known before any model is loaded."""

    models: tuple[ModelSource, ...]  # the checkpoint of each role, target first
    parts: Mapping[str, PartRecipe]  # by role
    engine_keys: Mapping[str, str]  # cache key of each role's engine
    build_key: str  # hash of all that decides the bundle
    settings: Mapping[str, Any]  # the recipe with what it came to
    tools: Mapping[str, str]  # versions
    reductions: Reductions  # what the draft is cut down by
    untried: str | None  # why no forms of a draft are tried that was to have the best; None if they are


def make_plan(recipe: BuildRecipe) -> BuildPlan:
    """Find the checkpoints of a recipe, and settle what it leaves open."""
    architectures = find_backend(recipe.backend).architectures(recipe.sm)  # before anything is fetched
    models = _find_models(recipe)
    parts = resolve_parts(recipe, {model.role: model.quantized for model in models}, architectures)
    reductions, untried = _reductions(recipe, parts, models[-1].weight_bytes)
    tools, trial = tool_versions(), reductions.trial
    sources, built_in = hash_sources(ENGINE_ROOT), hash_texts(read_counting_texts(None))
    keys: dict[str, str] = {}
    for model in models:
        part = parts[model.role]
        key = EngineKey(
            sources=sources,
            tools=tools,
            checkpoint=model.sha256,
            backend=part.backend,
            role=part.role,
            dtype=part.dtype,
            quantize=part.quantize,
            options={name: getattr(part, name) for name in find_backend(part.backend).key_fields},
            trust_remote_code=part.trust_remote_code,
            full_check=part.check == FULL,
            measured_on=built_in if needs_calibration(part) else "",
            rope_len=part.max_model_len if model.turns_by_length else 0,
            adapters=tuple(adapter.sha256 for adapter in model.adapters),
            chooses_adapters=part.chooses_adapters and bool(model.adapters),
        )
        if "head" in parts:  # a head may have its embedding from its target
            other = models[0] if part.role == "head" else models[-1]
            key = key._replace(head={"checkpoint": other.sha256, "sources": hash_sources(HEAD_ROOT)})
        if part.role == "draft":
            written = {} if trial is None else {"writer": keys["target"], "measured_on": built_in}
            if reductions.cut is not None:  # what ends a text of the target stays
                written["target"] = models[0].sha256
            key = key._replace(draft={"vocabulary": models[0].texts_sha256, **reductions.key(), **written})
        keys[part.role] = key.hash()
    found: dict[str, Any] = {"draft_vocab_size": None if reductions.cut is None else reductions.cut.size}
    if trial is not None:
        found |= {"draft_quantize": AUTO} if trial.quantizes else {}
        found |= {"draft_vocab_size": AUTO} if trial.cuts else {}
    settings = resolve_settings(recipe, parts, **found)
    decided = {
        "recipe": settings,
        "engines": keys,
        "names": {model.role: model.name for model in models},
        "sources": hash_sources(BUNDLE_ROOT),
    }
    return BuildPlan(tuple(models), parts, keys, hash_values(decided), settings, tools, reductions, untried)


def _reductions(
    recipe: BuildRecipe, parts: Mapping[str, PartRecipe], weight_bytes: int
) -> tuple[Reductions, str | None]:
    """What a draft of so many bytes is cut down by, and why no forms of it are tried if they were to be."""
    size, layers, own_texts = recipe.draft_vocab_size, recipe.draft_layers, recipe.draft_vocab_texts is not None
    quantizes, cuts, untried = recipe.draft_quantize == AUTO, size == AUTO, None
    if (quantizes or cuts) and weight_bytes < MIN_BYTES:
        untried = f"its weights take {weight_bytes / 1e6:.1f} MB, and a step is as fast in any form."
        quantizes = cuts = False
    reads = own_texts or isinstance(size, int) or layers is not None or quantizes or cuts
    texts = read_counting_texts(recipe.draft_vocab_texts) if reads else ()
    trial = DraftTrial(quantizes, cuts, texts, own_texts, parts["target"].lookahead) if quantizes or cuts else None
    cut = HeadCut(size, texts) if isinstance(size, int) else None
    return Reductions(cut, None if layers is None else LayerPrune(layers, texts), trial), untried


def _find_models(recipe: BuildRecipe) -> list[ModelSource]:
    target = _find_model(recipe, "target", recipe.target, recipe.revision)
    models = [target._replace(adapters=find_adapters(recipe))]
    if recipe.draft is not None:
        models.append(_find_model(recipe, "draft", recipe.draft, recipe.draft_revision))
    if recipe.head is not None:
        if recipe.head == MTP:  # a part of the target's own checkpoint
            models.append(target._replace(role="head", is_module=True))
        else:
            models.append(_find_model(recipe, "head", recipe.head, recipe.head_revision))
    return models


def _find_model(recipe: BuildRecipe, role: str, source: str, revision: str | None) -> ModelSource:
    from specexport.checkpoint.source import hash_source, may_hold_quantized, resolve_source, turns_by_length
    from specexport.compile.places import remember_place

    if not Path(source).expanduser().exists():  # a hub id: fetching it needs what building needs
        require_export_stack(find_backend(recipe.backend))
    found = resolve_source(source, revision, remote_code=recipe.trust_remote_code)
    digest = hash_source(found)
    remember_place(source, digest)
    named = (role, source, revision, found.name, digest, may_hold_quantized(found))
    weights = [file for file in found.files if file.suffix in (".safetensors", ".gguf")]
    others = found._replace(files=tuple(file for file in found.files if file.suffix != ".safetensors"))
    return ModelSource(
        *named,
        turns_by_length=turns_by_length(found),
        weight_bytes=sum(file.stat().st_size for file in weights),
        texts_sha256=hash_source(others),
    )


def check_tokenizer_files(plan: BuildPlan) -> None:
    """Compare vocabularies before the long work where both are plain files; they are compared again once loaded."""
    paths = [Path(model.source).expanduser() / TOKENIZER_NAME for model in plan.models]
    if "draft" in plan.parts and all(path.is_file() for path in paths):
        check_shared(*(VocabularySide(path.parent.name, path.read_bytes()) for path in paths))


def check_draft_sizes(plan: BuildPlan) -> None:
    """Compare what is to stay of the draft with what there is, before the long work where its config is a plain file.

    Where it is not, or has other names, the loaded model says it.
    """
    config = Path(plan.models[-1].source).expanduser() / "config.json"
    cut, prune = plan.reductions.cut, plan.reductions.prune
    if (cut is None and prune is None) or not config.is_file():
        return
    with contextlib.suppress(ValueError, AttributeError, OSError):  # the loader says what is wrong with a config
        values = json.loads(config.read_text(encoding="utf-8"))
        text = values.get("text_config", {})
        vocab_size, num_layers = (values.get(key) or text.get(key) for key in ("vocab_size", "num_hidden_layers"))
        if cut is not None and isinstance(vocab_size, int):
            check_head_size(cut.size, vocab_size)
        if prune is not None and isinstance(num_layers, int):
            check_num_layers(prune.num_layers, num_layers)
