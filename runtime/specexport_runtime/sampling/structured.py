"""What form a text must have: a JSON schema, a regular expression, a choice or a grammar. Names are vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.schema_rules import find_fault
from specexport_runtime.sampling.thinking import Thinking

MAX_GRAMMAR_CHARS = 262_144
"""Longest schema, expression or grammar; larger ones take seconds to compile."""
MAX_CHOICES = 4096


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of a text; exactly one of the first five fields is given.

    Attributes:
        json: a JSON schema, as an object or as text.
        json_object: any JSON object.
        regex: a regular expression of Rust's crate ``regex``, which the whole text matches.
        choice: texts, one of which is generated.
        grammar: a context-free grammar in Lark's syntax, as llguidance reads it.
        thinking: where the text thinks before it takes its form; None where it does not.
        beginning: text of this form with which the prompt ends; what is generated goes on from there.
        name: what messages call it; ``structured_outputs.`` and the field's name if empty.

    Raises:
        InvalidRequestError: none is given, or several, or one is not of its type or too large.
    """

    json: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    thinking: Thinking | None = None
    beginning: str = ""
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = f"{', '.join(given)} are given" if given else "nothing is given"
            raise InvalidRequestError(f"structured_outputs: {said}.", f"give one of {', '.join(_KINDS)}.")
        kind = given[0]
        if not self.name:
            object.__setattr__(self, "name", f"structured_outputs.{kind}")
        if kind == "json":
            object.__setattr__(self, "json", _schema_text(self.json, self.name))
        elif kind == "choice":
            object.__setattr__(self, "choice", _check_choices(self.choice, self.name))
        elif kind == "json_object":
            if self.json_object is not True:
                raise InvalidRequestError(f"{self.name} is {self.json_object!r}.", "give true.")
        elif not isinstance(getattr(self, kind), str):
            raise InvalidRequestError(f"{self.name} is no text.", "give a text.")
        if self.thinking is not None and not isinstance(self.thinking, Thinking):
            raise InvalidRequestError(
                f"structured_outputs.thinking is a {type(self.thinking).__name__}.", "give Thinking(...)."
            )
        if not isinstance(self.beginning, str):
            raise InvalidRequestError(f"{self.name}: its beginning is no text.", "give a text.")
        _check_size(self.name, self.text)

    @property
    def kind(self) -> str:
        """Which field is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The field as text; with :attr:`kind` it says which texts are allowed."""
        if self.choice is not None:
            return json.dumps(list(self.choice))
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else ""


_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _schema_text(schema: Any, name: str) -> str:
    try:
        if isinstance(schema, str):
            _check_size(name, schema)
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise InvalidRequestError(f"{name} is no JSON schema.", "give an object.")
        text = json.dumps(schema)
        _check_size(name, text)
        if (fault := find_fault(json.loads(text))) is not None:
            raise InvalidRequestError(f"{name}: {fault}.", "change it, or leave it out.")
        return text
    except InvalidRequestError:  # which is a ValueError too
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}.", "give a JSON schema.") from None


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"{name} has {len(text)} characters.", f"give at most {MAX_GRAMMAR_CHARS}.")


def _check_choices(choice: Any, name: str) -> tuple[str, ...]:
    if isinstance(choice, str) or not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequestError(f"{name} is no list of texts.", "give texts that are not empty.")
    choices = tuple(choice)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"{name} has {len(choices)} texts.", f"give 1 to {MAX_CHOICES} of them.")
    return choices
