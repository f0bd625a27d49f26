"""The compiler's stages, in order, for each model of a bundle; then the bundle.

::

    plan ── per model: load ─ reference ─ trace ─ passes ─ lower ─ build ─ check ── bundle
                          (or: reuse, when the cache has the engine)

Models are built one after another, and each stage's input is freed before the next needs memory. Torch and
everything else that is heavy is imported by the stages that need it: a build with nothing to do ends before.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.atomic import new_folder
from specexport.backends.registry import find_backend
from specexport.compile.built import TOKENIZER_NAME, BuiltModel, EngineCheck
from specexport.compile.bundle import check_output, find_up_to_date, refuse_to_replace, write_bundle
from specexport.compile.cache import EngineCache, open_cache
from specexport.compile.check import check_obstacle
from specexport.compile.draft_cuts import (
    HeadCut,
    LayerPrune,
    check_head_size,
    check_num_layers,
    hash_texts,
    read_counting_texts,
)
from specexport.compile.draft_trial import LEAST_BYTES, DraftTrial
from specexport.compile.fingerprint import BUNDLE_ROOT, ENGINE_ROOT, HEAD_ROOT, hash_sources, hash_values, tool_versions
from specexport.compile.head import HeadPlan, plan_head, prepare_head
from specexport.compile.lora import find_adapters
from specexport.compile.model import WHOLE, Reductions, prepare_model, reads_texts, require_export_stack
from specexport.compile.part import STAGES, ModelSource, Part, build_part
from specexport.compile.token_map import Side, check_shared, side_of
from specexport.host import peak_memory_bytes, seldom_collected
from specexport.progress import Progress, StageClock
from specexport.recipe import AUTO, FULL, MTP, BuildRecipe, resolve_recipe, settle_quantization
from specexport_runtime.bundle.entry import FormTrial
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.bundle.manifest import Manifest

if TYPE_CHECKING:
    from specexport.checkpoint.loaded import Checkpoint

_NUM_COMMON_STAGES = 2  # plan and bundle


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        path: the bundle.
        manifest: its manifest.
        up_to_date: nothing had changed, so nothing was done.
        reused: roles whose engine came from the cache.
        seconds: time of each stage, ``"role.stage"`` or ``"stage"``.
        checks: what the check of each model found; None if it was not checked.
        peak_memory_bytes: most resident memory of this process so far.
    """

    path: Path
    manifest: Manifest
    up_to_date: bool
    reused: tuple[str, ...]
    seconds: Mapping[str, float]
    checks: Mapping[str, EngineCheck | None]
    peak_memory_bytes: int

    @property
    def max_abs_errors(self) -> Mapping[str, float | None]:
        """Largest logit difference that the check of each model found; None if it was not checked."""
        return {role: None if check is None else check.max_abs_error for role, check in self.checks.items()}

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """Every file of the bundle but the manifest, with hash and size in bytes."""
        return self.manifest.files


@dataclass(frozen=True)
class _Plan:
    """What is known before any model is loaded."""

    models: tuple[ModelSource, ...]  # the checkpoint of each role, target first
    engine_keys: Mapping[str, str]  # cache key of each role's engine
    build_key: str  # hash of all that decides the bundle
    tools: Mapping[str, str]  # versions
    reductions: Reductions  # what the draft is cut down by


def build_bundle(
    recipe: BuildRecipe,
    *,
    progress: Progress | None = None,
    dump_passes: Path | None = None,
    force: bool = False,
    use_cache: bool = True,
) -> BuildResult:
    """Build the bundle of a recipe, or find that it is there already.

    Args:
        recipe: what to build.
        progress: called as each stage begins.
        dump_passes: folder for the graph after each pass, one subfolder a model; implies building every model anew.
        force: replace a bundle that stands in the way.
        use_cache: take engines from the cache and put new ones there.

    Returns:
        the bundle and what was done.

    Raises:
        UserInputError: a checkpoint, the vocabularies, the output folder or the disk do not allow it; one of its
            subclasses says which.
        CheckFailedError: an engine's logits differ from eager transformers.
    """
    output = Path(recipe.output).expanduser()
    num_models = 1 + (recipe.draft is not None) + (recipe.head is not None)
    num_steps = len(STAGES) * num_models + _NUM_COMMON_STAGES + (recipe.head is not None)
    clock = StageClock(progress, num_steps=num_steps)
    with clock.stage("plan"):
        exists = check_output(output, force=force)
        backend = find_backend(recipe.backend)
        recipe = replace(recipe, **backend.settle(recipe))
        models = _find_models(recipe)
        recipe, untried = _leave_small_ones(recipe, models)
        quantized = {model.role: model.quantized for model in models}
        simplest = settle_quantization(_without_trial(recipe), quantized=quantized)
        recipe = settle_quantization(recipe, quantized=quantized)
        plan = _make_plan(recipe, models)
        present = find_up_to_date(output, plan.build_key) if exists else None
        if exists and present is None and not force:
            raise refuse_to_replace(output, recipe)
        if present is None:
            _check_tokenizer_files(plan)
            _check_draft_sizes(plan)
    if present is not None and dump_passes is None:
        return BuildResult(output, present, True, (), dict(clock.seconds), {}, peak_memory_bytes())
    # Dumping passes needs every pass to run, so engines are not taken from the cache then.
    cache = open_cache() if use_cache else None
    built: dict[str, BuiltModel] = {}
    reused: list[str] = []
    heads = _Heads(simplest, plan.models, clock)
    with new_folder(output, replace=exists) as folder:
        for model in plan.models:
            key, place = plan.engine_keys[model.role], folder / model.role
            found = _reuse(cache, key, model, place, clock) if cache is not None and dump_passes is None else None
            if found is not None:
                reused.append(model.role)
            else:
                reductions = _reductions_of(model, plan, built, folder)
                found = _build_anew(simplest, model, place, clock, reductions, heads, dump_passes)
                # An engine that could have been checked and was not is not kept.
                if cache is not None and (found.check is not None or check_obstacle(replace(simplest, check=FULL))):
                    cache.store(key, found, place)
            built[model.role] = found
        with clock.stage("bundle"):
            if untried is not None:
                draft = built["draft"]
                built["draft"] = replace(draft, entry=replace(draft.entry, trial=FormTrial(0, (), untried)))
            resolved = _resolve(simplest, built, tried=plan.reductions.trial is not None)
            backend.check_bundle(resolved, {role: model.entry for role, model in built.items()})
            manifest = write_bundle(folder, recipe=resolved, build_key=plan.build_key, tools=plan.tools, models=built)
    checks = {role: model.check for role, model in built.items()}
    return BuildResult(output, manifest, False, tuple(reused), dict(clock.seconds), checks, peak_memory_bytes())


def _resolve(recipe: BuildRecipe, built: Mapping[str, BuiltModel], *, tried: bool) -> BuildRecipe:
    """The recipe with lengths that all parts support, and with the form of a draft that was tried."""
    entries = [model.entry for model in built.values()]
    limits = [each.max_positions for each in entries] + [each.rope.max_len for each in entries if each.rope]
    resolved = resolve_recipe(recipe, limits)
    if not tried:
        return resolved
    entry = built["draft"].entry
    rows = None if entry.cut_lm_head is None else entry.cut_lm_head.num_rows
    return replace(resolved, draft_quantize=entry.quantize, draft_vocab_size=rows)


def _without_trial(recipe: BuildRecipe) -> BuildRecipe:
    """The recipe with what a draft is without one: its file's own weights, and a whole LM head."""
    left: dict[str, Any] = {key: None for key in ("draft_quantize", "draft_vocab_size") if getattr(recipe, key) == AUTO}
    if left and recipe.draft_layers is None and not isinstance(recipe.draft_vocab_size, int):
        left["draft_vocab_texts"] = None  # nothing else reads them
    return replace(recipe, **left)


def _leave_small_ones(recipe: BuildRecipe, models: list[ModelSource]) -> tuple[BuildRecipe, str | None]:
    """The recipe without a trial of a draft that is so small that no form makes it faster; and why."""
    size = models[-1].weight_bytes
    if AUTO not in (recipe.draft_quantize, recipe.draft_vocab_size) or size >= LEAST_BYTES:
        return recipe, None
    if recipe.draft_vocab_texts is not None:
        read_counting_texts(recipe.draft_vocab_texts)  # what is wrong with them is said all the same
    return _without_trial(recipe), f"its weights take {size / 1e6:.1f} MB, and a step is as fast in any form."


def _find_models(recipe: BuildRecipe) -> list[ModelSource]:
    target = _find_model(recipe, "target", recipe.target, recipe.revision)
    models = [target._replace(adapters=find_adapters(recipe))]
    if recipe.draft is not None:
        models.append(_find_model(recipe, "draft", recipe.draft, recipe.draft_revision))
    if recipe.head is not None:
        if recipe.head == MTP:  # a part of the target's own checkpoint
            models.append(target._replace(role="head"))
        else:
            models.append(_find_model(recipe, "head", recipe.head, recipe.head_revision))
    return models


class _Heads:
    """A bundle's draft head, looked at when an engine is built that depends on it; its target is loaded once."""

    def __init__(self, recipe: BuildRecipe, models: tuple[ModelSource, ...], clock: StageClock) -> None:
        self._recipe, self._clock = recipe, clock
        self._sources = {model.role: model for model in models}
        self._plan: HeadPlan | None = None

    def plan(self) -> "tuple[HeadPlan | None, Checkpoint | None]":
        """What is known of the head, None where there is none; and its target, for the first that asks."""
        target = None
        if "head" in self._sources and self._plan is None:
            given = self._sources["head"], self._sources["target"], self._clock
            self._plan, target = plan_head(self._recipe, *given)
        return self._plan, target


def _make_plan(recipe: BuildRecipe, models: list[ModelSource]) -> _Plan:
    tools = tool_versions()
    # "auto" resolves the same way whenever all of this is the same.
    common: dict[str, Any] = {
        "backend": recipe.backend,
        "dtype": recipe.dtype,
        "trust_remote_code": recipe.trust_remote_code,
        "full_check": recipe.check == FULL,
        "sources": hash_sources(ENGINE_ROOT),
        "tools": tools,
    }
    backend = find_backend(recipe.backend)
    common |= backend.engine_key(recipe)
    cut = prune = trial = None
    reduced: dict[str, Any] = {}
    # With the draft's own files, which are in the key, all that decides which ids and which layers stay.
    tries = recipe.draft_quantize == AUTO, recipe.draft_vocab_size == AUTO
    reads = recipe.draft_vocab_size is not None or recipe.draft_layers is not None or any(tries)
    texts = read_counting_texts(recipe.draft_vocab_texts) if reads else ()
    if isinstance(recipe.draft_vocab_size, int):
        cut = HeadCut(recipe.draft_vocab_size, texts)
        reduced["head"] = {"size": cut.size, "texts": cut.texts_sha256, "target": models[0].sha256}
    if recipe.draft_layers is not None:
        prune = LayerPrune(recipe.draft_layers, texts)
        reduced["layers"] = {"size": prune.num_layers, "texts": prune.texts_sha256}
    if any(tries):
        trial = DraftTrial(*tries, texts, recipe.draft_vocab_texts is not None, recipe.lookahead)
        reduced["trial"] = [*tries, hash_texts(texts), trial.own_texts, trial.lookahead]
    # A target gives what its head reads; a head may have its embedding from its target.
    beside = {}
    if recipe.head is not None:
        hashes = {model.role: model.sha256 for model in models} | {"head_sources": hash_sources(HEAD_ROOT)}
        sides = {"target": ("head", "head_sources"), "head": ("target", "head_sources")}
        beside = {role: {name: hashes[name] for name in names} for role, names in sides.items()}
        beside["head"]["role"] = "head"
    keys: dict[str, str] = {}
    for model in models:
        keys[model.role] = hash_values(
            common
            | {"checkpoint": model.sha256, "quantize": recipe.quantization_of(model.role)}
            | ({"role": model.role} if backend.draft_differs else {})
            | _adapters_key(recipe, model)
            | ({"texts": hash_texts(read_counting_texts(None))} if reads_texts(recipe, model.role) else {})
            | ({"rope_len": recipe.max_model_len} if model.turns_by_length else {})
            | (reduced if model.role == "draft" else {})
            | ({"writer": keys["target"]} if model.role == "draft" and trial is not None else {})
            | ({"beside": models[0].texts_sha256} if model.role == "draft" else {})
            | beside.get(model.role, {})
        )
    build_key = hash_values(
        {
            "recipe": recipe.settings(),
            "engines": keys,
            "names": {model.role: model.name for model in models},
            "sources": hash_sources(BUNDLE_ROOT),
        }
    )
    return _Plan(tuple(models), keys, build_key, tools, Reductions(cut, prune, trial))


def _adapters_key(recipe: BuildRecipe, model: ModelSource) -> dict[str, Any]:
    """What of a model's engine its adapters decide; nothing without any."""
    if not model.adapters:
        return {}
    hashes = [adapter.sha256 for adapter in model.adapters]
    return {"adapters": hashes, "chooses_adapters": recipe.chooses_adapters}


def _reductions_of(model: ModelSource, plan: _Plan, built: Mapping[str, BuiltModel], folder: Path) -> Reductions:
    """What a model is cut down by: only a draft, whose LM head keeps what ends a text of the target."""
    if model.role != "draft":
        return WHOLE
    (cut, prune, trial, _), target = plan.reductions, built["target"]
    if cut is not None:
        cut = cut._replace(ends=target.eos_token_ids)
    if trial is not None:
        trial = trial._replace(target=target, folder=folder / "target")
    return Reductions(cut, prune, trial, side_of(target, target.entry.source.name, target.entry.vocab_size))


def _find_model(recipe: BuildRecipe, role: str, source: str, revision: str | None) -> ModelSource:
    from specexport.checkpoint.source import hash_source, holds_quantized, resolve_source, turns_by_length
    from specexport.compile.places import remember_place

    if not Path(source).expanduser().exists():  # a hub id: fetching it needs what building needs
        require_export_stack(find_backend(recipe.backend))
    found = resolve_source(source, revision, remote_code=recipe.trust_remote_code)
    digest = hash_source(found)
    remember_place(source, digest)
    named = (role, source, revision, found.name, digest, holds_quantized(found))
    weights = [file for file in found.files if file.suffix in (".safetensors", ".gguf")]
    others = found._replace(files=tuple(file for file in found.files if file.suffix != ".safetensors"))
    return ModelSource(
        *named,
        turns_by_length=turns_by_length(found),
        weight_bytes=sum(file.stat().st_size for file in weights),
        texts_sha256=hash_source(others),
    )


def _reuse(cache: EngineCache, key: str, model: ModelSource, folder: Path, clock: StageClock) -> BuiltModel | None:
    with clock.stage("cache", model.role, steps=0):
        built = cache.restore(key, folder)
    if built is None:
        return None
    clock.skip(len(STAGES))
    # The same checkpoint may be known by another name now, and so may its adapters.
    adapters = [
        known._replace(name=adapter.name, source=adapter.source)
        for known, adapter in zip(built.entry.adapters, model.adapters, strict=True)
    ]
    source = built.entry.source._replace(name=model.name)
    return replace(built, entry=replace(built.entry, source=source, adapters=tuple(adapters)))


def _build_anew(
    recipe: BuildRecipe,
    model: ModelSource,
    folder: Path,
    clock: StageClock,
    reductions: Reductions,
    heads: _Heads,
    dump: Path | None,
) -> BuiltModel:
    require_export_stack(find_backend(recipe.backend))
    import torch  # noqa: F401 - what it brings is there from here on

    with seldom_collected():
        part = _prepare(recipe, model, folder, clock, reductions, heads)
        return build_part(part, dump / model.role if dump is not None else None)


def _prepare(
    recipe: BuildRecipe, model: ModelSource, folder: Path, clock: StageClock, reductions: Reductions, heads: _Heads
) -> Part:
    plan, target = heads.plan()
    if plan is not None and model.role == "head":
        del target  # from here on its weights are read from its files
        return prepare_head(model, plan, folder, clock)
    features = None if plan is None else plan.request
    return prepare_model(recipe, model, folder, clock, reductions=reductions, features=features, checkpoint=target)


def _check_tokenizer_files(plan: _Plan) -> None:
    """Compare vocabularies before the long work where both are plain files; they are compared again once loaded."""
    paths = [Path(model.source).expanduser() / TOKENIZER_NAME for model in plan.models]
    if plan.models[-1].role == "draft" and all(path.is_file() for path in paths):
        check_shared(*(Side(path.parent.name, path.read_bytes()) for path in paths))


def _check_draft_sizes(plan: _Plan) -> None:
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
