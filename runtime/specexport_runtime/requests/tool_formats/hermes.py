"""Hermes, Qwen 2.5 and 3: each call is a JSON object between ``<tool_call>`` and ``</tool_call>``."""

import re
from collections.abc import Sequence as Seq

from specexport_runtime.requests.tool_formats.base import Marks, Style, ToolFormat
from specexport_runtime.requests.tool_formats.events import Feed, Reading
from specexport_runtime.requests.tool_formats.objects import read_object

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """``<tool_call>``, a line with the call, ``</tool_call>``; the next call follows on a line of its own."""

    name = "hermes"
    openers = (_OPEN,)
    markers = (_OPEN, _CLOSE)

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``. Qwen3-Coder has these markers around XML, which is another format."""
        if call:
            return cls() if re.search(rf'{_OPEN}\s*\{{\s*"name"\s*:\s*"{function}"', call) else None
        return cls() if _OPEN in template and "<function=" not in template else None

    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """See ``ToolFormat.read``."""
        yield from feed.skip_space()
        if not (yield from read_object(feed, names)):
            return False
        yield from feed.skip_space()
        yield from feed.takes(_CLOSE)
        return True

    def rules(self, names: Seq[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """See ``ToolFormat.rules``."""
        more = rf' ("\n" {marks(_OPEN)} body)*' if several else ""
        return (
            f"calls: {opener} body{more}\n"
            rf'body: "\n" object "\n" {marks(_CLOSE)}' + "\n" + self.object_rule(names, style)
        )
