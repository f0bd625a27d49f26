"""From a bundle folder to the parts of an engine: executors, drafting defaults, cost curves, tune profile."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import as_gated
from specexport_runtime.executors.open import backend_of, backends_with, open_executor
from specexport_runtime.lookahead.base import DraftLength
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.drafting import Obstacle
from specexport_runtime.watch.trace import RoundTracer

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.costs.tune_profile import TuneProfile


from pathlib import Path
from typing import NamedTuple

from specexport_runtime.bundle.opened import Bundle, load_bundle
from specexport_runtime.costs.curves import CostCurves, load_or_measure
from specexport_runtime.costs.tune_profile import TuneProfile, load_profile
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor
from specexport_runtime.requests.checks import check_match_length
from specexport_runtime.requests.drafting import DraftDefaults
from specexport_runtime.requests.speculative_config import parse_speculative_config


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


def load_engine_parts(path: Path, options: EngineOptions) -> EngineParts:
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
            executors[role] = open_executor(
                bundle,
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


def _draft_defaults(bundle: Bundle, options: EngineOptions) -> DraftDefaults:
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
    bundle: Bundle, defaults: DraftDefaults, executors: Mapping[str, Executor], options: EngineOptions
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
    given = None if options.tune_profile is None else Path(options.tune_profile)
    profile = load_profile(given, bundle=bundle.folder, build_key=bundle.manifest.build_key)
    return parts._replace(curves=curves, profile=profile)


MAX_BACKLOG = 32  # tokens that a draft model catches up on within a drafting step: several copied drafts in a row


def make_drafters(
    target: ModelRunner, draft: ModelRunner | None, *, vocab_size: int, match_length: int
) -> dict[str, Drafter]:
    """Every drafter that an engine has, by the names that draft plans use, cheap ones first.

    Args:
        target: the target; one with gates can draft with its own layers.
        draft: the draft model, if there is one.
        vocab_size: ids below it may be drafted.
        match_length: fewest tokens that lookup must match.
    """
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter(match_length=match_length)}
    if draft is not None:
        drafters["draft-model"] = ModelDrafter(draft, vocab_size=vocab_size, max_backlog=MAX_BACKLOG)
    if as_gated(target.executor) is not None and target.unpad_kv and target.unpad_input:
        drafters["self"] = SelfDrafter(target, vocab_size=vocab_size)
    return drafters


def make_decoder(
    target: ModelRunner,
    drafters: Mapping[str, Drafter],
    curves: "CostCurves | None",
    profile: "TuneProfile | None",
    lookahead: int,
    max_num_batched_tokens: int,
) -> Decoder:
    """The decoder of an engine.

    Args:
        target: the target.
        drafters: see :func:`make_drafters`.
        curves: what steps cost, to choose K by; None for no choice.
        profile: bounds the K that is chosen.
        lookahead: largest K.
        max_num_batched_tokens: most tokens of one step.
    """
    lengths: DraftLength | None = None
    if curves is not None:
        from specexport_runtime.lookahead.goodput import GoodputLength

        lengths = GoodputLength(curves, lookahead, profile)
    return Decoder(
        target,
        ChainDrafter(drafters, lengths),
        max_num_batched_tokens=max_num_batched_tokens,
        lengths=lengths,
        tracer=RoundTracer(curves),
    )


def check_empty(decoder: Decoder, draft: ModelRunner | None) -> None:
    """Assert that nothing of any request is left in an engine.

    Args:
        decoder: its decoder.
        draft: its draft model, if there is one.

    Raises:
        SpecexportError: something is.
    """
    decoder.check()
    if decoder.has_work:
        raise SpecexportError(f"nothing was asked for, and there is {decoder.load}.")
    if draft is not None:
        draft.kv.check()
        if draft.kv.num_committed:
            raise SpecexportError(f"{draft.kv.num_committed} cache entries of the draft model were left behind.")


def self_draft_obstacle(target: ModelRunner, entry: ModelEntry | None = None) -> Obstacle | None:
    """Why a target cannot draft with its own layers; None if it can.

    Args:
        target: the target.
        entry: what the manifest says of it, if it comes from a bundle.
    """
    if not (target.unpad_kv and target.unpad_input):
        return Obstacle("drafter 'self' needs unpadded KV and unpadded input.", "leave unpad_kv and unpad_input on.")
    if as_gated(target.executor) is not None:
        return None
    if entry is None:
        return Obstacle("drafter 'self' needs a target whose layers can be switched off.", "use another drafter.")
    if entry.gate_obstacle is not None:
        return Obstacle(
            f"drafter 'self': layers of this target ({entry.architecture}) cannot be skipped exactly: "
            f"{entry.gate_obstacle.rstrip('.')}.",
            "use drafter 'lookup', or build with --draft.",
        )
    backend = backend_of(entry.backend)
    if backend is None or not backend.has_gates:
        usable = backends_with("has_gates")
        return Obstacle(
            f"drafter 'self' needs backend {usable}; this target was built for {entry.backend}.",
            f"build it with --backend {usable}.",
        )
    return Obstacle(
        "drafter 'self': this bundle was built before targets could draft with their own layers.", "build it again."
    )
