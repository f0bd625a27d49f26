"""From a bundle folder to the parts of an engine: executors, drafting defaults, cost curves, tune profile."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.batch import ModelRunner
from specexport_runtime.bundle import Bundle, load_bundle
from specexport_runtime.cost_curves import CostCurves, load_or_measure
from specexport_runtime.engine_parts import self_draft_obstacle
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor
from specexport_runtime.requests import DraftDefaults, Obstacle, check_match_length
from specexport_runtime.speculative_config import parse_speculative_config
from specexport_runtime.tune_profile import TuneProfile, load_profile


class LoadOptions(NamedTuple):
    """How to load a bundle; see ``SpecEngine.load``."""

    max_num_seqs: int
    max_model_len: int | None
    num_threads: int | None
    spin: bool
    unpad_kv: bool
    unpad_input: bool
    cuda_graphs: bool | None
    adaptive: bool
    tune_profile: Path | None
    match_length: int | None
    speculative_config: Mapping[str, Any] | None
    prepacked: bool = True


class EngineParts(NamedTuple):
    """The parts of an engine.

    Attributes:
        bundle: the opened bundle.
        target: the target's executor.
        draft: the draft model's, if there is one.
        defaults: how to draft for requests that do not say.
        self_obstacle: why the target cannot draft with its own layers; None if it can.
        curves: what steps cost; None unless the engine is to be adaptive.
        profile: the tune profile, if there is one that fits.
    """

    bundle: Bundle
    target: Executor
    draft: Executor | None
    defaults: DraftDefaults
    self_obstacle: Obstacle | None
    curves: CostCurves | None = None
    profile: TuneProfile | None = None


def load_engine_parts(path: Path, options: LoadOptions) -> EngineParts:
    """Open a bundle, load its engines, and what an adaptive engine chooses K by.

    Raises:
        BundleError: the folder is no bundle, or a file is missing or altered.
        IncompatibleError: another schema, ABI or backend, or a GPU or memory that the engines do not fit.
        InvalidRequestError: a limit is out of range, or a default that this bundle cannot honour.
        MissingDependencyError: the runtime of the bundle's backend is not installed.
    """
    bundle = load_bundle(path, max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs)
    defaults = _draft_defaults(bundle, options)
    executors: dict[str, Executor] = {}
    try:
        for role in sorted(bundle.manifest.models, reverse=True):  # the target first: a draft takes what it leaves
            executors[role] = bundle.make_executor(
                role,
                num_threads=options.num_threads,
                spin=options.spin,
                unpad_kv=options.unpad_kv,
                cuda_graphs=options.cuda_graphs,
                prepacked=options.prepacked,
            )
        return _with_costs(bundle, defaults, executors, options)
    except BaseException:
        for executor in executors.values():  # a GPU's memory must not wait for the garbage collector
            executor.close()
        raise


def _draft_defaults(bundle: Bundle, options: LoadOptions) -> DraftDefaults:
    defaults = DraftDefaults()
    if options.speculative_config is not None:
        draft = bundle.manifest.models.get("draft")
        source = None if draft is None else draft.source
        defaults = parse_speculative_config(
            options.speculative_config, draft_source=source, built=bundle.manifest.lookahead
        )
    if options.match_length is not None:
        defaults = defaults._replace(match_length=options.match_length)
    check_match_length(defaults.match_length)
    return defaults


def _with_costs(
    bundle: Bundle, defaults: DraftDefaults, executors: Mapping[str, Executor], options: LoadOptions
) -> EngineParts:
    def runner(executor: Executor) -> ModelRunner:
        return ModelRunner(executor, unpad_kv=options.unpad_kv, unpad_input=options.unpad_input)

    target, draft = executors["target"], executors.get("draft")
    obstacle = self_draft_obstacle(runner(target), bundle.manifest.models["target"])
    needs_layers = defaults.drafter == "self" or (defaults.drafter == "chained" and draft is None)
    if needs_layers and obstacle is not None:
        raise InvalidRequestError(*obstacle)
    parts = EngineParts(bundle, target, draft, defaults, obstacle)
    if not options.adaptive and defaults.lookahead != "auto":
        return parts
    curves = load_or_measure(
        runner(target),
        None if draft is None else runner(draft),
        bundle_key=bundle.manifest.build_key,
        max_rows=bundle.max_num_seqs,
        lookahead=bundle.manifest.lookahead,
        num_threads=options.num_threads,
        spin=options.spin,
    )
    profile = load_profile(options.tune_profile, bundle=bundle.folder, build_key=bundle.manifest.build_key)
    return parts._replace(curves=curves, profile=profile)
