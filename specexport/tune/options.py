"""What ``specexport tune`` is asked to measure."""

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.bench.subject import Subject
from specexport_runtime.cli.errors import suggest
from specexport_runtime.costs.tune_profile import STAGES
from specexport_runtime.errors import InvalidRequestError

_OBSTACLES = {
    "draft-model": ("no draft model", "build it with --draft"),
    "self": ("no layers, or too few, that can be left out", "see `specexport inspect`"),
}
DEFAULT_BATCH_SIZES = (1, 4, 8)
DEFAULT_CONTEXTS = (128, 1024)
DEFAULT_LOOKAHEADS = (0, 1, 2, 4, 6, 8)


@dataclass(frozen=True)
class TuneOptions:
    """Every drafter is measured with every K at every batch size and context.

    Attributes:
        drafters: of ``tune_profile.STAGES``.
        batch_sizes: sequences decoded at a time; for each another engine is loaded.
        contexts: prompt lengths, tokens.
        lookaheads: values of K; 0, plain decoding, is always among them.
        tokens: most new tokens of a text.
        repeats: runs of each combination; medians count.
        num_prompts: prompts of a run; a larger batch has one for each row.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    drafters: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    lookaheads: tuple[int, ...]
    tokens: int = 48
    repeats: int = 3
    num_prompts: int = 4

    def __post_init__(self) -> None:
        for what, values, least in (
            ("a batch size", self.batch_sizes, 1),
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
    subject: Subject,
    *,
    drafters: Sequence[str],
    batch_sizes: Sequence[int] | None,
    contexts: Sequence[int] | None,
    lookaheads: Sequence[int] | None,
    max_model_len: int,
    tokens: int,
    repeats: int,
    num_prompts: int,
) -> TuneOptions:
    """Options that the bundle can serve. Defaults shrink to what fits; what was asked for is refused if it does not.

    Args:
        subject: the bundle.
        drafters: what to draft with; none: everything that the bundle has.
        batch_sizes: None takes the default.
        contexts: likewise.
        lookaheads: likewise.
        max_model_len: most tokens of a sequence.
        tokens: see :class:`TuneOptions`.
        repeats: likewise.
        num_prompts: likewise.

    Raises:
        InvalidRequestError: the bundle lacks a drafter, a K or a context, or a value is out of its range.
    """
    room = max_model_len - tokens
    if lookaheads is None:
        lookaheads = [k for k in DEFAULT_LOOKAHEADS if k <= subject.lookahead]
    if contexts is None:
        contexts = [context for context in DEFAULT_CONTEXTS if context <= room] or [max(room, 1)]
    options = TuneOptions(
        _resolve_drafters(subject, drafters),
        tuple(sorted(set(batch_sizes or DEFAULT_BATCH_SIZES))),
        tuple(sorted(set(contexts))),
        tuple(sorted({0, *lookaheads})),
        tokens,
        repeats,
        num_prompts,
    )
    _check_room(options, subject.lookahead, max_model_len)
    return options


def _check_room(options: TuneOptions, built: int, max_model_len: int) -> None:
    if options.lookaheads[-1] > built:
        raise InvalidRequestError(
            f"{options.lookaheads[-1]} draft tokens are asked for; the bundle was built for up to {built}.",
            "choose fewer, or build with a larger --lookahead.",
        )
    if options.lookaheads == (0,):
        raise InvalidRequestError("there is only plain decoding to measure.", "give --lookaheads with 1 or more.")
    room = max_model_len - options.tokens
    if options.contexts[-1] > room:
        raise InvalidRequestError(
            f"a context of {options.contexts[-1]} and {options.tokens} new tokens; a sequence takes {max_model_len}.",
            f"choose a context of at most {room}, or build with a larger --max-model-len.",
        )


def _resolve_drafters(subject: Subject, names: Sequence[str]) -> tuple[str, ...]:
    available = {"draft-model": subject.has_draft, "lookup": True, "self": subject.has_gates}
    if not names:
        return tuple(name for name in STAGES if available[name])
    for name in names:
        if name not in STAGES:
            near = suggest(name, STAGES)
            fix = f"did you mean {near!r}?" if near else f"choose from {', '.join(STAGES)}."
            raise InvalidRequestError(f"there is no drafter {name!r} with a K to tune.", fix)
        if not available[name]:
            lacks, fix = _OBSTACLES[name]
            raise InvalidRequestError(f"drafter {name!r}: this bundle has {lacks}.", f"{fix}, or tune another drafter.")
    return tuple(dict.fromkeys(names))
