"""Command line of the runtime: ``generate``. Also mounted by the ``specexport`` command.

Engines are imported when a command runs, so that ``--help`` is fast.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport_runtime.cli_errors import SuggestingGroup
from specexport_runtime.cli_output import OutputOptions, print_padding, print_result, print_stream
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.prompts import read_prompts, read_text

if TYPE_CHECKING:
    from specexport_runtime.sampling import SamplingParams


_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "unpad_kv",
    "unpad_input",
    "num_threads",
    "spin",
    "match_length",
    "cuda_graphs",
)


@click.group(cls=SuggestingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def runtime_cli() -> None:
    """Run specexport bundles."""


def _sampling_options(command: Any) -> Any:
    """The options that make a ``SamplingParams``; ranges are checked there, in one place."""
    options = [
        click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens to generate."),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 is off."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus probability; 1 is off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="Least share of the top; 0 is off."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit. Repeatable."),
        click.option("--seed", type=int, help="Seed of the random stream; none draws a fresh one."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the text at TEXT. Repeatable."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this id. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _batch_options(command: Any) -> Any:
    """The options that make engine limits and the way of batching."""
    options = [
        click.option("--max-num-seqs", type=int, default=8, show_default=True, help="Sequences decoded at a time."),
        click.option("--max-num-batched-tokens", type=int, default=512, show_default=True, help="Tokens of one step."),
        click.option("--max-model-len", type=int, help="Most tokens of a sequence.  [default: the bundle's limit]"),
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
            help="GPU engines: replay recorded steps.  [default: on for TensorRT]",
        ),
        click.option("--match-length", type=int, help="Fewest tokens that lookup must match.  [default: 2]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@runtime_cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 text file.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Many prompts: JSONL with a field `prompt`.")
@click.option("--chat", is_flag=True, help="Put each prompt into the bundle's chat template as a user message.")
@click.option(
    "--drafter",
    metavar="NAME",
    help="draft-model, lookup (copy from the text so far), chained (lookup, then the draft model) or none.  "
    "[default: the bundle's draft model, if it has one]",
)
@click.option(
    "--num-speculative-tokens",
    "--lookahead",
    type=int,
    help="Draft tokens a round (K).  [default: 4, for lookup 7, or less if the bundle was built for less]",
)
@click.option("--no-speculation", is_flag=True, help="Plain decoding: one token a round.")
@click.option("--reference", type=click.Path(path_type=Path), help="UTF-8 text file that lookup may copy from.")
@_batch_options
@_sampling_options
@click.option("--stats", is_flag=True, help="Print counters and speed to standard error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of text.")
@click.option(
    "--show-prompt/--no-show-prompt", default=None, help="Print the prompt before the text.  [default: on a terminal]"
)
@click.option("--color/--no-color", "colour", default=None, help="Colour tokens by origin.  [default: on a terminal]")
def generate(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    chat: bool,
    drafter: str | None,
    num_speculative_tokens: int | None,
    no_speculation: bool,
    reference: Path | None,
    stats: bool,
    as_json: bool,
    show_prompt: bool | None,
    colour: bool | None,
    **options: Any,
) -> None:
    """Generate text from BUNDLE for PROMPT (or --prompt-file, --prompts, or standard input)."""
    limits = {name: options.pop(name) for name in _LIMITS}
    params = _params(options)
    if limits["num_threads"] is not None and limits["num_threads"] < 1:
        raise InvalidRequestError(f"--threads is {limits['num_threads']}.", "give 1 or more.")
    items = list(read_prompts(prompt, prompt_file, prompts))
    shared = None if reference is None else read_text(reference)
    references = [shared if item.reference is None else item.reference for item in items]
    from specexport_runtime.engine import SpecEngine

    terminal = sys.stdout.isatty()
    output = OutputOptions(
        as_json,
        stats,
        terminal if colour is None else colour,
        terminal if show_prompt is None else show_prompt,
    )
    limits["max_num_seqs"] = min(limits["max_num_seqs"], max(len(items), 1))
    engine = SpecEngine.load(bundle, **limits)
    texts = [item.text for item in items]
    if chat:
        texts = [engine.format_chat([{"role": "user", "content": text}]) for text in texts]
    drafting: dict[str, Any] = {
        "drafter": drafter,
        "num_speculative_tokens": num_speculative_tokens,
        "speculation": not no_speculation,
    }
    if prompts is None and not as_json:
        print_stream(texts[0], engine.stream(texts[0], params, reference=references[0], **drafting), output)
        return
    results = engine.iter_results(texts, params, references=references, **drafting)
    for text, result in zip(texts, results, strict=True):
        print_result(text, result, output)
    if stats and len(texts) > 1:
        print_padding(engine.padding)


def _params(sampling: dict[str, Any]) -> "SamplingParams":
    from specexport_runtime.sampling import SamplingParams

    bias = {}
    for item in sampling.pop("logit_bias"):
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise InvalidRequestError(f"--logit-bias {item!r} is not ID=BIAS.", "write for example 42=-1.5.") from None
    return SamplingParams(logit_bias=bias, **sampling)
