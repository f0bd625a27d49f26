"""The parts of an engine, and how they are put together to one that decodes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.abi import kv_slack
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.token_map import STRETCH
from specexport_runtime.bundle.tokenizer_load import make_whole_text_tokenizer
from specexport_runtime.costs.curves import CostCurves, KnownCosts
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.prefix_files import PrefixFolder
from specexport_runtime.drafters.base import Drafter, DrafterFactory, DrafterParts, DraftOffer, Obstacle
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.head_kind import head_obstacle
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.open import find_engine_backend, list_engine_backends_with
from specexport_runtime.intake.builder import RequestBuilder
from specexport_runtime.intake.drafting import Capabilities, DraftDefaults
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.draft_cost import WeighedDrafter
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv
from specexport_runtime.requests.records import FORCED
from specexport_runtime.telemetry.round_log import RoundTracer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specexport_runtime.bundle.arrays import CutHead, MaskInput
    from specexport_runtime.bundle.token_map import TokenMap
    from specexport_runtime.drafters.suffix_open import KeptSuffixes

DEFAULT_BATCHED_TOKENS = 512


class EngineParts(NamedTuple):
    """What an engine is made of. Limits are those of options that give none."""

    target: Executor
    tokenizer: "Tokenizer"  # of all models; texts are read whole, even if it is set to cut or to fill them
    max_model_len: int  # most tokens of one sequence, prompt included
    draft: Executor | None = None  # the draft model's; None without
    head: Executor | None = None  # the draft head's; None without. The target's then gives features
    lookahead: int = 8  # largest K that may be asked for
    max_num_seqs: int | None = None  # sequences that run at a time; None takes all rows of the target
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS  # of one step
    draft_vocab_size: int | None = None  # ids below it may be drafted; None takes the target's LM head
    cut_head: "CutHead | None" = None  # token ids of the LM head of draft or head; None where it has all
    mask: "MaskInput | None" = None  # for unknown tokens, of a head that drafts all tokens in one step
    token_map: "TokenMap | None" = None  # of a draft model with another vocabulary; None where it has the target's
    eos_token_ids: Sequence[int] = ()  # end a text
    chat_template: str | None = None  # Jinja source, of the checkpoint
    special_tokens: Mapping[str, str] = {}  # by name, for the chat template
    draft_defaults: DraftDefaults = DraftDefaults()  # how to draft for requests that do not say
    costs: KnownCosts | None = None  # of steps, to choose K by and for traces; None: no request may ask for "auto"
    self_obstacle: Obstacle | None = None  # why the target cannot draft with its own layers; None finds out
    suffixes: "KeptSuffixes | None" = None  # what was generated earlier; None begins with nothing
    prefixes: PrefixFolder | None = None  # where kept texts are, too; None keeps them in rows alone
    name: str = "of no bundle"
    fingerprint: str | None = None  # of weights, recipe and compiler; None if they are not known
    adapters: Sequence[str] = ()  # LoRA adapters that requests may choose, in the order of their numbers in the engine


class Assembly(NamedTuple):
    """The parts put together."""

    builder: RequestBuilder
    decoder: Decoder
    drafting: Mapping[str, ModelRunner]  # what drafts beside the target: "draft", "head"


def assemble(parts: EngineParts, options: EngineOptions) -> Assembly:
    """Make what checks requests, and what decodes them; ``InvalidRequestError`` if parts and options do not fit."""
    if not isinstance(parts, EngineParts):
        raise InvalidRequestError(f"an engine is made of {parts!r:.80}.", "load a bundle: SpecEngine.load(PATH).")
    target, lookahead = parts.target, parts.lookahead
    max_model_len = options.max_model_len or parts.max_model_len
    tokenizer = make_whole_text_tokenizer(parts.tokenizer)
    runner = ModelRunner(target, unpad_kv=options.unpad_kv, unpad_input=options.unpad_input)
    drafting = {
        role: ModelRunner(
            executor,
            kv=BorrowedKv(runner.kv) if executor.borrows_cache else None,
            unpad_kv=options.unpad_kv,
            unpad_input=options.unpad_input,
            stretch=1.0 if parts.token_map is None else STRETCH,
        )
        for role, executor in (("draft", parts.draft), ("head", parts.head))
        if executor is not None
    }
    runners = [runner, *drafting.values()]
    memory = MemoryBudget(runners, limit=options.kv_bytes, slack=kv_slack(lookahead), max_model_len=max_model_len)
    offer = make_offer(runner, parts)
    drafters = make_drafters(
        DrafterParts(
            runner,
            drafting.get("draft"),
            parts.draft_vocab_size or target.vocab_size,
            parts.draft_defaults.match_length,
            None if parts.suffixes is None else parts.suffixes.store,
            parts.cut_head,
            drafting.get("head"),
            parts.mask,
            parts.token_map,
        ),
        offer,
        options.drafters,
    )
    weighed = weigh_drafters(drafters, None if parts.costs is None else parts.costs.curves)
    builder = RequestBuilder(
        tokenizer,
        target.vocab_size,
        max_model_len,
        make_capabilities(offer, drafters, lookahead=lookahead, target=target, weighed=weighed),
        eos_token_ids=tuple(parts.eos_token_ids),
        defaults=parts.draft_defaults,
        grammars=GrammarCompiler(tokenizer, target.vocab_size, parts.eos_token_ids),
        adapters=tuple(parts.adapters),
    )
    if options.lora is not None:
        target.default_adapter = builder.find_adapter(options.lora) or 0
    return Assembly(builder, _make_decoder(runners, drafters, weighed, memory, parts, options), drafting)


def make_offer(target: ModelRunner, parts: EngineParts) -> DraftOffer:
    """What there is to draft with."""
    obstacle = parts.self_obstacle or find_self_draft_obstacle(target)
    return DraftOffer(parts.draft is not None, obstacle, head_obstacle(target, has_head=parts.head is not None))


def make_drafters(
    parts: DrafterParts, offer: DraftOffer, factories: Mapping[str, DrafterFactory] | None = None
) -> dict[str, Drafter]:
    """Every drafter of an engine by the names that plans use; InvalidRequestError if one of ``factories`` misfits."""
    drafters: dict[str, Drafter] = {}
    drafters |= {name: kind.make(parts) for name, kind in KINDS.items() if kind.obstacle(offer) is None}
    for name, factory in (factories or {}).items():
        if name in KINDS or name in (FORCED, "chained", "auto", "none"):
            raise InvalidRequestError(f"a drafter of the name {name!r} is there already.", "give yours another name.")
        if "/" in name:  # learned costs have names behind slashes
            raise InvalidRequestError(f"a drafter's name {name!r} has a slash.", "give yours another name.")
        made = factory(parts)
        if not isinstance(made, Drafter):
            raise InvalidRequestError(
                f"the factory of drafter {name!r} made a {type(made).__name__}, which is no Drafter.",
                "let its class inherit from `specexport_runtime.drafters.base.Drafter`.",
            )
        drafters[name] = made
    return drafters


def weigh_drafters(drafters: Mapping[str, Drafter], curves: CostCurves | None) -> dict[str, WeighedDrafter]:
    """The drafters for which K can be chosen, with what their steps cost; none without curves."""
    if curves is None:
        return {}
    weighed = {}
    for name, drafter in drafters.items():
        cost = drafter.cost(curves)
        if drafter.traits.is_free or cost is not None:
            weighed[name] = WeighedDrafter(drafter.traits, cost)
    return weighed


def make_capabilities(
    offer: DraftOffer,
    drafters: Mapping[str, Drafter],
    *,
    lookahead: int,  # largest K
    target: Executor,
    weighed: Mapping[str, WeighedDrafter] | None = None,  # see :func:`weigh_drafters`
) -> Capabilities:
    """What requests may ask of an engine."""
    obstacles = {name: kind.obstacle(offer) for name, kind in KINDS.items()}
    return Capabilities(
        {name: kind.traits for name, kind in KINDS.items()} | {name: each.traits for name, each in drafters.items()},
        {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None},
        lookahead,
        frozenset(weighed or ()),
        target.num_gates // 2,
        target.takes_trees,
    )


def _make_decoder(
    runners: Sequence[ModelRunner],  # the target's, then those that draft beside it
    drafters: Mapping[str, Drafter],
    weighed: Mapping[str, WeighedDrafter],
    memory: MemoryBudget,
    parts: EngineParts,
    options: EngineOptions,
) -> Decoder:
    curves, learned = parts.costs or (None, None)
    lengths = None
    if curves is not None:
        lengths = Controller(curves, parts.lookahead, drafters=weighed, learned=learned)
    ttft_s, itl_s = (None if ms is None else ms / 1000 for ms in (options.ttft_budget_ms, options.itl_budget_ms))
    return Decoder(
        runners[0],
        ChainDrafter(drafters, lengths),
        max_num_seqs=options.max_num_seqs or parts.max_num_seqs,
        reuses_prefixes=options.enable_prefix_caching and _can_reuse_rows(runners),
        pace=Pace(ttft_s, itl_s),
        memory=memory,
        folder=parts.prefixes,
        max_num_batched_tokens=options.max_num_batched_tokens or parts.max_num_batched_tokens,
        lengths=lengths,
        tracer=RoundTracer(curves, learned),
    )


def _can_reuse_rows(runners: Sequence[ModelRunner]) -> bool:
    """Whether every engine keeps its rows as prefix reuse needs them: where it says, and without padding."""
    return all(runner.unpad_kv and runner.executor.copies_rows for runner in runners)


def check_empty(decoder: Decoder, drafting: Mapping[str, ModelRunner]) -> None:
    """Assert that nothing of any request is left in an engine; ``drafting`` has its models by role."""
    decoder.check()
    if decoder.has_work:
        raise SpecexportError(f"nothing was asked for, and there is {decoder.load}.")
    for role, runner in drafting.items():
        runner.kv.check()
        if runner.kv.num_committed:
            raise SpecexportError(f"{runner.kv.num_committed} cache entries of the {role} were left behind.")


def find_self_draft_obstacle(target: ModelRunner, entry: ModelEntry | None = None) -> Obstacle | None:
    """Why a target cannot draft with its own layers; None if it can. ``entry`` is None if it comes from no bundle."""
    if not (target.unpad_kv and target.unpad_input):
        return Obstacle("drafter 'self' needs unpadded KV and unpadded input.", "leave unpad_kv and unpad_input on.")
    if target.executor.num_gates:
        return None
    if entry is None:
        return Obstacle("drafter 'self' needs a target whose layers can be switched off.", "use another drafter.")
    if (why := entry.engine.gates.obstacle) is not None:
        return Obstacle(
            f"drafter 'self': layers of this target ({entry.source.architecture}) cannot be skipped exactly: "
            f"{why.rstrip('.')}.",
            "use drafter 'lookup', or build with --draft.",
        )
    backend = find_engine_backend(entry.backend)
    if backend is None or not backend.has_gates:
        usable = list_engine_backends_with("has_gates")
        return Obstacle(
            f"drafter 'self' needs backend {usable}; this target was built for {entry.backend}.",
            f"build it with --backend {usable}.",
        )
    return Obstacle(
        "drafter 'self': this target was built without layers that can be left out.",
        "build it again with --self-draft.",
    )
