"""The formats there are, and how to find that of a chat template."""

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.tool_formats.base import ToolFormat
from specexport_runtime.requests.tool_formats.generic import GenericJson
from specexport_runtime.requests.tool_formats.hermes import Hermes
from specexport_runtime.requests.tool_formats.llama import Llama3Json
from specexport_runtime.requests.tool_formats.mistral import Mistral

FORMATS: dict[str, type[ToolFormat]] = {each.name: each for each in (Hermes, Llama3Json, Mistral, GenericJson)}
PARSERS = ("auto", *FORMATS)
"""Values of ``--tool-call-parser``."""


def find_format(template: str, call: str, function: str) -> ToolFormat | None:
    """The format of a chat template; None if it is of none that is known. Arguments as ``ToolFormat.of``."""
    return next((found for each in FORMATS.values() if (found := each.of(template, call, function))), None)


def named_format(name: str, template: str, call: str, function: str) -> ToolFormat:
    """The format of a name, as the template writes it; ``InvalidRequestError`` for an unknown name."""
    if name not in FORMATS:
        raise InvalidRequestError(f"there is no tool call parser {name!r}.", f"give one of {', '.join(PARSERS)}.")
    return FORMATS[name].of(template, call, function) or FORMATS[name]()
