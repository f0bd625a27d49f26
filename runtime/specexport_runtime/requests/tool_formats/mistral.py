"""Mistral: ``[TOOL_CALLS]`` and a list of JSON objects or, since 2025, a name, ``[ARGS]`` and the arguments alone."""

import re
from collections.abc import Sequence as Seq

from specexport_runtime.requests.tool_formats.base import Marks, Style, ToolFormat
from specexport_runtime.requests.tool_formats.events import Feed, Reading
from specexport_runtime.requests.tool_formats.lists import list_rule, read_list
from specexport_runtime.requests.tool_formats.objects import read_arguments

_OPEN, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LONGEST = 256  # characters before the arguments


class Mistral(ToolFormat):
    """Both ways of writing are read; a grammar has the newer one if ``named``."""

    name = "mistral"
    openers = (_OPEN,)
    markers = (_OPEN, _ARGUMENTS, "[CALL_ID]")
    id_length = 9

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``."""
        text = call or template
        if _OPEN not in text or (call and function not in call):
            return None
        return cls(named=_ARGUMENTS in text)

    @property
    def has_lists(self) -> bool:  # type: ignore[override]
        """Only the older one: the newer one has an opener for each call."""
        return not self._named

    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """See ``ToolFormat.read``."""
        yield from feed.skip_space()
        if feed.next in "[{":
            return (yield from read_list(feed, names))
        while True:
            found = _NAMED.match(feed.text, feed.at)
            if found is not None:
                break
            if feed.ended or "{" in feed.text[feed.at :] or len(feed.text) - feed.at > _LONGEST:
                return False
            yield None
        if found[1] not in names:
            return False
        feed.at = found.end()
        return (yield from read_arguments(feed, found[1]))

    def rules(self, names: Seq[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """See ``ToolFormat.rules``."""
        if not self._named:
            return f"calls: {opener} list\n{list_rule(style, several=several)}" + self.object_rule(names, style)
        more = f" ({marks(_OPEN)} named)*" if several else ""
        each = (f'"{name}" {marks(_ARGUMENTS)} arguments_{i}' for i, name in enumerate(names))
        return f"calls: {opener} named{more}\nnamed: {' | '.join(each)}\n"
