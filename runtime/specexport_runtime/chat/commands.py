"""What can be entered in a conversation besides messages: ``/stats``, ``/reset`` and their like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from specexport_runtime.chat.session import Session, describe_answers
from specexport_runtime.cli.errors import suggest
from specexport_runtime.cli.options import OFF
from specexport_runtime.cli.prompts import read_text
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.conversation import FINISH_REASON, Message
from specexport_runtime.user_cache import replace_file

_TO_ENTER = (
    "A line that ends in \\ goes on in the next. Lines between two marks of three quotes are one message.\n"
    "A message that begins with a slash begins with two. Ctrl-C ends an answer, Ctrl-D the conversation."
)

_FORM = 'give a file that /save wrote, or one with {"messages": [{"role": "user", "content": "…"}, …]}.'
_CUT = ("length", "cancelled")


class _Command(NamedTuple):
    """A command: what may follow it, what it does, in words and as code, which is given what follows."""

    argument: str
    help: str
    run: Callable[[str], None]


class Commands:
    """The commands of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file: Path | None = None
        self._commands = {
            "stats": _Command("", "acceptance, tokens a round, known tokens of the prompt, speed", self._stats),
            "retry": _Command("", "answer the last message again", lambda _: session.retry()),
            "undo": _Command("", "forget the last turn", self._undo),
            "trim": _Command("[N]", "forget the oldest turn, or N, or as many as make a long message fit", self._trim),
            "reset": _Command("", "forget all but the system prompt", lambda _: session.reset()),
            "system": _Command(f"[TEXT|{OFF}]", "show the system prompt, set it, or take it away", self._system),
            "save": _Command("[FILE]", "save the conversation as JSON", self._save),
            "load": _Command("FILE", "go on from a saved conversation", self._load),
            "help": _Command("", "show this", self._help),
        }

    def run(self, line: str) -> bool:
        """Run a command, entered without its slash; False ends the conversation. InvalidRequestError if it fails."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("exit", "quit"):
            return False
        command = self._commands.get(name)
        if command is None:
            near = suggest(name, [*self._commands, "exit"])
            guess = f"did you mean /{near}? " if near else ""
            raise InvalidRequestError(
                f"there is no command /{name}.", f"{guess}/help lists them; // begins a message that begins with /."
            )
        if argument and not command.argument:
            raise InvalidRequestError(f"/{name} takes nothing after it.", f"enter /{name} alone.")
        command.run(argument)
        return True

    def load(self, path: Path) -> None:
        """Go on from a saved conversation; ``InvalidRequestError`` if it cannot be read, or does not fit."""
        session = self._session
        session.load(load_messages(path))
        self._file = path
        waiting = "" if session.unsent is None else "; its last message has no answer: /retry sends it"
        session.note(f"{_turns(session.conversation.num_turns)} loaded from {path}{waiting}")

    def _stats(self, _: str) -> None:
        session = self._session
        if session.answers:
            click.echo(describe_answers(session.answers), err=True)
        else:
            session.note("nothing was answered yet")

    def _undo(self, _: str) -> None:
        session = self._session
        what = "the last turn is" if session.unsent is None else "the message without an answer is"
        if not session.undo():
            raise InvalidRequestError("nothing was said yet.", "say something.")
        session.note(f"{what} forgotten; {_turns(session.conversation.num_turns)} left")

    def _trim(self, argument: str) -> None:
        try:
            count = int(argument) if argument else None
        except ValueError:
            count = 0
        if count is not None and count < 1:
            raise InvalidRequestError(f"{argument!r} is no number of turns.", "enter /trim, or for example /trim 2.")
        self._session.note(f"{_turns(self._session.trim(count))} forgotten")
        if self._session.unsent is not None:
            self._session.retry()

    def _system(self, argument: str) -> None:
        if argument:
            self._session.set_system(None if argument == OFF else argument)
        else:
            self._session.note(self._session.conversation.system or "there is no system prompt")

    def _save(self, argument: str) -> None:
        path = Path(argument).expanduser() if argument else self._file
        if path is None:
            raise InvalidRequestError("/save needs the name of a file.", "enter for example /save talk.json.")
        save_messages(path, self._session.conversation.messages)
        self._file = path
        self._session.note(f"saved in {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise InvalidRequestError("/load needs the name of a file.", "enter for example /load talk.json.")
        self.load(Path(argument).expanduser())

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {each.argument}", each.help) for name, each in self._commands.items()]
        rows.append(("/exit", "leave"))
        click.echo("\n".join([*(f"{usage:<20}{text}" for usage, text in rows), _TO_ENTER]), err=True)


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def save_messages(path: Path, messages: list[Message]) -> None:
    """Write a conversation, as OpenAI's ``messages``, to a file of this user; InvalidRequestError over another file."""
    if path.exists():
        try:
            load_messages(path)
        except InvalidRequestError:
            raise InvalidRequestError(f"{path} is there, and no conversation.", "choose another name.") from None
    text = json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n"
    try:
        replace_file(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}.", "choose another place.") from error


def load_messages(path: Path) -> list[Message]:
    """Read a conversation: roles, texts, and which answers were cut off; InvalidRequestError if it is none."""
    try:
        data = json.loads(read_text(path))
    except RecursionError:
        raise InvalidRequestError(f"{path} is nested too deeply.", _FORM) from None
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{path} is not JSON.", _FORM) from None
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{path} has no messages.", _FORM)
    return [_message(item, f"{path}, message {i}") for i, item in enumerate(messages, start=1)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("role", "content")):
        raise InvalidRequestError(f"{where} has no role and content that are texts.", _FORM)
    if item.get("tool_calls"):
        raise InvalidRequestError(f"{where} has calls of functions, which a chat here does not tell.", "leave it out.")
    cut = item.get(FINISH_REASON)
    message = {"role": item["role"], "content": item["content"]}
    return {**message, FINISH_REASON: cut} if cut in _CUT else message
