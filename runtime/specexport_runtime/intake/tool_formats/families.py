"""The formats there are, one for each family of models, and how to find that of a chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.tool_formats.base import Feed, Marks, Reading, Style, ToolFormat
from specexport_runtime.intake.tool_formats.objects import (
    list_rule,
    read_arguments,
    read_list,
    read_object,
    read_objects,
)

_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """Hermes, Qwen 2.5 and 3: a call on a line between ``<tool_call>`` and ``</tool_call>``; the next call follows."""

    name = "hermes"
    openers = (_CALL,)
    markers = (_CALL, _END_OF_CALL)

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``. Qwen3-Coder has these markers around XML, which is another format."""
        if call:
            return cls() if re.search(rf'{_CALL}\s*\{{\s*"name"\s*:\s*"{function}"', call) else None
        return cls() if _CALL in template and "<function=" not in template else None

    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """See ``ToolFormat.read``."""
        yield from feed.skip_space()
        if not (yield from read_object(feed, names)):
            return False
        yield from feed.skip_space()
        yield from feed.consume(_END_OF_CALL)
        return True

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """See ``ToolFormat.rules``."""
        more = rf' ("\n" {marks(_CALL)} body)*' if several else ""
        return (
            f"calls: {opener} body{more}\n"
            rf'body: "\n" object "\n" {marks(_END_OF_CALL)}' + "\n" + self.object_rule(names, style)
        )


_TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """Llama 3.1 and 3.2: one call, first or after ``<|python_tag|>``; several with ``;`` are read as well."""

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
        return (yield from read_objects(feed, names, ";"))

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``; the tag is not written, as the template does not write it for functions."""
        return "calls: object\n" + self.object_rule(names, style)


_CALLS, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LONGEST = 256  # characters before the arguments


class Mistral(ToolFormat):
    """``[TOOL_CALLS]`` and a list of objects or, if ``named`` (since 2025), a name, ``[ARGS]`` and the arguments."""

    name = "mistral"
    openers = (_CALLS,)
    markers = (_CALLS, _ARGUMENTS, "[CALL_ID]")
    id_length = 9

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    @classmethod
    def of(cls, template: str, call: str, function: str) -> ToolFormat | None:
        """See ``ToolFormat.of``."""
        text = call or template
        if _CALLS not in text or (call and function not in call):
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

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """See ``ToolFormat.rules``."""
        if not self._named:
            return f"calls: {opener} list\n{list_rule(style, several=several)}" + self.object_rule(names, style)
        more = f" ({marks(_CALLS)} named)*" if several else ""
        each = (f'"{name}" {marks(_ARGUMENTS)} arguments_{i}' for i, name in enumerate(names))
        return f"calls: {opener} named{more}\nnamed: {' | '.join(each)}\n"


_TASK = (
    "You may call the functions below. To call one, answer with nothing but a JSON object "
    '{"name": …, "arguments": {…}}; to call several, with a list of such objects. What they return comes next.'
)


class GenericJson(ToolFormat):
    """For models whose templates know no functions: a system message tells of them, see :func:`write_tools_as_text`."""

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

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``."""
        calls = f"calls: object | list\n{list_rule(style, several=True)}" if several else "calls: object\n"
        return calls + self.object_rule(names, style)


def write_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
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


FORMATS: dict[str, type[ToolFormat]] = {each.name: each for each in (Hermes, Llama3Json, Mistral, GenericJson)}
PARSERS = ("auto", *FORMATS)
"""Values of ``--tool-call-parser``."""


def find_format(template: str, call: str, function: str) -> ToolFormat | None:
    """The format of a chat template; None if it is of none that is known. Arguments as ``ToolFormat.of``."""
    return next((found for each in FORMATS.values() if (found := each.of(template, call, function))), None)


def get_format(name: str, template: str, call: str, function: str) -> ToolFormat:
    """The format of a name, as the template writes it; ``InvalidRequestError`` for an unknown name."""
    if name not in FORMATS:
        raise InvalidRequestError(f"there is no tool call parser {name!r}.", f"give one of {', '.join(PARSERS)}.")
    return FORMATS[name].of(template, call, function) or FORMATS[name]()
