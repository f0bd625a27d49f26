"""Suffix drafting: what it copies from where, who may see what, and that nothing it drafts changes the output."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime import SamplingParams
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.suffix import SuffixDrafter, best_path
from specexport_runtime.drafters.suffix_open import KeptSuffixes, open_suffixes
from specexport_runtime.drafters.suffix_segment import DEPTH, SEPARATOR, SuffixSegment, make_segment, split_texts
from specexport_runtime.drafters.suffix_store import SEGMENT_TOKENS, SuffixStore
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from tests.support.cases.chance import examples
from tests.support.fakes.engine import make_engine, make_tokenizer
from tests.support.fakes.goodput_fakes import curves
from tests.support.fakes.loop import finish, greedy_reference, make_sequence, make_target

SUFFIX = (DraftStage("suffix", 7),)
SIZES = {"tokenizer_sha256": "0" * 64, "vocab_size": 17}


def sequence(tokens, scope="", **options):
    return make_sequence(0, tokens, SamplingParams(max_tokens=40), draft_plan=SUFFIX, scope=scope, **options)


def drafter(*texts, corpus=()):
    store = SuffixStore(10_000, corpus)
    for text in texts:
        store.add("", text)
    return SuffixDrafter(store)


def draft(made, tokens, count=7, **options):
    return made.propose([sequence(tokens, **options)], [count])[0]


def test_what_earlier_texts_were_given_is_copied():
    made = drafter([1, 2, 3, 4, 5, 6, 7, 8])
    assert draft(made, [9, 2, 3, 4]).tokens == [5, 6, 7]  # as many as matched
    assert draft(made, [9, 2, 3, 4], count=2).tokens == [5, 6]
    assert draft(made, [9, 2, 3, 4]).match_length == 3
    assert draft(made, [9, 9, 4]).tokens == []  # a single token is no match
    assert draft(made, [1, 2], count=0).tokens == []
    assert draft(made, [2, 3], adaptive=True).tokens == [4, 5, 6, 7, 8]  # further than it matched
    made = drafter(*([1, 2, 3, 4, i, i] for i in range(5, 17)), [1, 2, 3, 9])
    assert draft(made, [1, 2], adaptive=True).tokens == [3, 4]  # the likeliest path, until it becomes unlikely


def test_the_longer_match_wins_and_the_own_text_among_equals():
    made = drafter([1, 2, 3, 4, 4, 4])
    assert draft(made, [2, 3, 5, 5, 0, 1, 2, 3]).tokens == [4, 4, 4]
    assert draft(made, [1, 2, 3, 9, 9, 9, 1, 2, 3], count=3).tokens == [9, 9, 9]
    assert draft(made, [1, 2, 3, 9, 9, 9, 1, 2, 3], count=3).drafter == "suffix"


def test_finished_sequences_are_kept_unless_they_are_off_the_record():
    made = drafter()
    for scope, text in (("", [1, 2, 3]), (None, [4, 5, 6])):
        seq = sequence(text[:1], scope=scope)
        seq.tokens += text[1:]
        made.commit([seq])
        assert made.store.num_tokens == (0 if scope == "" else 4)  # one that goes on is not kept yet
        seq.finish_reason = "stop"
        made.commit([seq])
    assert made.store.num_tokens == 4
    assert draft(made, [1, 2]).tokens == [3]
    assert draft(made, [4, 5]).tokens == []


def decode(target, made, sequences):
    finish(Decoder(ModelRunner(target), ChainDrafter({"suffix": made})), sequences)


def test_a_repeated_question_is_answered_in_few_rounds():
    """The acceptance of the drafter, not only that its text is right."""
    target, made = make_target(context=6), drafter()
    expected = greedy_reference(target, [3, 4], 40)
    first, again, off = sequence([3, 4]), sequence([3, 4]), sequence([3, 4], scope=None)
    for seq in (first, again, off):
        decode(target, made, [seq])
        assert seq.output == expected
    assert again.stats.acceptance_rate > 0.95
    assert again.stats.rounds <= 12 < first.stats.rounds == off.stats.rounds


def test_an_engine_learns_from_its_requests_by_salt():
    engine = make_engine()
    params = SamplingParams(max_tokens=40)

    def rounds(**drafting):
        return engine.submit([1, 2], params, drafter="suffix", **drafting).result(30).stats.rounds

    first = rounds()
    assert rounds(remember=False) == first
    assert rounds(cache_salt="mine") == first
    assert rounds() < first
    assert rounds(cache_salt="mine") < first
    assert rounds(cache_salt="other", remember=False) == first
    with pytest.raises(InvalidRequestError, match="cache_salt is ''"):
        engine.submit([1], params, drafter="suffix", cache_salt="")
    engine.close()


def test_requests_that_draft_otherwise_leave_nothing():
    engine = make_engine()
    for drafter_name in ("draft-model", "lookup", "none"):
        engine.submit([1, 2], SamplingParams(max_tokens=20), drafter=drafter_name).result(30)
    store = engine._loop.decoder.drafter.drafters["suffix"].store
    assert store.num_tokens == 0
    engine.close()


def test_what_was_learned_is_kept_in_a_file(tmp_path):
    tokenizer, file = make_tokenizer(), tmp_path / "kept.npz"
    kept = open_suffixes(tokenizer, file=file, **SIZES)
    kept.store.add("a", [1, 2, 3, 4])
    kept.store.add("b", [5, 6, 7])
    kept.store.add("a", [9, 8])
    kept.save()
    again = open_suffixes(tokenizer, file=file, **SIZES).store
    assert {scope: list(split_texts(tokens)) for scope, tokens in again.items()} == {
        "a": [[1, 2, 3, 4], [9, 8]],
        "b": [[5, 6, 7]],
    }
    with pytest.raises(InvalidRequestError, match="another tokenizer"):
        open_suffixes(tokenizer, file=file, tokenizer_sha256="1" * 64, vocab_size=17)
    with pytest.raises(InvalidRequestError, match="does not know"):
        open_suffixes(tokenizer, file=file, tokenizer_sha256="0" * 64, vocab_size=7)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no", b"\x93NUMPY", "pickle"])
def test_a_damaged_file_is_refused(tmp_path, content):
    file = tmp_path / "kept.npz"
    if content == "pickle":
        np.savez(file, head=np.array([{"a": 1}], object), tokens=np.zeros(1, np.int32))
    else:
        file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="is damaged"):
        open_suffixes(make_tokenizer(), file=file, **SIZES)


def test_the_file_is_written_when_an_engine_is_closed(tmp_path, caplog):
    for place, written in ((tmp_path / "kept.npz", True), (tmp_path / "missing" / "kept.npz", False)):
        engine = make_engine(suffixes=KeptSuffixes(SuffixStore(1000), place, "0" * 64))
        engine.submit([1, 2], SamplingParams(max_tokens=20), drafter="suffix").result(30)
        engine.close()
        assert place.exists() == written
    assert "could not be kept" in caplog.text


def test_a_corpus_is_read_from_text_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("w1 w2 w3 w4")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\0")
    (tmp_path / ".hidden").write_text("w5 w6 w7")
    kept = open_suffixes(make_tokenizer(), corpus=tmp_path, **SIZES)
    assert draft(SuffixDrafter(kept.store), [1, 2], scope=None).tokens == [3, 4]
    assert kept.store.num_tokens == 5


def test_what_an_engine_cannot_keep_is_refused(tmp_path, monkeypatch):
    def refuse(said, **options):
        with pytest.raises(InvalidRequestError, match=said):
            open_suffixes(make_tokenizer(), **options, **SIZES)

    refuse("no folder", corpus=tmp_path / "missing")
    refuse("no text", corpus=tmp_path)
    refuse("suffix_memory_mb is 0", memory_mb=0)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    refuse("4 MB", memory_mb=5)
    (tmp_path / "large.txt").write_text("w1 " * 70_000)
    refuse("62500 tokens", corpus=tmp_path, memory_mb=1)


def test_auto_is_whatever_there_is_with_a_chosen_length_where_costs_are_known():

    def plan(kind, **options):
        engine = make_engine(kind, **options)
        found = engine.resolve_drafting(drafter="auto")
        engine.close()
        return [stage.drafter for stage in found.stages], found.adaptive

    assert plan(None) == (["suffix"], False)
    assert plan("good") == (["suffix", "draft-model"], False)
    assert plan("good", cost_curves=curves()) == (["suffix", "draft-model"], True)


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=50), min_size=1, max_size=12)


def searched(texts, context, least):
    """Length of the longest suffix of ``context`` that something follows in a text, and all that follows it."""
    for length in range(min(len(context), DEPTH), least - 1, -1):
        suffix = context[-length:]
        found = [text[end:] for text in texts for end in range(length, len(text)) if text[end - length : end] == suffix]
        if found:
            return length, found
    return None


@examples(150)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(2, 5))
def test_a_segment_finds_the_longest_suffix_and_every_place(texts, context, least):
    segment = make_segment(texts)
    match = segment.find(context[::-1], least)
    expected = searched(texts, context, least)
    if expected is None:
        assert match is None
        return
    length, found = expected
    assert match.length == length
    places = segment.newest(match, 10_000)
    assert [segment.read(start, 10_000) for start in places] == found[::-1]
    assert list(split_texts(segment.tokens)) == texts


@examples(60)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_a_store_finds_the_same_however_its_segments_were_joined(texts, context):
    many, one = SuffixStore(10_000), SuffixStore(10_000, texts)
    for text in texts:
        many.add("a", text)
    found = many.find("a", context, least=2, most=8, width=6)
    long = [text for text in texts if len(text) > 1]
    expected = searched(long, context, 2)
    assert found == one.find(None, context, least=2, most=8, width=6)
    if expected is None:
        assert found is None
    else:
        assert (found.length, found.places) == (expected[0], len(expected[1]))
        assert found.continuations == [rest[:6] for rest in expected[1][::-1]][:8]


def test_large_segments_are_joined_beside_and_found_all_the_same():
    rng = np.random.default_rng(5)
    hurried, store = SuffixStore(1 << 20), SuffixStore(1 << 20)
    texts = [rng.integers(0, 1000, 1500).tolist() for _ in range(64)]
    for text in texts:
        hurried.add("a", text)  # while a join goes on, or when one is over
        store.add("a", text)
        store.settle()
    before = [hurried.find("a", text[:900], least=2, most=4, width=8) for text in texts]
    assert [store.find("a", text[:900], least=2, most=4, width=8) for text in texts] == before
    assert all(found.continuations == [text[900:908]] for found, text in zip(before, texts, strict=True))
    segments = store._shelves["a"].segments
    assert len(segments) == 1
    assert sum(len(segment) for segment in segments) == store.num_tokens == 64 * 1501


def test_scopes_see_their_own_texts_and_the_corpus_only():
    store = SuffixStore(1000, [[9, 8, 7, 6]])
    store.add("a", [1, 2, 3, 4])
    store.add("b", [1, 2, 5, 6])

    def after(scope, context):
        found = store.find(scope, context, least=2, most=4, width=4)
        return None if found is None else found.continuations

    assert after("a", [1, 2]) == [[3, 4]]
    assert after("b", [1, 2]) == [[5, 6]]
    assert after(None, [1, 2]) is None
    assert after("nobody", [1, 2]) is None
    assert [after(scope, [9, 8]) for scope in ("a", "b", None)] == [[[7, 6]]] * 3
    store.clear("a")
    assert after("a", [1, 2]) is None
    assert store.num_tokens == 10


def test_beyond_the_bound_the_oldest_is_forgotten_whoever_wrote_it():
    store = SuffixStore(4096)
    for i in range(40):
        store.add("ab"[i % 2], [i, *range(1000, 1300)])
        assert store.num_tokens <= 4096
    kept = [i for i in range(40) if store.find("ab"[i % 2], [i, 1000], least=2, most=1, width=1)]
    assert kept == list(range(kept[0], 40))
    assert len(kept) >= 7  # the bound less one segment of an eighth of it


def test_many_scopes_with_short_texts_stay_within_the_bound():
    """A segment has a cost of its own, or a million salts would take a hundred times the memory."""
    store = SuffixStore(100_000)
    for i in range(3000):
        store.add(f"salt {i}", [i, i, i])
    assert len(store._shelves) == 100_000 // (SEGMENT_TOKENS + 4)
    assert store.find("salt 2999", [2999, 2999], least=2, most=1, width=1) is not None
    assert store.find("salt 0", [0, 0], least=2, most=1, width=1) is None
    many = SuffixStore(100_000)
    tracemalloc.start()
    try:
        for i in range(500):
            many.add(f"salt {i}", [i, i, i])
        assert tracemalloc.get_traced_memory()[0] < 1.2 * many.num_bytes
    finally:
        tracemalloc.stop()


def test_of_a_text_beyond_the_largest_segment_the_end_is_kept():
    store = SuffixStore(4096)
    store.add("a", list(range(5000)))
    assert store.find("a", [4990, 4991], least=2, most=1, width=2).continuations == [[4992, 4993]]
    assert store.num_tokens == 512
    store = SuffixStore(8 * 300)
    store.restore("a", [list(range(i, i + 90)) for i in range(12)])
    assert store.find("a", [50, 51], least=2, most=20, width=1).places == 12


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="not be negative"):
        SuffixStore(100).add("a", [1, SEPARATOR, 2])
    with pytest.raises(ValueError, match="between 0 and"):
        SuffixSegment(np.array([1 << 21], np.int32))
    with pytest.raises(ValueError, match="more than 10 tokens"):
        SuffixStore(10, [[1] * 20])


def scores(continuations, prefix=()):
    here = [each for each in continuations if tuple(each[: len(prefix)]) == prefix]
    yield prefix, 0.0
    for token in {each[len(prefix)] for each in here if len(each) > len(prefix)}:
        chance = sum(len(each) > len(prefix) and each[len(prefix)] == token for each in here) / len(here)
        for path, score in scores(continuations, (*prefix, token)):
            yield path, chance * (1 + score)


@examples(100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8))
def test_the_path_has_the_highest_score(continuations):
    path = best_path(continuations)
    by_path = dict(scores(continuations))
    assert path.score == pytest.approx(max(by_path.values()))
    assert path.score == pytest.approx(by_path[tuple(path.tokens)]) == pytest.approx(sum(path.chances))
