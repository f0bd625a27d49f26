"""Formats that have a tag for each argument: Qwen3-Coder's, GLM's, MiniMax's second.

Arguments come as JSON: a text in pieces while it is written, any other value when it is whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.tool_formats.base import (
    LONGEST_HEAD,
    Arguments,
    Broken,
    CallBegin,
    CallEnd,
    Feed,
    Marks,
    Reading,
    Schemas,
    Style,
    ToolFormat,
    escaped,
    json_rule,
)
from specexport_runtime.intake.tool_formats.objects import EndOfValue, loads, read_section
from specexport_runtime.requests.text import StopStrings
from specexport_runtime.sampling.structured import MAX_GRAMMAR_CHARS

_DEFINITIONS = {"$defs", "definitions"}
_TITLES = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
_OBJECT = {"type", "properties", "required", "additionalProperties"} | _DEFINITIONS | _TITLES


class TaggedFormat(ToolFormat):
    """A format with tags; in what is written, ``{}`` stands for a name."""

    head: ClassVar[re.Pattern[str]]  # what is read up to the first argument, with the function's name
    key: ClassVar[re.Pattern[str]]  # what is read up to a value, with its name; or, without one, the end of a call
    call: ClassVar[tuple[str, str, str]]  # texts before the arguments of a call, before a value, and after the last
    close: ClassVar[str]  # after a value
    line: ClassVar[str] = ""  # around a value
    around: ClassVar[tuple[str, str]]  # a call, or all if ``has_lists``, within the opener

    def read(self, feed: Feed, schemas: Schemas) -> Reading:
        """See ``ToolFormat.read``."""
        begin, end = self.call[0].partition("{}")[0], self.around[1].strip()
        return (yield from read_section(feed, lambda: self._read_call(feed, schemas), begin, end))

    def _read_call(self, feed: Feed, schemas: Schemas) -> Reading:
        head = yield from feed.match(self.head)
        if head is None or head[1] not in schemas:
            return False
        before, key, schema = "{", (yield from feed.match(self.key)), schemas[head[1]]
        if key is None:
            return False
        yield CallBegin(head[1])
        while key is not None and key[1] is not None:
            yield Arguments(f"{before}{json.dumps(key[1], ensure_ascii=False)}: ")
            known = _part(schema, "properties", key[1])
            part = _resolved(_part(schema, "additionalProperties") if known is None else known, schema)
            before, is_text = ", ", part is not None and part.get("type") == "string"
            is_whole = yield from self._read_value(feed, is_text=is_text)
            key = (yield from feed.match(self.key)) if is_whole else None
        if key is not None:
            yield Arguments("{}" if before == "{" else "}")
            yield CallEnd()
        elif feed.is_cut:
            feed.at = len(feed.text)
        else:
            yield Broken(feed.text[feed.mark : feed.at])
        return True

    def _read_value(self, feed: Feed, *, is_text: bool) -> Reading:
        """A value and what closes it, with a tag of the call after that; False, at the end of all, if nothing does."""
        yield from feed.consume(self.line)
        begin = sent = at = feed.at
        if is_text:
            yield Arguments('"')
        elif not feed.is_odd:  # tags in the texts of JSON are no tags
            yield from feed.skip_space()
            if feed.next and feed.next in '{["':
                whole = EndOfValue(feed.at)
                while (end := whole.find(feed.text)) is None and not feed.ended:
                    yield None
                feed.is_odd = not feed.is_cut and (end is None or loads(feed.text[feed.at : end]) is None)
                at = begin if feed.is_odd else end or len(feed.text)
        closes = StopStrings((self.close,), include=False)
        while True:
            found = feed.text.find(self.close, at)
            behind = found + len(self.close)
            if found >= 0 and (feed.is_cut or self.key.match(feed.text, behind, behind + LONGEST_HEAD)):
                break
            if found >= 0 and (feed.ended or len(feed.text) - behind >= LONGEST_HEAD):
                at = behind  # it is a part of the value
                continue
            at = (
                found
                if found >= 0
                else len(feed.text) - closes.find_partial_stop_length(feed.text, len(feed.text) - at)
            )
            stop = at - len(self.line) * feed.text.endswith(self.line, begin, at)
            if is_text and stop > sent:
                yield Arguments(json.dumps(feed.text[sent:stop], ensure_ascii=False)[1:-1])
                sent = stop
            if feed.ended:
                feed.at = len(feed.text)
                return False
            yield None
        feed.at, stop = behind, found - len(self.line) * feed.text.endswith(self.line, begin, found)
        rest = json.dumps(feed.text[sent:stop], ensure_ascii=False)
        yield Arguments(rest[1:] if is_text else _to_json_value(feed.text[begin:stop]))
        return True

    def rules(self, names: Sequence[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:  # noqa: ARG002
        """See ``ToolFormat.rules``."""
        before, after = (self.spell(text, marks) for text in self.around)
        inner = r' ("\n" call)*' if several and self.has_lists else ""
        more = rf' ("\n" {marks(self.openers[0])} body)*' if several and not self.has_lists else ""
        heads = ((self.spell(self.call[0].replace("{}", name), marks), i) for i, name in enumerate(names))
        each = " | ".join(f"{head} arguments_{i}" for head, i in heads)
        end = self.spell(self.call[2], marks)
        return f"calls: {opener} body{more}\nbody: {before} call{inner} {after}\ncall: ({each}) {end}\n"

    def argument_rules(self, i: int, schema: Mapping[str, Any], style: Style, marks: Marks) -> str:
        """See ``ToolFormat.argument_rules``: arguments in the schema's order, and no others but where it names none."""
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if unknown := schema.keys() - _OBJECT:
            raise _inexact("the arguments", min(unknown))
        are_known = isinstance(properties, Mapping) and isinstance(required, list)
        if not are_known or not all(isinstance(key, str) for key in required):
            raise _inexact("the arguments", "properties")
        parts = {**properties, **{key: others for key in required if key not in properties}}
        if not parts and others is not False:
            begin, end = (self.spell(text, marks) for text in self.call[1].split("{}"))
            other = f"other_{i}: {begin} /[A-Za-z0-9_-]{{1,64}}/ {end} value_{i}\n"
            value = self._value_rules(f"{i}", "additionalProperties", others, schema, style, marks)
            return f"arguments_{i}: other_{i}*\n{other}{value}"
        each, values = [], ""
        for j, (key, part) in enumerate(parts.items()):
            tag = self.call[1].replace("{}", key)
            if (read := self.key.match(tag)) is None or read[1] != key:
                raise _inexact(key, "name")
            each.append(f"({self.spell(tag, marks)} value_{i}_{j}){'' if key in required else '?'}")
            values += self._value_rules(f"{i}_{j}", key, part, schema, style, marks)
            if len(values) > MAX_GRAMMAR_CHARS:
                raise _inexact(key, "$ref")  # each argument has the definitions with it
        return f"arguments_{i}: {' '.join(each) or json.dumps('')}\n{values}"

    def _value_rules(self, at: str, key: str, part: Any, schema: Mapping[str, Any], style: Style, marks: Marks) -> str:
        """The rule ``value_`` of ``at``: a value of the schema ``part``, as :meth:`_read_value` reads it."""
        found = _resolved({} if part is True else part, schema)
        if found is None:
            raise _inexact(key, "$ref")
        end, close, token = self.spell(f"{self.line}{self.close}\n", marks), escaped(self.close), marks(self.close)
        keywords = found.keys() - _TITLES
        if keywords and found.get("type") != "string":
            whole = found
            if '"$ref"' in json.dumps(found):
                whole = {**found, **{name: schema[name] for name in _DEFINITIONS if name in schema}}
                if re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)', json.dumps(whole)):
                    raise _inexact(key, "$ref")
            return f"value_{at}: {json_rule(whole, style)} {end}\n"
        if len(found.keys() & {"enum", "const"}) == 1 and keywords <= {"type", "enum", "const"}:
            options = found.get("enum", [found.get("const")])
            are_texts = isinstance(options, list) and all(isinstance(each, str) for each in options)
            if options and are_texts and not any(self.close in each for each in options):
                return f"value_{at}: ({' | '.join(map(json.dumps, options))}) {end}\n"
        bounds = found.get("minLength", 0), found.get("maxLength", "")
        if keywords - {"type", "minLength", "maxLength"} or not all(isinstance(each or 0, int) for each in bounds):
            raise _inexact(key, min(keywords - {"type"}))
        text = rf"(.|\n){{{bounds[0]},{bounds[1]}}}" + escaped(self.line).replace("\n", r"\n")
        if not token.startswith("<"):
            lexeme = rf"/{text}{close}/ & ~/(.|\n)*{close}(.|\n)+/"
            return f'value_{at}: text_{at} "\\n"\ntext_{at}[lazy]: TEXT_{at}\nTEXT_{at}: {lexeme}\n'
        lexeme = rf"/{text}/ & /(.|\n)+/ & ~/(.|\n)*{close}(.|\n)*/"
        return f'value_{at}: TEXT_{at}{"" if self.line or bounds[0] else "?"} {token} "\\n"\nTEXT_{at}: {lexeme}\n'


def _part(schema: Any, *keys: str) -> Any:
    """What is where ``keys`` lead to in a schema; None for nothing."""
    for key in keys:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _resolved(part: Any, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A part of a schema, or the definition that it refers to; None if there is none."""
    for _ in range(8):
        if not isinstance(part, Mapping) or "$ref" not in part:
            break
        keys = str(part["$ref"]).split("/")[1:]
        is_simple = len(keys) == 2 and keys[0] in _DEFINITIONS and part.keys() - _TITLES == {"$ref"}
        part = _part(schema, *keys) if is_simple else None
    return part if isinstance(part, Mapping) and "$ref" not in part else None


def _to_json_value(text: str) -> str:
    """A value that may be JSON; otherwise it is a text."""
    found = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())  # as Python writes them
    return found if found == "null" or loads(found) is not None else json.dumps(text, ensure_ascii=False)


def _inexact(key: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what!r} of {key!r} cannot be held exactly in this model's format of calls.",
        'change it, or leave the call to the model: tool_choice "auto", without strict.',
    )


class Qwen3Coder(TaggedFormat):
    """Qwen3-Coder and later: a call between ``<tool_call>`` and ``</tool_call>``, values on lines of their own."""

    name = "qwen3_coder"
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>")
    head = re.compile(r"<function=\s*([A-Za-z0-9_-]{1,64})\s*>")
    key = re.compile(r"\s*(?:<parameter=([^<>\n]{1,128})>|</function>)")
    call = ("<function={}>\n", "<parameter={}>\n", "</function>")
    close = "</parameter>"
    line = "\n"
    around = ("\n", "\n</tool_call>")


class MiniMaxM2(TaggedFormat):
    """MiniMax M2: all calls in one section."""

    name = "minimax_m2"
    openers = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>", "</parameter>", "</invoke>")
    head = re.compile(r'<invoke\s+name="([A-Za-z0-9_-]{1,64})"\s*>')
    key = re.compile(r'\s*(?:<parameter\s+name="([^"<>\n]{1,128})"\s*>|</invoke>)')
    call = ('<invoke name="{}">\n', '<parameter name="{}">', "</invoke>")
    close = "</parameter>"
    around = ("\n", "\n</minimax:tool_call>")
    has_lists = True


class Glm45(TaggedFormat):
    """GLM 4.5 and later: a name, then keys and values in tags of their own."""

    name = "glm45"
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    head = re.compile(r"([A-Za-z0-9_-]{1,64})\s*(?=<arg_key>|</tool_call>)")
    key = re.compile(r"\s*(?:<arg_key>\s*([^<>\n]{1,128}?)\s*</arg_key>\s*<arg_value>|</tool_call>)")
    call = ("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</tool_call>")
    close = "</arg_value>"
    around = ("", "")
