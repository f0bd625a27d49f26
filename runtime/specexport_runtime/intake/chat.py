"""Chat templates: messages to prompt text, as model authors write it (Jinja), in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat_forms import Form, UnwrittenError, find_form, joined, write_losslessly

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MAX_TEMPLATE_ARGUMENTS = 16
MAX_TEMPLATE_CHARS = 4096
"""Most variables of a template that a caller may give, and their size as JSON."""
ANY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "other_function", "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""A function with which templates are tried."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of what was thought; templates read the first two."""
_GOES_ON = "qzxqwgoesonwqxzq"
"""Stands at the end of a text, to find that in what a template writes."""
_TEMPLATE_HINT = "check the messages against the model's chat template, or pass a plain prompt."
_ASSISTANT = "end with a message of the assistant without calls, or leave continue_final_message out."
_TWICE = "leave that out, or reasoning_content, or let the model think (enable_thinking)."
_AS_IS = "leave white space out where it begins, and marks of thinking; or leave continue_final_message out."


def render_chat(
    template: str,  # Jinja source
    # each with ``role`` and ``content`` (or ``tool_calls``, whose arguments are objects)
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],  # names to texts, ``{"bos_token": "<s>"}`` say; variables of the template
    add_generation_prompt: bool = True,  # end with the header of the assistant's turn
    tools: Sequence[Mapping[str, Any]] | None = None,  # functions that may be called, as OpenAI writes them
    template_arguments: Mapping[str, Any] | None = None,  # more variables, ``{"enable_thinking": False}`` say
) -> str:
    """Render messages with a chat template, as they are given; InvalidRequestError if it refuses or is wrong."""
    from jinja2 import TemplateError, TemplateSyntaxError

    checked = _check_messages(messages)
    try:
        compiled = _compile(template)
    except TemplateSyntaxError as error:
        message = f"The chat template is not valid Jinja (line {error.lineno}): {error.message}."
        raise InvalidRequestError(message, hint="fix chat_template.jinja of the bundle.") from error
    given = dict(template_arguments or {})
    if given:
        check_template_arguments(template, given, special_tokens)
    variables = {**given, **special_tokens, "tools": tools or None, "documents": None}

    try:
        return compiled.render(messages=checked, add_generation_prompt=add_generation_prompt, **variables)
    except TemplateError as error:
        raise InvalidRequestError(f"The chat template refused: {error}.", hint=_TEMPLATE_HINT) from error
    except Exception as error:  # a template is a program: wrong types in it fail with any exception
        message = f"The chat template failed with {type(error).__name__}: {error}."
        raise InvalidRequestError(message, hint=_TEMPLATE_HINT) from error


def render_losslessly(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages in a form in which the template leaves nothing out; ``UnwrittenError`` if there is none."""

    def write(messages: Sequence[Mapping[str, Any]], header: bool) -> str:
        header = header and add_generation_prompt
        return render_chat(template, messages, special_tokens, header, tools, template_arguments)

    check_template_arguments(template, template_arguments or {}, special_tokens)
    variables = json.dumps([dict(special_tokens), bool(tools), dict(template_arguments or {}), add_generation_prompt])
    return write_losslessly(_check_messages(messages), write, partial(_find_form_cached, template, variables))


def render_begun(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[Mapping[str, Any]], bool], str],  # renders messages, with a generation prompt or without
    thinking: tuple[str, str] | None,  # what the template has around thoughts
) -> str:
    """Render messages up to the end of what the last one says, as it says it; ``UnwrittenError`` if that cannot be."""
    *before, last = _check_messages(messages)
    last, where = joined(last), f"messages[{len(before)}]"
    said, thought = last.get("content") or "", last.get("reasoning_content")
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(said, str):
        raise UnwrittenError(where, f"{where} cannot go on: it is no text of the assistant, or has calls.", _ASSISTANT)
    if thinking is not None and said.lstrip().startswith(thinking[0]):
        # Templates write thoughts in their own way, or add an empty one: here the model is given its own words.
        text = write(before, True)
        end = text.rstrip()
        if thought or end.endswith(thinking[1]):
            raise UnwrittenError(where, f"{where} would think twice: it begins with {thinking[0]!r}.", _TWICE)
        return (end.removesuffix(thinking[0]) if end.endswith(thinking[0]) else text) + said
    header, begun = (
        write([*before, last | {"content": text + _GOES_ON}], False).rpartition(_GOES_ON)[0] for text in ("", said)
    )
    if not header or begun != header + said:
        param = f"{where}.content"
        raise UnwrittenError(param, f"{param} cannot go on: this model's chat template changes it.", _AS_IS)
    if thought and _GOES_ON not in write([*before, last | dict.fromkeys(_THOUGHTS, _GOES_ON)], False):
        param = f"{where}.reasoning_content"
        raise UnwrittenError(param, f"{param} is left out by this model's chat template.", "leave it out.")
    return begun


@lru_cache(maxsize=256)
def _find_form_cached(template: str, variables: str, kinds: tuple[str, ...]) -> Form:
    """The form for messages of some kinds; ``variables``: special tokens, whether there are tools, arguments."""
    special_tokens, has_tools, arguments, add_generation_prompt = json.loads(variables)
    tools = [ANY_TOOL] if has_tools else None

    def write(messages: Sequence[Mapping[str, Any]], header: bool) -> str:
        return render_chat(template, messages, special_tokens, header and add_generation_prompt, tools, arguments)

    return find_form(kinds, write)


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not set itself; empty for one that is not valid Jinja."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except TemplateSyntaxError:
        return frozenset()


def check_template_arguments(
    template: str, given: Mapping[str, Any], special_tokens: Mapping[str, str] | None = None
) -> None:
    """Refuse variables that a template does not read, that are set by us, or that are too large."""
    if len(given) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidRequestError(
            f"{len(given)} variables are given to the chat template.", f"give at most {MAX_TEMPLATE_ARGUMENTS}."
        )
    for name in given:
        if name in _OWN_VARIABLES or name in (special_tokens or {}) or name in _environment().globals:
            raise InvalidRequestError(f"{name[:64]!r} of the chat template is not yours to set.", "leave it out.")
        if name not in template_variables(template):
            raise InvalidRequestError(f"the chat template does not read {name[:64]!r}.", "leave it out.")
    try:
        size = len(json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"a variable of the chat template is no JSON: {error}.", "give JSON.") from None
    if size > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"the variables of the chat template have {size} characters.", f"give at most {MAX_TEMPLATE_CHARS}."
        )


def _check_messages(messages: object) -> list[dict[str, Any]]:
    example = 'give a list such as [{"role": "user", "content": "Hello"}].'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(f"messages is {messages!r}, not a list of messages.", hint=example)
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{i}] is {message!r}, not a mapping.", hint=example)
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}] has no role (a string).", hint=example)
        content = message.get("content")
        if not isinstance(content, (str, list)) and not message.get("tool_calls"):
            raise InvalidRequestError(f"messages[{i}] has no content (a string or a list of parts).", hint=example)
        thoughts = [message[key] for key in _THOUGHTS if message.get(key) is not None][:1]
        named = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]} if thoughts else dict(message)
        checked.append(named)
    return checked


@lru_cache(maxsize=8)
def _compile(template: str) -> "Template":
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    """The environment that published templates are written for."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %}`` marks assistant text for training; here its body is rendered as it stands."""

        tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Macro) -> str:  # a block of its own: what is set in it is not seen after it
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escaping: a prompt is not a web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
