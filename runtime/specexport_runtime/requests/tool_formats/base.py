"""What a format of calls has: how calls begin, how they are written, and how they are read."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import ClassVar, NamedTuple

from specexport_runtime.requests.tool_formats.events import Feed, Reading


class Style(NamedTuple):
    """How a model writes JSON."""

    item: str = ", "  # what stands between items
    key: str = ": "  # what stands between a key and its value
    # A grammar of calls has the lexemes of JSON, as that of an answer beside them has: a lexer cannot go back from a
    # longer one. Beside free text, the longer one is what parts them.
    apart: bool = False


Marks = Callable[[str], str]
"""From a marker to what a Lark grammar calls it: its token, or its text."""


class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: ClassVar[str]  # vLLM's where it has one
    openers: ClassVar[tuple[str, ...]] = ()  # texts behind which calls stand, anywhere in an answer
    markers: ClassVar[tuple[str, ...]] = ()  # all texts that must be seen to read calls; they may be special tokens
    starts: ClassVar[str] = ""  # characters that begin an answer of calls without an opener; empty for none
    arguments_key: ClassVar[str] = "arguments"  # in a call that is one JSON object
    has_lists: ClassVar[bool] = False  # one opener is enough for several calls
    id_length: ClassVar[int] = 0  # letters and digits of a call's id, where templates insist; 0 for ids like OpenAI's

    @classmethod
    @abstractmethod
    def of(cls, template: str, call: str, function: str) -> "ToolFormat | None":
        """This format, if a chat template has it.

        ``call`` is what the template wrote of a conversation with a call of ``function``; empty if it refused.
        """

    @abstractmethod
    def read(self, feed: Feed, names: frozenset[str]) -> Reading:
        """The calls behind an opener, or at the start of an answer; what stands between them is left out."""

    @abstractmethod
    def rules(self, names: Seq[str], style: Style, marks: Marks, *, opener: str, several: bool) -> str:
        """Rules of a Lark grammar: ``calls`` is one call or, if ``several`` may be, more.

        ``arguments_0``, ``arguments_1`` and so on are rules of the arguments of ``names``. ``marks`` says what markers
        are called; ``opener`` is the opener in the grammar, empty if it was read.
        """

    def heads(self, style: Style) -> tuple[str, ...]:
        """How answers begin that are calls and have no opener."""
        start = f'{{"name"{style.key}"'
        return (start, f"[{start}") if "[" in self.starts else (start,)

    def object_rule(self, names: Seq[str], style: Style) -> str:
        """The rule ``object``: a call that is one JSON object."""
        return f"object: {' | '.join(self._object(name, i, style) for i, name in enumerate(names))}\n"

    def _object(self, name: str, i: int, style: Style) -> str:
        parts = ["{", '"name"', style.key, f'"{name}"', style.item, f'"{self.arguments_key}"', style.key]
        head = " ".join(map(json.dumps, parts if style.apart else ["".join(parts)]))
        return f'{head} arguments_{i} "}}"'
