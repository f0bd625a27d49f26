"""Steps in the sizes an engine was built for, written out by hand and checked against the contract."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.abi import STEP_INPUTS, StepShape, with_feature_size
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors import trt_pack
from specexport_runtime.executors.base import StepBuffers
from specexport_runtime.executors.trt_memory import lay_out_inputs
from specexport_runtime.packing.batch import fill_index_inputs

NAMES, FEATURE_SIZE = tuple(trt_pack.SPECS), 2


def make_step(first_row, tokens, kv_lens, logits):
    counts = [len(row) for row in tokens]
    shape = StepShape(first_row, len(tokens), sum(counts), max(counts), sum(logits))
    features = np.arange(shape.num_tokens * FEATURE_SIZE, dtype=np.float32).reshape(-1, FEATURE_SIZE) + 1
    buffers = StepBuffers(
        *(np.full(shape.shape_of(spec), -7, spec.dtype) for spec in STEP_INPUTS), token_features=features
    )
    fill_index_inputs(buffers, counts, logits)
    buffers.input_ids[:] = [token for row in tokens for token in row]
    buffers.positions[:] = [kv + j for row, kv in zip(tokens, kv_lens, strict=True) for j in range(len(row))]
    buffers.kv_lens[:, 0] = kv_lens
    return shape, buffers


def rubbish(shape, names):
    sizes = {name: shape.shape_of(with_feature_size(trt_pack.SPECS[name], FEATURE_SIZE)) for name in names}
    return {name: np.full(size, -9, trt_pack.SPECS[name].dtype) for name, size in sizes.items()}


def pack(
    profile, num_rows, tokens, kv_lens, logits, *, first_row=0, packed=False, last_position=10**6, names=NAMES,
    ends=None,
):  # fmt: skip
    shape, buffers = make_step(first_row, tokens, kv_lens, logits)
    window = trt_pack.place_step(shape, profile, num_rows, packed=packed)
    plan = trt_pack.plan_step(window, [len(row) for row in tokens], buffers.logit_rows, names)
    arrays = rubbish(window.shape, names)
    trt_pack.start_plan(plan, arrays)
    held = np.arange(40, 40 + window.shape.num_seqs, dtype=np.int32)[:, None] if ends is None else ends
    trt_pack.fill_step(plan, buffers, arrays, held, last_position)
    return window, arrays


def test_a_dense_window_pads_every_row_and_writes_behind_those_that_are_not_in_the_step():
    profile = Profile("verify", 4, 3, 12, 12)
    window, got = pack(profile, 5, [[7, 8, 9], [4]], [20, 30], [3, 1], first_row=3)
    assert window == trt_pack.Window("dense", StepShape(1, 4, 12, 3, 12), 2)
    assert got["input_ids"].tolist() == [0] * 6 + [7, 8, 9, 4, 0, 0]
    assert got["positions"].tolist() == [40, 41, 42, 41, 42, 43, 20, 21, 22, 30, 31, 32]
    assert got["kv_lens"][:, 0].tolist() == [40, 41, 20, 30]
    assert got["row_totals"][:, 0].tolist() == [43, 44, 23, 33]
    assert got["cu_new_tokens"].tolist() == [0, 3, 6, 9, 12]
    assert got["tile_index"].tolist() == np.arange(12).reshape(4, 3).tolist()
    assert got["untile_index"].tolist() == list(range(12))
    assert got["logit_rows"].tolist() == [6, 7, 8, 9] + [0] * 8
    assert got["token_features"].tolist() == [[0, 0]] * 6 + [[1, 2], [3, 4], [5, 6], [7, 8], [0, 0], [0, 0]]


def test_a_row_without_tokens_inside_a_dense_step_is_hidden_too():
    _, got = pack(Profile("verify", 4, 2, 8, 8), 4, [[5], [], [6, 7]], [10, 11, 12], [1, 0, 2])
    assert got["kv_lens"][:, 0].tolist() == [10, 41, 12, 43]
    assert got["input_ids"].tolist() == [5, 0, 0, 0, 6, 7, 0, 0]
    assert got["logit_rows"][:3].tolist() == [0, 4, 5]


@pytest.mark.parametrize(
    ("profile", "packed"),
    [
        (Profile("verify", 4, 4, 16, 16), False),
        (Profile("verify", 4, 4, 16, 16), True),
        (Profile("prefill", 4, 9, 9, 9), False),
    ],
)
def test_where_rows_end_is_kept_for_those_of_the_step(profile, packed):
    ends = np.array([[5], [6], [7], [8]], np.int32)[: 4 if profile.is_fixed else 3]
    pack(profile, 4, [[1, 2, 3], [], [4]], [20, 25, 2], [1, 0, 1], packed=packed, ends=ends)
    assert ends[:, 0].tolist() == [23, 6, 3, 8][: len(ends)]


def test_dummies_stay_within_the_positions_the_model_knows():
    _, got = pack(Profile("verify", 2, 3, 6, 6), 2, [[5]], [30], [1], last_position=31)
    assert got["positions"].tolist() == [30, 31, 31, 31, 31, 31]


def test_a_packed_window_leaves_what_is_left_to_no_row():
    profile = Profile("verify", 4, 3, 12, 12)
    window, got = pack(profile, 5, [[7, 8, 9], [4]], [20, 30], [2, 1], first_row=3, packed=True)
    assert window == trt_pack.Window("packed", StepShape(1, 4, 12, 3, 12), 2)
    assert got["input_ids"].tolist() == [7, 8, 9, 4] + [0] * 8
    assert got["positions"].tolist() == [20, 21, 22, 30] + [0] * 8
    assert got["cu_new_tokens"].tolist() == [0, 0, 0, 3, 4]
    assert got["kv_lens"][:, 0].tolist() == [0, 0, 20, 30]
    assert got["row_totals"][:, 0].tolist() == [1, 1, 23, 31]
    assert got["logit_rows"][:3].tolist() == [1, 2, 3]


def test_a_ranged_step_is_taken_as_it_is():
    profile = Profile("prefill", 4, 16, 16, 16)
    window, got = pack(profile, 4, [[7, 8, 9], [], [4]], [20, 25, 0], [1, 0, 1], first_row=1)
    assert window == trt_pack.Window("ranged", StepShape(1, 3, 4, 3, 2), 0)
    assert got["input_ids"].tolist() == [7, 8, 9, 4]
    assert got["positions"].tolist() == [20, 21, 22, 0]
    assert got["cu_new_tokens"].tolist() == [0, 3, 3, 4]
    assert got["kv_lens"][:, 0].tolist() == [20, 25, 0]
    assert got["row_totals"][:, 0].tolist() == [23, 25, 1]
    assert got["tile_index"].tolist() == [[0, 1, 2], [3, 3, 3], [3, 3, 3]]
    assert got["untile_index"].tolist() == [0, 1, 2, 8]
    assert got["logit_rows"].tolist() == [2, 3]


def test_an_idle_row_that_is_empty_still_has_an_entry_to_attend_to():
    _, got = pack(Profile("prefill", 2, 4, 4, 4), 2, [[5], []], [3, 0], [1, 0])
    assert got["row_totals"][:, 0].tolist() == [4, 1]


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_index_inputs_agree_with_those_of_the_contract_and_tiles_are_each_others_inverse(counts):
    wanted = [min(count, 1) for count in counts]
    shape, buffers = make_step(0, [[1] * count for count in counts], [0] * len(counts), wanted)
    got = trt_pack.index_inputs(np.array(counts), shape)
    for name in ("cu_new_tokens", "row_starts", "row_ends", "pad_index", "unpad_index"):
        np.testing.assert_array_equal(got[name], getattr(buffers, name))
    tile = got["tile_index"]
    assert tile.ravel()[got["untile_index"]].tolist() == list(range(shape.num_tokens))
    for row, count in enumerate(counts):
        own = range(got["cu_new_tokens"][row], got["cu_new_tokens"][row + 1])
        assert tile[row, shape.max_new_tokens - count :].tolist() == list(own)


def test_windows_move_down_at_the_end_of_the_arena_only():
    profile = Profile("decode", 4, 1, 4, 4)
    starts = [trt_pack.place_step(StepShape(row, 1, 1, 1, 1), profile, 6, packed=False) for row in range(6)]
    assert [(window.shape.first_row, window.offset) for window in starts] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3),
    ]  # fmt: skip


def test_an_engine_gets_the_inputs_it_takes_and_no_others():
    names = ("input_ids", "logit_rows", "cu_new_tokens")
    _, got = pack(Profile("decode", 2, 1, 2, 2), 2, [[5]], [3], [1], names=names)
    assert set(got) == set(names)
    tensors, num_bytes = lay_out_inputs(names, StepShape(0, 2, 40, 20, 2))
    assert [(t.name, t.shape, t.offset) for t in tensors] == [
        ("input_ids", (40,), 0),
        ("logit_rows", (2,), 512),
        ("cu_new_tokens", (3,), 768),
    ]
    assert num_bytes == 1024


@pytest.mark.parametrize("packed", [True, False])
def test_what_an_earlier_plan_left_is_gone(packed):
    """A longer step came first: none of its tokens may be seen as a shorter one's dummies."""
    profile = Profile("verify", 2, 3, 6, 6)
    shape, buffers = make_step(0, [[7, 8, 9], [4, 5, 6]], [1, 2], [3, 3])
    window = trt_pack.place_step(shape, profile, 2, packed=packed)
    arrays = rubbish(window.shape, NAMES)
    for tokens in ([[7, 8, 9], [4, 5, 6]], [[3]]):
        shape, buffers = make_step(0, tokens, [1] * len(tokens), [1] * len(tokens))
        window = trt_pack.place_step(shape, profile, 2, packed=packed)
        plan = trt_pack.plan_step(window, [len(row) for row in tokens], buffers.logit_rows, NAMES)
        trt_pack.start_plan(plan, arrays)
        trt_pack.fill_step(plan, buffers, arrays, np.zeros((2, 1), np.int32), 10**6)
    assert arrays["input_ids"].tolist() == [3, 0, 0, 0, 0, 0]
    assert arrays["token_features"].tolist() == [[1, 2]] + [[0, 0]] * 5
