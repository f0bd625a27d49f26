"""Formats that have one section for all calls of an answer: DeepSeek's, Kimi's, MiniMax's first."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specexport_runtime.intake.tool_formats.base import Feed, Marks, Reading, Schemas, Style, ToolFormat
from specexport_runtime.intake.tool_formats.objects import read_arguments, read_object, read_section


class Section(ToolFormat):
    """Calls between two markers; ``markers`` are these, and those before a name, its arguments, and after them."""

    label: ClassVar[str] = "(?P<name>[A-Za-z0-9_-]{1,64})"  # what stands for a function; ``id``: the id of the call
    written: ClassVar[str] = '"{}"'  # the same, in Lark
    has_lists = True

    def read(self, feed: Feed, schemas: Schemas) -> Reading:
        """See ``ToolFormat.read``."""
        _, end, begin, before, behind = self.markers
        head = re.compile(rf"{re.escape(begin)}\s*{self.label}\s*{re.escape(before)}\s*(?=\{{)")

        def read_call() -> Reading:
            found = yield from feed.match(head)
            if found is None or found["name"] not in schemas:
                return False
            yield from read_arguments(feed, found["name"], found.groupdict().get("id", ""))
            yield from feed.skip_space()
            yield from feed.consume(behind)
            return True

        return (yield from read_section(feed, read_call, begin, end))

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``."""
        _, end, begin, before, behind = map(marks, self.markers)
        each = " | ".join(f"{self.written.format(name)} {before} arguments_{i}" for i, name in enumerate(names))
        return f"calls: {opener} call{'+' * several} {end}\ncall: {begin} ({each}) {behind}\n"


class DeepSeekV31(Section):
    """DeepSeek-V3.1: a name, ``<｜tool▁sep｜>`` and the arguments."""

    name = "deepseek_v31"
    markers = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    )  # fmt: skip
    openers = markers[:1]

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``; V3 has these markers, too, and fences around the arguments."""
        return None if "```json" in (call or template) else super().of(template, call, function)


class KimiK2(Section):
    """Kimi K2: an id such as ``functions.name:0``, which is all that its template writes of a name."""

    name = "kimi_k2"
    markers = (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip
    openers = markers[:1]
    label = rf"(?P<id>(?:functions\.)?{Section.label}:[0-9]{{1,9}})"
    written = '"functions.{}:" /[0-9]{{1,3}}/'

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See ``ToolFormat.prepare``: calls that have other ids get such ones."""
        count, named, told = 0, {}, []
        for message in map(dict, messages):
            calls = []
            for call in message.get("tool_calls") or ():
                known, begin = call.get("id"), f"functions.{call['function']['name']}:"
                named[known] = known if str(known).startswith(begin) else f"{begin}{count}"
                calls.append({**call, "id": named[known]})
                count += 1
            told.append(message | ({"tool_calls": calls} if calls else {}))
            if (answers := message.get("tool_call_id")) is not None:
                told[-1]["tool_call_id"] = named.get(answers, answers)
        return told


class MiniMax(ToolFormat):
    """MiniMax M1: a call on a line."""

    name = "minimax"
    markers = ("<tool_calls>", "</tool_calls>")
    signs = (*markers, "arguments")
    openers = markers[:1]
    has_lists = True

    def read(self, feed: Feed, schemas: Schemas) -> Reading:
        """See ``ToolFormat.read``."""
        return (yield from read_section(feed, lambda: read_object(feed, schemas), "{", self.markers[1]))

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """See ``ToolFormat.rules``."""
        lines = f'calls: {opener} "\\n" line{"+" * several} {marks(self.markers[1])}\nline: object "\\n"\n'
        return lines + self.object_rule(names, style)
