"""Options of commands, and what they make: sampling parameters, engine options, how to draft."""

from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from specexport_runtime.cli.any_text import decode_argument
from specexport_runtime.cli.gone import deprecated_option
from specexport_runtime.cli.grouped import RARE, add_under_heading
from specexport_runtime.cli.prompts import read_text
from specexport_runtime.engine_options import DEPRECATED, OPTIONS, EngineOptions, Use
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from specexport_runtime.intake.drafting import RequestOptions
    from specexport_runtime.sampling.cut import Cut
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sampling.structured import StructuredOutputs

F = TypeVar("F", bound=Callable[..., Any])


class NumberOr(click.ParamType):  # type: ignore[type-arg]  # older releases of click have no arguments
    """A number (an integer if ``integer``), or a word that stands for ``value``."""

    def __init__(self, word: str, value: Any, *, integer: bool = True) -> None:
        self.word, self.value, self.integer = word, value, integer
        self.name = f"{'integer' if integer else 'number'}|{word}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or what the word stands for."""
        if value == self.word or not isinstance(value, str):
            return self.value if value == self.word else value
        try:
            return int(value) if self.integer else float(value)
        except ValueError:
            kind = "an integer" if self.integer else "a number"
            self.fail(f"{value!r} is neither {kind} nor {self.word!r}.", param, ctx)


def find_bundle(given: Path) -> Path:
    """The bundle to run: what the compiler's command line, where this is a part of it, makes of a checkpoint."""
    find = click.get_current_context().obj
    return given if find is None else find(given)


OFF = "off"
"""Switches a rule off on the command line; the rule is None then."""


def sampling_options(
    command: Any, *, max_tokens: int | None = 128, temperature: float = 0.0, top_p: float = 1.0
) -> Any:
    """Add the options that make a ``SamplingParams``, which checks their ranges."""
    from specexport_runtime.sampling.params import CUTS

    options = [
        click.option(
            "--max-tokens",
            type=int,
            default=max_tokens,
            show_default=max_tokens is not None or "as many as there is room for",
            help="Most tokens to generate.",
        ),
        click.option("--temperature", type=float, default=temperature, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 is off."),
        click.option("--top-p", type=float, default=top_p, show_default=True, help="Nucleus; 1 is off, 0 is greedy."),
        *(_cut_option(name, cut) for name, cut in CUTS.items()),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off."),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="0 is off."),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="0 is off."),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit. Repeatable."),
        click.option("--seed", type=int, help="Seed of the random stream; none draws a fresh one."),
        click.option(
            "--stop", multiple=True, type=decode_argument, metavar="TEXT", help="End the text at TEXT. Repeatable."
        ),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this id. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
        click.option(
            "--json-schema",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write JSON that follows this JSON schema.",
        ),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option(
            "--regex", type=decode_argument, metavar="TEXT", help="Write what matches this regular expression."
        ),
        click.option(
            "--choice", multiple=True, type=decode_argument, metavar="TEXT", help="Write one of these. Repeatable."
        ),
        click.option(
            "--grammar",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write what follows this grammar (Lark).",
        ),
    ]
    return add_under_heading("Text", *options)(command)


def _cut_option(name: str, cut: "Cut") -> Any:
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=float, default=cut.off, show_default=True, help=cut.help)


def engine_flags(*uses: Use) -> Callable[[Any], Any]:
    """Add the flags of the engine options of some uses, in the order of the options."""
    flags = [engine_flag(name) for name, option in OPTIONS.items() if option.use in uses]
    return add_under_heading(
        "Machine", *flags, deprecated_option("--prepacked/--no-prepacked", DEPRECATED["prepacked"])
    )


def engine_flag(name: str, **changes: Any) -> Callable[[F], F]:
    """The click option of an engine option; ``changes`` are of its keywords."""
    option, default = OPTIONS[name], EngineOptions.__dataclass_fields__[name].default
    settings = {
        "type": _click_type(name),
        "default": default,
        "show_default": default is not None,
        "metavar": option.metavar,
        "help": option.text + (f"  [default: {option.none}]" if option.none and "default" not in changes else ""),
    }
    heading = "Drafting" if option.drafter else _HEADINGS.get(name, "Machine")
    return add_under_heading(heading, click.option(get_flag_name(name), name, **settings | changes))


_HEADINGS = {"adaptive": "Drafting", "lora": "Text", "match_length": "Drafting"} | dict.fromkeys(
    ("unpad_kv", "unpad_input"), RARE
)


def get_flag_name(name: str) -> str:
    """The flag of an engine option, as click has it."""
    words = name.replace("_", "-")
    return OPTIONS[name].flag or (f"--{words}/--no-{words}" if _option_types(name) == {bool} else f"--{words}")


def _click_type(name: str) -> Any:
    kinds = _option_types(name)
    if Path in kinds:
        return click.Path()
    return kinds.pop() if kinds in ({int}, {float}) else None  # click makes a switch, or a text


def _option_types(name: str) -> set[Any]:
    kind = EngineOptions.__dataclass_fields__[name].type
    return set(get_args(kind) or (kind,)) - {NoneType}


def pop_engine_options(values: dict[str, Any]) -> EngineOptions:
    """The options that the flags of a command make, out of ``values``; InvalidRequestError out of range."""
    from specexport_runtime.executors.open import check_threads

    given = {name: values.pop(name) for name in OPTIONS if name in values}
    check_threads(given.get("num_threads"), "--threads")
    return EngineOptions(**given)


def drafting_options(command: Any) -> Any:
    """Add the options that say how to draft."""
    options = [
        click.option(
            "--drafter",
            metavar="NAME",
            help="auto (in every round what pays), draft-model, head, lookup (copies from the text), suffix (and from "
            "earlier answers), self (some of the target's layers), chained (lookup, then a model) or none.  [default: "
            "auto; the draft model with a number of tokens, or for a seed to sample by]",
        ),
        click.option(
            "--num-speculative-tokens",
            "--lookahead",
            type=NumberOr("auto", "auto"),
            metavar="N|auto",
            help="Draft tokens a round (K), or auto: chosen every round for the most expected tokens a second.  "
            "[default: auto; with a drafter 4, for lookup 7, for self 3, or less if less was built]",
        ),
        engine_flag("lora"),
        click.option("--no-speculation", is_flag=True, help="Plain decoding: one token a round."),
        click.option(
            "--acceptance",
            metavar="block|token",
            help="How sampled drafts are accepted: as a block, which keeps more, or token by token.  [default: block]",
        ),
        click.option(
            "--tree-size",
            type=NumberOr("auto", "auto"),
            metavar="N|auto",
            help="Most draft tokens tested in a round, branches included; 0 for chains; auto: as many as pay.  "
            "[default: auto where the number of draft tokens is auto, else 0]",
        ),
    ]
    return add_under_heading("Drafting", *options, add_under_heading(RARE, *_rare_drafting_options()))(command)


reference_option = add_under_heading(
    "Drafting",
    click.option("--reference", type=click.Path(path_type=Path), help="UTF-8 text file that lookup may copy from."),
)


def _rare_drafting_options() -> list[Any]:
    return [
        click.option(
            "--layer-threshold",
            type=NumberOr(OFF, OFF, integer=False),
            metavar="X|off",
            help="self: leave out attention and recurrences of a higher cosine similarity, or off.  [default: 0.985]",
        ),
        click.option(
            "--layer-period",
            type=NumberOr(OFF, OFF),
            metavar="N|off",
            help="self: leave out every n-th layer, or off.  [default: 3]",
        ),
        click.option(
            "--layer-keep-last",
            type=NumberOr(OFF, OFF),
            metavar="N|off",
            help="self: never leave out the last n layers, or off.  [default: 2]",
        ),
        click.option(
            "--draft-exit/--no-draft-exit",
            default=None,
            help="End a model's draft when it is no longer sure.  [default: off]",
        ),
        click.option("--draft-exit-gamma", type=float, help="Threshold to start with.  [default: 0.8]"),
        click.option("--draft-exit-acceptance", type=float, help="Acceptance rate that it moves to.  [default: 0.9]"),
        click.option("--draft-exit-step", type=float, help="How far it moves in a round.  [default: 0.01]"),
    ]


def check_suffix_options(
    engine: EngineOptions, drafting: "RequestOptions", params: "SamplingParams | None" = None
) -> None:
    """Refuse engine options for drafter suffix if no request drafts by it; ``params`` None: greedy requests."""
    drafter, lookahead = drafting.get("drafter"), drafting.get("num_speculative_tokens")
    is_repeatable = params is not None and params.seed is not None and not params.is_greedy
    by_default = drafter is None and not isinstance(lookahead, int) and not is_repeatable
    copies = drafting.get("speculation", True) and (by_default or drafter in ("suffix", "auto"))
    wanted = [name for name, option in OPTIONS.items() if option.drafter == "suffix"]
    unused = [get_flag_name(name) for name in wanted if getattr(engine, name) is not None]
    if unused and not copies:
        raise InvalidRequestError(f"{unused[0]} was given, and no drafter uses it.", "add --drafter suffix or auto.")


def pop_drafting_options(options: dict[str, Any]) -> "RequestOptions":
    """The keyword arguments that :func:`drafting_options` make; InvalidRequestError if they contradict."""
    from specexport_runtime.intake.checks import check_acceptance
    from specexport_runtime.requests.draft_exit import DraftExitParams
    from specexport_runtime.requests.layer_choice import LayerRules

    drafting: RequestOptions = {
        "drafter": options.pop("drafter"),
        "num_speculative_tokens": options.pop("num_speculative_tokens"),
        "speculation": not options.pop("no_speculation"),
    }
    acceptance = options.pop("acceptance")
    if acceptance is not None:
        check_acceptance(acceptance)
        drafting["acceptance"] = acceptance
    tree_size = options.pop("tree_size")
    if tree_size is not None:
        drafting["tree_size"] = tree_size
    rules = {name: options.pop(f"layer_{name}") for name in ("threshold", "period", "keep_last")}
    given: dict[str, Any] = {
        name: None if value == OFF else value for name, value in rules.items() if value is not None
    }
    if given:
        drafting["layer_rules"] = LayerRules(**given)
    wanted = options.pop("draft_exit")
    names = {"gamma": "gamma", "acceptance": "target_acceptance", "step": "epsilon"}
    numbers = {field: options.pop(f"draft_exit_{name}") for name, field in names.items()}
    numbers = {field: value for field, value in numbers.items() if value is not None}
    if numbers and wanted is False:
        raise InvalidRequestError("--no-draft-exit was given, and a parameter of the draft exit.", "drop one.")
    if numbers:
        drafting["draft_exit"] = DraftExitParams(**numbers)
    elif wanted is not None:
        drafting["draft_exit"] = wanted
    return drafting


def sampling_params(sampling: dict[str, Any]) -> "SamplingParams":
    """The parameters that :func:`sampling_options` make; InvalidRequestError if a value is out of its range."""
    from specexport_runtime.sampling.params import SamplingParams

    bias = {}
    for item in sampling.pop("logit_bias"):
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise InvalidRequestError(f"--logit-bias {item!r} is not ID=BIAS.", "write for example 42=-1.5.") from None
    form = _pop_structured_outputs(sampling)
    return SamplingParams(logit_bias=bias, structured_outputs=form, **sampling)


_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


def _pop_structured_outputs(sampling: dict[str, Any]) -> "StructuredOutputs | None":
    """The form that the text must have; takes its options out."""
    from specexport_runtime.sampling.structured import StructuredOutputs

    given = {name: value for name in _FORMS if (value := sampling.pop(name)) not in (None, False, ())}
    flags = [f"--{name.replace('_', '-')}" for name in given]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(flags)} were both given.", "give one form of the text.")
    for flag, (name, value) in zip(flags, given.items(), strict=True):
        field: dict[str, Any] = {name.removesuffix("_schema"): value, "name": flag}
        if isinstance(value, Path):
            try:
                field = {name.removesuffix("_schema"): read_text(value), "name": f"{flag} {value}"}
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{flag} {error.message}", error.hint) from None
        return StructuredOutputs(**field)
    return None
