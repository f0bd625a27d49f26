"""Compiler and runtime agree on sizes: every step of the loop lies inside a profile of the engine."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specexport.backends.profiles import engine_kv_capacity, input_shapes, plan_profiles
from specexport_runtime.abi import TOKEN_FEATURES, StepShape, kv_slack
from specexport_runtime.bundle.profiles import choose_profile, head_steps
from specexport_runtime.executors.trt_load import size_engine
from specexport_runtime.executors.trt_memory import lay_out_inputs
from specexport_runtime.executors.trt_pack import place_step, plan_step
from tests.support.cases.chance import examples
from tests.support.fakes.trt_fakes import NATIVE, PLUGIN, make_entry


@st.composite
def engines(draw):
    lookahead, rows = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    tokens = draw(st.integers(max(64, rows * (lookahead + 1)), 300))
    role, head, more = draw(st.sampled_from(["target", "draft", "head"])), None, {}
    names = draw(st.sampled_from([NATIVE, PLUGIN]))
    if role == "head":
        kind = draw(st.sampled_from([{}, {"has_mask": True}, {"num_draft_heads": 3}]))
        head, names = head_steps(lookahead, **kind), (*names, TOKEN_FEATURES.name)
        more = {"feature_size": 6, "kind": "eagle3"}
    profiles = plan_profiles(role, lookahead=lookahead, max_num_seqs=rows, max_num_tokens=tokens, head=head)
    capacity = engine_kv_capacity(100, lookahead, None if head is None else head.width)
    return lookahead, make_entry(lookahead, rows, 100, profiles=profiles, kv_capacity=capacity, inputs=names, **more)


@examples(150)
@given(data=st.data())
def test_steps_lie_inside_their_profiles(data):
    lookahead, entry = data.draw(engines())
    num_rows = data.draw(st.integers(1, entry.engine.limits.max_num_seqs))
    sizes = size_engine(entry, "engine", num_rows)
    assert sizes.kv_capacity - sizes.scratch >= 100 + kv_slack(lookahead)
    first = data.draw(st.integers(0, num_rows - 1))
    count = data.draw(st.integers(1, num_rows - first))
    most = max(profile.num_tokens for _, profile in sizes.profiles)
    wide = data.draw(st.booleans())
    each = st.integers(0, most // count if wide else lookahead + 1)
    counts = data.draw(st.lists(each, min_size=count, max_size=count).filter(any))
    if sum(counts) > most:
        return  # the scheduler never sends more than the largest prefill profile takes
    logits = [min(n, lookahead + 1) for n in counts]
    shape = StepShape(first, count, sum(counts), max(counts), sum(logits))
    number, profile = sizes.profiles[choose_profile([profile for _, profile in sizes.profiles], shape)]
    window = place_step(shape, profile, sizes.arena_rows, packed=entry.engine.lowering == "plugin")
    assert 0 <= window.shape.first_row <= first
    assert window.shape.first_row + window.shape.num_seqs <= sizes.arena_rows
    feature_size = entry.engine.feature_size
    limits = input_shapes(
        entry.engine.limits.profiles[number], entry.engine.inputs, entry.attention.layers, sizes.kv_capacity,
        feature_size,
    )  # fmt: skip
    tensors, num_bytes = lay_out_inputs(entry.engine.inputs, window.shape, feature_size)
    for tensor in tensors:
        low, _, high = limits[tensor.name]
        assert all(a <= b <= c for a, b, c in zip(low, tensor.shape, high, strict=True)), (tensor, profile)
    assert num_bytes <= lay_out_inputs(entry.engine.inputs, profile.largest, feature_size)[1]
    plan = plan_step(window, counts, np.arange(sum(logits)), entry.engine.inputs)
    assert {name: array.shape for name, array in plan.constants.items()}.items() <= {
        t.name: t.shape for t in tensors
    }.items()


@given(engines())
def test_a_full_batch_verifies_in_the_profile_made_for_it(drawn):
    _, entry = drawn
    several = [profile for profile in entry.engine.limits.profiles if profile.kind in ("verify", "catch-up", "draft")]
    wanted = {(profile.max_new_tokens, profile.num_logit_rows // profile.num_seqs) for profile in several}
    decodes = any(profile.kind == "decode" for profile in entry.engine.limits.profiles)
    for width, logits in wanted | ({(1, 1)} if decodes else set()):
        rows = entry.engine.limits.max_num_seqs
        shape = StepShape(0, rows, rows * width, width, rows * logits)
        profile = entry.engine.limits.profiles[choose_profile(entry.engine.limits.profiles, shape)]
        assert profile.is_fixed
        assert (profile.num_seqs, profile.max_new_tokens) == (rows, width)
