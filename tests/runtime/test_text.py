"""Streamed text is the decoded text, piece by piece, cut at the first stop string."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from specexport_runtime.requests.text import StopStrings, TextStream
from specexport_runtime.sampling.params import SamplingParams
from tests.support.models.tokenizers import byte_level, gemma_like, llama_like, metaspace, wordpiece

TOKENIZERS = [byte_level, llama_like, gemma_like, metaspace, wordpiece]


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=6), max_size=8),
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_hold_back_is_the_longest_possible_start(pieces, strings):
    stops, text, held = StopStrings(tuple(strings), include=False), "", 0
    for piece in pieces:
        text += piece
        assume(not any(s in text for s in strings))
        expected = max(n for n in range(len(text) + 1) for s in strings if n < len(s) and text.endswith(s[:n]))
        held = stops.find_partial_stop_length(text, held + len(piece))  # as much as the new characters can add
        assert held == stops.find_partial_stop_length(text, len(text)) == expected


class CountedText(str):
    compared = 0

    def startswith(self, *args):
        type(self).compared += 1
        return super().startswith(*args)


def test_work_per_character_does_not_grow_with_the_length_of_stop_texts():
    strings = tuple(CountedText("th" * 127 + chr(ord("A") + i)) for i in range(16))
    tokenizer = llama_like()
    stream = TextStream(tokenizer, SamplingParams(stop=strings))
    ids = tokenizer.encode("the cat " * 100).ids
    CountedText.compared = 0
    for token in ids:
        stream.append(token)
        stream.take()
    assert 0 < CountedText.compared <= 3 * 16 * len(stream.text)


def test_the_stop_string_that_completes_first_counts_and_of_several_the_longest():
    assert StopStrings(("bc", "ab"), include=False).find("xabc", 0) == 1
    assert StopStrings(("bc", "ab"), include=True).find("xabc", 0) == 3
    assert StopStrings(("bc", "abc"), include=False).find("xabc", 0) == 1


def feed(tokenizer, tokens, **params):
    stream = TextStream(tokenizer, SamplingParams(**params))
    pieces = []
    for token in tokens:
        stopped = stream.append(token)
        pieces.append(stream.take())
        if stopped:
            break
    return pieces, stream.finish(), stream


def test_never_half_a_character():
    tokenizer = byte_level()
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ids = [tokenizer.token_to_id(c) for c in spell("a😀b")[0][0]]
    pieces, rest, _ = feed(tokenizer, ids)
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert rest == ""
    pieces, rest, stream = feed(tokenizer, ids[:3])
    assert pieces == ["a", "", ""]
    assert rest == "\ufffd"  # it can no longer complete
    assert stream.text == "a\ufffd"
    pieces, rest, _ = feed(tokenizer, [*ids[:3], ids[0]])
    assert "".join(pieces) == "a\ufffda"  # decided by the next token, not by the end


def test_byte_tokens_appear_when_their_run_is_decided():
    tokenizer = llama_like()
    run = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "中".encode()]
    a = tokenizer.token_to_id("▁a")
    pieces, rest, _ = feed(tokenizer, [a, *run, a])
    assert pieces == ["a", "", "", "", "中 a"]
    pieces, rest, _ = feed(tokenizer, [a, *run])
    assert (pieces, rest) == (["a", "", "", ""], "中")
    # One more byte makes the whole run invalid: had "中" been given out, it could not be taken back.
    pieces, rest, _ = feed(tokenizer, [*run, tokenizer.token_to_id("<0xFF>"), a])
    assert "".join(pieces) == "\ufffd" * 4 + " a"
    # Nor is it a half character's sign that a stop string waits for.
    pieces, rest, stream = feed(tokenizer, [a, *run, a], stop="\ufffd")
    assert stream.text == "a中 a"
    # But a stop string inside the run ends generation there, so the run is decided.
    pieces, rest, stream = feed(tokenizer, [a, *run, a], stop="中")
    assert len(pieces) == 4
    assert stream.text == "a"


def test_no_token_after_the_end():
    tokenizer = gemma_like()
    a = tokenizer.token_to_id("a")
    _, _, stream = feed(tokenizer, [a, a], stop="a")
    with pytest.raises(ValueError, match="finished"):
        stream.append(a)
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.finish() == ""
    with pytest.raises(ValueError, match="finished"):
        stream.append(a)


@pytest.mark.parametrize("make", [llama_like, metaspace])
def test_a_window_without_text_is_no_context(make):
    """After a long run of skipped tokens, the next space must not be taken for the first of the text."""
    tokenizer = make()
    a, end = tokenizer.token_to_id("▁a"), tokenizer.token_to_id("</s>")
    ids = [a] * 3 + [end] * 50 + [a, a]
    pieces, rest, _ = feed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == "a a a a a"


class AlternatingTokenizer:
    """Decodes tokens in turns as x and y, counted from the first: no window of odd length can stand for the text."""

    decoder = None

    def token_to_id(self, name):
        return None

    def decode(self, ids, skip_special_tokens=True):
        return "".join("xy"[i % 2] for i in range(len(ids)))


def test_a_window_moves_only_to_where_it_decodes_alike():
    pieces, rest, _ = feed(AlternatingTokenizer(), [0] * 101)
    assert "".join(pieces) + rest == "xy" * 50 + "x"


class CountingTokenizer:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_work_per_token_does_not_grow_with_the_text_or_its_prompt(make):
    count = 2000
    tokenizer = CountingTokenizer(make())
    token = tokenizer.token_to_id("cat" if make is wordpiece else "a")
    stream = TextStream(tokenizer, SamplingParams())
    for _ in range(count):
        stream.append(token)
    assert tokenizer.decoded == 0  # nobody asked
    stream.finish()
    assert tokenizer.decoded <= count
    tokenizer.decoded = 0
    stream = TextStream(tokenizer, SamplingParams(stop="never"), prompt=[token] * 40_000)
    for _ in range(count):
        stream.append(token)
        stream.take()
    assert tokenizer.decoded < 40 * count
