"""``specexport demo``: build the demo pair's bundle, stream from it, measure it. Uses the public API only."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from specexport.report import print_json
from specexport_runtime.cli.options import engine_flag
from specexport_runtime.errors import CheckFailedError, UserInputError

if TYPE_CHECKING:
    from specexport_runtime import GenerationResult, SpecEngine

PAIR = Path("examples") / "demo_pair"
STREAM_PROMPT = 'def read_lines(path, *, encoding="utf-8"):\n    """Return the lines of a file."""\n    with open(path'
NUM_PROMPTS = 8


class Difference(NamedTuple):
    """First difference between plain and speculative output."""

    prompt: int  # counted from 0
    position: int  # of the first token that differs, in the output, counted from 0


@dataclass(frozen=True)
class Measurement:
    """Plain against speculative decoding, greedy, one sequence at a time, both in one run."""

    num_prompts: int  # of each repeat
    num_tokens: int  # generated in each repeat, by each of the two
    repeats: int  # rates are medians over them
    lookahead: int  # K, draft tokens a round
    plain_tokens_per_second: float  # prefill included
    speculative_tokens_per_second: float  # prefill included
    speedup: float  # median over the repeats of the ratio within one repeat
    acceptance_rate: float  # accepted / drafted
    mean_accepted_length: float  # tokens a speculative round, its correction or bonus token included
    identical: bool  # every prompt gave the same tokens both ways
    difference: Difference | None  # None if identical


def find_demo_pair() -> Path:
    """Folder of the demo pair: beside the package in a clone, else below the working folder (else UserInputError)."""
    places = [Path(__file__).resolve().parents[1] / PAIR, Path.cwd() / PAIR]
    for place in places:
        if (place / "target" / "config.json").is_file() and (place / "draft" / "config.json").is_file():
            return place
    raise UserInputError(
        f"the demo needs the checkpoints of {PAIR}, which an installed package does not carry.",
        "clone the repository and run `make demo` there.",
    )


def load_prompts(pair: Path) -> list[str]:
    """The demo pair's own prompts (``prompts.jsonl``, field ``prompt``)."""
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines if line.strip()]


def measure(
    engine: "SpecEngine", prompts: Sequence[str], *, lookahead: int, max_tokens: int, repeats: int
) -> Measurement:
    """Decode every prompt plainly and speculatively, in turns of changing order: both meet the same machine."""
    from specexport_runtime import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def decode(prompt: str, speculative: bool) -> "GenerationResult":
        if speculative:
            return engine.generate(prompt, params, num_speculative_tokens=lookahead)[0]
        return engine.generate(prompt, params, speculation=False)[0]

    runs: dict[bool, list[list[GenerationResult]]] = {False: [], True: []}
    for repeat in range(repeats):
        results: dict[bool, list[GenerationResult]] = {False: [], True: []}
        for prompt in prompts:
            for speculative in (False, True) if repeat % 2 == 0 else (True, False):
                results[speculative].append(decode(prompt, speculative))
        for speculative, each in results.items():
            runs[speculative].append(each)
    return _summarize(runs[False], runs[True], lookahead)


def _summarize(
    plain: "list[list[GenerationResult]]", speculative: "list[list[GenerationResult]]", lookahead: int
) -> Measurement:
    rates = [(_rate(slow), _rate(fast)) for slow, fast in zip(plain, speculative, strict=True)]
    stats = [result.stats for each in speculative for result in each]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    draft_rounds = sum(s.draft_rounds for s in stats)
    difference = next(filter(None, map(_first_difference, plain, speculative)), None)
    return Measurement(
        num_prompts=len(plain[0]),
        num_tokens=sum(len(result.token_ids) for result in plain[0]),
        repeats=len(plain),
        lookahead=lookahead,
        plain_tokens_per_second=statistics.median(slow for slow, _ in rates),
        speculative_tokens_per_second=statistics.median(fast for _, fast in rates),
        speedup=statistics.median(fast / slow for slow, fast in rates),
        acceptance_rate=accepted / max(drafted, 1),
        mean_accepted_length=1 + accepted / max(draft_rounds, 1),
        identical=difference is None,
        difference=difference,
    )


def _rate(results: "list[GenerationResult]") -> float:
    """Tokens a second over several generations: all tokens over all time."""
    seconds = sum((result.stats.end_time or 0.0) - result.stats.start_time for result in results)
    return sum(len(result.token_ids) for result in results) / seconds


def _first_difference(plain: "list[GenerationResult]", speculative: "list[GenerationResult]") -> Difference | None:
    for index, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shorter = min(len(one.token_ids), len(other.token_ids))
            return Difference(index, next((i for i, (a, b) in enumerate(pairs) if a != b), shorter))
    return None


def format_measurement(measured: Measurement) -> str:
    """The table that the command prints."""
    rows = [
        ("plain decoding", f"{measured.plain_tokens_per_second:.1f} tokens/s"),
        (f"speculative decoding, K={measured.lookahead}", f"{measured.speculative_tokens_per_second:.1f} tokens/s"),
        ("speed-up", f"{measured.speedup:.2f}×"),
        ("acceptance rate", f"{measured.acceptance_rate:.3f}"),
        ("mean accepted length", f"{measured.mean_accepted_length:.2f} tokens a round"),
        ("identical to plain greedy", "yes" if measured.identical else "no"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}   {value}" for name, value in rows]
    title = (
        f"Greedy, {measured.num_prompts} prompts, {measured.num_tokens} tokens each way, one sequence at a time, "
        f"medians of {measured.repeats}:"
    )
    return "\n".join([title, *lines])


def _build(pair: Path, output: Path) -> None:
    from specexport.compile.pipeline import build_bundle
    from specexport.progress import show_progress
    from specexport.recipe import BuildRecipe

    recipe = BuildRecipe(target=str(pair / "target"), draft=str(pair / "draft"), output=str(output))
    with show_progress(sys.stderr) as progress:
        result = build_bundle(recipe, progress=progress, force=True)
    state = "is up to date" if result.up_to_date else f"built in {sum(result.seconds.values()):.1f} s"
    click.echo(f"bundle {_short(output)} {state}", err=True)


def _stream(engine: "SpecEngine", prompt: str, *, lookahead: int, max_tokens: int) -> None:
    from specexport_runtime import SamplingParams
    from specexport_runtime.cli.output import coloured_kinds, print_chunk

    colour = sys.stdout.isatty()
    click.echo()
    click.secho(prompt, nl=False, dim=colour)
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=1, max_tokens=max_tokens)
    for chunk in engine.stream(prompt, params, num_speculative_tokens=lookahead):
        print_chunk(chunk, colour=colour)
    click.echo("\n")
    if colour:
        click.echo(f"tokens: {', '.join(coloured_kinds())}\n")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Bundle folder.  [default: engines/demo]")
@click.option("--prompt", default=STREAM_PROMPT, help="Prompt of the live stream.")
@click.option("--num-speculative-tokens", "--lookahead", "lookahead", type=int, default=4, show_default=True, help="K.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens to generate for each prompt.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed repeats.")
@engine_flag("num_threads")
@click.option("--json", "as_json", is_flag=True, help="Print the measured numbers as JSON and nothing else.")
def demo(
    output: Path | None,
    prompt: str,
    lookahead: int,
    max_tokens: int,
    repeats: int,
    num_threads: int | None,
    as_json: bool,
) -> None:
    """Build the demo bundle, stream text from it, and measure it against plain decoding."""
    from specexport_runtime.executors.open import check_threads

    check_threads(num_threads, "--threads")
    pair = find_demo_pair()
    folder = output if output is not None else pair.parents[1] / "engines" / "demo"
    _build(pair, folder)
    from specexport_runtime import SpecEngine

    engine = SpecEngine.load(folder, enable_prefix_caching=False, max_num_seqs=1, num_threads=num_threads)
    try:
        if not as_json:
            _stream(engine, prompt, lookahead=lookahead, max_tokens=max_tokens)
        measured = measure(
            engine, load_prompts(pair)[:NUM_PROMPTS], lookahead=lookahead, max_tokens=max_tokens, repeats=repeats
        )
    finally:
        engine.close()
    if as_json:
        print_json(asdict(measured))
    else:
        click.echo(format_measurement(measured))
    if measured.difference is not None:
        raise CheckFailedError(
            f"prompt {measured.difference.prompt} differs from plain decoding at token {measured.difference.position}.",
            f"run `specexport verify {_short(folder)}` to see the logit gap there.",
        )
