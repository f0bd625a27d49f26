"""Command line of the runtime: ``generate``, ``chat`` and ``serve``, also mounted by ``specexport``."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport_runtime.cli.any_text import decode_argument
from specexport_runtime.cli.grouped import GroupedCommand, add_under_heading
from specexport_runtime.cli.lazy import LazyGroup, Mount
from specexport_runtime.cli.options import (
    check_suffix_options,
    drafting_options,
    engine_flags,
    find_bundle,
    pop_drafting_options,
    pop_engine_options,
    reference_option,
    sampling_options,
    sampling_params,
)
from specexport_runtime.cli.output import OutputOptions, print_notes, print_padding, print_result, print_stream
from specexport_runtime.cli.prompts import read_prompts, read_text
from specexport_runtime.cli.serve import serve
from specexport_runtime.engine_options import Use
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.machine import available_cores, find_excessive_load

if TYPE_CHECKING:
    from specexport_runtime.requests.results import Prompt


_ANNEXES = {"chat": Mount("specexport_runtime.chat.command", "chat", "Talk with a bundle's model in the terminal.")}


@click.group(cls=LazyGroup, mounts=_ANNEXES, context_settings={"help_option_names": ["-h", "--help"]})
def runtime_cli() -> None:
    """Run specexport bundles."""


runtime_cli.add_command(serve)


@runtime_cli.command(
    cls=GroupedCommand,
    first="chat max_tokens temperature seed drafter num_speculative_tokens stats as_json prompt_file prompts",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 text file.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Many prompts: JSONL with a field `prompt`.")
@click.option("--chat", is_flag=True, help="Put each prompt into the bundle's chat template as a user message.")
@add_under_heading(
    "Text",
    click.option(
        "--system", type=decode_argument, metavar="TEXT", help="With --chat: what the model is told before the prompt."
    ),
)
@sampling_options
@drafting_options
@reference_option
@engine_flags(Use.ANY, Use.BATCH)
@click.option("--stats", is_flag=True, help="Print counters and speed to standard error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of text.")
@add_under_heading(
    "Output",
    click.option(
        "--logprobs", type=int, metavar="N", help="With --json: log-probability of each token, and the top N."
    ),
    click.option("--trace", is_flag=True, help="Print what each round did, and what it saved, to standard error."),
    click.option(
        "--show-prompt/--no-show-prompt",
        default=None,
        help="Print the prompt before the text.  [default: on a terminal]",
    ),
    click.option(
        "--color/--no-color", "colour", default=None, help="Colour tokens by origin.  [default: on a terminal]"
    ),
)
def generate(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    chat: bool | None,  # None: where the bundle has a template
    system: str | None,
    reference: Path | None,
    stats: bool,
    trace: bool,
    as_json: bool,
    show_prompt: bool | None,
    colour: bool | None,
    **options: Any,
) -> None:
    """Generate text from BUNDLE for PROMPT (or --prompt-file, --prompts, or standard input)."""
    engine_options = pop_engine_options(options)
    drafting = pop_drafting_options(options)
    params = sampling_params(options)
    if params.logprobs is not None and not as_json:
        raise InvalidRequestError("--logprobs was given, and text has no place for them.", "add --json.")
    items = list(read_prompts(prompt, prompt_file, prompts))
    shared = None if reference is None else read_text(reference)
    references = [shared if item.reference is None else item.reference for item in items]
    from specexport_runtime.bundle.manifest import load_manifest
    from specexport_runtime.bundle.opened import CHAT_TEMPLATE_NAME

    terminal = sys.stdout.isatty()
    output = OutputOptions(
        as_json,
        stats,
        terminal if colour is None else colour,
        terminal if show_prompt is None else show_prompt,
        trace,
    )
    check_suffix_options(engine_options, drafting, params)
    busy = find_excessive_load() if stats and engine_options.spin else None  # before this adds its own
    drafting["trace"] = trace
    bundle = find_bundle(bundle)
    chats = CHAT_TEMPLATE_NAME in load_manifest(bundle).files if chat is None else chat
    if system is not None and not chats:
        raise InvalidRequestError(
            "--system was given, and plain text has no place for it.",
            "leave it out: this model has no chat template." if chat is None else "add --chat.",
        )
    rows = min(engine_options.max_num_seqs or load_manifest(bundle).default_num_seqs, max(len(items), 1))
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.telemetry.never_accepted import NeverAccepted

    notes: list[str] = []
    with closing(SpecEngine.load(bundle, engine_options, max_num_seqs=rows, share_threads=True)) as engine:
        engine.add_observer(NeverAccepted(notes.append))
        texts = [item.text for item in items]
        inputs: list[Prompt] = list(texts)
        if chats:
            told = [] if system is None else [{"role": "system", "content": system}]
            conversations = [[*told, {"role": "user", "content": text}] for text in texts]
            texts = [engine.format_chat(each) for each in conversations]
            inputs = [engine.encode_chat(each) for each in conversations]
        if prompts is None and not as_json:
            print_stream(texts[0], engine.stream(inputs[0], params, reference=references[0], **drafting), output)
        else:
            results = engine.iter_results(inputs, params, references=references, **drafting)
            for text, result in zip(texts, results, strict=True):
                print_result(text, result, output)
            if stats and len(texts) > 1:
                print_padding(engine.padding)
    if busy is not None:
        cores = available_cores()
        click.echo(f"load {busy:.1f} on {cores} cores at the start: here --no-spin may be faster", err=True)
    print_notes(notes)
