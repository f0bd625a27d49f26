"""How every command ends: one line for a user's mistake, a traceback only for our own.

:class:`SuggestingGroup` is the click group that the compiler's and the runtime's command lines share. This module
imports click and the error tree only, besides its neighbours.

============================================  =========  ====================================================
what was raised                               exit code  printed on standard error
============================================  =========  ====================================================
a ``SpecexportError``                         its own    ``error: what and where. Fix: how``
a usage error (unknown flag, command, value)  2          the same, with the nearest match
Ctrl-C                                        130        ``interrupted``
SIGTERM; SIGHUP                               143; 129   ``terminated``; ``hung up``
a closed output (``… | head``)                141        nothing
a full or read-only disk, a limit of files    2          as for a ``SpecexportError``; names the path if known
no memory (``MemoryError``)                   3          the same
anything else                                 1          its traceback: it is a defect of ours
============================================  =========  ====================================================
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import Any

import click

from specexport_runtime.cli.any_text import escape_unencodable_output
from specexport_runtime.errors import MORE_MEMORY, SpecexportError, describe_write_fault

EXIT_CLOSED_OUTPUT = 141
"""128 and the number of SIGPIPE, by which most programs end then."""

_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _SAID[signal.SIGHUP] = "hung up"


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to a mistyped one, or None if none is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def format_error(message: str, hint: str | None = None) -> str:
    """``error: what. Fix: how`` on one line."""
    text = " ".join(message.split())
    if not text.endswith((".", "!", "?")):
        text += "."
    return f"error: {text} Fix: {' '.join(hint.split())}" if hint else f"error: {text}"


def describe_error(error: BaseException) -> tuple[str, int] | None:
    """The line to print and the exit code for an error a user can act on; None for a defect of ours."""
    if isinstance(error, SpecexportError):
        return format_error(error.message, error.hint), error.exit_code
    if isinstance(error, click.ClickException):
        return _describe_click_error(error), error.exit_code
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        given = (error.__cause__ or error).args  # click raises its Abort from it
        number = given[0] if given and given[0] in _SAID else signal.SIGINT
        return _SAID[number], 128 + number
    if isinstance(error, MemoryError):
        return format_error("not enough memory", MORE_MEMORY), 3
    if isinstance(error, OSError) and (fault := describe_write_fault(error)) is not None:
        where = f" while writing {error.filename}" if error.filename else ""
        return format_error(fault[0] + where, fault[1]), 2
    return None


def _describe_click_error(error: click.ClickException) -> str:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return format_error(error.format_message())
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):  # click's own wording differs between its versions
        flags = [flag for param in error.ctx.command.get_params(error.ctx) for flag in param.opts]
        near = suggest(error.option_name, flags)
        message = f"no such option {error.option_name!r}" + (f": did you mean {near!r}?" if near else "")
    return format_error(message, f"see `{error.ctx.command_path} --help`.")


def run_command(command: Callable[[], Any]) -> int:
    """Run a command; its exit code is the int that it returns, or that of what it raises by this module's table."""
    with handle_interrupts() as interrupts:
        try:
            result = command()
        except ClosedOutputError:
            return EXIT_CLOSED_OUTPUT
        except (Exception, KeyboardInterrupt) as error:
            described = describe_error(error)
            if described is None:
                error.add_note("This is a defect in specexport. Please report it with this traceback.")
                raise
            line, code = described
            with contextlib.suppress(BrokenPipeError):
                click.echo(line, err=True)
            interrupts.allow_forced_exit()
            return code
        return result if isinstance(result, int) else 0


class SuggestingGroup(click.Group):
    """A click group that ends as this module's table says and suggests the nearest command for an unknown one."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; see :meth:`click.Command.main`."""
        escape_unencodable_output()
        _open_missing_streams()

        def run() -> Any:
            return super(SuggestingGroup, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        sys.exit(run_command(run))

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line; it may print help."""
        with watch_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with watch_output():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is a usage error that names the nearest."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and name not in self.list_commands(ctx):
            near = suggest(name, self.list_commands(ctx))
            known = ", ".join(self.list_commands(ctx))
            tail = f"did you mean {near!r}?" if near else f"the commands are {known}."
            raise click.UsageError(f"no such command {name!r}: {tail}", ctx=ctx)
        return super().resolve_command(ctx, args)


def _open_missing_streams() -> None:
    """What was closed for this process (``<&-``, ``>&-``) is empty, and nobody reads it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end


class ClosedOutputError(Exception):
    """The output is read no more. Not an ``OSError``: click has its own exit code for that."""


@contextlib.contextmanager
def watch_output() -> Iterator[None]:
    """Tell a closed output (``ClosedOutputError``) from other broken pipes (``RuntimeError``), which are defects."""
    try:
        yield
        sys.stdout.flush()  # at the interpreter's end it would be a traceback
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # so rich ends
            raise ClosedOutputError from error
        raise
    except BrokenPipeError as error:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise RuntimeError(f"a pipe that is not the output broke: {error}") from error
        for stream in closed:
            _discard_output(stream)
        raise ClosedOutputError from error


def _is_closed(stream: Any) -> bool:
    try:
        stream.flush()  # what could not be written is still there, if there is a buffer
        place = stream.fileno()
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no stream, or none of the system's
        return False
    if not hasattr(select, "poll"):
        return False
    asked = select.poll()
    asked.register(place, select.POLLOUT)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0))


def _discard_output(stream: Any) -> None:
    """Let the interpreter flush what is left into nothing when it ends."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class Interrupts:
    """The handler of SIGINT, SIGTERM and SIGHUP.

    The first one raises ``KeyboardInterrupt``. While that goes up others would break the clearing away off, so they
    wait; once all is clear they end the process.
    """

    def __init__(self) -> None:
        self.came: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # what a handler is called with
        """Handle one."""
        self.came = number
        error = sys.exception()
        while error is not None:
            if isinstance(error, KeyboardInterrupt):
                return
            error = error.__context__
        raise KeyboardInterrupt(signal.Signals(number))

    def allow_forced_exit(self) -> None:
        """Nothing is left to clear away: the next one may end the process."""
        if self.came is not None:
            for number in _SAID:
                if signal.getsignal(number) is self:
                    signal.signal(number, lambda number, _: os._exit(128 + number))


@contextlib.contextmanager
def handle_interrupts() -> Iterator[Interrupts]:
    """Handle what ends a process as :class:`Interrupts` says, unless another handler does, or ignores it."""
    handler = Interrupts()
    main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in _SAID} if main else {}
    usual = {number: own for number, own in usual.items() if own in (signal.default_int_handler, signal.SIG_DFL)}
    for number in usual:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        if handler.came is None:
            for number, own in usual.items():
                signal.signal(number, own)
