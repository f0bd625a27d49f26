"""Functions that a model may call, as OpenAI's ``tools`` describe them, and the grammar of an answer with calls."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.tool_formats.base import Style, ToolFormat
from specexport_runtime.sampling.schema_rules import find_fault
from specexport_runtime.sampling.structured import MAX_GRAMMAR_CHARS

MAX_FUNCTIONS = 128
"""Most functions of a request, as in OpenAI's API."""
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
_NAME = re.compile(NAME_PATTERN)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = r"/(.|\n)*/"


class FunctionError(InvalidRequestError):
    """A function cannot be called; ``param`` says which part is wrong, ``tools[2].function.name`` say."""

    def __init__(self, param: str, message: str, hint: str | None = None) -> None:
        super().__init__(f"{param}: {message}", hint)
        self.param = param


@dataclass(frozen=True)
class Function:
    """A function that may be called."""

    name: str  # 1 to 64 of ``A-Z a-z 0-9 _ -``
    parameters: Mapping[str, Any] | None  # JSON schema of its arguments, an object; None: it takes none
    strict: bool  # arguments follow the schema, also where the model decides to call
    tool: Mapping[str, Any]  # the tool as it was given; chat templates get it so

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments, which are an object."""
        if self.parameters is None:
            return _NO_ARGUMENTS
        return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}


def read_functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    """The functions of ``tools``, as OpenAI writes them; FunctionError for wrong, equal, many or large ones."""
    if len(tools) > MAX_FUNCTIONS:
        raise FunctionError("tools", f"{len(tools)} functions.", f"give at most {MAX_FUNCTIONS}.")
    functions: list[Function] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise FunctionError(f"tools[{i}]", "it is no function.", 'give {"type": "function", "function": {…}}.')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.match(name):
            raise FunctionError(f"tools[{i}].function.name", "it is no name.", "give 1 to 64 of A-Z a-z 0-9 _ -.")
        if any(name == each.name for each in functions):
            raise FunctionError(f"tools[{i}].function.name", f"{name!r} is there twice.", "give each its own name.")
        if parameters is not None and (
            not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"
        ):
            raise FunctionError(f"tools[{i}].function.parameters", "arguments are an object.", "give its JSON schema.")
        functions.append(Function(name, parameters, bool(function.get("strict")), tool))
    try:
        size = len(json.dumps([dict(tool) for tool in tools]))
    except (TypeError, ValueError, RecursionError) as error:
        raise FunctionError("tools", f"they are no JSON: {error}.", "give JSON.") from None
    if size > MAX_GRAMMAR_CHARS:
        raise FunctionError("tools", f"they have {size} characters.", f"give at most {MAX_GRAMMAR_CHARS}.")
    for i, each in enumerate(functions):
        if (fault := find_fault(each.parameters)) is not None:
            raise FunctionError(f"tools[{i}].function.parameters", f"{fault}.", "change it.")
    return tuple(functions)


@dataclass(frozen=True)
class ToolChoice:
    """Whether functions are called."""

    mode: str = "auto"  # ``"auto"`` leaves it to the model, ``"none"`` calls none, ``"required"`` calls one or more
    name: str | None = None  # the function that is called, once; with ``"required"`` only
    parallel: bool = True  # an answer may have several calls


@dataclass(frozen=True)
class CallGrammar:
    """Writes grammars of calls."""

    format: ToolFormat
    style: Style
    token_of: Callable[[str], int | None]  # id of the token that is exactly a text; None where there is none
    eos_token_ids: tuple[int, ...]

    def write(self, functions: Sequence[Function], choice: ToolChoice, answer: Mapping[str, Any] | None) -> str | None:
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
        apart = {"item_separator": self.style.item, "key_separator": self.style.key}
        rules = "".join(f"arguments_{i}: {_json_rule(schema, **apart)}\n" for i, schema in enumerate(schemas))
        if is_free:
            return self._free(names, several=several) + rules
        opener = self.mark(self.format.openers[0]) if self.format.openers and not self.format.starts else ""
        style = self.style._replace(apart=answer is not None)
        calls = self.format.rules(names, style, self.mark, opener=opener, several=several)
        if answer is None:
            return f"start: calls\n{calls}{rules}"
        # Beside a call, the answer is compact, as it is without functions.
        return f"start: calls | answer\nanswer: {_json_rule(answer)}\n{calls}{rules}"

    def mark(self, text: str) -> str:
        """A marker in Lark: its token if it has one, otherwise its text."""
        token = self.token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _free(self, names: Sequence[str], *, several: bool) -> str:
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

    def _free_start(self, names: Sequence[str], opener: str, token: int | None, *, several: bool) -> str:
        """As :meth:`_free`, where an answer that is a call begins like one."""
        heads = "|".join(map(_escaped, self.format.heads(self.style)))
        without = f" & ~/(.|\\n)*{_escaped(opener)}(.|\\n)*/" if opener and token is None else ""
        tagged = f" | TEXT? {self.mark(opener)} calls" if token is not None else ""
        return f"start: calls | TEXT{tagged}\nTEXT: {_ANY_TEXT} & ~/({heads})(.|\\n)*/{without}\n" + self.format.rules(
            names, self.style, self.mark, opener="", several=several
        )


def _json_rule(schema: Mapping[str, Any], **separators: str) -> str:
    options = {"whitespace_flexible": False, **separators}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _escaped(text: str) -> str:
    r"""A text in an expression of Rust's ``regex`` between slashes."""
    return "".join(f"\\{sign}" if sign in r"\.+*?()|[]{}^$#&-~/\"" else sign for sign in text)
