"""Checks of one request against what an engine was built for, and the plan of how to draft for it."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypedDict

from specexport_runtime.drafters.base import Obstacle
from specexport_runtime.drafters.lookup import DEFAULT_MATCH_LENGTH
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import expand_per_prompt
from specexport_runtime.requests.draft_exit import DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DrafterTraits, DraftStage
from specexport_runtime.requests.request import DraftPlan
from specexport_runtime.requests.results import Prompt, as_prompts
from specexport_runtime.sampling.params import SamplingParams

DRAFTERS = (*KINDS, "chained", "auto", "none")
"""Ways to draft that every request can name. ``self`` drafts with some of the target's own layers; ``chained`` asks
lookup first and, where it finds nothing, the first that there is of draft model, draft head and own layers.
``suffix`` copies as lookup does, and from what earlier requests were given. ``auto`` asks suffix, then the same first
one, and with cost curves takes what promises the most tokens a second, or neither."""

Lookahead = int | Literal["auto"]
"""Draft tokens a round, or ``"auto"``: chosen in every round for the most expected tokens per second."""


_COPIES = frozenset(name for name, kind in KINDS.items() if kind.traits.is_free)

TreeSize = int | Literal["auto"]
"""Most draft tokens tested in a round, branches included; 0: chains; ``"auto"``: as many as pay."""
MAX_NODES = 63


class RequestOptions(TypedDict, total=False):
    """How to draft for one request, and for whom: keyword arguments of ``SpecEngine.submit`` and others."""

    # ``"draft-model"``, ``"head"``, ``"lookup"``, ``"suffix"``, ``"self"`` (some of the target's own layers),
    # ``"chained"`` (lookup, and where it finds nothing the draft model, the draft head, or the target's own layers),
    # ``"auto"`` (whatever the bundle has, by what each promises) or ``"none"``. None takes the engine's default:
    # ``"auto"``, or the draft model for a request with a number of tokens, with a seed to sample by, or without cost
    # curves.
    drafter: str | None
    # K (4 if None; of ``"self"`` 3), or tokens copied by ``"lookup"`` (7 if None), or ``"auto"``: chosen in every
    # round, up to what was built; not for an engine loaded with ``adaptive=False``.
    num_speculative_tokens: Lookahead | None
    speculation: bool  # False decodes plainly, as ``drafter="none"``; else True
    layer_rules: LayerRules | None  # which layers ``"self"`` leaves out
    # End a model's draft when it is no longer sure: True, False or the parameters of the threshold.
    draft_exit: DraftExitParams | bool | None
    # How sampled drafts are accepted: ``"block"``, which keeps the most, or ``"token"``, one by one; None takes
    # ``"block"``. Another rule is another draw from the same distribution.
    acceptance: str | None
    # Most draft tokens tested in a round, branches included, or 0 for chains without branches, or ``"auto"``: chosen in
    # every round, where K is. None takes ``"auto"`` where K is ``"auto"``, else 0.
    tree_size: TreeSize | None
    trace: bool  # keep what each round did; else False
    cache_salt: str | None  # requests of one salt, or of none, may see what is kept of each other
    # False keeps nothing of this request for later ones, and shows it nothing of earlier ones; else True.
    remember: bool
    owner: str  # owners get cache rows in turns, however much each has waiting; all that name none are one
    priority: int  # requests with a lower number go first, as in vLLM, and may have others paused; else 0
    # The LoRA adapter that the target writes with, one of ``SpecEngine.adapters``; None takes the engine's default,
    # which is none unless it was loaded with one.
    lora: str | None


class DraftDefaults(NamedTuple):
    """How an engine drafts for requests that do not say."""

    drafter: str | None = None  # one of ``DRAFTERS``; None: ``"auto"``, see :class:`RequestOptions`
    lookahead: Lookahead | None = None  # K of a model, or tokens copied by lookup; None takes the default of each
    match_length: int = DEFAULT_MATCH_LENGTH  # fewest tokens that lookup must match
    layer_rules: LayerRules = LayerRules()  # which layers ``"self"`` leaves out
    draft_exit: DraftExitParams | None = None  # threshold at which a model's draft ends; None for no threshold


class Capabilities(NamedTuple):
    """What an engine can do."""

    drafters: Mapping[str, DrafterTraits]  # by name
    obstacles: Mapping[str, Obstacle]  # why it has not some drafters, by name
    lookahead: int  # largest K it was built for
    # drafters between which, and for which, K can be chosen; empty without cost curves
    weighed: frozenset[str] = frozenset()
    num_layers: int = 0  # of a target that can draft with its own layers
    takes_trees: bool = False  # drafts may have branches

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return (*self.drafters, "chained", "auto", "none")

    @property
    def default(self) -> str | None:
        """The drafter of requests that say nothing: ``auto`` where lengths can be chosen, else :attr:`fixed`."""
        return "auto" if self.weighed.issuperset(resolve_stage_names("auto", self)) else self.fixed

    @property
    def fixed(self) -> str | None:
        """The drafter of requests that name none and must not depend on others: the first, if nothing is in its way."""
        first = next(iter(self.drafters))
        return None if first in self.obstacles else first

    def is_shared(self, plan: DraftPlan) -> bool:
        """Whether what other requests taught or left decides how text is drawn; not so with copies alone."""
        names = {stage.drafter for stage in plan.stages}
        return (plan.adaptive or any(self.drafters[name].remembers for name in names)) and not names <= _COPIES


def check_names(options: Mapping[str, Any]) -> None:
    """``TypeError`` for a name that is no option of requests."""
    names = RequestOptions.__annotations__
    for name in options:
        if name in SamplingParams.__annotations__:
            raise TypeError(f"{name} is a sampling parameter: give SamplingParams({name}={options[name]!r})")
        if name not in names:
            near = get_close_matches(name, names, n=1)
            raise TypeError(f"there is no request option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def resolve_lookahead(requested: Lookahead | None, *, built: int, default: int) -> int:
    """The lookahead K of a drafter, ``default`` if None was asked; InvalidRequestError above ``built``."""
    if requested is None:
        return min(default, built)
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise InvalidRequestError(f"num_speculative_tokens is {requested!r}.", "give an integer.")
    if not 1 <= requested <= built:
        plain = " (turn speculation off for plain decoding)" if requested == 0 else ""
        raise InvalidRequestError(
            f"num_speculative_tokens is {requested}; this engine was built for 1 to {built}.",
            f"choose a number in that range{plain}, or build with a larger --lookahead.",
        )
    return requested


def resolve_draft_plan(
    options: RequestOptions, capabilities: Capabilities, defaults: DraftDefaults, *, is_repeatable: bool = False
) -> DraftPlan:
    """The ways to draft for a request; a repeatable one gets ``auto``, which others change, only if it asks."""
    check_names(options)
    plan = _resolve_stages(options, capabilities, defaults, is_repeatable=is_repeatable)
    size = _resolve_tree_size(asked := options.get("tree_size"), plan, capabilities)
    if not size or asked in (None, "auto"):
        return plan._replace(tree_size=size)
    stages = tuple(stage._replace(lookahead=min(stage.lookahead, size)) for stage in plan.stages)
    return plan._replace(stages=stages, tree_size=size)


def check_tree_size(asked: object) -> None:
    """Refuse what is no number of draft tokens of a round: a step has that many at most."""
    if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked <= MAX_NODES:
        raise InvalidRequestError(
            f"tree_size is {asked!r}.", f"give an integer from 0 (chains) to {MAX_NODES}, or 'auto'."
        )


def _resolve_tree_size(asked: TreeSize | None, plan: DraftPlan, capabilities: Capabilities) -> int:
    """Most draft tokens of a round; 0 for chains. InvalidRequestError for a size that cannot be had."""
    if asked is not None and asked != "auto":
        check_tree_size(asked)
        if asked and not plan.stages:
            raise InvalidRequestError("tree_size was given, and nothing drafts here.", "drop it, or name a drafter.")
        if asked and not capabilities.takes_trees:
            raise InvalidRequestError(
                f"tree_size is {asked}, and this target cannot verify trees.",
                "leave it out: drafts are chains then; trees need backend ort-cpu, and a target without recurrences.",
            )
        return asked
    if asked == "auto" and plan.stages and not plan.adaptive:
        raise InvalidRequestError(
            "tree_size is 'auto', and the number of draft tokens is not.",
            f"give a number from 0 to {MAX_NODES}, or let num_speculative_tokens be 'auto' too.",
        )
    return MAX_NODES if plan.adaptive and capabilities.takes_trees else 0


def _resolve_stages(
    options: RequestOptions, capabilities: Capabilities, defaults: DraftDefaults, *, is_repeatable: bool
) -> DraftPlan:
    drafter, requested = options.get("drafter"), options.get("num_speculative_tokens")
    if drafter is not None and drafter not in capabilities.names:
        near = get_close_matches(drafter, capabilities.names, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(capabilities.names)}."
        raise InvalidRequestError(f"there is no drafter {drafter!r}.", fix)
    if not options.get("speculation", True) or drafter == "none":
        if requested is not None or drafter not in (None, "none"):
            raise InvalidRequestError(
                "speculation is off, but a drafter or a number of draft tokens was given.", "drop one."
            )
        return DraftPlan()
    if drafter is None:
        pinned = is_repeatable or isinstance(requested, int)
        drafter = defaults.drafter or (capabilities.fixed if pinned else capabilities.default)
        if drafter is None and requested is not None:  # a request for draft tokens learns why there are none
            drafter = next(iter(capabilities.drafters))
        requested = defaults.lookahead if requested is None else requested
    if drafter == "none" and options.get("num_speculative_tokens") is not None:
        raise InvalidRequestError(
            "a number of draft tokens was given, and this engine does not draft unless it is told how.",
            "name a drafter too, or drop the number.",
        )
    if drafter in (None, "none"):
        return DraftPlan()
    names = resolve_stage_names(drafter, capabilities)
    if is_repeatable and options.get("drafter") is None and options.get("num_speculative_tokens") != "auto":
        requested = None if requested == "auto" else requested
        if not _COPIES.issuperset(names):
            names = tuple(name for name in names if not capabilities.drafters[name].remembers)
    elif drafter == "auto" and requested is None and capabilities.weighed.issuperset(names):
        requested = "auto"
    if requested == "auto":
        _check_adaptive_lookahead(names, capabilities)
        return DraftPlan(tuple(DraftStage(name, capabilities.lookahead) for name in names), adaptive=True)
    asked = [requested if name == names[-1] else None for name in names]  # of a chain, the number is the model's
    return DraftPlan(
        tuple(
            DraftStage(
                name,
                resolve_lookahead(
                    number, built=capabilities.lookahead, default=capabilities.drafters[name].default_lookahead
                ),
            )
            for name, number in zip(names, asked, strict=True)
        )
    )


def resolve_stage_names(drafter: str, capabilities: Capabilities) -> tuple[str, ...]:
    """Names of the drafters after one that a request may name; ``InvalidRequestError`` if the engine lacks one."""
    names: tuple[str, ...] = (drafter,)
    models = [name for name in KINDS if not KINDS[name].traits.is_free]
    usable = [name for name in models if name not in capabilities.obstacles]
    if drafter == "auto":
        names = (*(name for name, kind in KINDS.items() if kind.traits.remembers), *usable[:1])
    if drafter == "chained":
        copying = (name for name, kind in KINDS.items() if kind.traits.is_free and not kind.traits.remembers)
        names = (*copying, (usable or models)[0])
    for name in names:
        if name in capabilities.obstacles:
            raise InvalidRequestError(*capabilities.obstacles[name])
    return names


def _check_adaptive_lookahead(names: Sequence[str], capabilities: Capabilities) -> None:
    if not capabilities.weighed:
        raise InvalidRequestError(
            "num_speculative_tokens is 'auto', and this engine has no cost curves to choose by.",
            "load it without adaptive=False, or give a number.",
        )
    for name in names:
        if name not in capabilities.weighed:
            raise InvalidRequestError(
                f"num_speculative_tokens is 'auto', and what a step of drafter {name!r} costs is not known.",
                "give a number, or give the drafter a method `cost`.",
            )


class RequestSpec(NamedTuple):
    """One request."""

    prompt: Prompt
    params: SamplingParams = SamplingParams()
    reference: Prompt | None = None  # what lookup may copy from
    options: RequestOptions = {}  # noqa: RUF012 never changed


def request_specs(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    references: Sequence[Prompt | None] | None,
    options: RequestOptions,
) -> list[RequestSpec]:
    """A request for each prompt; arguments as ``SpecEngine.generate``, ``options`` are those of all of them."""
    batch = as_prompts(prompts)
    each = expand_per_prompt(params or SamplingParams(), len(batch), "sampling parameters")
    copied = expand_per_prompt(references, len(batch), "references")
    return [RequestSpec(*item, options) for item in zip(batch, each, copied, strict=True)]
