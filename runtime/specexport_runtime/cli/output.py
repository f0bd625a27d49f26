"""What ``generate`` prints: a stream of pieces, finished results, counters."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specexport_runtime.requests.records import RoundTrace
    from specexport_runtime.requests.results import GenerationResult, StreamChunk
    from specexport_runtime.requests.stats import PaddingStats


@dataclass(frozen=True)
class OutputOptions:
    """Form of the output."""

    as_json: bool  # one JSON object a line
    stats: bool  # counters on standard error
    colour: bool  # colour tokens by where they came from
    show_prompt: bool  # before the text
    trace: bool = False  # what each round did, on standard error, or in the JSON objects


_STYLES: dict[str, dict[str, Any]] = {
    "accepted": {"fg": "green"},
    "branch": {"fg": "green", "underline": True},
    "corrected": {"fg": "red"},
    "bonus": {"fg": "cyan"},
    "target": {},
}


def print_stream(prompt: str, chunks: "Iterator[StreamChunk]", output: OutputOptions) -> None:
    """Print a stream as it comes, tokens coloured by where they came from."""
    if output.show_prompt:
        click.secho(prompt, nl=False, dim=output.colour, color=output.colour)
    stats = None
    for chunk in chunks:
        print_chunk(chunk, colour=output.colour)
        if output.trace and chunk.trace is not None:
            _print_round(chunk.trace)
        stats = chunk.stats
    click.echo()
    if output.colour:
        print_legend()
    if output.stats and stats is not None:
        print_stats(stats.to_json())


def print_chunk(chunk: "StreamChunk", *, colour: bool, is_dim: Callable[[str], bool] = lambda _: False) -> None:
    """Print the pieces of one round, coloured by where they came from; ``is_dim`` gets each piece's text in turn."""
    for piece in chunk.pieces:
        kind = "branch" if piece.is_branch else piece.kind
        style = {**_STYLES[kind], "dim": is_dim(piece.text) or None} if colour else {}
        click.echo(click.style(piece.text, **style), nl=False, color=colour)
    sys.stdout.flush()


def print_legend() -> None:
    """What the colours of tokens say, on standard error."""
    click.echo(f"[{' '.join(coloured_kinds())}]", err=True, color=True)


def coloured_kinds() -> list[str]:
    """Where a token may come from, each in its colour."""
    return [click.style(kind, **style) for kind, style in _STYLES.items() if style]


def print_notes(notes: Iterable[str]) -> None:
    """What was noticed meanwhile, on standard error, a line each."""
    for note in notes:
        click.echo(f"warning: {note}", err=True)


def print_padding(padding: "PaddingStats") -> None:
    """What padding cost the batch, or would have cost it, on standard error."""
    click.echo(
        f"padding ratio {padding.ratio:.3f} (padding {padding.padding}, accepted {padding.accepted}); "
        f"input tokens {padding.input_tokens}, padding tokens fed {padding.input_padding}",
        err=True,
    )


def print_result(prompt: str, result: "GenerationResult", output: OutputOptions) -> None:
    """Print one finished generation."""
    stats = result.stats.to_json()
    if output.as_json:
        record = {
            "prompt": prompt,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "stats": stats,
        }
        if result.logprobs is not None:
            record["logprobs"] = [
                {"token_id": each.token_id, "logprob": each.logprob, "top": [list(pair) for pair in each.top]}
                for each in result.logprobs
            ]
        if result.trace is not None:
            record["trace"] = [each.to_json() for each in result.trace]
        click.echo(json.dumps(record))
    else:
        click.echo(f"{prompt if output.show_prompt else ''}{result.text}")
    if output.trace and not output.as_json:
        for each in result.trace or ():
            _print_round(each)
    if output.stats:
        print_stats(stats)


def describe_drafters(drafters: dict[str, dict[str, int]], plain: int) -> str:
    """Accepted of drafted tokens and rounds of each of ``drafters``; then the ``plain`` rounds without a draft."""
    parts = [
        f"{name} {each['accepted']} of {each['drafted']} in {format_rounds(each['rounds'])}"
        for name, each in drafters.items()
    ]
    return "; ".join([*parts, *([f"{format_rounds(plain)} without a draft"] if plain else [])])


def describe_unused(stats: dict[str, Any]) -> list[str]:
    """Why ``auto`` did without a drafter in most rounds; of ``RequestStats.to_json``."""
    rounds, drafted = stats["rounds"], {name: each["rounds"] for name, each in stats["drafters"].items()}
    return [
        f"{name} sat out {rounds - drafted.get(name, 0)} of {format_rounds(rounds)}: "
        f"it promised {promised:.2f} of plain decoding's speed"
        + (f", and its last drafts lost the time of {-balance:.1f} rounds" if balance < 0 else "")
        for name, (promised, balance) in stats["unused"].items()
        if 2 * drafted.get(name, 0) < rounds
    ]


def format_rounds(count: int) -> str:
    """``1 round``, or more of them."""
    return f"{count} round" if count == 1 else f"{count} rounds"


def _print_round(trace: "RoundTrace") -> None:
    click.echo(trace.describe(), err=True)


def print_stats(stats: dict[str, Any]) -> None:
    """Counters and speed of one generation, as ``RequestStats.to_json`` gives them, on standard error."""

    def number(key: str, form: str) -> str:
        return "-" if stats[key] is None else format(stats[key], form)

    branches = f", on branches {stats['accepted_branches']} of {stats['branches']}" if stats["branches"] else ""
    click.echo(
        f"{stats['num_generated_tokens']} tokens in {stats['rounds']} rounds, "
        f"{number('tokens_per_second', '.1f')} tokens/s, first after {number('time_to_first_token_s', '.3f')} s; "
        f"drafted {stats['drafted']}, accepted {stats['accepted']} "
        f"(rate {number('acceptance_rate', '.3f')}{branches}), "
        f"mean accepted length {number('mean_accepted_length', '.2f')}",
        err=True,
    )
    if stats["drafters"]:
        plain = stats["rounds"] - sum(stats["accepted_histogram"].values())
        click.echo(describe_drafters(stats["drafters"], plain), err=True)
    for line in describe_unused(stats):
        click.echo(line, err=True)
    choice = stats["layer_choice"]
    if choice is not None:
        states = f", recurrence {choice['removed_recurrences']}" if choice["removed_recurrences"] else ""
        click.echo(
            f"draft out of the target's own layers: without attention {choice['removed_attention']}{states} and MLP "
            f"{choice['removed_mlp']} of {choice['num_layers']} layers",
            err=True,
        )
