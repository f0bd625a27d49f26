from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specexport_runtime.executors.fake import FakeExecutor
from tools.gpu_check_lib import timing
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.forced import decode
from tools.gpu_check_lib.models import SIZES, make_tensors, next_token
from tools.gpu_check_lib.outputs import compare_texts
from tools.gpu_check_lib.rows import Row, judge, read_rows
from tools.gpu_check_lib.speed import LARGE, RATIO_LOOKAHEAD, cells, step_plans
from tools.gpu_check_lib.steps import compare_logits, compare_steps, time_step

VOCAB = 61


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows_of(context: Context) -> list[Row]:
    return read_rows(context.recorder.path)


# steps and comparisons


def test_steps_of_equal_engines_are_equal_and_of_others_not() -> None:
    one, same = FakeExecutor(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120)
    other = FakeExecutor(VOCAB, 4, 120, noise=0.1)
    found = compare_steps(one, same)
    assert [item.largest for item in found] == [0.0] * len(found)
    assert all(item.rows == item.same_best for item in found)
    noisy = compare_steps(FakeExecutor(VOCAB, 4, 120), other)
    assert all(0 < item.largest < 1 for item in noisy)
    assert any(item.same_best < item.rows for item in noisy)


def test_steps_of_the_script_go_on_from_the_kept_tokens() -> None:
    class Watched(FakeExecutor):
        seen: list[list[int]] = []  # noqa: RUF012

        def execute(self, want: Any = "logits") -> Any:
            assert self._buffers is not None
            self.seen.append(self._buffers.kv_lens[:, 0].tolist())
            return super().execute(want)

    compare_steps(Watched(VOCAB, 4, 120), FakeExecutor(VOCAB, 4, 120))
    assert Watched.seen == [[0, 0, 0, 0], [17, 5, 40, 1], [19, 6, 43, 6], [20, 9, 43, 7], [25, 10, 47, 9]]


def test_logits_that_are_no_numbers_miss_any_target() -> None:
    good = np.ones((2, 5), np.float32)
    bad = good.copy()
    bad[1, 3] = np.nan
    assert judge(compare_logits("x", good, bad).largest, at_most=1e9) == "missed"
    assert judge(compare_logits("x", good, good).largest, at_most=0) == "ok"


def test_gap_where_texts_part_is_the_references_own() -> None:
    reference = FakeExecutor(VOCAB, 1, 100)
    prompt = [3, 1, 4]
    ours = decode(reference, [prompt], 12).outputs[0]
    assert compare_texts(reference, prompt, ours, ours) == (12, 12, None)
    theirs = [*ours[:5], (ours[5] + 7) % VOCAB, *ours[6:]]
    found = compare_texts(reference, prompt, ours, theirs)
    logits = reference.logits_after([*prompt, *ours[:5]])
    assert found.equal == 5
    assert found.gap == pytest.approx(float(logits[ours[5]] - logits[theirs[5]]))
    assert found.gap > 0


def test_a_timed_step_is_the_same_step_each_time() -> None:
    from specexport_runtime.packing.batch import ModelRunner

    executor = FakeExecutor(VOCAB, 2, 100)
    found = time_step(ModelRunner(executor), 2, 5, repeats=4, seconds=10)
    assert len(executor.calls) == 1 + 5 + 4
    assert len(set(executor.calls)) == 1
    assert executor.calls[0].num_tokens == executor.calls[0].num_logit_rows == 10
    assert 0 < found.engine_ms < found.total_ms


def test_measurements_that_matter_come_first() -> None:
    order = list(cells(LARGE))
    assert len(order) == len(set(order)) == len(LARGE.batches) * len(LARGE.lookaheads) * len(LARGE.rates)
    assert order[0] == (1, 4, 0.8)
    assert {k for _, k, _ in order[:8]} == set(range(1, 9))
    assert {batch for batch, _, _ in order[8:11]} == {2, 4, 8}


def test_every_length_is_timed_alone_before_any_batch() -> None:
    plans = list(step_plans(LARGE))
    assert [(plan.past, plan.batches) for plan in plans[:3]] == [(256, (1,)), (8192, (1,)), (2048, (1,))]
    assert {(plan.past, plan.batches) for plan in plans[3:]} == {(256, (2, 4, 8)), (8192, (8,)), (2048, (8,))}
    assert all(RATIO_LOOKAHEAD in plan.lookaheads for plan in plans)


# bytes and rates


def test_bytes_of_a_step_are_those_of_its_entries() -> None:
    keys = np.zeros((8, 8, 4101, 128), np.float16)
    assert timing.kv_step_bytes(8, 8, 4101, 128, 2) == 2 * keys.nbytes
    assert round(timing.kv_step_bytes(8, 8, 4096, 128, 2) / 1e6) == 134  # as in docs/gpu.md
    assert round(timing.kv_step_bytes(8, 8, 16384, 128, 2) / 1e6) == 537


def test_rates_and_rotation() -> None:
    assert timing.gigabytes_per_second(4e9, 1000.0) == pytest.approx(4.0)
    assert timing.num_sets(10**9, 60 * 2**20) == 2
    assert timing.num_sets(2**20, 60 * 2**20) == 240


class FakeEvent:
    clock = Clock()

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize("can_record", [True, False])
def test_times_are_of_one_call(monkeypatch: pytest.MonkeyPatch, can_record: bool) -> None:
    import contextlib

    import torch

    ran = []

    def call() -> None:
        ran.append(1)
        FakeEvent.clock.now += 0.002

    calls = [call] * 4

    class Graph:
        def replay(self) -> None:
            for each in calls:
                each()

    def record(_: Graph) -> Any:
        if not can_record:
            raise RuntimeError("cannot be recorded")
        return contextlib.nullcontext()

    for name, value in {"synchronize": lambda: None, "Event": FakeEvent, "CUDAGraph": Graph, "graph": record}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    milliseconds, how = timing.time_rotating(calls, repeats=5, warm_up=1)
    assert milliseconds == pytest.approx(2.0)
    assert how == ("replayed from a graph" if can_record else "launched one by one (RuntimeError)")
    assert len(ran) == 4 * (1 + can_record + 1 + 5)


@pytest.mark.parametrize("ours_ms", [0.001, 0.004])
def test_the_kernels_table(monkeypatch: pytest.MonkeyPatch, context: Context, ours_ms: float) -> None:
    from types import SimpleNamespace

    import torch

    from specexport.kernels import launch
    from tools.gpu_check_lib import kernel_speed

    def attention(q: Any, k: Any, v: Any, kv_lens: Any, cu: Any, **options: Any) -> Any:
        return kernel_speed.expected(kernel_speed.case_of(64), q, k, v, options["scale"]).to(q.dtype)

    def measured(calls: Sequence[Any], **_: Any) -> tuple[float, str]:
        return ours_ms, "a graph"

    gpu = SimpleNamespace(L2_cache_size=2**10, major=9, minor=0, multi_processor_count=132)
    make_inputs = kernel_speed.make_inputs
    for module, name, value in (
        (kernel_speed, "PASTS", (64,)),
        (kernel_speed, "NUM_SEQS", 2),
        (kernel_speed, "make_inputs", lambda case, dtype, _: make_inputs(case, dtype, "cpu")),
        (kernel_speed, "copy_bandwidth", lambda *_: 1000.0),
        (kernel_speed, "time_rotating", measured),
        (launch, "ragged_attention", attention),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: gpu),
    ):
        monkeypatch.setattr(module, name, value)
    kernel_speed.measure_kernels(context)
    rows = rows_of(context)
    assert "failed" not in {row.verdict for row in rows}, rows
    main, copy = (row for row in rows if not row.is_detail)
    num_bytes = 2 * 8 * 69 * 2 * 128 * 2
    assert main.data["kv_bytes"] == num_bytes
    assert main.data["gb_per_s"] == pytest.approx(num_bytes / ours_ms / 1e6)
    assert copy.verdict == ("missed" if num_bytes / ours_ms / 1e6 < 800 else "ok")


# models


def test_the_large_model_has_a_billion_parameters() -> None:
    assert 1.0e9 <= SIZES["large"].parameters <= 1.3e9
    tensors = dict(make_tensors(SIZES["tiny"], seed=1, decisive=False))
    assert sum(tensor.size for tensor in tensors.values()) == SIZES["tiny"].parameters
    assert all(np.isfinite(tensor).all() and tensor.std() > 0.01 for tensor in tensors.values() if tensor.ndim == 2)


def test_the_large_models_profiles_take_every_step() -> None:
    from specexport_runtime.abi import StepShape
    from specexport_runtime.bundle.profiles import choose_profile
    from tools.gpu_check_lib.bundles import large_profiles

    profiles = large_profiles("target")
    for batch in LARGE.batches:
        for new in (1, *(k + 1 for k in LARGE.lookaheads)):
            choose_profile(profiles, StepShape(0, batch, batch * new, new, batch * new))
    for batch, new in ((1, 1), (1, 5), (8, 5), (32, 1)):
        chosen = profiles[choose_profile(profiles, StepShape(0, batch, batch * new, new, batch * new))]
        assert (chosen.num_seqs, chosen.max_new_tokens, chosen.is_fixed) == (batch, new, True)
    draft = large_profiles("draft")
    for batch in LARGE.batches:
        assert draft[choose_profile(draft, StepShape(0, batch, 2 * batch, 2, batch))].is_fixed


def test_the_large_models_bundle_is_folded_behind_its_longest_past() -> None:
    """The builder's own arithmetic of masks, for the sizes that the checks build with."""
    from specexport.backends import tensorrt as gpu_build
    from specexport.backends.profiles import engine_kv_capacity, most_new_tokens
    from tools.gpu_check_lib.bundles import MAX_NUM_TOKENS, PLANS, large_profiles

    for name in ("small", "large-speed"):
        plan = PLANS[name]
        assert plan.max_model_len >= max(LARGE.long_pasts) + LARGE.prompt + LARGE.tokens
        for role, fold in (("target", most_new_tokens("target", plan.lookahead)), ("draft", 2)):
            limits = {"max_num_seqs": plan.max_num_seqs, "max_num_tokens": MAX_NUM_TOKENS, "fold": fold}
            planned = large_profiles(role, **limits) if name == "large-speed" else gpu_build.plan_profiles(
                role, lookahead=plan.lookahead, **limits
            )  # fmt: skip
            assert {profile.fold for profile in planned} == {fold}
            assert max(profile.num_seqs for profile in planned) == plan.max_num_seqs
            widest = max(-(-profile.max_new_tokens // fold) * fold for profile in planned)
            masks = SIZES[plan.model].heads * plan.max_num_seqs * widest
            masks *= engine_kv_capacity(plan.max_model_len, plan.lookahead)
            assert masks <= gpu_build.MAX_MASK_BYTES
            assert masks * 32 // plan.max_num_seqs > gpu_build.MAX_MASK_BYTES or name == "small", (
                "more rows do not fold"
            )


def test_a_decisive_head_answers_with_the_next_token() -> None:
    vocab = SIZES["tiny"].vocab
    tensors = dict(make_tensors(SIZES["tiny"], seed=1, decisive=True))
    logits = tensors["model.embed_tokens.weight"].astype(np.float32) @ tensors["lm_head.weight"].astype(np.float32).T
    assert logits.argmax(axis=1).tolist() == [next_token(token, vocab) for token in range(vocab)]
    assert sorted(next_token(token, vocab) for token in range(vocab)) == list(range(vocab))
