"""``specexport explain``: decode one prompt twice, plainly and with a draft, and show what the draft did and saved."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from specexport_runtime.cli.grouped import GroupedCommand
from specexport_runtime.cli.options import (
    check_suffix_options,
    drafting_options,
    engine_flag,
    pop_drafting_options,
    pop_engine_options,
    reference_option,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from specexport_runtime import GenerationResult, SamplingParams, SpecEngine
    from specexport_runtime.requests.records import RoundTrace

WARMUP_TOKENS = 8


@click.command(
    cls=GroupedCommand,
    first="chat max_tokens temperature seed drafter num_speculative_tokens as_json show_all prompt_file",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 text file.")
@click.option("--chat", is_flag=True, help="Put the prompt into the bundle's chat template as a user message.")
@sampling_options
@drafting_options
@reference_option
@engine_flag("match_length")
@engine_flag("max_model_len")
@engine_flag("num_threads")
@engine_flag("spin")
@click.option("--all", "show_all", is_flag=True, help="Also what was turned down, and acceptance by position.")
@click.option("--color/--no-color", "colour", default=None, help="Colour draft tokens.  [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def explain(
    bundle: Path,
    prompt: str | None,
    *,
    prompt_file: Path | None,
    chat: bool,
    reference: Path | None,
    show_all: bool,
    colour: bool | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show, round by round, what was drafted for PROMPT, what was accepted, why each draft ended, and what it saved.

    The prompt (or --prompt-file, or standard input) is decoded plainly first, to compare with.
    """
    from specexport_runtime.cli.prompts import read_prompts, read_text
    from specexport_runtime.engine import SpecEngine

    engine_options = pop_engine_options(options)
    asked = pop_drafting_options(options)
    params = sampling_params(options)
    check_suffix_options(engine_options, asked, params)
    drafting: dict[str, Any] = {**asked}
    (item,) = read_prompts(prompt, prompt_file, None)
    if reference is not None:
        drafting["references"] = [read_text(reference)]
    engine = SpecEngine.load(bundle, engine_options, enable_prefix_caching=False, max_num_seqs=1, share_threads=True)
    try:
        text = engine.format_chat([{"role": "user", "content": item.text}]) if chat else item.text
        result, trace = _decode(engine, text, params, drafting)
        _print(engine, text, result, trace, params.max_tokens, whole=show_all, colour=colour, as_json=as_json)
    finally:
        engine.close()


def _decode(
    engine: "SpecEngine", text: str, params: "SamplingParams", drafting: dict[str, Any]
) -> "tuple[GenerationResult, list[RoundTrace]]":
    """Decode with a draft; the trace is priced by rounds of plain decoding that were measured just before."""
    from dataclasses import replace

    short = replace(params, max_tokens=min(params.max_tokens, WARMUP_TOKENS))
    # A mistake is refused before anything long begins. Nothing is remembered: a draft would copy the text that it is
    # compared with.
    engine.generate(text, short, remember=False, **drafting)
    engine.generate(text, short, remember=False, drafter="none")
    plain = engine.generate(text, params, remember=False, drafter="none", trace=True)[0].trace or []
    result = engine.generate(text, params, trace=True, **drafting)[0]
    each = [r.milliseconds / len(r.emitted) for r in plain[1:] if r.emitted]  # the first one reads the prompt
    trace = (result.trace or [])[1:]
    if each:
        price = fmean(each)  # not the median: stalls of a busy machine hit both ways to decode
        trace = [r._replace(plain_milliseconds=price * len(r.emitted)) for r in trace]
    return result, trace


def _print(
    engine: "SpecEngine",
    text: str,
    result: "GenerationResult",
    trace: "list[RoundTrace]",
    most: int,
    *,
    whole: bool,
    colour: bool | None,
    as_json: bool,
) -> None:
    from specexport.explain.report import (
        NARROW,
        Pieces,
        end_line,
        make_table,
        short_lines,
        summary_lines,
        verdict_line,
    )
    from specexport.explain.summary import summarize
    from specexport.report import print_json, print_report
    from specexport_runtime.cli.output import describe_unused

    context = result.stats.num_prompt_tokens + result.stats.num_generated_tokens // 2
    summary = summarize(
        trace,
        curves=engine.cost_curves,
        learned=engine.learned_costs,
        longest=engine.lookahead,
        context=context,
        layers=result.stats.layer_choice,
    )
    if as_json:
        record = {
            "prompt": text,
            "text": result.text,
            "token_ids": result.token_ids,
            "layers": None if result.stats.layer_choice is None else result.stats.layer_choice.to_json(),
            "rounds": [r.to_json() for r in trace],
            "summary": summary.to_json(),
        }
        print_json(record)
        return
    pieces = Pieces(
        lambda ids: engine.tokenizer.decode(list(ids), skip_special_tokens=False), _find_token_before(result)
    )
    lines = summary_lines(summary, result.stats.layer_choice) if whole else short_lines(summary)
    lines += describe_unused(result.stats.to_json())
    if engine.token_map is not None:
        shared = engine.token_map.num_shared
        lines.append(f"The draft model has another vocabulary: it can say {shared} tokens of the target's.")
    first = (result.trace[0].num_tested, result.trace[0].accepted) if result.trace else (0, 0)
    before = "\n".join([verdict_line(summary, first), *end_line(result.finish_reason, len(result.token_ids), most)])
    table = make_table(trace, pieces, whole=whole)
    print_report(table, lines, before=before, colour=colour, width=None if whole else NARROW)


def _find_token_before(result: "GenerationResult") -> int:
    """The last token of the round that read the prompt: the table begins after it."""
    return result.trace[0].emitted[-1] if result.trace else result.token_ids[0]
