"""Compiling a form keeps nobody waiting but those who want that form, and what fails in the matcher stays with us."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.grammars import GrammarCompiler, iterate_named_tokens
from specexport_runtime.sampling.grammar import explain_refusal
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.models.tokenizers import byte_level

pytest.importorskip("llguidance")

KNOWN, SLOW, WRONG = (StructuredOutputs(regex=text) for text in ("known", "slow", "("))


def test_a_form_is_compiled_once_and_only_those_who_want_it_wait(monkeypatch):
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [0])
    compiler.compile(KNOWN)
    begun, may_end, compiled, really = threading.Event(), threading.Event(), [], compiler._compile

    def slowly(form):
        compiled.append(form)
        begun.set()
        assert may_end.wait(60)
        return really(form)

    monkeypatch.setattr(compiler, "_compile", slowly)
    with ThreadPoolExecutor(4) as pool:
        try:
            slow = [pool.submit(compiler.compile, SLOW) for _ in range(2)]
            assert begun.wait(60)
            assert pool.submit(compiler.compile, KNOWN).result(20).allowed(()).any()
        finally:
            may_end.set()
        one, other = (each.result(60) for each in slow)
    one.consume([tokenizer.token_to_id("s")])
    assert other.forced(1) == [tokenizer.token_to_id("s")]
    assert compiled == [SLOW]
    for _ in range(2):  # what was refused is looked at again
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            compiler.compile(WRONG)
    assert compiled == [SLOW, WRONG, WRONG]


@pytest.mark.parametrize("size", [1, 5000])  # the longer ones are watched
def test_a_form_goes_on_from_its_beginning(size):
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [0])
    regex = f"ab{'c' * size}?d"
    form = StructuredOutputs(regex=regex, beginning="a")
    assert not compiler.has(form)
    for _ in range(2):
        rules = compiler.compile(form)
        assert rules.forced(1) == [tokenizer.token_to_id("b")]
        rules.consume([tokenizer.token_to_id("b")])
        assert compiler.has(form)
    whole = StructuredOutputs(regex="abd", beginning="abd")
    assert compiler.compile(whole).allowed(()).nonzero()[0].tolist() == [0]
    for text in ("x", "ax", "a" * 9999):
        with pytest.raises(InvalidRequestError, match="does not begin such a text"):
            compiler.compile(StructuredOutputs(regex=regex, beginning=text))
    with pytest.raises(InvalidRequestError, match="beginning is no text"):
        StructuredOutputs(regex="a", beginning=1)


@pytest.mark.parametrize("begin", ['"', "/"])
def test_what_a_grammar_opens_and_does_not_close_is_read_once(begin):
    """Else each mark in it would be another beginning, and the work would grow with the square of their number."""
    assert list(iterate_named_tokens(f"start: {begin}" + f"\\{begin}" * 50_000 + "<a>", {"<a>": 1}.get)) == []
    assert list(iterate_named_tokens(f"start: {begin}x{begin} <a>", {"<a>": 1}.get)) == [{1}]


def test_failures_of_the_matcher_are_told_to_the_log_alone(caplog):
    assert explain_refusal("unclosed\n group.") == "unclosed group"
    assert "assertion" not in explain_refusal("panic: assertion failed: a < b\n<backtrace>\n 0: c")
    assert [each.getMessage() for each in caplog.records] == ["the matcher failed: panic: assertion failed: a < b"]
