"""The compiler's stages, in order, for each model of a bundle; then the bundle.

::

    plan ── per model: load ─ reference ─ trace ─ passes ─ lower ─ build ─ check ── bundle
                          (or: reuse, when the cache has the engine)

Models are built one after another, and each stage's input is freed before the next needs memory. Torch and
everything else that is heavy is imported by the stages that need it: a build with nothing to do ends before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.atomic import new_folder
from specexport.backends.base import PartRecipe
from specexport.backends.registry import find_backend
from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.bundle import check_output, find_up_to_date, make_output_exists_error, write_bundle
from specexport.compile.cache import EngineCache, open_cache
from specexport.compile.head import HeadPlan, plan_head, prepare_head
from specexport.compile.model import WHOLE, Reductions, prepare_model, require_export_stack
from specexport.compile.part import STAGES, ModelSource, Part, build_part
from specexport.compile.plan import BuildPlan, check_draft_sizes, check_tokenizer_files, make_plan
from specexport.compile.token_map import make_vocabulary_side
from specexport.host import collect_garbage_rarely, peak_memory_bytes
from specexport.progress import Progress, StageClock
from specexport.recipe import BuildRecipe, resolve_model_len
from specexport_runtime.bundle.entry import FormTrial, ModelEntry
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
        plan = make_plan(recipe)
        present = find_up_to_date(output, plan.build_key) if exists else None
        if exists and present is None and not force:
            raise make_output_exists_error(output, plan.settings)
        if present is None:
            check_tokenizer_files(plan)
            check_draft_sizes(plan)
    if present is not None and dump_passes is None:
        return BuildResult(output, present, True, (), dict(clock.seconds), {}, peak_memory_bytes())
    # Dumping passes needs every pass to run, so engines are not taken from the cache then.
    cache = open_cache() if use_cache else None
    built: dict[str, BuiltModel] = {}
    reused: list[str] = []
    backend, heads = find_backend(recipe.backend), _HeadPlanner(plan, clock)
    with new_folder(output, replace=exists) as folder:
        for model in plan.models:
            key, place = plan.engine_keys[model.role], folder / model.role
            found = (
                _restore_cached(cache, key, model, place, clock) if cache is not None and dump_passes is None else None
            )
            if found is not None:
                reused.append(model.role)
            else:
                part = plan.parts[model.role]
                reductions = _select_reductions(model, plan, built, folder)
                found = _build_uncached(part, model, place, clock, reductions, heads, dump_passes)
                # An engine that could have been checked and was not is not kept.
                if cache is not None and (found.check is not None or backend.find_unchecked_reason(part)):
                    cache.store(key, found, place)
            built[model.role] = found
        with clock.stage("bundle"):
            if plan.untried is not None:
                draft = built["draft"]
                built["draft"] = replace(draft, entry=replace(draft.entry, trial=FormTrial(0, (), plan.untried)))
            entries = {role: model.entry for role, model in built.items()}
            backend.check_bundle(plan.parts["target"], entries)
            settings = {**plan.settings, **_resolve_open_settings(plan, entries)}
            manifest = write_bundle(folder, settings=settings, build_key=plan.build_key, tools=plan.tools, models=built)
    checks = {role: model.check for role, model in built.items()}
    return BuildResult(output, manifest, False, tuple(reused), dict(clock.seconds), checks, peak_memory_bytes())


def _resolve_open_settings(plan: BuildPlan, entries: Mapping[str, ModelEntry]) -> dict[str, Any]:
    """What was open until all parts were built: a length that all support, and the form of a draft that was tried."""
    limits = [entry.max_positions for entry in entries.values()]
    limits += [entry.rope.max_len for entry in entries.values() if entry.rope]
    found: dict[str, Any] = {"max_model_len": resolve_model_len(plan.parts["target"].max_model_len, limits)}
    if plan.reductions.trial is not None:
        draft = entries["draft"]
        rows = None if draft.cut_lm_head is None else draft.cut_lm_head.num_rows
        found |= {"draft_quantize": draft.quantize, "draft_vocab_size": rows}
    return found


class _HeadPlanner:
    """A bundle's draft head, looked at when an engine is built that depends on it; its target is loaded once."""

    def __init__(self, plan: BuildPlan, clock: StageClock) -> None:
        self._parts, self._clock = plan.parts, clock
        self._sources = {model.role: model for model in plan.models}
        self._plan: HeadPlan | None = None

    def plan(self) -> "tuple[HeadPlan | None, Checkpoint | None]":
        """What is known of the head, None where there is none; and its target, for the first that asks."""
        target = None
        if "head" in self._sources and self._plan is None:
            given = self._parts["target"], self._sources["target"], self._clock
            self._plan, target = plan_head(self._sources["head"], *given)
        return self._plan, target


def _select_reductions(
    model: ModelSource, plan: BuildPlan, built: Mapping[str, BuiltModel], folder: Path
) -> Reductions:
    """What a model is cut down by: only a draft, whose LM head keeps what ends a text of the target."""
    if model.role != "draft":
        return WHOLE
    (cut, prune, trial, _), target = plan.reductions, built["target"]
    if cut is not None:
        cut = cut._replace(ends=target.eos_token_ids)
    if trial is not None:
        trial = trial._replace(target=target, folder=folder / "target")
    return Reductions(
        cut, prune, trial, make_vocabulary_side(target, target.entry.source.name, target.entry.vocab_size)
    )


def _restore_cached(
    cache: EngineCache, key: str, model: ModelSource, folder: Path, clock: StageClock
) -> BuiltModel | None:
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


def _build_uncached(
    recipe: PartRecipe,
    model: ModelSource,
    folder: Path,
    clock: StageClock,
    reductions: Reductions,
    heads: _HeadPlanner,
    dump: Path | None,
) -> BuiltModel:
    require_export_stack(find_backend(recipe.backend))
    import torch  # noqa: F401 - what it brings is there from here on

    with collect_garbage_rarely():
        part = _prepare(recipe, model, folder, clock, reductions, heads)
        return build_part(part, dump / model.role if dump is not None else None)


def _prepare(
    recipe: PartRecipe, model: ModelSource, folder: Path, clock: StageClock, reductions: Reductions, heads: _HeadPlanner
) -> Part:
    plan, target = heads.plan()
    if plan is not None and model.role == "head":
        del target  # from here on its weights are read from its files
        return prepare_head(recipe, model, plan, folder, clock)
    features = None if plan is None else plan.request
    return prepare_model(recipe, model, folder, clock, reductions=reductions, features=features, checkpoint=target)
