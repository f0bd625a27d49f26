"""Options of ``generate``, and what they make: sampling parameters, engine limits, how to draft."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport_runtime.cli.any_text import typed
from specexport_runtime.cli.gone import gone
from specexport_runtime.engine_options import GONE
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from specexport_runtime.requests.drafting import Drafting
    from specexport_runtime.sampling.cut import Cut
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sampling.structured import StructuredOutputs

LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "unpad_kv",
    "unpad_input",
    "num_threads",
    "spin",
    "match_length",
    "cuda_graphs",
    "enable_prefix_caching",
    "prefix_rows",
    "kv_cache_memory_bytes",
    "suffix_memory_mb",
    "corpus",
    "suffix_file",
    "lora",
)
"""Options that ``SpecEngine.load`` takes."""


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


OFF = "off"
"""Switches a rule off on the command line; the rule is None then."""


def _add(command: Any, options: list[Any]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def sampling_options(
    command: Any, *, max_tokens: int | None = 128, temperature: float = 0.0, top_p: float = 1.0
) -> Any:
    """Add the options that make a ``SamplingParams``; ranges are checked there, in one place.

    ``max_tokens`` is a default, None for a command that finds its own.
    """
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
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit. Repeatable."),
        click.option("--seed", type=int, help="Seed of the random stream; none draws a fresh one."),
        click.option("--stop", multiple=True, type=typed, metavar="TEXT", help="End the text at TEXT. Repeatable."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this id. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
        click.option(
            "--json-schema",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write JSON that follows this JSON schema.",
        ),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option("--regex", type=typed, metavar="TEXT", help="Write what matches this regular expression."),
        click.option("--choice", multiple=True, type=typed, metavar="TEXT", help="Write one of these. Repeatable."),
        click.option(
            "--grammar",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write what follows this grammar (Lark).",
        ),
    ]
    return _add(command, options)


def _cut_option(name: str, cut: "Cut") -> Any:
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=float, default=cut.off, show_default=True, help=cut.help)


def batch_options(command: Any) -> Any:
    """Add the options that make engine limits and the way of batching."""
    options = [
        click.option("--max-num-seqs", type=int, help="Sequences decoded at a time.  [default: the bundle's, else 8]"),
        click.option(
            "--unpad-kv/--no-unpad-kv",
            default=True,
            show_default=True,
            help="Off: all sequences advance by the batch's maximum, with padding in the KV cache.",
        ),
        click.option(
            "--unpad-input/--no-unpad-input",
            default=True,
            show_default=True,
            help="Off: all sequences of a step are padded to the longest draft.",
        ),
        click.option(
            "--prefix-rows",
            type=int,
            default=0,
            show_default=True,
            help="Cache rows that keep prefixes beside those of the sequences that are decoded.",
        ),
        click.option(
            "--kv-cache-memory-bytes",
            metavar="SIZE",
            help="Most memory of the KV caches, 2GiB for example; more sequences than have their full length in it may "
            "run (CPU).  [default: what is written to]",
        ),
    ]
    return _add(engine_options(command), options)


def engine_options(command: Any) -> Any:
    """Add the options that make an engine, however many sequences it decodes."""
    options = [
        click.option(
            "--max-num-batched-tokens", type=int, help="Tokens of one step.  [default: the bundle's, else 512]"
        ),
        click.option("--max-model-len", type=int, help="Most tokens of a sequence.  [default: the bundle's limit]"),
        click.option("--threads", "num_threads", type=int, help="Compute threads.  [default: the cores available]"),
        click.option(
            "--spin/--no-spin",
            default=True,
            show_default=True,
            help="Let idle threads spin; turn off on busy machines.",
        ),
        click.option(
            "--cuda-graphs/--no-cuda-graphs",
            default=None,
            help="GPU engines: replay recorded steps.  [default: on where the engine can]",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=True,
            show_default=True,
            help="Go on from what cache rows have of a prompt.",
        ),
        gone("--prepacked/--no-prepacked", GONE["prepacked"]),
        click.option(
            "--corpus",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Folder of text files that drafter suffix may copy from.",
        ),
        click.option(
            "--suffix-file",
            type=click.Path(),
            metavar="FILE|cache",
            help="Keep what drafter suffix learns in this file, or in the user's cache.",
        ),
        click.option(
            "--suffix-memory",
            "suffix_memory_mb",
            type=int,
            metavar="MB",
            help="Memory for what drafter suffix learns: 16 bytes a token.  [default: 16]",
        ),
        click.option("--match-length", type=int, help="Fewest tokens that lookup must match.  [default: 2]"),
    ]
    return _add(command, options)


def drafting_options(command: Any) -> Any:
    """Add the options that say how to draft."""
    options = [
        click.option(
            "--drafter",
            metavar="NAME",
            help="draft-model, head (reads the target's hidden states), lookup (copy from the text so far), suffix "
            "(and from earlier answers), self (some of the target's own layers), chained (lookup, then the draft "
            "model, the head or the own layers), "
            "auto (whatever the bundle has, by what it promises in every round) or none.  "
            "[default: auto; the draft model with a number of tokens, or for a seed to sample by]",
        ),
        click.option(
            "--num-speculative-tokens",
            "--lookahead",
            type=NumberOr("auto", "auto"),
            metavar="N|auto",
            help="Draft tokens a round (K), or auto: chosen every round for the most expected tokens a second.  "
            "[default: auto; with a drafter 4, for lookup 7, for self 3, or less if less was built]",
        ),
        click.option("--lora", metavar="NAME", help="LoRA adapter of the bundle to write with.  [default: none]"),
        click.option("--no-speculation", is_flag=True, help="Plain decoding: one token a round."),
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
        click.option(
            "--acceptance",
            metavar="block|token",
            help="How sampled drafts are accepted: as a block, which keeps more, or token by token.  [default: block]",
        ),
        click.option("--draft-exit-gamma", type=float, help="Threshold to start with.  [default: 0.8]"),
        click.option("--draft-exit-acceptance", type=float, help="Acceptance rate that it moves to.  [default: 0.9]"),
        click.option("--draft-exit-step", type=float, help="How far it moves in a round.  [default: 0.01]"),
    ]
    return _add(command, options)


def check_of_use(limits: Mapping[str, Any], drafting: "Drafting", params: "SamplingParams | None" = None) -> None:
    """Refuse options of ``SpecEngine.load`` for drafter suffix if no request drafts by it.

    ``params`` None: requests sample greedily.
    """
    drafter, lookahead = drafting["drafter"], drafting["num_speculative_tokens"]
    is_repeatable = params is not None and params.seed is not None and not params.is_greedy
    by_default = drafter is None and not isinstance(lookahead, int) and not is_repeatable
    copies = drafting["speculation"] and (by_default or drafter in ("suffix", "auto"))
    flags = {"corpus": "--corpus", "suffix_file": "--suffix-file", "suffix_memory_mb": "--suffix-memory"}
    unused = [flag for name, flag in flags.items() if limits.get(name) is not None]
    if unused and not copies:
        raise InvalidRequestError(f"{unused[0]} was given, and nobody drafts by it.", "add --drafter suffix or auto.")


def take_drafting(options: dict[str, Any]) -> "Drafting":
    """The keyword arguments that the options of :func:`drafting_options` make; takes them out of ``options``.

    ``InvalidRequestError`` if a value is out of its range, or options contradict each other.
    """
    from specexport_runtime.requests.checks import check_acceptance
    from specexport_runtime.sequences.draft_exit import DraftExitParams
    from specexport_runtime.sequences.layer_choice import LayerRules

    drafting: Drafting = {
        "drafter": options.pop("drafter"),
        "num_speculative_tokens": options.pop("num_speculative_tokens"),
        "speculation": not options.pop("no_speculation"),
    }
    acceptance = options.pop("acceptance")
    if acceptance is not None:
        check_acceptance(acceptance)
        drafting["acceptance"] = acceptance
    rules = {name: options.pop(f"layer_{name}") for name in ("threshold", "period", "keep_last")}
    given = {name: None if value == OFF else value for name, value in rules.items() if value is not None}
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
    """The parameters that the options of :func:`sampling_options` make; takes some of them out.

    ``InvalidRequestError`` if a value is out of its range.
    """
    from specexport_runtime.sampling.params import SamplingParams

    bias = {}
    for item in sampling.pop("logit_bias"):
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise InvalidRequestError(f"--logit-bias {item!r} is not ID=BIAS.", "write for example 42=-1.5.") from None
    form = _form(sampling)
    return SamplingParams(logit_bias=bias, structured_outputs=form, **sampling)


def _form(sampling: dict[str, Any]) -> "StructuredOutputs | None":
    """The form that the text must have; takes its options out."""
    from specexport_runtime.sampling.structured import StructuredOutputs

    schema, grammar = (_read_form(sampling.pop(name)) for name in ("json_schema", "grammar"))
    fields: dict[str, Any] = {
        "json": schema,
        "json_object": sampling.pop("json_object"),
        "regex": sampling.pop("regex"),
        "choice": sampling.pop("choice") or None,
        "grammar": grammar,
    }
    given = {name: value for name, value in fields.items() if value not in (None, False)}
    return StructuredOutputs(**given) if given else None


def _read_form(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}.", "give a text file.") from None
