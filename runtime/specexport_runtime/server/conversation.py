"""From the body of a chat to its prompt and to the form of its answer: messages, tools, thinking."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError, MissingDependencyError
from specexport_runtime.intake.answer_reader import AnswerSyntax
from specexport_runtime.intake.chat import check_template_arguments, template_variables
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.chat_forms import UnwrittenError
from specexport_runtime.intake.functions import Function, FunctionError, ToolChoice, read_functions
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking_budget import ThinkingBudget
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, invalid_error, unsupported_error
from specexport_runtime.server.parsing import is_deep
from specexport_runtime.server.prompt_tokens import encode
from specexport_runtime.server.protocol import (
    ChatRequest,
    Effort,
    Message,
    NamedTool,
    PromptEnd,
    Tool,
    ToolCall,
    join_text,
)
from specexport_runtime.server.structured import check_strict, read_form

_log = logging.getLogger("specexport.server")


def make_dialect(engine: SpecEngine, config: ServerConfig) -> ChatDialect:
    """How the model writes conversations, by the server's parsers; ``ApiError`` 400 without a chat template."""
    try:
        return engine.chat_dialect(config.tool_call_parser, config.reasoning_parser)
    except InvalidRequestError as error:
        raise invalid_error("messages", f"messages: {error}") from None


@dataclass(frozen=True)
class ParsedConversation:
    """A conversation that was understood."""

    dialect: ChatDialect  # how the model writes it
    prompt: str  # up to where the answer begins
    ids: list[int]  # tokens of that, and of what the answer has already
    functions: tuple[Function, ...]  # that may be called
    choice: ToolChoice  # whether they are
    syntax: AnswerSyntax  # how the answer is read
    budget: ThinkingBudget | None  # of its thinking

    @property
    def has_parts(self) -> bool:
        """Whether answers have more than the content that is generated."""
        return self.syntax.thinking is not None or self.syntax.format is not None or self.syntax.echo

    def sampling(self, biases: Mapping[int, float] | None) -> dict[str, Any]:
        """Arguments of ``SamplingParams`` without which the answer could not be read, or would have calls."""
        if self.choice.mode == "none":
            banned = dict.fromkeys(self.dialect.banned_tokens(self.functions), float("-inf"))
            more: dict[str, Any] = {"logit_bias": {**(biases or {}), **banned}} if banned else {}
        else:
            more = {}
        shown = self.dialect.shown_tokens(self.syntax)
        return more | {"shown_special_tokens": shown, "thinking_budget": self.budget}

    def form(self, body: ChatRequest, engine: SpecEngine) -> StructuredOutputs | None:
        """The form of the answer, checked, and ready in the engine; None for any. ``ApiError`` 400 if it is refused."""
        for i, function in enumerate(self.functions):
            if function.strict:
                check_strict(function.schema, f"tools[{i}].function.parameters")
        answer = read_form(body, engine)
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        try:
            form = self.dialect.form(self.prompt, self.functions, self.choice, answer, self.syntax.beginning)
        except FunctionError as error:
            raise invalid_error(error.param, str(error)) from None
        except InvalidRequestError as error:
            raise invalid_error(param if answer is not None else "tools", str(error)) from None
        if form is not None and (answer is None or form.kind == "grammar"):
            self._check_calls(replace(form, beginning=""), engine)
        if form is not None and form.beginning:
            try:
                engine.check_form(form)
            except InvalidRequestError as error:
                where = f"messages[{len(body.messages) - 1}].content"
                raise invalid_error(where, f"{where}: {error}") from None
        return form

    def _check_calls(self, form: StructuredOutputs, engine: SpecEngine) -> None:
        try:
            engine.check_form(form)
        except MissingDependencyError as error:
            raise ApiError(400, f"tools: {error}", param="tools", code="unsupported_parameter") from None
        except InvalidRequestError as error:
            raise self._find_schema_error(engine, error) from None

    def _find_schema_error(self, engine: SpecEngine, error: InvalidRequestError) -> ApiError:
        """The error of a grammar as that of the schema that is to blame."""
        for i, function in enumerate(self.functions):
            param = f"tools[{i}].function.parameters"
            try:
                engine.check_form(StructuredOutputs(json=function.schema))
            except InvalidRequestError as own:
                return invalid_error(param, f"{param}: {own}")
        return invalid_error("tools", f"tools: {error}")


def read_conversation(body: ChatRequest, engine: SpecEngine, config: ServerConfig) -> ParsedConversation:
    """A body of ``/v1/chat/completions`` as a prompt, and how to read its answer; ApiError 400 names the parameter."""
    dialect = make_dialect(engine, config)
    functions, choice = _read_functions(body, dialect)
    arguments = template_arguments(dialect.template, body.reasoning_effort, body.chat_template_kwargs)
    if body.echo and not body.continue_final_message:
        raise invalid_error("echo", "echo needs continue_final_message: true.")
    prompt, ids = read_prompt(engine, config, dialect, body.messages, functions, arguments, body)
    beginning = join_text(body.messages[-1].content or "") if body.continue_final_message else ""
    prompt = prompt.removesuffix(beginning)
    try:
        syntax = dialect.syntax(prompt, functions, choice, beginning, echo=bool(body.echo))
    except InvalidRequestError as error:
        where = f"messages[{len(body.messages) - 1}].content"
        raise invalid_error(where, f"{where}: {error}") from None
    budget = _budget(body, config, dialect, prompt, beginning)
    return ParsedConversation(dialect, prompt, ids, functions, choice, syntax, budget)


def _budget(
    body: ChatRequest, config: ServerConfig, dialect: ChatDialect, prompt: str, beginning: str
) -> ThinkingBudget | None:
    """The budget of the answer's thinking: the body's, or the server's, which only holds where there can be one."""
    asked, param = body.thinking_token_budget, "thinking_token_budget"
    if asked is not None and dialect.thinking is None:
        raise unsupported_error(param, f"{param}: this model does not think, or its thoughts are not looked for.")
    most = config.thinking_budget if asked is None else asked
    try:
        return None if most is None else dialect.thinking_budget(most, prompt, beginning)
    except InvalidRequestError as error:
        if asked is None:
            return None
        raise unsupported_error(param, f"{param}: {error}") from None


def warn_of_unused_budget(engine: SpecEngine, config: ServerConfig) -> None:
    """Log that the server's own budget of thinking never holds for a model, if it has one and that is so."""
    if config.thinking_budget is None:
        return
    try:
        dialect = make_dialect(engine, config)
        holds = dialect.end_of_thinking is not None and not dialect.has_channels
    except ApiError:
        holds = False
    if not holds:
        _log.warning(
            "--thinking-budget has no effect: this model (%s) does not think, or no token ends its thinking.",
            config.model_name,
        )


def read_prompt(
    engine: SpecEngine,
    config: ServerConfig,
    dialect: ChatDialect,
    messages: Sequence[Message],
    functions: Sequence[Function],
    template_arguments: Mapping[str, Any] | None,
    end: PromptEnd,
) -> tuple[str, list[int]]:
    """The prompt of a conversation: its text, and its tokens; ``ApiError`` 400 names the parameter."""
    try:
        check_template_arguments(dialect.template, template_arguments or {})
    except InvalidRequestError as error:
        raise invalid_error("chat_template_kwargs", f"chat_template_kwargs: {error}") from None
    if end.continue_final_message and end.add_generation_prompt:
        raise invalid_error("continue_final_message", "continue_final_message needs add_generation_prompt: false.")
    told, tools = chat_messages(messages, dialect), [each.tool for each in functions]
    how = {name: value for name in PromptEnd.model_fields if (value := getattr(end, name)) is not None}
    try:
        text = dialect.render(told, tools, template_arguments, **how)
        return text, encode(engine, text, "messages", config.max_prompt_tokens, add_special_tokens=False)
    except UnwrittenError as error:
        raise invalid_error(error.param, str(error)) from None
    except InvalidRequestError as error:
        raise invalid_error("messages", f"messages: {error}") from None


def chat_messages(messages: Sequence[Message], dialect: ChatDialect) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents as texts or lists of them, arguments of calls as objects."""
    called: set[str] = set()
    read = []
    for i, item in enumerate(messages):
        where = f"messages[{i}]"
        message: dict[str, Any] = {"role": item.role, "content": _read_content(item, where, dialect)}
        if item.name:
            message["name"] = item.name
        if item.tool_calls:
            _check_role("assistant", item, f"{where}.tool_calls")
            message["tool_calls"] = [
                _read_tool_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(item.tool_calls)
            ]
            called.update(call.id for call in item.tool_calls)
        if item.tool_call_id is not None:
            _check_role("tool", item, f"{where}.tool_call_id")
            message["tool_call_id"] = item.tool_call_id
        if item.role == "tool" and item.tool_call_id not in called:
            param = f"{where}.tool_call_id"
            if item.tool_call_id is None:
                raise ApiError(400, f"{param} is missing.", param=param, code="missing_required_parameter")
            raise invalid_error(param, f"{param} names no call of a message before it.")
        thought = item.reasoning_content if item.reasoning_content is not None else item.reasoning
        if thought is not None:
            _check_role("assistant", item, f"{where}.reasoning_content")
            message |= {"reasoning_content": thought, "reasoning": thought}
        read.append(message)
    return read


def read_tools(tools: Sequence[Tool], dialect: ChatDialect) -> tuple[Function, ...]:
    """The functions of a body, checked against each other and the chat template; ``ApiError`` 400 if one is refused."""
    try:
        functions = read_functions([tool.model_dump(exclude_none=True) for tool in tools])
        if functions:
            dialect.check_tools()
    except FunctionError as error:
        raise invalid_error(error.param, str(error)) from None
    except InvalidRequestError as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="unsupported_parameter") from None
    return functions


def _read_functions(body: ChatRequest, dialect: ChatDialect) -> tuple[tuple[Function, ...], ToolChoice]:
    functions = read_tools(body.tools or (), dialect)
    asked, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(asked, NamedTool):
        choice = ToolChoice("required", asked.function.name, parallel=False)
    else:
        choice = ToolChoice(asked or "auto", parallel=parallel)
    try:
        dialect.check_choice(functions, choice)
    except FunctionError as error:
        raise invalid_error(error.param, str(error)) from None
    return functions, choice


def _read_content(item: Message, where: str, dialect: ChatDialect) -> str | list[dict[str, str]] | None:
    param = f"{where}.content"
    if isinstance(item.content, list) and len(item.content) > 1:
        return [{"type": "text", "text": part.text} for part in item.content]
    if item.content:
        return join_text(item.content)
    if item.content == "":
        return ""
    if item.role == "assistant":
        # Most templates want a text here. Some tell calls by a content that is none: they ask for it.
        return None if item.tool_calls and _tests_for_none(dialect.template) else ""
    if "content" not in item.model_fields_set:
        raise ApiError(400, f"{param} is missing.", param=param, code="missing_required_parameter")
    if item.content is not None:
        raise invalid_error(param, f"{param} has no parts.")
    raise invalid_error(param, f"{param} is null: that is for messages of the assistant.")


@lru_cache(maxsize=8)
def _tests_for_none(template: str) -> bool:
    return re.search(r"""content['"]?\]?\s+is\s+(not\s+)?none""", template, re.IGNORECASE) is not None


def _read_tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or is_deep(arguments):
        raise invalid_error(param, f"{param} is no JSON object, or nested too deeply.")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_role(role: str, item: Message, param: str) -> None:
    if item.role != role:
        raise invalid_error(param, f"{param} is for messages of role {role!r}.")


def template_arguments(template: str, effort: Effort | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables of a chat template that a body names, its effort among them; a given one goes before the effort."""
    names = template_variables(template)
    if effort is None:
        own: dict[str, Any] = {}
    elif "reasoning_effort" in names:
        own = {"reasoning_effort": effort}
    elif effort != "none":
        raise unsupported_error(
            "reasoning_effort", f"reasoning_effort = {effort!r}: the chat template reads no effort. Leave it out."
        )
    else:
        own = {"enable_thinking": False} if "enable_thinking" in names else {}
    return own | dict(given or {})
