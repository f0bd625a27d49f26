"""From the form that a text must have to the grammar of a sequence, by llguidance (extra ``structured``)."""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specexport_runtime.errors import InvalidRequestError, MissingDependencyError, make_install_hint
from specexport_runtime.intake.plain_tokens import PlainTokens
from specexport_runtime.intake.trial import UNTRIED, Trial, run_on_deep_stack
from specexport_runtime.intake.watched import MAX_S, Watched
from specexport_runtime.sampling.grammar import Grammar, explain_refusal
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import GrammarAfterThinking

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FEW = 64  # of a longer range, some end no text
_PART = re.compile(
    r"%json\s*(?P<schema>\{)"
    r'|(?P<text>"(?:[^"\\]|\\.)*"?)'  # what has no end goes on as far as it can: it is read once
    r"|/(?:[^/\\\n]|\\.)+/?"
    r"|(?://|#)[^\n]*"
    r"|<(?P<token>[^<>\s]+)>"
)

MAX_COMPILED = 64
"""Compiled grammars that are kept for the next request with the same one."""
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 50_000,
}
"""What a grammar may cost: its size, the states of its lexer, and the work of one token. What needs more is refused."""


def iterate_literals(form: StructuredOutputs) -> Iterator[str]:
    """Texts that an answer may have to have: choices, those of a grammar, and keys and values of a schema as JSON."""
    if form.choice is not None:
        yield from form.choice
    elif form.kind == "json":
        yield from _iterate_json_values(json.loads(form.text))
    elif form.kind == "grammar":
        for kind, text in _iterate_grammar_parts(form.text):
            try:
                if kind == "text":
                    yield json.loads(text)
                elif kind == "schema":
                    yield from _iterate_json_values(json.loads(text))
            except ValueError:
                continue  # it has an escape that JSON has not


def _iterate_json_values(schema: Any) -> Iterator[str]:
    return (json.dumps(value, ensure_ascii=False) for value in _iterate_schema_values(schema))


def _iterate_schema_values(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key == "properties" and isinstance(value, dict):
                    yield from value
                    waiting += value.values()
                elif key == "const":
                    yield value
                elif key == "enum" and isinstance(value, list):
                    yield from value
                elif key not in ("default", "examples"):
                    waiting.append(value)


def iterate_named_tokens(lark: str, token_of: Callable[[str], int | None]) -> Iterator[set[int]]:
    """Token ids of each ``<name>`` and ``<[1,3-5]>`` of a Lark grammar; tokens that it only leaves out are none."""
    for kind, name in _iterate_grammar_parts(lark):
        if kind != "token":
            continue
        ids: set[int] = set()
        if (token := token_of(f"<{name}>")) is not None:
            ids.add(token)
        elif ranges := re.fullmatch(r"\[([\d,-]+)\]", name):
            for part in ranges[1].split(","):
                first, _, last = part.partition("-")
                if first.isdecimal() and (not last or last.isdecimal()) and len(part) < 20:
                    ids |= set(range(int(first), min(int(last or first), int(first) + _FEW) + 1))
        yield ids


def _iterate_grammar_parts(lark: str) -> Iterator[tuple[str, str]]:
    """The texts, schemas and tokens of a grammar; expressions and comments are left out."""
    at = 0
    while (found := _PART.search(lark, at)) is not None:
        at, kind = found.end(), found.lastgroup
        if kind == "schema":
            try:
                _, at = json.JSONDecoder().raw_decode(lark, found.start(kind))
            except (ValueError, RecursionError):
                continue
            yield kind, lark[found.start(kind) : at]
        elif kind is not None:
            yield kind, found[kind]


class GrammarCompiler:
    """Makes grammars over one vocabulary. Safe from any thread; the tokenizer is read when the first one is wanted."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._lock = threading.Lock()  # held for moments only
        self._reading = threading.Lock()  # of the vocabulary, which is read once
        self._known: Any = None
        self._plain: PlainTokens
        self._trial = Trial(self._vocabulary)
        self._compiled: OrderedDict[tuple[str, str, str], Future[Any]] = OrderedDict()

    def has(self, form: StructuredOutputs) -> bool:
        """Whether a form is compiled."""
        with self._lock:
            found = self._compiled.get((form.kind, form.text, form.beginning))
        return found is not None and found.done()

    def close(self) -> None:
        """End the process in which forms are tried; another starts when it is wanted."""
        self._trial.close()

    def compile(self, form: StructuredOutputs, *, follows_text: bool = True) -> Grammar:
        """The grammar of a text that has yet to begin; ``InvalidRequestError`` if the form is unknown or too large."""
        if not self._eos:
            raise InvalidRequestError(
                "structured_outputs: this model has no end-of-sequence token, so that no text would end.",
                "leave it out.",
            )
        own = self._matcher(form)
        first = None if follows_text else self._plain.first
        if form.thinking is None:
            grammar = Grammar(own, self._vocab_size, self._eos, first)
            allowed = None if first is None else grammar.allowed(())
            if allowed is not None and not allowed.any():
                raise InvalidRequestError(
                    f"{form.name}: such a text begins with a space or a part of a word, which this "
                    "model's decoder does not show after a prompt without text.",
                    "give a prompt, or change the form.",
                )
            return grammar
        return GrammarAfterThinking(own, self._vocab_size, self._eos, form.thinking)

    def _matcher(self, form: StructuredOutputs) -> Any:
        """A matcher of one's own; a form is compiled by the first who asks, others wait for that form alone."""
        key = (form.kind, form.text, form.beginning)
        with self._lock:
            found = self._compiled.get(key)
            if is_new := found is None:
                found = self._compiled[key] = Future()
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        if is_new:
            try:
                found.set_result(self._start_next_piece(form) if form.beginning else self._compile(form))
            except BaseException as error:
                with self._lock:
                    if self._compiled.get(key) is found:
                        del self._compiled[key]
                found.set_exception(error)
        matcher = found.result()
        with self._lock:
            own = matcher.deep_copy()
        return own if len(form.text) <= UNTRIED or isinstance(own, Watched) else Watched(own)

    def _start_next_piece(self, form: StructuredOutputs) -> Any:
        """The matcher of a form after its beginning."""
        matcher, data = self._matcher(replace(form, beginning="")), form.beginning.encode()
        tokens, until = self._plain(data), time.monotonic() + MAX_S
        is_spelled = b"".join([self._plain.tokens[token] for token in tokens]) == data
        if not is_spelled or not all(time.monotonic() < until and matcher.consume_token(token) for token in tokens):
            raise InvalidRequestError(
                f"{form.name}: {form.beginning[:40]!r} does not begin such a text, or is too long.",
                "change the beginning, or leave the form out.",
            )
        return matcher

    def _compile(self, form: StructuredOutputs) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError:
            raise MissingDependencyError(
                "structured outputs need llguidance, which is not installed.",
                make_install_hint("structured"),
            ) from None
        with self._reading:
            if self._known is None:
                self._plain = PlainTokens(self._tokenizer, self._vocab_size, self._eos)
                wrapper = TokenizerWrapper(self._plain)
                self._known = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(self._eos))
        try:
            text = _grammar_text(LLMatcher, form)
        except ValueError as error:
            raise _refused_form_error(form, str(error)) from None
        if form.kind == "grammar":
            self._check_ends(form)
        if (fault := self._trial.find_fault(text)) is not None:
            raise _refused_form_error(form, fault)
        limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]

        def compile_it() -> tuple[Any, bool]:
            has_failed, messages = LLMatcher.validate_grammar_with_warnings(text, self._known, limits=limits)
            if has_failed or messages:  # a warning is of something that would not be honoured
                raise _refused_form_error(form, messages[0])
            matcher = LLMatcher(self._known, text, limits=limits, log_level=0)
            if matcher.is_error():
                raise _refused_form_error(form, matcher.get_error())
            first = matcher.deep_copy()
            first.compute_bitmask()
            return matcher, not first.is_error()

        matcher, begins = run_on_deep_stack(compile_it)
        self._check_spelling(form)
        if not begins:
            raise InvalidRequestError(
                f"{form.name}: this model has no tokens for how such a text begins.",
                "change it, or leave it out.",
            )
        return matcher

    def _vocabulary(self) -> dict[str, Any]:
        named = {token: self._plain.tokens[token].decode("latin-1") for token in self._plain.special_token_ids}
        return {"size": self._vocab_size, "ends": self._eos, "named": named, "limits": _LIMITS}

    def _check_ends(self, form: StructuredOutputs) -> None:
        """A token that ends the text is no part of it."""
        ends = set(self._eos)
        if any(tokens and tokens <= ends for tokens in iterate_named_tokens(form.text, self._tokenizer.token_to_id)):
            raise InvalidRequestError(
                f"{form.name}: it names a token that ends the text.",
                "leave the token out: the text ends where its grammar does.",
            )

    def _check_spelling(self, form: StructuredOutputs) -> None:
        """Vocabularies without bytes lack characters; what is found only on the way ends its own request."""
        if self._plain.is_complete:
            return
        for text in iterate_literals(form):
            missing = self._plain.missing(text)
            if missing is not None:
                raise InvalidRequestError(
                    f"{form.name}: this model has no tokens for {missing[:40]!r} in {text[:40]!r}.",
                    "change it, or leave it out.",
                )


def _grammar_text(matcher: Any, form: StructuredOutputs) -> str:
    """A grammar in the form that llguidance compiles."""
    made: str
    if form.kind == "json":
        made = matcher.grammar_from_json_schema(form.text, overrides={"whitespace_flexible": False})
    elif form.kind == "json_object":
        made = matcher.grammar_from_json_schema({"type": "object"}, overrides={"whitespace_flexible": False})
    elif form.kind == "regex":
        made = matcher.grammar_from_regex(form.text)
    elif form.kind == "choice":
        made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in form.choice or ()))
    else:
        made = matcher.grammar_from_lark(form.text)
    return made


def _refused_form_error(form: StructuredOutputs, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{form.name}: {explain_refusal(message)}.", "change it, or leave it out.")
