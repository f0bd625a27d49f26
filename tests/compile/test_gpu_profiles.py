import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.backends.profiles import buckets, engine_kv_capacity, input_shapes, kv_bytes, plan_profiles
from specexport_runtime.abi import ALIGNED_STEP_INPUTS, LayerGeometry, StepShape
from specexport_runtime.bundle.profiles import Profile, choose_profile
from specexport_runtime.errors import IncompatibleError
from tests.support.cases.chance import examples

LAYERS = (LayerGeometry(2, 64, 64), LayerGeometry(2, 64, 32))
NAMES = [spec.name for spec in ALIGNED_STEP_INPUTS]


def plan(role: str = "target", seqs: int = 8, tokens: int = 512, lookahead: int = 4) -> tuple[Profile, ...]:
    return plan_profiles(role, lookahead=lookahead, max_num_seqs=seqs, max_num_tokens=tokens)


def test_buckets_are_powers_of_two_and_the_limit_itself() -> None:
    assert [buckets(8), buckets(6), buckets(1)] == [[1, 2, 4, 8], [1, 2, 4, 6], [1]]
    assert buckets(300, 64) == [64, 128, 256, 300]


def test_verify_has_exactly_one_token_more_than_the_lookahead() -> None:
    verify = [profile for profile in plan(lookahead=6) if profile.kind == "verify"]
    assert [(p.num_seqs, p.max_new_tokens, p.num_tokens) for p in verify] == [
        (rows, 7, 7 * rows) for rows in (1, 2, 4, 8)
    ]
    assert {profile.kind for profile in plan("draft")} == {"decode", "catch-up", "prefill"}
    assert {p.max_new_tokens for p in plan("draft") if p.kind == "catch-up"} == {2}
    shapes = input_shapes(verify[1], NAMES, LAYERS, 100)
    assert shapes["input_ids"] == ((14,), (14,), (14,))
    assert shapes["tile_index"] == ((2, 7),) * 3
    assert shapes["cu_new_tokens"] == ((3,),) * 3


def test_a_prefill_profile_takes_every_size_up_to_its_own() -> None:
    profile = next(p for p in plan() if p.kind == "prefill" and p.num_tokens == 128)
    shapes = input_shapes(profile, NAMES, LAYERS, 100)
    assert shapes["input_ids"] == ((1,), (128,), (128,))
    assert shapes["kv_lens"] == ((1, 1), (1, 1), (8, 1))
    assert shapes["tile_index"] == ((1, 1), (1, 128), (8, 128)), "tuned for one prompt"
    assert shapes["v_cache.1"] == ((1, 2, 100, 32), (1, 2, 100, 32), (8, 2, 100, 32))


def test_a_row_of_padding_has_room_behind_every_other_row() -> None:
    # max_model_len tokens, K+1 for a verify step, K+1 for a row that is there as padding only
    assert engine_kv_capacity(102, 4) == 112
    assert engine_kv_capacity(103, 4) == 128, "rows begin at multiples of 256 bytes, whatever the head size"
    assert kv_bytes(LAYERS, 110, 3, 2) == (2 * 128 + 2 * 96) * 110 * 3 * 2


@examples(200)
@given(seqs=st.integers(1, 8), lookahead=st.integers(1, 8), data=st.data())
def test_every_step_within_the_limits_has_a_profile(seqs: int, lookahead: int, data: st.DataObject) -> None:
    profiles = plan(seqs=seqs, lookahead=lookahead)
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=seqs).filter(any))
    logits = sum(min(count, data.draw(st.integers(1, lookahead + 1))) for count in counts)
    shape = StepShape(0, len(counts), sum(counts), max(counts), logits)
    chosen = profiles[choose_profile(profiles, shape)]
    assert chosen.num_seqs >= len(counts)
    assert chosen.max_new_tokens >= max(counts)
    assert chosen.num_logit_rows >= logits
    for other in profiles:
        if other.is_fixed and other.fits(shape):
            assert chosen.is_fixed, "a step that a fixed profile fits never runs in a ranged one"
            assert chosen.num_tokens <= other.num_tokens


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (StepShape(0, 9, 9, 1, 9), "9 sequences, the engine was built for 8 (--max-num-seqs)"),
        (StepShape(0, 1, 600, 600, 1), "600 tokens, the engine was built for 512 (--max-num-tokens)"),
        (StepShape(0, 1, 300, 300, 300), "no profile of the engine fits"),
    ],
)
def test_a_step_beyond_every_profile_says_which_limit(shape: StepShape, words: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        choose_profile(plan(), shape)
    assert words in caught.value.message
