"""Several bundles of one target, whose drafts are compared: what may be compared, and what is measured with which."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from specexport.bench.methods import OWN_DRAFTERS, SWITCHES, Method, needs_draft, resolve_methods
from specexport.bench.options import BenchOptions
from specexport.bench.subject import Subject
from specexport_runtime.errors import InvalidRequestError

_SHOWN = 12  # characters of a hash; words are shorter


def name_bundles(folders: Sequence[Path], subjects: Sequence[Subject]) -> dict[str, Subject]:
    """The bundles by unique names: their own, or their folders; InvalidRequestError if two are one bundle."""
    for (one, first), (other, second) in combinations(zip(folders, subjects, strict=True), 2):
        if one.resolve() == other.resolve() or first.details["build_key"] == second.details["build_key"]:
            raise InvalidRequestError(f"{one} and {other} are the same bundle.", "give each bundle once.")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return dict(zip(names, subjects, strict=True))


def check_same_target(named: Mapping[str, Subject]) -> None:
    """Refuse bundles that do not have the target of the first: InvalidRequestError names the bundle and what differs.

    Two targets are one if checkpoint, tokenizer, backend, dtype and quantization are the same, and the engine file too.
    TensorRT times its kernels while it builds, so that two builds of one model may differ: there the file may. It may
    too where a target gives features to a head, which nothing else in it depends on.
    """
    first, *others = named
    wanted = _describe_target(named[first])
    for name in others:
        found = _describe_target(named[name])
        different = [what for what in wanted if found[what] != wanted[what] and None not in (found[what], wanted[what])]
        if different[1:] and different[-1] == "engine file":
            different.pop()  # it follows from the others
        if different:
            shown = [f"{what} {_show(named[name], what)} instead of {_show(named[first], what)}" for what in different]
            raise InvalidRequestError(
                f"{name} has another target than {first}: {', '.join(shown)}.",
                "compare bundles of one target, built alike but for the draft.",
            )


def _describe_target(subject: Subject) -> dict[str, str | None]:
    """What makes a target; None where it may differ."""
    target = subject.details["models"]["target"]
    varies = target["built_for"] or target.get("feature_size")
    return {
        "checkpoint": target["source_sha256"],
        "tokenizer": subject.details["tokenizer_sha256"],
        **{name: target[name] for name in ("backend", "dtype")},
        "quantization": target["quantize"] or "none",
        "engine file": None if varies else str(target["engine_sha256"]),
    }


def _show(subject: Subject, what: str) -> str:
    value = str(_describe_target(subject)[what])[:_SHOWN]
    return f"{subject.details['models']['target']['source']} ({value})" if what == "checkpoint" else value


def join_subjects(named: Mapping[str, Subject]) -> Subject:
    """One subject for several bundles of one target; what asks no draft runs on the first."""
    name, *others = named
    if not others:
        return named[name]
    check_same_target(named)
    details = {"name": ", ".join(named), "bundles": {name: subject.details for name, subject in named.items()}}
    return replace(
        named[name],
        details={**named[name].details, **details},
        lookahead=min(subject.lookahead for subject in named.values()),
        load=lambda key: named[key.bundle].load(key),
        first=name,
    )


def compared_methods(named: Mapping[str, Subject], names: Sequence[str] | None, **rest: Any) -> list[Method]:
    """What is measured, of several bundles their own drafts and what else is named; ``rest`` as ``resolve_methods``."""
    if len(named) == 1:
        (subject,) = named.values()
        return resolve_methods(names, **rest, **subject.draft_abilities)
    methods: dict[Method, None] = {}
    for bundle, subject in named.items():
        own = subject.own_drafter
        if own is None:
            fix = "leave it out, or build it with --draft or --head."
            raise InvalidRequestError(f"{bundle} has no draft model and no head to compare.", fix)
        drafters = {name: rest["drafter"] if name in SWITCHES else name for name in names or (own,)}
        mine = [name for name, drafter in drafters.items() if drafter not in OWN_DRAFTERS - {own}]
        found = resolve_methods(mine, **rest, **subject.draft_abilities)
        if own not in mine:
            raise InvalidRequestError(
                f"bundles are compared by their own drafts, and --methods leaves out that of {bundle}.",
                f"add {own} to --methods, or measure one bundle.",
            )
        methods |= {method._replace(bundle=bundle) if needs_draft(method.drafter) else method: None for method in found}
    return list(methods)


def check_room(named: Mapping[str, Subject], options: BenchOptions) -> None:
    """Refuse contexts that leave no room for the new tokens, a K or trees that not all bundles were built for."""
    several, tokens = len(named) > 1, options.max_tokens[1]
    most, longest = max(options.num_speculative_tokens or (0,)), max(options.contexts, default=0)
    for bundle, subject in named.items():
        name = bundle if several else "the bundle"
        if several and most > subject.lookahead:
            raise InvalidRequestError(
                f"{most} draft tokens are asked for; {name} was built for up to {subject.lookahead}.",
                "choose fewer, or build with a larger --lookahead.",
            )
        if any(options.tree_sizes or ()) and not subject.takes_trees:
            raise InvalidRequestError(
                f"--tree-size asks for trees, and the target of {name} cannot verify them.",
                "leave it out: drafts are chains then; trees need backend ort-cpu, and a target without recurrences.",
            )
        if longest and longest + tokens > (room := subject.details["max_model_len"]):
            raise InvalidRequestError(
                f"a context of {longest} and {tokens} new tokens; a sequence of {name} takes {room}.",
                f"choose a context of at most {room - tokens}, or build with a larger --max-model-len.",
            )
