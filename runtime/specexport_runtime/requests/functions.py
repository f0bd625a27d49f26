"""Functions that a model may call, as OpenAI's ``tools`` describe them."""

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.schema_rules import fault_of
from specexport_runtime.sampling.structured import MAX_GRAMMAR_CHARS

MAX_FUNCTIONS = 128
"""Most functions of a request, as in OpenAI's API."""
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
_NAME = re.compile(NAME_PATTERN)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


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


def read_functions(tools: Seq[Mapping[str, Any]]) -> tuple[Function, ...]:
    """The functions of ``tools``, as OpenAI writes them, checked.

    A malformed one, two of one name, and too many or too large ones are a ``FunctionError``.
    """
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
    for i, each in enumerate(functions):
        if (fault := fault_of(each.parameters)) is not None:
            raise FunctionError(f"tools[{i}].function.parameters", f"{fault}.", "change it.")
    if size > MAX_GRAMMAR_CHARS:
        raise FunctionError("tools", f"they have {size} characters.", f"give at most {MAX_GRAMMAR_CHARS}.")
    return tuple(functions)


@dataclass(frozen=True)
class ToolChoice:
    """Whether functions are called."""

    mode: str = "auto"  # ``"auto"`` leaves it to the model, ``"none"`` calls none, ``"required"`` calls one or more
    name: str | None = None  # the function that is called, once; with ``"required"`` only
    parallel: bool = True  # an answer may have several calls
