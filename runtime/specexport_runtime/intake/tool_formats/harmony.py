"""gpt-oss's format (harmony): every message of an answer names its channel, and a call the function it goes to."""

import re
from collections.abc import Sequence

from specexport_runtime.intake.tool_formats.base import (
    Content,
    Feed,
    Marks,
    Reading,
    ReasoningSpan,
    Schemas,
    Style,
    ToolFormat,
    read_until,
)
from specexport_runtime.intake.tool_formats.objects import read_arguments

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BORDERS = ("<|start|>", "<|channel|>", *_ENDS)
_BEFORE_MORE = ("<|end|><|start|>assistant",)  # single markers may stand in a text
_TO = r"\s*to=functions\.(?P<{}>[A-Za-z0-9_-]{{1,64}})"
_HEAD = re.compile(
    rf"\s*(?:(?:<\|start\|>assistant)?(?:{_TO.format('first')})?\s*<\|channel\|>(?P<channel>analysis|commentary|final)"
    rf"(?:{_TO.format('name')})?\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>|<\|(?:end|call|return)\|>)"
)


class Harmony(ToolFormat):
    """gpt-oss: thoughts in the channel ``analysis``, calls in ``commentary``, what it says in ``final``."""

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_ENDS)
    signs = ("<|channel|>", "<|message|>")
    openers = (*_BORDERS, "to=functions.")
    has_channels = True
    said_after = "<|channel|>final<|message|>"

    def read(self, feed: Feed, schemas: Schemas) -> Reading:
        """See ``ToolFormat.read``; the next message, with thoughts and text as well."""
        feed.at = feed.mark
        head = yield from feed.match(_HEAD)
        if head is None:
            return False
        if (name := head["first"] or head["name"]) is not None:
            yield from feed.skip_space()
            return name in schemas and feed.next == "{" and (yield from read_arguments(feed, name))
        if (channel := head["channel"]) is not None:
            kind = ReasoningSpan if channel == "analysis" else Content
            before = ("analysis",) if channel == "analysis" else ("commentary", "final")
            if any(feed.text.find(f"<|channel|>{each}<|message|>", 0, feed.mark) >= 0 for each in before):
                yield kind("\n\n")
            borders = _BORDERS if channel == "analysis" else _BEFORE_MORE
            border = yield from read_until(feed, borders, kind)
            feed.at = feed.at if border is None else border
        return True

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``; one call ends an answer."""
        begin, end = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
        heads = (self.spell(f"{begin}{name}{end}", marks) for name in names)
        return f"calls: {' | '.join(f'{head} arguments_{i}' for i, head in enumerate(heads))}\n"
