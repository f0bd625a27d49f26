"""How a model's chat template writes conversations, found out from the template: functions, calls, thinking."""

import contextlib
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.answer_reader import AnswerParts, AnswerSyntax, ThinkingMarks, read_parts
from specexport_runtime.intake.chat import ANY_TOOL, render_begun, render_chat, render_losslessly, template_variables
from specexport_runtime.intake.chat_forms import joined
from specexport_runtime.intake.functions import CallGrammar, Function, FunctionError, ToolChoice, read_functions
from specexport_runtime.intake.tool_formats.base import Style, ToolFormat
from specexport_runtime.intake.tool_formats.families import (
    PARSERS,
    GenericJson,
    find_format,
    get_format,
    write_tools_as_text,
)
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import Thinking
from specexport_runtime.sampling.thinking_budget import ThinkingBudget

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REASONING_PARSERS = ("auto", "none")
"""Values of ``--reasoning-parser``."""
_THINKING = {  # by what a template has of them
    "</think>": ThinkingMarks("<think>", "</think>"),
    "[/THINK]": ThinkingMarks("[THINK]", "[/THINK]"),
    "</seed:think>": ThinkingMarks("<seed:think>", "</seed:think>"),
    "<|channel|>analysis<|message|>": ThinkingMarks("<|channel|>analysis<|message|>", "<|end|>"),
}
_FUNCTION, _KEY = "probe_function", "probe_key"
_ID = "abcdefghi"  # nine letters: the form on which some templates insist
_LETTERS = string.ascii_letters + string.digits
_Place = Literal["may", "begun", "none"]
"""Before the thinking, which may come; in it; after it, or there is none."""


class ChatDialect:
    """A chat template, and what it tells of the model."""

    def __init__(
        self,
        template: str,  # Jinja source
        special_tokens: Mapping[str, str],
        tokenizer: "Tokenizer",  # the target's
        eos_token_ids: Sequence[int] = (),
        *,
        tool_call_parser: str = "auto",  # name of the format of calls; ``"auto"`` finds it
        reasoning_parser: str = "auto",  # ``"none"`` leaves what a model thinks in the text; ``"auto"`` takes it out
    ) -> None:
        check_parsers(tool_call_parser, reasoning_parser)
        self.template = template
        self._special_tokens, self._tokenizer, self._eos = dict(special_tokens), tokenizer, tuple(eos_token_ids)
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of functions."""
        return "tools" in template_variables(self.template)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls; None if that is not known."""
        if self._tool_call_parser != "auto":
            return get_format(self._tool_call_parser, self.template, self._probe, _FUNCTION)
        return find_format(self.template, self._probe, _FUNCTION) if self.takes_tools else None

    @cached_property
    def thinking(self) -> ThinkingMarks | None:
        """What stands around the model's thinking; None if the template does not say that it thinks."""
        return None if self._reasoning_parser == "none" else self._marks

    @cached_property
    def _marks(self) -> ThinkingMarks | None:
        return next((marks for text, marks in _THINKING.items() if text in self.template), None)

    @cached_property
    def _probe(self) -> str:
        """What the template writes of a conversation with a call, from there on; empty if it refuses it."""
        called = {"name": _FUNCTION, "arguments": {_KEY: 1}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": called}]},
            {"role": "tool", "name": _FUNCTION, "tool_call_id": _ID, "content": "found"},
        ]
        try:
            text = render_chat(
                self.template, messages, self._special_tokens, add_generation_prompt=False, tools=[ANY_TOOL]
            )
        except InvalidRequestError:
            return ""
        at = text.find(_FUNCTION)
        return text[max(0, at - 80) :] if at >= 0 and _KEY in text[at:] else ""

    @property
    def has_channels(self) -> bool:
        """Whether every message of an answer names its channel: thinking is one of them."""
        return self.tool_format is not None and self.tool_format.has_channels

    @property
    def _style(self) -> Style:
        return Style(",", ":") if f'"{_KEY}":1' in self._probe.replace("'", '"') else Style()

    def check_tools(self) -> ToolFormat:
        """How the model writes calls; ``InvalidRequestError`` if it is unknown, or the template takes no functions."""
        found = self.tool_format
        if not self.takes_tools and not isinstance(found, GenericJson):
            raise InvalidRequestError(
                "this model's chat template knows no tools.",
                "leave them out, or serve it with --tool-call-parser json, which tells of them in a system message.",
            )
        if found is None:
            raise InvalidRequestError(
                "this model's chat template writes calls in a format that is not known.",
                f"name one with --tool-call-parser: {', '.join(PARSERS[1:])}.",
            )
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,  # end with the header of the assistant's turn
        continue_final_message: bool = False,  # end with what the last message, the assistant's, says; and go on there
    ) -> str:
        """The prompt of a conversation in OpenAI's form; ``UnwrittenError`` if the template leaves a message out."""
        if tools:
            self.check_tools()
        if continue_final_message:
            return render_begun(
                messages, lambda told, header: self._write(told, tools, template_arguments, header), self._marks
            )
        return self._write(messages, tools, template_arguments, add_generation_prompt)

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None,
        header: bool,
    ) -> str:
        if not self.takes_tools and isinstance(self.tool_format, GenericJson):
            messages, tools = write_tools_as_text([joined(each) for each in messages], tools), ()
        elif self.tool_format is not None:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # these are refused below
                messages = self.tool_format.prepare(messages)
        return render_losslessly(
            self.template, messages, self._special_tokens, tools or None, template_arguments, header
        )

    def syntax(
        self,
        prompt: str,
        functions: Sequence[Function] = (),
        choice: ToolChoice | None = None,  # whether functions are called; None leaves it to the model
        beginning: str = "",  # of the answer, after the prompt
        *,
        echo: bool = False,  # the beginning is told too
    ) -> AnswerSyntax:
        """How an answer to a prompt of :meth:`render` is read; ``InvalidRequestError`` if it begins with a call."""
        choice = choice or ToolChoice()
        where, _ = self._find_thinking_state(prompt)
        called = [each for each in functions if choice.mode != "none" and choice.name in (None, each.name)]
        calls = self._format_of(called)
        said = self._find_thinking_state(prompt, beginning)[1]
        if calls is not None and (
            said.lstrip()[:1] in tuple(calls.starts) or any(each in said for each in calls.openers)
        ):
            raise InvalidRequestError(
                "it begins a call of a function, of which the rest alone could not be told.",
                "leave the call out, or the tools.",
            )
        return AnswerSyntax(
            self.thinking if where != "none" else None,
            where == "begun",
            calls,
            {each.name: each.schema for each in called},
            None if choice.parallel and choice.name is None else 1,
            beginning,
            echo,
        )

    def _format_of(self, called: Sequence[Function]) -> ToolFormat | None:
        return self.check_tools() if called else self.tool_format if self.has_channels else None

    def form(
        self,
        prompt: str,
        functions: Sequence[Function] = (),
        choice: ToolChoice | None = None,  # whether functions are called; None leaves it to the model
        answer: StructuredOutputs | None = None,  # the form of an answer that calls none
        beginning: str = "",  # of the answer, after the prompt: the form is that of the whole
    ) -> StructuredOutputs | None:
        """The form of an answer to a prompt of :meth:`render`, after thinking; None for any."""
        choice = choice or ToolChoice()
        called = [each for each in functions if choice.mode != "none" and choice.name in (None, each.name)]
        calls = self._format_of(called)
        is_said = calls is not None and bool(calls.said_after) and prompt.endswith(calls.said_after)
        is_alone = is_said and answer is not None and choice.mode != "required"  # the form's end is that of the text
        if calls is None or (not called and answer is None) or is_alone:
            return None if answer is None else self._after_thinking(answer, prompt, beginning)
        schema = None if answer is None or choice.mode == "required" else _get_answer_schema(answer, bool(called))
        grammar = CallGrammar(calls, self._style, self._tokenizer.token_to_id, self._eos)
        text = grammar.write(called, choice, schema)
        if text is not None and is_said:
            raise InvalidRequestError(
                "the answer has begun in a channel in which calls cannot be held to a schema.",
                "leave the tools out, or end with a message of the user.",
            )
        return None if text is None else self._after_thinking(StructuredOutputs(grammar=text), prompt, beginning)

    def check_choice(self, functions: Sequence[Function], choice: ToolChoice) -> None:
        """Refuse a choice of functions that are not there, with a ``FunctionError``."""
        if choice.mode == "required" and not functions:
            raise FunctionError("tool_choice", "there are no functions to choose from.", "give tools.")
        if choice.name is not None and all(choice.name != each.name for each in functions):
            raise FunctionError("tool_choice.function.name", f"there is no {choice.name!r}.", "name one of the tools.")

    def shown_tokens(self, syntax: AnswerSyntax) -> tuple[int, ...]:
        """Ids of special tokens without whose texts an answer cannot be read."""
        texts = [*(syntax.thinking or ()), *(() if syntax.format is None else syntax.format.markers)]
        return tuple(token for text in texts if (token := self._tokenizer.token_to_id(text)) is not None)

    @property
    def end_of_thinking(self) -> int | None:
        """Id of the token that ends the thinking; None if the model does not think, or has no such token."""
        return None if self.thinking is None else self._tokenizer.token_to_id(self.thinking.end)

    def banned_tokens(self, functions: Sequence[Function]) -> tuple[int, ...]:
        """Ids of tokens with which calls begin; without them there are none, as far as calls have tokens."""
        if not functions or self.tool_format is None or self.has_channels:
            return ()
        ids = (self._tokenizer.token_to_id(text) for text in self.tool_format.openers)
        return tuple(token for token in ids if token is not None)

    def new_id(self) -> str:
        """An id for a call, in the form that the template takes."""
        length = 0 if self.tool_format is None else self.tool_format.id_length
        if length:
            return "".join(secrets.choice(_LETTERS) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"

    def read(
        self, text: str, prompt: str, tools: Sequence[Mapping[str, Any]] = (), *, is_cut: bool = False
    ) -> AnswerParts:
        """Text, thinking and calls of an answer to ``prompt``; ``is_cut``: it ended by its length."""
        return read_parts(self.syntax(prompt, read_functions(tools)), text, is_cut=is_cut)

    def _find_thinking_state(self, prompt: str, beginning: str = "") -> tuple[_Place, str]:
        """Where an answer is after a prompt and its beginning, and what of that is not before, or in, the thinking."""
        marks, end = self.thinking, prompt.rstrip()
        if marks is None or end.endswith(marks.end):
            return "none", beginning
        where: _Place = "begun" if end.endswith(marks.begin) else "may"
        if where == "may" and not beginning.lstrip().startswith(marks.begin):
            return ("none" if beginning else "may"), beginning
        _, is_over, said = beginning.partition(marks.end)
        return ("none", said.lstrip("\n")) if is_over else ("begun", "")

    def find_thinking(self, prompt: str, beginning: str = "") -> Thinking | None:
        """Where an answer to a prompt of :meth:`render` thinks; None where it does not, or has.

        ``InvalidRequestError`` if no token ends it.
        """
        where, _ = self._find_thinking_state(prompt, beginning)
        if where == "none" or self.thinking is None:
            return None
        if self.has_channels:
            raise InvalidRequestError(
                "this model thinks in channels, which no single token begins.", "leave the budget out."
            )
        begin, end = (self._tokenizer.token_to_id(text) for text in self.thinking)
        if end is None or (where == "may" and begin is None):
            raise InvalidRequestError(
                f"{self.thinking.end!r} is no token of this model: no form can begin after it, no budget end with it.",
                "turn thinking off with chat_template_kwargs, or leave form and budget out.",
            )
        lines = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", "\n\n"))
        between = tuple(line[0] for line in lines if len(line) == 1)
        return Thinking(end, begin if where == "may" else None, between)

    def thinking_budget(self, num_tokens: int, prompt: str, beginning: str = "") -> ThinkingBudget | None:
        """A budget of an answer's thinking, of which its beginning has used some; None where it does not think.

        Errors are as for :meth:`find_thinking`.
        """
        thinking = self.find_thinking(prompt, beginning)
        if thinking is None or self.thinking is None:
            return None
        thought = beginning.lstrip().removeprefix(self.thinking.begin)
        used = len(self._tokenizer.encode(thought, add_special_tokens=False).ids)
        return ThinkingBudget(max(num_tokens - used, 0), thinking)

    def _after_thinking(self, form: StructuredOutputs, prompt: str, beginning: str) -> StructuredOutputs:
        thinking = None if self.has_channels else self.find_thinking(prompt, beginning)
        said = self._find_thinking_state(prompt, beginning)[1]
        return replace(form, thinking=thinking, beginning=said) if thinking is not None or said else form


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuse names of parsers that there are not."""
    for name, given, known in (
        ("--tool-call-parser", tool_call_parser, PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if given not in known:
            raise InvalidRequestError(f"{name} is {given!r}.", f"give one of {', '.join(known)}.")


def _get_answer_schema(form: StructuredOutputs, beside_tools: bool) -> Mapping[str, Any]:
    """The schema of an answer that may stand in the place of calls; ``InvalidRequestError`` if it has none."""
    import json

    if form.kind == "json_object":
        return {"type": "object"}
    if form.kind == "json":
        schema: Mapping[str, Any] = json.loads(form.text)
        return schema
    if not beside_tools:
        raise InvalidRequestError(f"{form.name} is no form of an answer in channels.", "give a JSON schema.")
    raise InvalidRequestError(
        f"{form.name} and tools are both given.",
        'give a JSON schema, leave the tools out, or say tool_choice "none".',
    )
