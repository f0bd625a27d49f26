"""``specexport chat``: options, and the loop of lines and answers."""

import sys
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from specexport_runtime.chat.commands import Commands
from specexport_runtime.chat.lines import ReadLine, piped_lines, read_entry, terminal_lines
from specexport_runtime.chat.session import ChatOptions, Session
from specexport_runtime.chat.slips import InterruptHandler
from specexport_runtime.cli.any_text import decode_argument
from specexport_runtime.cli.errors import format_error
from specexport_runtime.cli.grouped import GroupedCommand, add_under_heading
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
from specexport_runtime.cli.output import print_legend, print_notes
from specexport_runtime.cli.prompts import read_text
from specexport_runtime.engine_options import Use
from specexport_runtime.errors import InvalidRequestError, SpecexportError

_PATH = click.Path(path_type=Path)


@click.command(
    cls=GroupedCommand,
    first="system system_file load_file max_tokens temperature seed drafter num_speculative_tokens stats",
)
@click.argument("bundle", type=_PATH)
@click.option(
    "--system", type=decode_argument, metavar="TEXT", help="System prompt: what the model is told before everything."
)
@click.option("--system-file", type=_PATH, help="Read the system prompt from a UTF-8 text file.")
@click.option("--load", "load_file", type=_PATH, metavar="FILE", help="Go on from a conversation that /save wrote.")
@partial(sampling_options, max_tokens=None, temperature=0.7, top_p=0.95)
@add_under_heading(
    "Text", click.option("--chat-template", type=_PATH, metavar="FILE", help="Jinja template, not the bundle's.")
)
@drafting_options
@reference_option
@engine_flags(Use.ANY)
@click.option("--stats", is_flag=True, help="Print counters and speed of every answer to standard error.")
@add_under_heading(
    "Output",
    click.option(
        "--color/--no-color", "colour", default=None, help="Colour tokens by origin.  [default: on a terminal]"
    ),
    click.option(
        "--history/--no-history",
        "keep_history",
        default=True,
        show_default=True,
        help="On a terminal: keep what was entered in the user's cache, for later conversations.",
    ),
)
def chat(
    bundle: Path,
    system: str | None,
    system_file: Path | None,
    load_file: Path | None,
    chat_template: Path | None,
    reference: Path | None,
    stats: bool,
    colour: bool | None,
    keep_history: bool,
    max_tokens: int | None,
    **options: Any,
) -> None:
    """Talk with BUNDLE's model, by its chat template. /help lists what can be entered besides messages.

    Standard input that is no terminal is read line by line: each line is a message.
    """
    engine_options = pop_engine_options(options)
    drafting = pop_drafting_options(options)
    params = sampling_params({**options, "max_tokens": 1 if max_tokens is None else max_tokens})
    if system is not None and system_file is not None:
        raise InvalidRequestError("--system and --system-file were both given.", "drop one.")
    told = system if system_file is None else read_text(system_file).strip()
    terminal = sys.stdout.isatty()
    session_options = ChatOptions(
        params,
        max_tokens,
        drafting,
        None if reference is None else read_text(reference),
        stats,
        terminal if colour is None else colour,
        None if chat_template is None else read_text(chat_template),
    )
    check_suffix_options(engine_options, drafting, params)
    bundle = find_bundle(bundle)
    _check_template(bundle, session_options)
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.telemetry.never_accepted import NeverAccepted

    notes: list[str] = []
    with closing(SpecEngine.load(bundle, engine_options, max_num_seqs=1, share_threads=True)) as engine:
        engine.add_observer(NeverAccepted(notes.append))
        engine.resolve_drafting(**drafting)
        if params.structured_outputs is not None:
            engine.check_form(params.structured_outputs)
        slips = InterruptHandler()
        session = Session(engine, session_options, slips)
        commands = Commands(session)
        if load_file is not None:
            commands.load(load_file)
        if told is not None:
            session.set_system(told)
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            session.note(f"{bundle.name}: up to {engine.max_model_len} tokens. /help lists commands, Ctrl-D leaves.")
            if session_options.colour:
                print_legend()
        lines = terminal_lines(keep_history=keep_history) if is_interactive else nullcontext(piped_lines())
        with lines as read_line, slips.install() if is_interactive else nullcontext():
            talk(session, commands, read_line, slips, is_interactive=is_interactive)
    print_notes(notes)


def _check_template(bundle: Path, options: ChatOptions) -> None:
    """Refuse a bundle without a chat template before its engines are loaded."""
    from specexport_runtime.bundle.manifest import load_manifest
    from specexport_runtime.bundle.opened import CHAT_TEMPLATE_NAME

    if options.chat_template is None and CHAT_TEMPLATE_NAME not in load_manifest(bundle).files:
        raise InvalidRequestError(
            f"{bundle.name} has no chat template.",
            "give one with --chat-template, or a prompt to `specexport run`, which writes plain text then.",
        )


def talk(
    session: Session, commands: Commands, read_line: ReadLine, slips: InterruptHandler, *, is_interactive: bool
) -> None:
    """Read and answer until the end of input, ``/exit``, or Ctrl-C twice; raise mistakes unless ``is_interactive``."""
    slipped = False
    while True:
        try:
            with slips.allow_interrupts():
                entry = read_entry(read_line)
        except EOFError:
            if is_interactive:
                click.echo(err=True)
            return
        except KeyboardInterrupt as error:
            if not is_interactive or error.args:  # it has a signal that is not Ctrl-C
                raise
            click.echo(err=True)
            if slipped:
                return
            slipped = True
            session.note("(Ctrl-C again leaves, and so do Ctrl-D and /exit)")
            continue
        except SpecexportError as error:
            _report_error(error, is_interactive=is_interactive)
            continue
        slipped = False
        try:
            if entry.is_command and not commands.run(entry.text):
                return
            if not entry.is_command and entry.text:
                session.say(entry.text)
        except SpecexportError as error:
            _report_error(error, is_interactive=is_interactive)


def _report_error(error: SpecexportError, *, is_interactive: bool) -> None:
    if not is_interactive:
        raise error
    click.echo(format_error(error.message, error.hint), err=True)
