"""The tensor part finds nothing in a right engine, and each kind of wrong one."""

import math

import numpy as np
import pytest

from specexport.verify.logits import check_tensors, make_sequences
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.verify_fakes import LOOKAHEAD, MAX_MODEL_LEN, PROMPTS, VOCAB, make_executor


def references_for(sequences):
    reference = make_executor()
    return [np.stack([reference.logits_after(ids[: i + 1]) for i in range(len(ids))]) for ids in sequences]


def check(executor, lookahead=LOOKAHEAD, **sizes):
    sequences = make_sequences(PROMPTS, VOCAB, lookahead=lookahead, max_model_len=MAX_MODEL_LEN, **sizes)
    return check_tensors("target", executor, sequences, references_for(sequences), lookahead=lookahead)


def test_a_right_engine_passes_every_kind_of_step():
    executor = make_executor()
    result = check(executor)
    assert result.passed
    assert result.max_abs == 0.0
    assert [case.name for case in result.cases] == ["prefill", *(f"width {w}" for w in range(1, 6)), "ragged"]
    assert all(case.argmax_agreement == 1.0 and case.rows for case in result.cases)
    ragged = [shape for shape in executor.calls if shape.num_seqs == 4]
    assert len({(shape.num_tokens, shape.max_new_tokens) for shape in ragged}) > 5
    with pytest.raises(IncompatibleError, match="int3"):
        check_tensors("target", make_executor(), [], [], lookahead=2, dtype="int3")


class Offset(FakeExecutor):
    """Logits that are off by ``offset`` in steps of ``width`` tokens; 0 is every width."""

    def __init__(self, *sizes, offset, width=0, rows=1):
        super().__init__(*sizes)
        self.offset, self.width, self.rows = offset, width, rows

    def execute(self, want="logits"):
        shape = self._shape
        logits = super().execute().copy()
        if self.width in (0, shape.max_new_tokens) and shape.num_seqs >= self.rows:
            logits[-1, 3] += self.offset
        return logits


@pytest.mark.parametrize(
    ("options", "failed"),
    [
        ({"offset": 0.5, "width": 3}, {"width 3", "ragged"}),
        ({"offset": 0.5, "rows": 2}, {"ragged"}),
        ({"offset": math.nan, "width": 5}, {"width 5", "ragged"}),
        ({"offset": math.inf}, {"prefill", "width 1", "width 2", "width 3", "width 4", "width 5", "ragged"}),
    ],
)
def test_wrong_logits_fail_where_they_are(options, failed):
    result = check(make_executor(Offset, **options))
    assert not result.passed
    assert {case.name for case in result.cases if not case.passed} == failed
    within = check(make_executor(Offset, offset=1e-5))
    assert within.passed
    assert 0 < within.max_relative < within.max_abs < 2e-5


class Stale(FakeExecutor):
    """Sees one cache entry beyond ``kv_lens``: a rollback that is not one."""

    def _run_row(self, shape, buffers, offset, handed):
        kv_len = int(buffers.kv_lens[offset, 0])
        cache = self._cache[shape.first_row + offset]
        stale = int(cache[kv_len])
        found = super()._run_row(shape, buffers, offset, handed)
        return {row: logits + (stale >= 0) * np.float32(0.1) for row, logits in found.items()}


def test_entries_that_were_rolled_back_must_not_be_seen():
    result = check(make_executor(Stale))
    failed = {case.name for case in result.cases if not case.passed}
    assert "ragged" in failed
    assert "prefill" not in failed


def test_short_models_and_single_rows_are_checked_too():
    sequences = make_sequences(PROMPTS, VOCAB, lookahead=8, max_model_len=12, num_rows=1)
    assert [len(ids) for ids in sequences] == [12]
    result = check_tensors("draft", make_executor(), sequences, references_for(sequences), lookahead=8)
    assert result.passed
    assert [case.name for case in result.cases][-1] == "width 9"


def test_sequences_stay_in_the_vocabulary_and_in_memory():
    for vocab_size in (5, 262_144):
        sequences = make_sequences(PROMPTS, vocab_size, lookahead=8, max_model_len=4096)
        assert all(0 <= token < vocab_size for ids in sequences for token in ids)
        assert len({len(ids) for ids in sequences}) == 4
        assert 4 * vocab_size * sum(map(len, sequences)) <= 2**28
