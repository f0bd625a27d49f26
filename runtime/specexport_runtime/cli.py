"""Command line of the runtime: ``generate``. Also mounted by the ``specexport`` command.

Engines are imported when a command runs, so that ``--help`` is fast.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport_runtime.cli_errors import SuggestingGroup
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.prompts import read_prompts

if TYPE_CHECKING:
    from specexport_runtime.results import GenerationResult, StreamChunk
    from specexport_runtime.sampling import SamplingParams


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


@dataclass(frozen=True)
class _Output:
    as_json: bool
    stats: bool
    colour: bool
    show_prompt: bool


@runtime_cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 text file.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Many prompts: JSONL with a field `prompt`.")
@click.option("--chat", is_flag=True, help="Put each prompt into the bundle's chat template as a user message.")
@click.option(
    "--num-speculative-tokens",
    "--lookahead",
    type=int,
    help="Draft tokens a round (K).  [default: 4, or less if the bundle was built for less]",
)
@click.option("--no-speculation", is_flag=True, help="Plain decoding: one token a round.")
@click.option("--max-num-seqs", type=int, default=8, show_default=True, help="Sequences decoded at a time.")
@click.option("--max-model-len", type=int, help="Most tokens of a sequence.  [default: the bundle's limit]")
@click.option("--threads", type=int, help="Compute threads.  [default: the cores available]")
@click.option(
    "--spin/--no-spin", default=True, show_default=True, help="Let idle threads spin; turn off on busy machines."
)
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
    num_speculative_tokens: int | None,
    no_speculation: bool,
    max_num_seqs: int,
    max_model_len: int | None,
    threads: int | None,
    spin: bool,
    stats: bool,
    as_json: bool,
    show_prompt: bool | None,
    colour: bool | None,
    **sampling: Any,
) -> None:
    """Generate text from BUNDLE for PROMPT (or --prompt-file, --prompts, or standard input)."""
    params = _params(sampling)
    if threads is not None and threads < 1:
        raise InvalidRequestError(f"--threads is {threads}.", "give 1 or more.")
    texts = list(read_prompts(prompt, prompt_file, prompts))
    from specexport_runtime.engine import SpecEngine

    terminal = sys.stdout.isatty()
    output = _Output(
        as_json,
        stats,
        terminal if colour is None else colour,
        terminal if show_prompt is None else show_prompt,
    )
    engine = SpecEngine.load(
        bundle,
        max_num_seqs=min(max_num_seqs, max(len(texts), 1)),
        max_model_len=max_model_len,
        num_threads=threads,
        spin=spin,
    )
    if chat:
        texts = [engine.format_chat([{"role": "user", "content": text}]) for text in texts]
    options = {"num_speculative_tokens": num_speculative_tokens, "speculation": not no_speculation}
    if prompts is None and not as_json:
        _print_stream(texts[0], engine.stream(texts[0], params, **options), output)  # type: ignore[arg-type]
        return
    for text, result in zip(texts, engine.iter_results(texts, params, **options), strict=True):  # type: ignore[arg-type]
        _print_result(text, result, output)


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


_STYLES: dict[str, dict[str, Any]] = {
    "accepted": {"fg": "green"},
    "corrected": {"fg": "red"},
    "bonus": {"fg": "cyan"},
    "target": {},
}


def _print_stream(prompt: str, chunks: "Iterator[StreamChunk]", output: _Output) -> None:
    if output.show_prompt:
        click.secho(prompt, nl=False, dim=output.colour, color=output.colour)
    stats = None
    for chunk in chunks:
        for piece in chunk.pieces:
            style = _STYLES[piece.kind] if output.colour else {}
            click.echo(click.style(piece.text, **style), nl=False, color=output.colour)
        sys.stdout.flush()
        stats = chunk.stats
    click.echo()
    if output.colour:
        legend = " ".join(click.style(kind, **style) for kind, style in _STYLES.items() if style)
        click.echo(f"[{legend}]", err=True, color=True)
    if output.stats and stats is not None:
        _print_stats(stats.to_json())


def _print_result(prompt: str, result: "GenerationResult", output: _Output) -> None:
    stats = result.stats.to_json()
    if output.as_json:
        record = {
            "prompt": prompt,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "stats": stats,
        }
        click.echo(json.dumps(record, ensure_ascii=False))
    else:
        click.echo(f"{prompt if output.show_prompt else ''}{result.text}")
    if output.stats:
        _print_stats(stats)


def _print_stats(stats: dict[str, Any]) -> None:
    def number(key: str, form: str) -> str:
        return "-" if stats[key] is None else format(stats[key], form)

    click.echo(
        f"{stats['num_generated_tokens']} tokens in {stats['rounds']} rounds, "
        f"{number('tokens_per_second', '.1f')} tokens/s, first after {number('time_to_first_token_s', '.3f')} s; "
        f"drafted {stats['drafted']}, accepted {stats['accepted']} (rate {number('acceptance_rate', '.3f')}), "
        f"mean accepted length {number('mean_accepted_length', '.2f')}",
        err=True,
    )
