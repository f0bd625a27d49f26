"""A conversation that goes on: what is said, what came back, and what it cost."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from specexport_runtime.cli.chat.answer import stream_answer
from specexport_runtime.cli.chat.slips import Slips
from specexport_runtime.cli.chat.tally import Tally
from specexport_runtime.cli.output import print_stats
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.requests.conversation import Conversation, Message
    from specexport_runtime.requests.drafting import RequestOptions
    from specexport_runtime.sampling.params import SamplingParams
    from specexport_runtime.sequences.results import GenerationResult

_ROOM = 256
"""Tokens that :meth:`Session.trim` leaves for an answer, or a quarter of the context if that is less."""
_PROBE = "x"


@dataclass(frozen=True)
class ChatOptions:
    """How answers are made and shown."""

    params: "SamplingParams"
    max_tokens: int | None  # most of an answer; None for as many as there is room for
    drafting: "RequestOptions"
    reference: str | None = None  # text that lookup may copy from
    stats: bool = False  # print counters behind every answer
    colour: bool = False  # colour tokens by where they came from
    chat_template: str | None = None  # Jinja template in place of the bundle's


class Session:
    """One engine and one conversation, which changes only when an answer, or a command, is complete."""

    def __init__(self, engine: "SpecEngine", options: ChatOptions, slips: Slips) -> None:
        self._engine, self._options, self._slips = engine, options, slips
        self.conversation = self._open([])
        self.unsent: str | None = None  # a message that has no answer, for ``/retry``; None if the last one has
        self.last: Tally | None = None  # what the last answer cost; None before the first
        self.total = Tally()  # what all answers cost

    @property
    def limit(self) -> int:
        """Most tokens of a prompt."""
        return self._engine.max_model_len - 1

    def say(self, text: str) -> None:
        """Say something and print the answer.

        ``InvalidRequestError`` if the conversation is too long for the engine, or the template refuses it.
        """
        self._say(self.conversation, text)

    def retry(self) -> None:
        """Send the message that has no answer, or the last one again; its answer takes the other's place.

        ``InvalidRequestError`` if there is none.
        """
        conversation = self.conversation.copy()
        text = conversation.undo() if self.unsent is None else self.unsent
        if text is None:
            raise InvalidRequestError("nothing was said yet.", "say something.")
        self._say(conversation, text)

    def undo(self) -> bool:
        """Forget the last turn, or the message that has no answer; whether there was one."""
        waiting, self.unsent = self.unsent, None
        return waiting is not None or self.conversation.undo() is not None

    def trim(self, count: int | None) -> int:
        """Forget the oldest turns, ``count`` of them; returns how many were forgotten.

        None forgets one, or as many as make room for the message that has no answer, and for its answer. If that
        message alone is too long, it is an ``InvalidRequestError``, and nothing is forgotten.
        """
        conversation, text = self.conversation.copy(), self.unsent
        if count is not None or text is None:
            dropped = conversation.drop_oldest(count or 1)
        else:
            dropped, room = 0, min(self._options.max_tokens or _ROOM, self.limit // 4)
            while (size := len(conversation.copy().ask(text))) + room > self.limit and conversation.num_turns:
                dropped += conversation.drop_oldest()
            if size > self.limit:
                raise self._too_long(size, "make it shorter; /undo forgets it.")
        self.conversation = conversation
        return dropped

    def reset(self) -> None:
        """Forget all but what the system says."""
        self.unsent = None
        self.conversation.clear()

    def set_system(self, text: str | None) -> None:
        """Change what the system says; the turns stay. ``InvalidRequestError`` if the template refuses it."""
        conversation = self.conversation.copy()
        conversation.system = text
        conversation.copy().ask(_PROBE)
        self.conversation = conversation

    def load(self, messages: "list[Message]") -> None:
        """Go on from other messages. A last one that has no answer waits for :meth:`retry`.

        ``InvalidRequestError`` if they are no turns of a user and an assistant, or the template refuses them.
        """
        waiting = messages[-1]["content"] if messages and messages[-1]["role"] == "user" else None
        conversation = self._open(messages if waiting is None else messages[:-1])
        conversation.copy().ask(_PROBE if waiting is None else waiting)
        self.conversation, self.unsent = conversation, waiting

    def _open(self, messages: "list[Message]") -> "Conversation":
        return self._engine.conversation(messages, chat_template=self._options.chat_template)

    def _say(self, conversation: "Conversation", text: str) -> None:
        from specexport_runtime.requests.drafting import RequestSpec

        conversation, options = conversation.copy(), self._options
        ids = conversation.ask(text)
        self.unsent = text
        if len(ids) > self.limit:
            raise self._too_long(len(ids), "/trim forgets the oldest turns and sends it, /reset forgets all.")
        room = self._engine.max_model_len - len(ids)
        params = replace(options.params, max_tokens=options.max_tokens or room)
        spec = RequestSpec(ids, params, options.reference, options.drafting)
        result = stream_answer(self._engine, spec, self._slips, colour=options.colour)
        if result.token_ids:
            conversation.answer(result.text, result.token_ids, result.finish_reason)
            self.conversation, self.unsent = conversation, None
        self.last = Tally.of(result.stats)
        self.total += self.last
        self._note_end(result)
        if options.stats:
            print_stats(result.stats.to_json())
            self.note(f"prompt {self.last.prompt} tokens, of these {self.last.cached} known from before")

    def note(self, text: str) -> None:
        """Say something that is no answer, on standard error."""
        click.echo(click.style(text, dim=True) if self._options.colour else text, err=True, color=self._options.colour)

    def _note_end(self, result: "GenerationResult") -> None:
        if result.finish_reason == "cancelled":
            end = "cut off" if result.token_ids else "nothing was said yet: /retry sends your message again"
            self.note(f"({end})")
        elif result.finish_reason == "length":
            is_full = result.stats.num_prompt_tokens + len(result.token_ids) >= self._engine.max_model_len
            end = f"the context of {self._engine.max_model_len} tokens is full; /trim makes room" if is_full else (
                f"{len(result.token_ids)} tokens are the most of an answer"
            )  # fmt: skip
            self.note(f"(cut off: {end})")

    def _too_long(self, size: int, hint: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"with this message the conversation has {size} tokens, {size - self.limit} more than this engine takes.",
            hint,
        )
