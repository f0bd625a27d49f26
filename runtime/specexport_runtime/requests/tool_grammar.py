"""From functions to the grammar of an answer that calls them, in the format of the model."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from specexport_runtime.requests.functions import Function, ToolChoice
from specexport_runtime.requests.tool_formats.base import Style, ToolFormat

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class CallGrammar:
    """Writes grammars of calls."""

    format: ToolFormat
    style: Style
    token_of: Callable[[str], int | None]  # id of the token that is exactly a text; None where there is none
    eos_token_ids: tuple[int, ...]

    def write(self, functions: Seq[Function], choice: ToolChoice, answer: Mapping[str, Any] | None) -> str | None:
        """The grammar of an answer, in Lark; None if any text will do.

        ``functions`` may be called (of a named choice, that one alone); ``answer`` is the JSON schema of an answer that
        calls none, None for any text.
        """
        is_free = choice.mode == "auto" and answer is None
        if is_free and not any(function.strict for function in functions):
            return None
        schemas = [_ANY_OBJECT if is_free and not each.strict else each.schema for each in functions]
        several = choice.parallel and choice.name is None
        names = [function.name for function in functions]
        rules = "".join(f"arguments_{i}: {self._json(schema)}\n" for i, schema in enumerate(schemas))
        if is_free:
            return self._free(names, several=several) + rules
        opener = self.mark(self.format.openers[0]) if self.format.openers and not self.format.starts else ""
        style = self.style._replace(apart=answer is not None)
        calls = self.format.rules(names, style, self.mark, opener=opener, several=several)
        if answer is None:
            return f"start: calls\n{calls}{rules}"
        # Beside a call, the answer is compact, as it is without functions.
        return f"start: calls | answer\nanswer: {_compact(answer)}\n{calls}{rules}"

    def mark(self, text: str) -> str:
        """A marker in Lark: its token if it has one, otherwise its text."""
        token = self.token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _free(self, names: Seq[str], *, several: bool) -> str:
        """Any text, with calls in it: from an opener on, the call is ruled by the grammar."""
        opener = self.format.openers[0] if self.format.openers else ""
        token = self.token_of(opener) if opener else None
        one, again = several and self.format.has_lists, "*" if several else "?"
        if self.format.starts:
            return self._free_start(names, opener, token, several=one)
        if token is not None:
            # Any token at all, but those that end the text: they end it in the grammar, too.
            free = f"<[^{','.join(map(str, sorted({token, *self.eos_token_ids})))}]>*"
            start, calls = f"start: {free} (calls {free}){again}\n", f"<[{token}]>"
        else:
            with_opener = f"(.|\\n)*{_escaped(opener)}"
            start = (
                f"start: (head calls){again} TEXT\n"
                f"TEXT: {_ANY_TEXT} & ~/{with_opener}(.|\\n)*/\n"
                f"head[lazy]: /{with_opener}/\n"
            )
            calls = ""
        return start + self.format.rules(names, self.style, self.mark, opener=calls, several=one)

    def _free_start(self, names: Seq[str], opener: str, token: int | None, *, several: bool) -> str:
        """As :meth:`_free`, where an answer that is a call begins like one."""
        heads = "|".join(map(_escaped, self.format.heads(self.style)))
        without = f" & ~/(.|\\n)*{_escaped(opener)}(.|\\n)*/" if opener and token is None else ""
        tagged = f" | TEXT? {self.mark(opener)} calls" if token is not None else ""
        return f"start: calls | TEXT{tagged}\nTEXT: {_ANY_TEXT} & ~/({heads})(.|\\n)*/{without}\n" + self.format.rules(
            names, self.style, self.mark, opener="", several=several
        )

    def _json(self, schema: Mapping[str, Any]) -> str:
        return _json_rule(schema, item_separator=self.style.item, key_separator=self.style.key)


def _compact(schema: Mapping[str, Any]) -> str:
    return _json_rule(schema)


def _json_rule(schema: Mapping[str, Any], **separators: str) -> str:
    options = {"whitespace_flexible": False, **separators}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _escaped(text: str) -> str:
    r"""A text in an expression of Rust's ``regex`` between slashes."""
    return "".join(f"\\{sign}" if sign in r"\.+*?()|[]{}^$#&-~/\"" else sign for sign in text)
