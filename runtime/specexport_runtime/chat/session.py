"""A conversation that goes on: what is said, what came back (streamed, and ended early by Ctrl-C), what it cost."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal

import click

from specexport_runtime.chat.slips import InterruptHandler
from specexport_runtime.cli.output import print_chunk, print_stats
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from specexport_runtime.decoding.handle import RequestHandle
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.intake.conversation import Conversation, Message
    from specexport_runtime.intake.drafting import RequestOptions, RequestSpec
    from specexport_runtime.requests.results import GenerationResult, StreamChunk
    from specexport_runtime.requests.stats import RequestStats
    from specexport_runtime.sampling.params import SamplingParams

_ROOM = 256
"""Tokens that :meth:`Session.trim` leaves for an answer, or a quarter of the context if that is less."""
_PROBE = "x"

_OPEN, _CLOSE = "<think>", "</think>"
_LOOK_S = 0.5
"""A signal that comes just before a wait begins does not end it: so often Python gets to look for one."""


def describe_answers(answers: "Sequence[RequestStats]") -> str:
    """A table of the last answer and of all."""
    lines = [("", "last answer", f"all {len(answers)}")]
    lines += [
        (name, one, both)
        for (name, one), (_, both) in zip(_compute_rows(answers[-1:]), _compute_rows(answers), strict=True)
    ]
    return "\n".join(f"{name:<32}{one:>12}{both:>12}" for name, one, both in lines)


def _compute_rows(answers: "Sequence[RequestStats]") -> list[tuple[str, str]]:
    def total(name: str) -> float:
        return sum(getattr(each, name) or 0 for each in answers)

    def ratio(top: float, bottom: float, form: str) -> str:
        return format(top / bottom, form) if bottom else "-"

    generated, first_token = total("num_generated_tokens"), total("time_to_first_token_s")
    seconds = sum((each.end_time or each.start_time) - each.start_time for each in answers)
    return [
        ("prompt tokens", str(total("num_prompt_tokens"))),
        ("  of these known from before", str(total("cached_tokens"))),
        ("generated tokens", str(generated)),
        ("tokens/s, prompt included", ratio(generated, seconds, ".1f")),
        # The first token of each answer comes with its prompt.
        ("tokens/s, after the first", ratio(generated - len(answers), seconds - first_token, ".1f")),
        ("seconds to the first token", ratio(first_token, len(answers), ".3f")),
        ("acceptance rate", ratio(total("accepted"), total("drafted"), ".3f")),
        ("tokens a round", ratio(generated, total("rounds"), ".2f")),
    ]


@dataclass(frozen=True)
class ChatOptions:
    """How answers are made and shown."""

    params: "SamplingParams"
    max_tokens: int | None  # most of an answer; None for as many as there is room for
    drafting: "RequestOptions"
    reference: str | None = None  # text that lookup may copy from
    stats: bool = False  # print counters after every answer
    colour: bool = False  # colour tokens by where they came from
    chat_template: str | None = None  # Jinja template in place of the bundle's


class Session:
    """One engine and one conversation, which changes only when an answer, or a command, is complete."""

    def __init__(self, engine: "SpecEngine", options: ChatOptions, slips: InterruptHandler) -> None:
        self._engine, self._options, self._slips = engine, options, slips
        self.conversation = self._open([])
        self.unsent: str | None = None  # a message that has no answer, for ``/retry``; None if the last one has
        self.answers: list[RequestStats] = []  # what each cost

    @property
    def limit(self) -> int:
        """Most tokens of a prompt."""
        return self._engine.max_model_len - 1

    def say(self, text: str) -> None:
        """Say something and print the answer; InvalidRequestError if it is too long, or the template refuses it."""
        self._say(self.conversation, text)

    def retry(self) -> None:
        """Send the message that has no answer, or the last one again; InvalidRequestError if there is none."""
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
                raise self._too_long_error(size, "make it shorter; /undo forgets it.")
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
        """Go on from other messages; a last one without an answer waits for :meth:`retry`."""
        waiting = messages[-1]["content"] if messages and messages[-1]["role"] == "user" else None
        conversation = self._open(messages if waiting is None else messages[:-1])
        conversation.copy().ask(_PROBE if waiting is None else waiting)
        self.conversation, self.unsent = conversation, waiting

    def _open(self, messages: "list[Message]") -> "Conversation":
        return self._engine.conversation(messages, chat_template=self._options.chat_template)

    def _say(self, conversation: "Conversation", text: str) -> None:
        from specexport_runtime.intake.drafting import RequestSpec

        conversation, options = conversation.copy(), self._options
        ids = conversation.ask(text)
        self.unsent = text
        if len(ids) > self.limit:
            raise self._too_long_error(len(ids), "/trim forgets the oldest turns and sends it, /reset forgets all.")
        room = self._engine.max_model_len - len(ids)
        params = replace(options.params, max_tokens=options.max_tokens or room)
        spec = RequestSpec(ids, params, options.reference, options.drafting)
        result = stream_answer(self._engine, spec, self._slips, colour=options.colour)
        if result.token_ids:
            conversation.answer(result.text, result.token_ids, result.finish_reason)
            self.conversation, self.unsent = conversation, None
        self.answers.append(result.stats)
        self._note_end(result)
        if options.stats:
            print_stats(result.stats.to_json())
            known = result.stats.cached_tokens or 0
            self.note(f"prompt {result.stats.num_prompt_tokens} tokens, of these {known} known from before")

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

    def _too_long_error(self, size: int, hint: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"with this message the conversation has {size} tokens, {size - self.limit} more than this engine takes.",
            hint,
        )


class _Listener:
    """Hands chunks, and the end, over to the main thread."""

    def __init__(self) -> None:
        self.news: SimpleQueue[StreamChunk | Literal["done", "stop"]] = SimpleQueue()

    def on_chunk(self, chunk: "StreamChunk") -> None:
        self.news.put(chunk)

    def on_done(self, _: "RequestHandle") -> None:
        self.news.put("done")

    def next(self) -> "StreamChunk | Literal['done', 'stop']":
        """Wait for what comes next."""
        while True:
            with suppress(Empty):
                return self.news.get(timeout=_LOOK_S)

    def stop(self) -> None:
        """May be called in a signal handler: such a queue is made for that."""
        self.news.put("stop")


class ThinkingTags:
    """Which text lies between ``<think>`` and ``</think>``, tags included; ``begun``: the prompt ends inside."""

    def __init__(self, begun: bool) -> None:
        self._inside = begun
        self._end = ""

    def __call__(self, text: str) -> bool:
        """Whether a part of this piece lies there."""
        was, recent = self._inside, self._end + text
        last = {tag: recent.rfind(tag) for tag in (_OPEN, _CLOSE)}
        if max(last.values()) >= 0:
            self._inside = last[_OPEN] > last[_CLOSE]
        self._end = recent[-len(_CLOSE) + 1 :]
        return was or self._inside


def stream_answer(
    engine: "SpecEngine", spec: "RequestSpec", slips: InterruptHandler, *, colour: bool
) -> "GenerationResult":
    """Generate and print. Ctrl-C ends it with what is there by then; the second one is a ``KeyboardInterrupt``."""
    listener, printed = _Listener(), 0
    before: str = engine.tokenizer.decode(engine.encode(spec.prompt)[-8:], skip_special_tokens=False)
    thinking = ThinkingTags(before.rstrip().endswith(_OPEN))
    with slips.notify_on_interrupt(listener.stop):
        [handle] = engine.submit_all([spec], [listener])
        while (item := listener.next()) != "done":
            if isinstance(item, str):
                handle.cancel()
                continue
            print_chunk(item, colour=colour, is_dim=thinking)
            printed += len(item.text)
        result = handle.result()
    click.echo(result.text[printed:])  # of an answer that was cut off: what could still have become something else
    return result
