"""From a bundle folder to the parts of an engine: executors, drafters, drafting defaults, what steps cost."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from specexport_runtime.bundle.arrays import CutHead, MaskInput, load_cut_head, load_mask
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.opened import Bundle, load_bundle
from specexport_runtime.costs.curves import CostCurves, KnownCosts, load_costs
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.costs.prior import DRAFTER_OF, prior_costs
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.drafters.base import Drafter, DrafterFactory, DrafterParts, DraftOffer, Obstacle
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.head_kind import head_obstacle
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.drafters.suffix_open import KeptSuffixes, open_suffixes
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors import operators
from specexport_runtime.executors.base import Executor, as_gated
from specexport_runtime.executors.open import backend_of, backends_with, open_executor
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.checks import budget_of, check_adapter, check_match_length
from specexport_runtime.requests.drafting import Abilities, DraftDefaults, stage_names
from specexport_runtime.requests.speculative_config import parse_speculative_config
from specexport_runtime.sequences.records import FORCED
from specexport_runtime.watch.trace import RoundTracer


class EngineParts(NamedTuple):
    """The parts of an engine."""

    bundle: Bundle
    target: Executor
    draft: Executor | None  # the draft model's; None without
    defaults: DraftDefaults  # how to draft for requests that do not say
    self_obstacle: Obstacle | None  # why the target cannot draft with its own layers; None if it can
    costs: KnownCosts | None = None  # of steps; None unless the engine is to be adaptive
    suffixes: KeptSuffixes | None = None  # what was generated earlier
    draft_head: CutHead | None = None  # token ids of the LM head of draft or head; None where it has all
    head: Executor | None = None  # the draft head's; None without
    mask: MaskInput | None = None  # for unknown tokens, of a head that drafts all tokens in one step


def load_engine_parts(path: Path, options: EngineOptions) -> EngineParts:
    """Open a bundle, load its engines, and what an adaptive engine chooses K by.

    ``BundleError``: no bundle, or a file is missing, altered or damaged. ``IncompatibleError``: another schema, ABI or
    backend, or a GPU or memory that the engines do not fit. ``InvalidRequestError``: an option that cannot be honoured.
    ``MissingDependencyError``: the backend's runtime is not installed.
    """
    bundle = load_bundle(
        path,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        prefix_rows=options.prefix_rows,
    )
    backend = backend_of(bundle.manifest.models["target"].backend)
    if options.prefix_rows and (backend is None or not backend.copies_rows or not options.enable_prefix_caching):
        raise InvalidRequestError(
            f"prefix_rows is {options.prefix_rows}, and this engine keeps no prefixes.",
            f"leave it out; prefixes need backend {backends_with('copies_rows')} and enable_prefix_caching.",
        )
    budget = budget_of(options.kv_cache_memory_bytes)
    if budget is not None and (backend is None or not backend.gives_back or not options.unpad_kv):
        raise InvalidRequestError(
            f"kv_cache_memory_bytes is {options.kv_cache_memory_bytes}, and this engine cannot give memory of its KV "
            "cache back.",
            f"leave it out; a budget needs backend {backends_with('gives_back') or 'ort-cpu'} on Linux, and unpad_kv.",
        )
    check_adapter(options.lora, bundle.manifest.models["target"].chosen_adapters)
    defaults = _draft_defaults(bundle, options)
    drafting = [bundle.manifest.models[role] for role in ("draft", "head") if role in bundle.manifest.models]
    lm_head = load_cut_head(bundle.folder, drafting[0]) if drafting else None
    mask = load_mask(bundle.folder, drafting[0]) if drafting else None
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
                share_threads=options.share_threads,
                gives_back=budget is not None,
                target=executors.get("target"),
            )
        return _with_costs(bundle, defaults, executors, options)._replace(draft_head=lm_head, mask=mask)
    except BaseException:
        for executor in executors.values():  # a GPU's memory must not wait for the garbage collector
            executor.close()
        raise


def _draft_defaults(bundle: Bundle, options: EngineOptions) -> DraftDefaults:
    defaults = DraftDefaults()
    if options.speculative_config is not None:
        models = bundle.manifest.models
        sources = {DRAFTER_OF[role]: entry.source.name for role, entry in models.items() if role in DRAFTER_OF}
        defaults = parse_speculative_config(
            options.speculative_config, sources=sources, built=bundle.manifest.lookahead
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

    target, draft, head = executors["target"], executors.get("draft"), executors.get("head")
    obstacle = self_draft_obstacle(runner(target), bundle.manifest.models["target"])
    offer = DraftOffer(draft is not None, obstacle, head_obstacle(runner(target), has_head=head is not None))
    if defaults.drafter not in (None, "none"):
        stage_names(defaults.drafter, describe_abilities(offer, {}, lookahead=bundle.manifest.lookahead))
    suffixes = open_suffixes(
        bundle.tokenizer,
        tokenizer_sha256=bundle.manifest.vocabulary.tokenizer_sha256,
        vocab_size=bundle.manifest.models["target"].vocab_size,
        memory_mb=options.suffix_memory_mb,
        corpus=options.corpus,
        file=options.suffix_file,
    )
    parts = EngineParts(bundle, target, draft, defaults, obstacle, suffixes=suffixes, head=head)
    if not options.adaptive and "auto" not in (defaults.drafter, defaults.lookahead):
        return parts
    backend = backend_of(bundle.manifest.models["target"].backend)
    kernels = None if backend is not None and backend.on_gpu else operators.kernels()
    circumstances = {
        "bundle": bundle.manifest.build_key,
        "kernels": kernels,
        "threads": options.num_threads,
        "spin": options.spin,
        "cuda_graphs": options.cuda_graphs,
        "padded": [not options.unpad_kv, not options.unpad_input],
    }
    return parts._replace(costs=load_costs(prior_costs(bundle.manifest.models, kernels=kernels), circumstances))


def make_drafters(
    parts: DrafterParts, offer: DraftOffer, factories: Mapping[str, DrafterFactory] | None = None
) -> dict[str, Drafter]:
    """Every drafter that an engine has, by the names that draft plans use; ``factories`` are the user's own, by name.

    ``InvalidRequestError`` if a name is taken or has a slash, or a factory made something that is no drafter.
    """
    drafters: dict[str, Drafter] = {}
    drafters |= {name: kind.make(parts) for name, kind in KINDS.items() if kind.obstacle(offer) is None}
    for name, factory in (factories or {}).items():
        if name in KINDS or name in (FORCED, "chained", "auto", "none"):
            raise InvalidRequestError(f"a drafter of the name {name!r} is there already.", "give yours another name.")
        if "/" in name:  # learned costs have names behind slashes
            raise InvalidRequestError(f"a drafter's name {name!r} has a slash.", "give yours another name.")
        made = factory(parts)
        missing = [part for part in _DRAFTER_PARTS if not hasattr(made, part)]
        if missing:
            raise InvalidRequestError(
                f"what the factory of drafter {name!r} made has no {missing[0]!r}.", "see `drafters.base.Drafter`."
            )
        drafters[name] = made
    return drafters


_DRAFTER_PARTS = ("traits", "engine_seconds", "propose", "commit", "move_row", "release_row")


def weigh_drafters(drafters: Mapping[str, Drafter], curves: CostCurves | None) -> dict[str, WeighedDrafter]:
    """The drafters for which K can be chosen, with what their steps cost; none without curves."""
    if curves is None:
        return {}
    weighed = {}
    for name, drafter in drafters.items():
        cost = drafter.cost(curves) if hasattr(drafter, "cost") else None
        if drafter.traits.is_free or cost is not None:
            weighed[name] = WeighedDrafter(drafter.traits, cost)
    return weighed


def describe_abilities(
    offer: DraftOffer,
    drafters: Mapping[str, Drafter],
    *,
    lookahead: int,  # largest K
    weighed: Mapping[str, WeighedDrafter] | None = None,  # see :func:`weigh_drafters`
    num_layers: int = 0,  # of a target that can draft with its own layers
    fixed_layers: bool = False,  # its engine fixes which of them a draft leaves out
) -> Abilities:
    """What requests may ask of an engine."""
    obstacles = {name: kind.obstacle(offer) for name, kind in KINDS.items()}
    return Abilities(
        {name: kind.traits for name, kind in KINDS.items()} | {name: each.traits for name, each in drafters.items()},
        {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None},
        lookahead,
        frozenset(weighed or ()),
        num_layers,
        fixed_layers,
    )


def make_decoder(
    target: ModelRunner,
    drafters: Mapping[str, Drafter],  # see :func:`make_drafters`
    weighed: Mapping[str, WeighedDrafter],  # see :func:`weigh_drafters`
    curves: CostCurves | None,  # what steps cost, to choose K by; None for no choice
    *,
    lookahead: int,  # largest K
    max_num_batched_tokens: int,  # of one step
    learned: LearnedCosts | None = None,  # mends the curves by what rounds take; None takes them as they are
    max_num_seqs: int | None = None,  # sequences that run at a time; None takes all rows of the target
    reuses_prefixes: bool = False,  # let sequences go on from what cache rows have of their prompts
    pace: Pace | None = None,  # times that are to be kept; None for none
    memory: MemoryBudget | None = None,  # bounds the memory of the cache rows; None: nothing but their number does
) -> Decoder:
    """The decoder of an engine."""
    lengths = None
    if curves is not None:
        lengths = Controller(curves, lookahead, drafters=weighed, learned=learned)
    return Decoder(
        target,
        ChainDrafter(drafters, lengths),
        max_num_seqs=max_num_seqs,
        reuses_prefixes=reuses_prefixes,
        pace=pace,
        memory=memory,
        max_num_batched_tokens=max_num_batched_tokens,
        lengths=lengths,
        tracer=RoundTracer(curves, learned),
    )


def check_empty(decoder: Decoder, drafting: Mapping[str, ModelRunner]) -> None:
    """Assert that nothing of any request is left in an engine; ``drafting`` has its models by role."""
    decoder.check()
    if decoder.has_work:
        raise SpecexportError(f"nothing was asked for, and there is {decoder.load}.")
    for role, runner in drafting.items():
        runner.kv.check()
        if runner.kv.num_committed:
            raise SpecexportError(f"{runner.kv.num_committed} cache entries of the {role} were left behind.")


def self_draft_obstacle(target: ModelRunner, entry: ModelEntry | None = None) -> Obstacle | None:
    """Why a target cannot draft with its own layers; None if it can. ``entry`` is None if it comes from no bundle."""
    if not (target.unpad_kv and target.unpad_input):
        return Obstacle("drafter 'self' needs unpadded KV and unpadded input.", "leave unpad_kv and unpad_input on.")
    if as_gated(target.executor) is not None:
        return None
    if entry is None:
        return Obstacle("drafter 'self' needs a target whose layers can be switched off.", "use another drafter.")
    if (why := entry.engine.gates.obstacle) is not None:
        return Obstacle(
            f"drafter 'self': layers of this target ({entry.source.architecture}) cannot be skipped exactly: "
            f"{why.rstrip('.')}.",
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
        "drafter 'self': this target was built without layers that can be left out.",
        "build it again with --self-draft.",
    )
