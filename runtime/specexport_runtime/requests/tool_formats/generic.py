"""Any model: an answer that is a JSON object with ``name`` and ``arguments``, or a list of them."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from specexport_runtime.requests.tool_formats.base import Marks, Style, ToolFormat
from specexport_runtime.requests.tool_formats.events import Feed, Reading
from specexport_runtime.requests.tool_formats.lists import list_rule, read_list

_TASK = (
    "You may call the functions below. To call one, answer with nothing but a JSON object "
    '{"name": …, "arguments": {…}}; to call several, with a list of such objects. What they return comes next.'
)


class GenericJson(ToolFormat):
    """For models whose templates know no functions: a system message tells of them, see :func:`in_words`."""

    name = "json"
    starts = "{["
    has_lists = True

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:  # noqa: ARG003
        """Never: a caller that wants it names it."""
        return None

    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """See ``ToolFormat.read``."""
        yield from feed.skip_space()
        return (yield from read_list(feed, names))

    def rules(self, names: Seq[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``."""
        calls = f"calls: object | list\n{list_rule(style, several=True)}" if several else "calls: object\n"
        return calls + self.object_rule(names, style)


def in_words(messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that knows no functions: they, their calls and what they return are plain text."""
    names: dict[Any, str] = {}
    told: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            written = [json.dumps(_plain(call["function"]), ensure_ascii=False) for call in calls]
            text = written[0] if len(written) == 1 else f"[{', '.join(written)}]"
            before = message.get("content")
            told.append({"role": "assistant", "content": f"{before}\n{text}" if before else text})
        elif message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), "The function")
            text = f"{name} returned: {message['content']}"
            if told and told[-1].get("returned"):
                told[-1]["content"] += f"\n{text}"
            else:
                told.append({"role": "user", "content": text, "returned": True})
        else:
            told.append(dict(message))
    if tools:
        text = "\n".join([_TASK, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)])
        if told[0]["role"] == "system" and isinstance(told[0]["content"], str):
            told[0]["content"] += f"\n\n{text}"
        else:
            told.insert(0, {"role": "system", "content": text})
    return [{key: value for key, value in message.items() if key != "returned"} for message in told]


def _plain(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}
