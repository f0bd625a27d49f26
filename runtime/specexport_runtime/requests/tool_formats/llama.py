"""Llama 3.1 and 3.2: a JSON object with ``name`` and ``parameters`` at the beginning, or behind ``<|python_tag|>``."""

import re
from collections.abc import Sequence as Seq

from specexport_runtime.requests.tool_formats.base import Marks, Style, ToolFormat
from specexport_runtime.requests.tool_formats.events import Feed, Reading
from specexport_runtime.requests.tool_formats.objects import read_object

_TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """One call an answer. Several, with ``;`` between them, are read as well; the template refuses to repeat them."""

    name = "llama3_json"
    openers = markers = (_TAG,)
    starts = "{"
    arguments_key = "parameters"

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``."""
        if call:
            return cls() if re.search(rf'\{{"name": ?"{function}", ?"parameters": ?\{{', call) else None
        return cls() if '"parameters": ' in template and '"name": ' in template else None

    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """See ``ToolFormat.read``."""
        while True:
            yield from feed.skip_space()
            if not (yield from read_object(feed, names)):
                return False
            feed.mark = feed.at
            yield from feed.skip_space()
            if not (yield from feed.takes(";")):
                return True

    def rules(self, names: Seq[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``; the tag is not written, as the template does not write it for functions."""
        return "calls: object\n" + self.object_rule(names, style)
