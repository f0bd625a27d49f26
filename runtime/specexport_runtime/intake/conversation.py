"""A conversation whose prompts go on, token for token, from what the engine was given and wrote before.

A chat template gives the text of a whole conversation. Encoded anew in each turn, an answer may be split otherwise than
the model wrote it, and from there on nothing that a cache row has can be used. So a prompt is::

    ids of the last prompt | ids that were written | ids of the rest of the text

as long as these decode to what the whole text, encoded anew, decodes to. Otherwise it is the whole text, encoded anew:
after an edit, and where a template leaves out what was said (thinking, say) or says it in other words.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_text
from specexport_runtime.requests.text import common_prefix_length, decode_continuation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, Any]
FINISH_REASON = "finish_reason"
"""Key of a message of the assistant that did not end by itself. Templates do not see it."""
_KEPT_TURNS = 8
"""Turns whose tokens are kept: the last one holds those before it, and the others serve who takes turns back."""
_NO_CHARACTER = "\ufffd"


class _Turn(NamedTuple):
    """What the engine was given, and wrote.

    Attributes:
        prompt: text of the prompt.
        ids: its token ids.
        output: token ids that were written.
    """

    prompt: str
    ids: list[int]
    output: list[int]


class Conversation:
    """Messages of a system, a user and an assistant, in turns: :meth:`ask`, generate, :meth:`answer`, and again.

    Make one with :meth:`SpecEngine.conversation`. One thread at a time may use it.

    Args:
        render: the text of a prompt for messages, by a chat template.
        tokenizer: encodes it.
        messages: what was said before: perhaps one of the system, then turns of the user and the assistant.

    Raises:
        InvalidRequestError: the messages are no such conversation.
    """

    def __init__(
        self,
        render: Callable[[Sequence[Mapping[str, Any]]], str],
        tokenizer: "Tokenizer",
        messages: Sequence[Message] = (),
    ) -> None:
        self._render = render
        self._tokenizer = tokenizer
        self._messages = [dict(message) for message in messages]
        _check_turns(self._messages)
        self._turns: deque[_Turn] = deque(maxlen=_KEPT_TURNS)
        self._asked: _Turn | None = None

    def copy(self) -> "Conversation":
        """Another conversation in which the same was said; what is said in one is not said in the other."""
        other = Conversation(self._render, self._tokenizer)
        other._messages = self.messages
        other._turns, other._asked = self._turns.copy(), self._asked
        return other

    @property
    def messages(self) -> list[Message]:
        """All that was said. An answer that was cut off has a ``finish_reason``, ``"length"`` or ``"cancelled"``."""
        return [dict(message) for message in self._messages]

    @property
    def num_turns(self) -> int:
        """Questions that were answered."""
        return sum(message["role"] == "assistant" for message in self._messages)

    @property
    def system(self) -> str | None:
        """What the system says before everything; None for nothing. May be set between turns."""
        first = self._messages[0] if self._messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self._messages if self.system is None else self._messages[1:]
        self._messages = [*([] if text is None else [{"role": "system", "content": text}]), *rest]

    def ask(self, text: str) -> list[int]:
        """Say something as the user.

        Args:
            text: what is said.

        Returns:
            token ids of the prompt for the answer. Its length is not checked: an engine does that.

        Raises:
            InvalidRequestError: the last question has no answer, or the template refuses the messages. Nothing was
                said then.
        """
        if self._asked is not None:
            raise InvalidRequestError("the last question has no answer.", "call answer() or undo() first.")
        said = [*self._messages, {"role": "user", "content": text}]
        prompt = self._text(said)
        ids = self._encode(prompt)
        self._messages, self._asked = said, _Turn(prompt, ids, [])
        return list(ids)

    def answer(self, text: str, token_ids: Sequence[int], finish_reason: str = "stop") -> None:
        """What the assistant said; of a ``GenerationResult`` its ``text``, ``token_ids`` and ``finish_reason``.

        Args:
            text: what was said.
            token_ids: as the model wrote it.
            finish_reason: why it ended.

        Raises:
            InvalidRequestError: nothing was asked.
        """
        if self._asked is None:
            raise InvalidRequestError("there is no question to answer.", "call ask() first.")
        cut = {} if finish_reason == "stop" else {FINISH_REASON: finish_reason}
        self._messages.append({"role": "assistant", "content": text, **cut})
        self._turns.append(self._asked._replace(output=list(token_ids)))
        self._asked = None

    def undo(self) -> str | None:
        """Take back the question that waits for its answer, or else the last turn.

        Returns:
            the question; None if there is none.
        """
        count = 1 if self._asked is not None else 2
        if self._asked is None and not self.num_turns:
            return None
        self._asked = None
        question = self._messages[-count]["content"]
        del self._messages[-count:]
        return str(question)

    def drop_oldest(self, count: int = 1) -> int:
        """Forget the oldest turns; what the system says stays.

        Returns:
            how many were forgotten.
        """
        first = 0 if self.system is None else 1
        count = min(count, self.num_turns)
        del self._messages[first : first + 2 * count]
        return count

    def clear(self) -> None:
        """Forget all but what the system says."""
        self._messages = self._messages[: 0 if self.system is None else 1]
        self._asked = None
        self._turns.clear()

    def _text(self, messages: Sequence[Message]) -> str:
        text = self._render([{key: value for key, value in each.items() if key != FINISH_REASON} for each in messages])
        check_text(text, "the conversation")
        return text

    def _encode(self, text: str) -> list[int]:
        """Token ids of a prompt, which begin as those of an earlier turn if its text does."""
        anew = self._encode_plain(text)
        for turn in reversed(self._turns):
            if text.startswith(turn.prompt):
                rest = text[len(turn.prompt) :]
                output = turn.output[: self._count_repeated_tokens(turn, rest)]
                ids = [*turn.ids, *output, *self._encode_plain(rest[len(self._decode_output(turn, output)) :])]
                return ids if self._decode(ids) == self._decode(anew) else anew
        return anew

    def _count_repeated_tokens(self, turn: _Turn, text: str) -> int:
        """How many of the tokens that were written are, as text, what a text begins with."""
        output = turn.output
        if self._begins_with_output(text, turn, output):
            return len(output)
        limit = common_prefix_length(self._decode_output(turn, output), text)
        low, high = 0, len(output) - 1  # texts of more tokens are longer, but for halves of characters
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if len(self._decode_output(turn, output[:middle])) <= limit else (low, middle - 1)
            )
        while low and not self._begins_with_output(text, turn, output[:low]):
            low -= 1
        return low

    def _begins_with_output(self, text: str, turn: _Turn, output: Sequence[int]) -> bool:
        said = self._decode_output(turn, output)
        return text.startswith(said) and _NO_CHARACTER not in said  # which many byte sequences decode to

    def _decode_output(self, turn: _Turn, output: Sequence[int]) -> str:
        return decode_continuation(self._tokenizer, turn.ids, output)

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _check_turns(messages: Sequence[Message]) -> None:
    expected = "user"
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise InvalidRequestError(f"messages[{i}] has no content that is a text.", "give each a text.")
        check_text(content, f"messages[{i}]")
        if role == "system" and i == 0:
            continue
        if role != expected:
            raise InvalidRequestError(
                f"messages[{i}] is of {role!r}, where one of {expected!r} should be.",
                "give turns of 'user' and 'assistant', perhaps with one message of 'system' before them.",
            )
        expected = "assistant" if expected == "user" else "user"
    if expected == "assistant":
        raise InvalidRequestError("the last message has no answer.", "leave it out, and ask() it.")
