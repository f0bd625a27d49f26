"""Prompts: token ids of texts, and of conversations by the checkpoint's chat template."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.builder import RequestBuilder
from specexport_runtime.intake.conversation import Conversation
from specexport_runtime.requests.results import Prompt

if TYPE_CHECKING:
    from specexport_runtime.intake.chat_dialect import ChatDialect


class PromptEncoder:
    """Makes prompts for one model, as its tokenizer and its chat template have them.

    Args:
        builder: what prompts are checked against.
        chat_template: Jinja template of the checkpoint; None if it has none.
        special_tokens: named special tokens for the chat template.
    """

    def __init__(self, builder: RequestBuilder, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        self.tokenizer = builder.tokenizer
        self._builder = builder
        self._chat_template, self._special_tokens = chat_template, dict(special_tokens)
        self._chat_dialects: dict[tuple[str, str], ChatDialect] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`format_chat` can make a prompt of a conversation."""
        return self._chat_template is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        return self._builder.encode(prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation's prompt, checked. The template's text holds all special tokens: none is added.

        Args:
            messages: as :meth:`format_chat`.
            tools: as :meth:`format_chat`.
            template_arguments: as :meth:`format_chat`.
            continue_final_message: as :meth:`format_chat`.

        Raises:
            InvalidRequestError: as :meth:`format_chat`, or the prompt is empty or too long for the engine.
        """
        text = self.format_chat(messages, tools, template_arguments, continue_final_message)
        return self._builder.encode(text, add_special_tokens=False)

    def format_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template; to generate, :meth:`encode_chat` it.

        Args:
            messages: ``{"role": …, "content": …}`` in order; arguments of ``tool_calls`` are objects.
            tools: functions that may be called, as OpenAI writes them.
            template_arguments: more variables of the template, ``{"enable_thinking": False}`` say.
            continue_final_message: end with what the last message, the assistant's, says; the model goes on with it.

        Raises:
            InvalidRequestError: the bundle has no chat template, or the template refuses the messages.
        """
        dialect = self.chat_dialect()
        return dialect.render(messages, tools, template_arguments, continue_final_message=continue_final_message)

    def chat_dialect(self, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> "ChatDialect":
        """How the model writes conversations: what to do with functions, their calls, and thinking.

        Args:
            tool_call_parser: name of the format of calls; ``"auto"`` finds it in the chat template.
            reasoning_parser: ``"none"`` leaves what a model thinks in its text.

        Raises:
            InvalidRequestError: the bundle has no chat template, or there is no parser of that name.
        """
        from specexport_runtime.intake.chat_dialect import ChatDialect

        if self._chat_template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give a plain prompt.")
        names = (tool_call_parser, reasoning_parser)
        found = self._chat_dialects.get(names)
        if found is None or found.template != self._chat_template:
            found = self._chat_dialects[names] = ChatDialect(
                self._chat_template,
                self._special_tokens,
                self.tokenizer,
                self._builder.eos_token_ids,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
            )
        return found

    def conversation(
        self, messages: Sequence[Mapping[str, Any]] = (), *, chat_template: str | None = None
    ) -> Conversation:
        """A conversation whose prompts go on from what was generated, token for token, so that little is read again.

        Args:
            messages: what was said before, the system's message too.
            chat_template: Jinja template in place of the checkpoint's.

        Raises:
            InvalidRequestError: there is no chat template, or the messages are no turns of a user and an assistant.
        """
        from specexport_runtime.intake.chat import render_losslessly

        template = self._chat_template if chat_template is None else chat_template
        if template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give one as chat_template.")
        render = partial(render_losslessly, template, special_tokens=self._special_tokens)
        return Conversation(render, self.tokenizer, [dict(message) for message in messages])
