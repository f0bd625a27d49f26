import json

import pytest

from specexport.compile.vocabulary import check_vocabularies, draftable_size, read_vocabulary
from specexport_runtime.errors import CheckpointError, VocabularyMismatchError

WORDS = {0: "a", 1: "b", 2: "c", 3: "<eos>"}


def test_added_tokens_and_both_vocabulary_forms_are_read() -> None:
    added = [{"id": 2, "content": "<eos>"}]
    bpe = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}).encode()
    unigram = json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}).encode()
    assert read_vocabulary(bpe, where="x") == read_vocabulary(unigram, where="x") == {0: "a", 1: "b", 2: "<eos>"}


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b'{"model": {"vocab": 3}}', b"\xff\xfe"])
def test_a_broken_tokenizer_file_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json of mymodel"):
        read_vocabulary(data, where="mymodel")


def test_a_hole_in_one_vocabulary_is_a_difference() -> None:
    draft = {index: token for index, token in WORDS.items() if index != 1}
    with pytest.raises(VocabularyMismatchError, match="token id 1 is 'b' in the target and unused in the draft"):
        check_vocabularies(WORDS, draft, num_shared_rows=4)


def test_tokens_at_the_end_of_one_side_are_padding() -> None:
    check_vocabularies(WORDS | {4: "<pad>"}, WORDS, num_shared_rows=4)
    check_vocabularies(WORDS, WORDS | {4: "<pad>"}, num_shared_rows=None)
    # beyond the shared LM head rows nothing can be drafted, so nothing is compared
    check_vocabularies(WORDS, WORDS | {3: "x"}, num_shared_rows=3)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match="share no token"):
        check_vocabularies(WORDS, {}, num_shared_rows=4)


@pytest.mark.parametrize(("rows", "size"), [([4, 4], 4), ([8, 6], 4), ([3, 6], 3)])
def test_padding_rows_cannot_be_drafted(rows: list[int], size: int) -> None:
    assert draftable_size([WORDS, WORDS], rows) == size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([3], "1 of 40 ids differ."),
        ([3, 4, 5, 9], "4 of 40 ids differ (3-5, 9)."),
        (range(1, 40, 2), "20 of 40 ids differ (1, 3, 5, 7, 9 and more)."),
    ],
)
def test_the_ids_that_differ_are_named(changed, words):
    target = {i: f"t{i}" for i in range(40)}
    draft = target | {i: f"d{i}" for i in changed}
    with pytest.raises(VocabularyMismatchError) as raised:
        check_vocabularies(target, draft, num_shared_rows=None)
    assert words in raised.value.message
    assert (
        f"token id {min(changed)} is 't{min(changed)}' in the target and 'd{min(changed)}' in the draft"
        in raised.value.message
    )
