"""What ``specexport tune`` is asked to measure."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specexport.bench.subject import Subject
from specexport_runtime.bundle.opened import check_num_seqs
from specexport_runtime.cli.errors import suggest
from specexport_runtime.drafters.base import NO_HEAD, DraftOffer, Obstacle
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError

_NO_LAYERS = Obstacle(
    "this bundle has no layers, or too few, that can be left out.",
    "see `specexport inspect`, or tune another drafter.",
)
DEFAULT_BATCH_SIZES = (1, 4, 8)
DEFAULT_CONTEXTS = (128, 1024)
DEFAULT_LOOKAHEADS = (0, 1, 2, 4, 6, 8)


@dataclass(frozen=True)
class TuneOptions:
    """Every drafter is measured with every K at every batch size and context.

    A value out of its range raises InvalidRequestError.
    """

    drafters: tuple[str, ...]  # of ``drafters.registry.KINDS``, without ones that learn
    batch_sizes: tuple[int, ...]  # sequences decoded at a time; each needs another engine
    contexts: tuple[int, ...]  # prompt lengths, tokens, ascending
    lookaheads: tuple[int, ...]  # values of K, ascending; 0, plain decoding, is always among them
    tokens: int = 48  # most new tokens of a text
    repeats: int = 3  # runs of each combination; medians count
    num_prompts: int = 4  # of a run; a larger batch has one for each row

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            check_num_seqs(size, "a batch size")
        for what, values, least in (
            ("a context", self.contexts, 1),
            ("a number of draft tokens", self.lookaheads, 0),
            ("the number of new tokens", [self.tokens], 2),  # the first one comes with the prompt
            ("the number of repeats", [self.repeats], 1),
            ("the number of prompts", [self.num_prompts], 1),
        ):
            for value in values:
                if value < least:
                    raise InvalidRequestError(f"{what} is {value}.", f"give {least} or more.")


def resolve_options(
    subjects: Mapping[str, Subject],  # the bundles by their names
    *,
    drafters: Seq[str],  # empty takes all that the bundle has, or the draft models and heads of several
    batch_sizes: Seq[int] | None,  # None takes the default
    contexts: Seq[int] | None,  # likewise
    lookaheads: Seq[int] | None,  # likewise
    tokens: int,
    repeats: int,
    num_prompts: int,
) -> TuneOptions:
    """Options that every bundle can serve; defaults shrink to what fits.

    Raises InvalidRequestError if a bundle lacks a drafter, a K or a context that was asked for, or a value is out of
    its range.
    """
    room = min(subject.details["max_model_len"] for subject in subjects.values()) - tokens
    if lookaheads is None:
        built = min(subject.lookahead for subject in subjects.values())
        lookaheads = [k for k in DEFAULT_LOOKAHEADS if k <= built]
    if contexts is None:
        contexts = [context for context in DEFAULT_CONTEXTS if context <= room] or [max(room, 1)]
    several = len(subjects) > 1
    options = TuneOptions(
        _drafters_to_compare(subjects, drafters) if several else _drafters(next(iter(subjects.values())), drafters),
        tuple(sorted(set(batch_sizes or DEFAULT_BATCH_SIZES))),
        tuple(sorted(set(contexts))),
        tuple(sorted({0, *lookaheads})),
        tokens,
        repeats,
        num_prompts,
    )
    if options.lookaheads == (0,):
        raise InvalidRequestError("there is only plain decoding to measure.", "give --lookaheads with 1 or more.")
    for name, subject in subjects.items():
        _check_room(options, subject, name if several else "the bundle")
    return options


def _check_room(options: TuneOptions, subject: Subject, name: str) -> None:
    most, longest, max_model_len = options.lookaheads[-1], options.contexts[-1], subject.details["max_model_len"]
    if most > subject.lookahead:
        raise InvalidRequestError(
            f"{most} draft tokens are asked for; {name} was built for up to {subject.lookahead}.",
            "choose fewer, or build with a larger --lookahead.",
        )
    room = max_model_len - options.tokens
    if longest > room:
        raise InvalidRequestError(
            f"a context of {longest} and {options.tokens} new tokens; a sequence of {name} takes {max_model_len}.",
            f"choose a context of at most {room}, or build with a larger --max-model-len.",
        )


def _drafters_to_compare(subjects: Mapping[str, Subject], names: Seq[str]) -> tuple[str, ...]:
    """What is measured of several bundles: their own drafts, and what else is named; that is the target's alone."""
    own: list[str] = []
    for name, subject in subjects.items():
        drafter = subject.own_drafter
        if drafter is None:
            raise InvalidRequestError(
                f"{name} has no draft model and no head to compare.",
                "leave it out, or build it with --draft or --head.",
            )
        if names and drafter not in names:
            raise InvalidRequestError(
                f"bundles are compared by their own drafts, and --drafter leaves out that of {name}.",
                f"add --drafter {drafter}, or tune one bundle.",
            )
        own.append(drafter)
    if others := [name for name in names if name not in own]:
        _drafters(next(iter(subjects.values())), others)
    return tuple(dict.fromkeys(names or own))


def _drafters(subject: Subject, names: Seq[str]) -> tuple[str, ...]:
    has_head = None if subject.has_head else NO_HEAD
    offer = DraftOffer(subject.has_draft, None if subject.has_gates else _NO_LAYERS, has_head)
    lacking = {name: kind.obstacle(offer) for name, kind in KINDS.items()}
    # The best K of a drafter that learns is another one with every request.
    known = [name for name, kind in KINDS.items() if not kind.traits.remembers]
    if not names:
        return tuple(name for name in known if lacking[name] is None)
    for name in names:
        if name not in known:
            near = suggest(name, known)
            fix = f"did you mean {near!r}?" if near else f"choose from {', '.join(known)}."
            raise InvalidRequestError(f"there is no drafter {name!r} with a K to tune.", fix)
        obstacle = lacking[name]
        if obstacle is not None:
            raise InvalidRequestError(f"drafter {name!r}: {obstacle.message}", obstacle.hint)
    return tuple(dict.fromkeys(names))
