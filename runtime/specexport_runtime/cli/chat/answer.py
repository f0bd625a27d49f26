"""One answer: streamed to standard output, and ended early by Ctrl-C."""

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal

import click

from specexport_runtime.cli.chat.slips import Slips
from specexport_runtime.cli.output import print_chunk

if TYPE_CHECKING:
    from specexport_runtime.decoding.handle import RequestHandle
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.requests.drafting import RequestSpec
    from specexport_runtime.sequences.results import GenerationResult, StreamChunk

_OPEN, _CLOSE = "<think>", "</think>"
_LOOK_S = 0.5
"""A signal that comes just before a wait begins does not end it: so often Python gets to look for one."""


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


class Thinking:
    """Which text lies between ``<think>`` and ``</think>``, the tags too; called with each piece of a text in turn.

    ``begun``: the prompt ends inside.
    """

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


def stream_answer(engine: "SpecEngine", spec: "RequestSpec", slips: Slips, *, colour: bool) -> "GenerationResult":
    """Generate and print. Ctrl-C ends it with what is there by then; the second one is a ``KeyboardInterrupt``.

    What was printed is the text of the result. The prompt of ``spec`` is token ids. Errors are those of
    ``SpecEngine.submit`` and of ``RequestHandle.result``.
    """
    listener, printed = _Listener(), 0
    before: str = engine.tokenizer.decode(engine.encode(spec.prompt)[-8:], skip_special_tokens=False)
    thinking = Thinking(before.rstrip().endswith(_OPEN))
    with slips.telling(listener.stop):
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
