"""Targets whose layers keep a state draft with some of their own: what a draft reads, and what it leaves behind."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.inspect import describe
from specexport.trace.check import compute_reference_logits
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.abi import num_pending
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.cases import chance
from tests.support.cases.entries import make_entry
from tests.support.fakes.rounds import opened
from tests.support.models.tiny_models import HYBRIDS, VOCAB, make_model, save_checkpoint
from tests.support.models.tiny_traces import trace_of
from tests.support.references.engine_harness import make_checkpoint

LOOKAHEAD = 5
TOLERANCE = 1e-4
"""Of the largest logit."""
OFF: dict[str, tuple[int, ...]] = {
    "qwen3_5": (2, 3, 5),  # a recurrence, and the MLPs of two layers; attention stays
    "falcon_h1": (0, 3),  # attention and recurrences are one block
    "nemotron_h": (2, 3),  # the recurrence, which is left, is a layer without an MLP
}
"""Gates that a draft switches off."""
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        "head_dim": 64,  # a quarter of it is rotated: the cosine of few angles has other bits in a step of one token
    }
}
"""Three layers, of which the last has attention, where an architecture of the tests has more, or fewer."""
PARTS = (("linear_attn", "self_attn", "mamba", "conv", "mixer"), ("mlp", "feed_forward"))


def make_hybrid(name: str) -> Any:
    classes, config = HYBRIDS[name]
    return make_model(classes, config | CONFIGS.get(name, {}))


def open_gated(model: Any, folder: Path, rows: int) -> OrtExecutor:
    from specexport.backends.ort import write_onnx
    from specexport.lowering.common import step_inputs
    from specexport.lowering.layer_gate import gate_layers
    from specexport.passes.pipeline import default_passes, run_passes
    from specexport.passes.residual_blocks import find_residual_blocks
    from tests.support.references.lowered import lower_ort_cpu

    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes("float32", own_operators=True))
    blocks = find_residual_blocks(traced.ir_model)
    assert blocks.obstacle is None
    lower_ort_cpu(traced.ir_model)
    assert gate_layers(traced.ir_model, blocks) == len(blocks.gate_kinds)
    path = write_onnx(traced.ir_model, folder)
    entry = make_entry(
        path=path, vocab_size=VOCAB, layers=traced.layers, states=traced.states, inputs=step_inputs(traced.ir_model),
        max_positions=256, kinds=blocks.gate_kinds,
    )  # fmt: skip
    return OrtExecutor(folder / path, entry, num_rows=rows, kv_capacity=64, num_threads=1, lookahead=LOOKAHEAD)


@contextmanager
def left_out(model: Any, off: Sequence[int], kinds: Sequence[str]) -> Iterator[None]:
    """The transformers model with the parts behind the gates ``off`` giving zeros."""
    import torch

    def silence(_module: Any, _args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    base = getattr(model, "model", None) or model.backbone
    if "" in kinds:  # each block is a layer of transformers
        present = [gate for gate, kind in enumerate(kinds) if kind]
        parts = [base.layers[present.index(gate)].mixer for gate in off]
    else:
        parts = [
            part for gate in off for name in PARTS[gate % 2] if (part := getattr(base.layers[gate // 2], name, None))
        ]
    assert len(parts) >= len(off)
    hooks = [part.register_forward_hook(silence) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def eager_draft(model: Any, known: list[int], fed: list[int], off: Sequence[int], kinds: Sequence[str]) -> np.ndarray:
    """Logits of a drafting pass: all layers read ``known``, and those that are left read ``fed``, one by one."""
    import torch

    found = []
    with torch.no_grad():
        past = model(torch.tensor([known]), use_cache=True)
        name = "past_key_values" if getattr(past, "past_key_values", None) is not None else "cache_params"
        with left_out(model, off, kinds):
            for token in fed:
                past = model(torch.tensor([[token]]), use_cache=True, **{name: past[name]})
                found.append(past.logits[0, -1].numpy())
    return np.stack(found)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", OFF)
def test_drafting_passes_are_those_of_eager_transformers_and_leave_no_trace(name: str, tmp_path: Path) -> None:
    """Rounds as decoding makes them: drafting steps, which are rolled back, then the whole model over other drafts."""
    model = make_hybrid(name)
    random = np.random.default_rng(chance.seed(11))
    texts = [random.integers(3, VOCAB, length).tolist() for length in (34, 29)]
    expected = compute_reference_logits(make_checkpoint(model), texts)
    limit = TOLERANCE * max(float(np.abs(logits).max()) for logits in expected)
    executor = open_gated(model, tmp_path, 3)
    runner = ModelRunner(executor)
    mask = np.ones(executor.num_gates, np.bool_)
    mask[list(OFF[name])] = False
    for row, chunk in enumerate((4, 7)):
        runner.prefill(row, texts[row][:chunk])
    most = 0
    for good in [(LOOKAHEAD, 2), (0, 3), (2, LOOKAHEAD), (LOOKAHEAD, 0), (1, 1)]:
        starts = [runner.kv.kv_len(row) for row in range(2)]
        # Of one row after another, as with layers of its own; the other one sits idle.
        for row, start in enumerate(starts):
            fed = [texts[row][start], *random.integers(3, VOCAB, LOOKAHEAD - 1).tolist()]
            wanted = eager_draft(model, texts[row][:start], fed, OFF[name], executor.gate_kinds)
            executor.set_layers(mask)
            for at, token in enumerate(fed):
                work = [RowWork([token], 1, settles=False), IDLE] if row == 0 else [RowWork([token], 1, settles=False)]
                logits = runner.step(row, work)
                assert np.abs(logits[0] - wanted[at]).max() < limit
                runner.kv.commit(row, start + at + 1)
                most = max(most, start + at + 1 - runner.kv.state_len(row))
            executor.set_layers(None)
            runner.kv.commit(row, start)
            runner.kv.check()
        work = []
        for row, start in enumerate(starts):
            wrong = random.integers(3, VOCAB, LOOKAHEAD - good[row]).tolist()
            work.append(RowWork([*texts[row][start : start + 1 + good[row]], *wrong], 1 + LOOKAHEAD, drafts=LOOKAHEAD))
        logits = runner.step(0, work)
        for row, start in enumerate(starts):
            count, begin = 1 + good[row], runner.logit_starts[row]
            assert np.abs(logits[begin : begin + count] - expected[row][start : start + count]).max() < limit
            runner.kv.commit(row, start + count)
        runner.kv.check()
    assert most == 2 * LOOKAHEAD < runner.kv.num_pending == num_pending(LOOKAHEAD, drafts_itself=True)


def test_parts_that_are_off_leave_states_and_what_is_pending_alone(tmp_path: Path) -> None:
    executor = open_gated(make_hybrid("lfm2"), tmp_path, 2)
    runner = ModelRunner(executor)
    runner.prefill(0, [5, 6, 7])
    executor.set_layers(np.array([False, True, True, True]))
    before = {name: memory.copy() for name, memory in executor._states.items()}
    runner.step(0, [RowWork([8, 9], 2, settles=False)])
    for name, memory in executor._states.items():
        np.testing.assert_array_equal(memory, before[name])
    executor.set_layers(None)
    runner.step(0, [RowWork([8, 9], 2, settles=False)])
    np.testing.assert_array_equal(executor._states["state.0"], before["state.0"])
    assert (executor._states["pending.0"][0] != before["pending.0"][0]).any()
    with pytest.raises(Exception, match="would leave"):  # more than there are places for
        runner.step(0, [RowWork([5] * (2 * LOOKAHEAD + 2), 1, settles=False)])


SILENT = LayerRules(threshold=None, period=2, keep_last=1)
"""Leaves out the second layer, which does nothing."""
LOUD = LayerRules(threshold=None, period=3, keep_last=0)
"""Leaves out the last one."""
SIMILAR = LayerRules(threshold=0.999, period=None, keep_last=0)
"""Leaves out what changes nothing: found by its similarity."""
PROMPTS = ["abcabcabcabcabc", "x", "for i in range(10):\n    print(i)\nfor i in range(10):\n"]


@pytest.fixture(scope="module", params=CONFIGS)  # the name of a model that the long lane has
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid in int8 whose second layer, a recurrence and an MLP, adds zeros."""
    import torch

    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    model = make_hybrid(request.param)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers.1." in name and ("out_proj" in name or "down_proj" in name):
                weight.zero_()
        model.get_output_embeddings().weight[259:] = 0  # the tokenizer has no such ids, so that they are never drafted
    folder = tmp_path_factory.mktemp(request.param)
    target = save_checkpoint(model, folder / "target")
    # A random model loses more by int8 than a build allows.
    recipe = BuildRecipe(
        target=str(target), output=str(folder / "bundle"), quantize="int8", max_model_len=128, self_draft=True,
        check=False,
    )  # fmt: skip
    build_bundle(recipe)
    return folder / "bundle"


@pytest.fixture
def engine(bundle: Path) -> Iterator[SpecEngine]:
    with opened(bundle, 2) as engine:
        yield engine


def test_texts_are_those_of_plain_decoding_and_what_does_nothing_is_not_missed(engine: SpecEngine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    plain = engine.generate(PROMPTS, params, drafter="none")
    for rules, lookahead in [*((SILENT, k) for k in (1, 3, 8)), *((LOUD, k) for k in (1, 3, 8)), (SIMILAR, 4)]:
        for prompts in (PROMPTS[:1], PROMPTS):
            ways: dict[str, Any] = {"drafter": "self", "num_speculative_tokens": lookahead, "layer_rules": rules}
            found = engine.generate(prompts, params, **ways)
            for result, wanted in zip(found, plain, strict=False):
                assert (result.token_ids, result.logprobs) == (wanted.token_ids, wanted.logprobs)
                stats = result.stats
                assert stats.drafted > 15
                assert (stats.accepted == stats.drafted) == (rules is not LOUD)
                choice = stats.layer_choice
                assert choice is not None
                if rules is not LOUD:
                    assert (choice.removed_attention, choice.removed_recurrences) == ((), (1,))


def test_forced_tokens_wait_beside_a_state_too(engine: SpecEngine) -> None:
    """A draft begins with what a grammar forces: its first step reads several tokens."""
    pytest.importorskip("llguidance")
    form = StructuredOutputs(regex="[ab]{3}(forced text here)[a-z]{20}")
    params = SamplingParams(max_tokens=60, structured_outputs=form)
    plain = engine.generate(PROMPTS, params, drafter="none")
    for lookahead in (1, 8):
        ways: dict[str, Any] = {"drafter": "self", "num_speculative_tokens": lookahead, "layer_rules": SILENT}
        found = engine.generate(PROMPTS, params, **ways)
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert all(result.stats.accepted == result.stats.drafted > 20 for result in found)


def test_a_row_is_gone_on_from_behind_what_a_draft_left(engine: SpecEngine) -> None:
    """The next turn of a text that was drafted, whose last tokens were pending; and requests that are given up."""
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    ways: dict[str, Any] = {"drafter": "self", "num_speculative_tokens": 6, "layer_rules": SILENT}
    start = engine.encode("a text that is long enough to be kept")
    (first,) = engine.generate([start], params, **ways)
    given_up = engine.submit(start, params, **ways)
    next(iter(given_up))
    given_up.cancel()
    assert given_up.result(60).finish_reason in ("cancelled", "length")
    history = [*start, *first.token_ids, *engine.encode(" and more of it")]
    (second,) = engine.generate([history], params, **ways)
    assert second.stats.cached_tokens == len(start) + len(first.token_ids) - 1
    (wanted,) = engine.generate([history], params, drafter="none", remember=False)
    assert second.token_ids == wanted.token_ids


def test_inspect_names_the_blocks(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    kinds = manifest.models["target"].engine.gates.kinds
    assert kinds == ("recurrence", "MLP", "recurrence", "MLP", "attention", "MLP")
    assert any(
        line.endswith("6 blocks (2 recurrence, 3 MLP, 1 attention) can be skipped") for line in describe(manifest)
    )
