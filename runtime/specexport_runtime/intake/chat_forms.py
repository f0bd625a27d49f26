"""Conversations in the form that a chat template writes in full, found out by trying: nothing of them is lost.

Templates take a content as one text or as parts, know some roles and not others, and leave out without a word what
they do not know. So a conversation of the same shape, with a distinct word in each place, is rendered first: where
every word is in the text, the messages are handed over in that form.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specexport_runtime.errors import InvalidRequestError

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and where they have it."""

_WORD = re.compile("qzxqw([a-j]+)wqxzq")
_ID = "abcdefghi"  # nine letters: the form on which some templates insist
_MAX_KINDS = 64  # messages of a short conversation; what does not fit is only looked at in the whole one
_MAX_BEGINNINGS = 16  # renders of what was said up to a text that is left out

Message = dict[str, Any]
Write = Callable[[Sequence[Message], bool], str]


class UnwrittenError(InvalidRequestError):
    """A chat template leaves out something of a message; ``param`` names it, ``messages[1].content`` say."""

    def __init__(self, param: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.param = param


class Form(NamedTuple):
    """How messages are handed over."""

    parts: frozenset[str] = frozenset()  # roles whose content is a list of parts
    joined: bool = False  # such a list has one part
    system: bool = False  # a developer's messages are given the role system
    null: bool = False  # a content that is empty beside calls is null, or an empty text where it was null
    split: bool = False  # text and calls of one message are two messages
    written: bool = False  # arguments of calls are text, as OpenAI has them

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        return [each for message in messages for each in self._convert_message(message)]

    def _convert_message(self, message: Message) -> Iterator[Message]:
        role, content = message["role"], message.get("content")
        texts = _texts(content)
        if self.split and message.get("tool_calls") and texts is not None and "".join(texts).strip():
            yield from self._convert_message({"role": role, "content": content})
            texts = [""]
        if self.written and message.get("tool_calls"):
            message = message | {"tool_calls": [_encode_arguments(call) for call in message["tool_calls"]]}
        if self.system and role == "developer":
            message = message | {"role": "system"}
        if self.null and message.get("tool_calls") and not "".join(texts or ()):
            yield message | {"content": "" if content is None else None}
        elif texts is None:
            yield message
        elif role in self.parts:
            told = ["".join(texts)] if self.joined or not texts else texts
            yield message | {"content": [{"type": "text", "text": text} for text in told]}
        else:
            yield message | {"content": "".join(texts)}


def write_losslessly(messages: Sequence[Message], write: Write, choose: Callable[[tuple[str, ...]], Form]) -> str:
    """A conversation in the form that ``choose`` (:func:`find_form`) gives; ``UnwrittenError`` if it loses text."""
    form = choose(tuple(_drop_repetitions(map(_kind, messages))))
    words = _PlaceholderWords()
    shape = [words.shape(i, message) for i, message in enumerate(messages)]
    try:
        lost = _find_lost_words(words, shape, write(form.apply(shape), True), form, write)
    except InvalidRequestError:
        text, at = write(form.apply(messages), True), 0  # what the template has against them, if it has
        for i, message in enumerate(messages):
            for said in map(str.strip, _texts(message.get("content")) or ()):
                at = text.find(said, at)
                if at < 0:
                    raise _unwritten_error((i, "content"), messages) from None
        return text
    if lost:
        raise _unwritten_error(words.places[lost[0]], messages)
    return write(form.apply(messages), True)


def find_form(kinds: Sequence[str], write: Write) -> Form:
    """The first form in which a template leaves nothing out of messages of these kinds; else that with the least."""
    messages = [json.loads(kind) for kind in kinds]
    words = _PlaceholderWords()
    shape = [words.shape(i, message) for i, message in enumerate(messages)]
    best, fewest, nones = Form(), len(words.places) + 1, None
    for form in _iterate_forms(messages):
        try:
            text = write(form.apply(shape), True)
        except InvalidRequestError:
            continue
        nones = text.count("None") if nones is None else nones
        if (form.parts and words.is_quoted(text)) or text.count("None") > nones:  # a list or a null as Python writes it
            continue
        lost = _find_lost_words(words, shape, text, form, write)
        if len(lost) < fewest:
            best, fewest = form, len(lost)
        if not lost:
            break
    return best


def _kind(message: Message) -> str:
    """What of a message may matter to a template besides what it says: a short message of its kind, as JSON."""
    return json.dumps({key: _outline(key, value) for key, value in message.items()}, default=str)


def _outline(key: str, value: Any) -> Any:
    if isinstance(value, str):
        own = {"role": value, "type": value, "id": _ID, "tool_call_id": _ID}
        return own.get(key, "said" if value.strip() else value[:1])
    if isinstance(value, Mapping):
        return {} if key == "arguments" else {name: _outline(name, each) for name, each in value.items()}
    return [_outline(key, each) for each in value[:2]] if isinstance(value, list) else value


def _drop_repetitions(kinds: Iterable[str]) -> list[str]:
    """A conversation without what comes again in it: it ends alike, and all steps from a kind to the next are there."""
    kept: list[str] = []
    before: list[int | None] = []  # where the step to each was last
    places: dict[tuple[str | None, str], int | None] = {}
    newest = 0  # the last step that had not been there
    for kind in kinds:
        step = kept[-1] if kept else None, kind
        place = places.get(step)
        if place is not None and newest <= place:
            while len(kept) > place + 1:
                last = kept.pop()
                places[kept[-1], last] = before.pop()
            continue
        newest = newest if place is not None else len(kept)
        places[step] = len(kept)
        kept.append(kind)
        before.append(place)
    return kept[:_MAX_KINDS]


def joined(message: Mapping[str, Any]) -> Message:
    """A message whose content is one text, if it was texts."""
    texts = _texts(message.get("content"))
    return dict(message) if texts is None else {**message, "content": "".join(texts)}


def _iterate_forms(messages: Sequence[Message]) -> Iterator[Form]:
    """Ways to hand messages over, the usual one first."""
    roles = list(dict.fromkeys(str(message["role"]) for message in messages))
    whole = frozenset(roles)
    some = [frozenset(each) for size in range(1, len(whole)) for each in itertools.combinations(roles, size)]
    systems = (False, True) if "developer" in whole else (False,)
    nulls = (False, True) if any(each.get("tool_calls") for each in messages) else (False,)
    lists = any(len(_texts(each.get("content")) or ()) > 1 for each in messages)
    for split, written, null in itertools.product(nulls, nulls, nulls):
        usual = not (split or written or null)  # the others are for calls: fewer of them bound what a refusal costs
        for parts, system in itertools.product([frozenset[str](), whole, *(some if usual else ())], systems):
            yield Form(parts, False, system, null, split, written)
            if lists and parts:
                yield Form(parts, True, system, null, split, written)


class _PlaceholderWords:
    """Words that stand in a conversation in the places of its texts."""

    def __init__(self) -> None:
        self.places: list[tuple[int, str]] = []  # the message of each word, and its part

    def shape(self, index: int, message: Message) -> Message:
        """A message with words in the places of what it says; empty texts stay."""
        shape, texts = dict(message), _texts(message.get("content"))
        if texts is not None:
            told = [self._new(index, "content") if text.strip() else text for text in texts]
            single = isinstance(message["content"], str)
            shape["content"] = told[0] if single else [{"type": "text", "text": text} for text in told]
        if message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            shape["tool_calls"] = [self._call(index, f"tool_calls[{j}]", call) for j, call in calls]
        return shape

    def lost(self, text: str) -> list[int]:
        """Numbers of the words that are not in a text."""
        found = {f"qzxqw{number}wqxzq" for number in _WORD.findall(text.casefold())}
        return [i for i in range(len(self.places)) if _word(i) not in found]

    def is_quoted(self, text: str) -> bool:
        """Whether a list of parts is in a text as Python or JSON writes it."""
        starts = ("'text': '", '"text": "', '"text":"')
        return any(start + _word(0)[:5] in text for start in starts)

    def _new(self, index: int, part: str) -> str:
        self.places.append((index, part))
        return _word(len(self.places) - 1)

    def _call(self, index: int, part: str, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), (str, Mapping)):
            return call
        name, value = self._new(index, part), self._new(index, part)
        is_text = isinstance(function["arguments"], str)
        told = {"name": name, "arguments": f'{{"key": "{value}"}}' if is_text else {"key": value}}
        return {**call, "function": {**function, **told}}


def _encode_arguments(call: Any) -> Any:
    """A call whose arguments are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _word(number: int) -> str:
    return "qzxqw" + "".join(chr(ord("a") + int(digit)) for digit in str(number)) + "wqxzq"


def _find_lost_words(
    words: _PlaceholderWords, shape: Sequence[Message], text: str, form: Form, write: Write
) -> list[int]:
    """Numbers of words that are left out of a text for good.

    A text beside calls may be written until more is said: then it is left out as thoughts are. Of each kind of message
    the first and the last such one tell of all.
    """
    lost = words.lost(text)
    never = [at for at in lost if words.places[at][1] != "content" or not shape[words.places[at][0]].get("tool_calls")]
    if never:
        return never
    kinds: dict[str, list[int]] = {}
    for at in lost:
        index = words.places[at][0]
        kinds.setdefault(_kind(shape[index]), []).append(index)
    for count, index in enumerate(dict.fromkeys(each for found in kinds.values() for each in (found[0], found[-1]))):
        try:
            told = "" if count == _MAX_BEGINNINGS else write(form.apply(shape[: index + 1]), False)
        except InvalidRequestError:
            told = ""
        missing = set(words.lost(told))
        if never := [at for at in lost if at in missing and words.places[at][0] == index]:
            return never
    return []


def _texts(content: Any) -> list[str] | None:
    """The texts of a content; None if it has something else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    texts = [part.get(_TEXTS.get(str(part.get("type")), "")) if isinstance(part, Mapping) else None for part in content]
    return [str(text) for text in texts] if all(isinstance(text, str) for text in texts) else None


def _unwritten_error(place: tuple[int, str], messages: Sequence[Message]) -> UnwrittenError:
    index, part = place
    role, param = messages[index]["role"], f"messages[{index}].{part}"
    return UnwrittenError(
        param,
        f"{param}, of role {role!r}, is left out by this model's chat template.",
        "leave the message out, or say it in one of the user.",
    )
