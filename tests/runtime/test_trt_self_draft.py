"""Self-drafting over TensorRT engines: draft steps have profiles of their own, over the same weights and caches."""

from typing import Any

import numpy as np
import pytest

from specexport.backends.ort import write_onnx
from specexport.backends.profiles import engine_kv_capacity, plan_profiles
from specexport.lowering import trt_native
from specexport.lowering.common import step_inputs
from specexport.lowering.layer_gate import gate_layers
from specexport.lowering.ort_cpu import lower_ort_cpu
from specexport.lowering.tensorrt import lower_tensorrt
from specexport.passes.residual_blocks import find_residual_blocks
from specexport_runtime.abi import EXTENT_INPUTS
from specexport_runtime.costs.curves import CostCurves, StepCost
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.engine_parts import weigh_drafters
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.runtime.test_trt_bundle import make_tokenizer
from tests.runtime.test_trt_lowered import GraphEngine
from tests.support.engine_of import engine_of
from tests.support.half_models import trace
from tests.support.loop import MAX_MODEL_LEN, VOCAB, make_sequence, run
from tests.support.trt_fakes import NATIVE, FakeGpu, make_entry, make_profiles, open_fake

ROWS, LOOKAHEAD = 3, 4
MASK = (True, True, False, False, False, False, True, True)
PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2]]
INPUTS = (*NATIVE, *(spec.name for spec in EXTENT_INPUTS))


def open_gated(folder: Any, **options: Any) -> Any:
    """An executor over a fake engine that was built to leave out layers 1 and 2 of 4, and that engine."""
    plain = make_profiles(LOOKAHEAD, ROWS)
    drafts = tuple(profile._replace(kind="self") for profile in plain if profile.kind == "decode")
    entry = make_entry(
        LOOKAHEAD,
        ROWS,
        inputs=INPUTS,
        profiles=(*drafts, *plain),
        kinds=("attention", "MLP") * 4,
        skipped_layers=(1, 2),
    )
    executor, _, engine = open_fake(folder, entry, FakeExecutor(VOCAB, ROWS, 8, num_gates=len(MASK)), **options)
    engine.mask = MASK
    return executor, engine


def make_reference() -> FakeExecutor:
    """The same model, which may leave out any layers and is told to leave out those."""
    model = FakeExecutor(VOCAB, ROWS, 80, num_gates=len(MASK))
    model.fixed_layers = np.array(MASK)
    return model


def decode(executor: Any, params: Any, lookahead: int = 3, *, vocab: int = VOCAB, **options: Any) -> list[Any]:
    runner = ModelRunner(executor)
    drafter = SelfDrafter(runner, vocab_size=vocab)
    decoder = Decoder(runner, ChainDrafter({"self": drafter}, options.get("lengths")), **options)
    decoder.draft_model = None
    plan = (DraftStage("self", lookahead),) if lookahead else ()
    adaptive = "lengths" in options
    sequences = [
        make_sequence(i, prompt, params(i), seed=i, draft_plan=plan, adaptive=adaptive)
        for i, prompt in enumerate(PROMPTS)
    ]
    run(decoder, sequences)
    runner.reset()
    return sequences


def greedy(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=8 + 5 * i)


def sampled(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=8 + 3 * i, temperature=0.9, top_k=9)


def found(sequences: list[Any]) -> list[Any]:
    return [(seq.output, seq.stats.drafted, seq.stats.accepted) for seq in sequences]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("params", [greedy, sampled])
def test_text_and_acceptance_are_the_models_own(tmp_path: Any, params: Any, graphs: bool) -> None:
    executor, engine = open_gated(tmp_path, use_graphs=graphs)
    ours = decode(executor, params)
    assert found(ours) == found(decode(make_reference(), params))
    assert sum(seq.stats.accepted for seq in ours) > 0
    kinds = {profile.kind for profile in engine.runs}
    assert kinds == {"self", "verify", "prefill"} | ({"decode"} & kinds)
    assert {seq.stats.layer_choice.removed_attention for seq in ours} == {(1, 2)}
    assert bool(engine.gpu.calls["launch"]) == graphs


def test_drafts_of_other_layers_are_accepted_less(tmp_path: Any) -> None:
    """What this would not notice: draft steps that run all layers, and are all accepted."""
    executor, engine = open_gated(tmp_path)
    right = sum(seq.stats.accepted for seq in decode(executor, greedy))
    engine.mask = None
    assert sum(seq.stats.accepted for seq in decode(executor, greedy)) > right


def test_without_drafts_no_draft_step_runs(tmp_path: Any) -> None:
    executor, engine = open_gated(tmp_path)
    assert found(decode(executor, greedy, 0)) == found(decode(make_reference(), greedy, 0))
    assert "self" not in {profile.kind for profile in engine.runs}


def test_draft_steps_are_recorded_with_the_others(tmp_path: Any) -> None:
    executor, engine = open_gated(tmp_path)
    executor.capture(executor.fixed_shapes())
    before = engine.gpu.captures
    assert found(decode(executor, greedy)) == found(decode(make_reference(), greedy))
    assert before == 9, "decode, draft and verify for 1, 2 and 3 rows"


def test_k_is_chosen_by_what_a_draft_step_costs(tmp_path: Any) -> None:
    executor, _ = open_gated(tmp_path)
    runner = ModelRunner(executor)
    target = StepCost(1.0, 0.1)
    curves = CostCurves(target, {"self": target.scaled(0.5)})
    weighed = weigh_drafters({"self": SelfDrafter(runner, vocab_size=VOCAB)}, curves)
    assert weighed["self"].cost.seconds((), 1, 0) == curves.drafters["self"].seconds(1, 1, 0)
    assert weighed["self"].cost.catch_up_seconds(9) == 0
    lengths = Controller(curves, LOOKAHEAD, drafters=weighed)
    sequences = decode(executor, greedy, LOOKAHEAD, lengths=lengths)
    assert [seq.output for seq in sequences] == [seq.output for seq in decode(make_reference(), greedy, 0)]


def test_requests_get_the_layers_of_the_engine_and_may_not_bring_rules(tmp_path: Any) -> None:
    executor, _ = open_gated(tmp_path)
    engine = engine_of(executor, make_tokenizer(), max_model_len=MAX_MODEL_LEN, lookahead=LOOKAHEAD)
    params = [greedy(i) for i in range(len(PROMPTS))]
    results = engine.generate(PROMPTS, params, drafter="self", num_speculative_tokens=3)
    assert [result.token_ids for result in results] == [seq.output for seq in decode(make_reference(), greedy, 0)]
    assert {result.stats.layer_choice.removed_mlp for result in results} == {(1, 2)}
    assert sum(result.stats.accepted for result in results) > 0
    with pytest.raises(InvalidRequestError, match="fixed when it was built"):
        engine.generate(PROMPTS[:1], params[:1], drafter="self", layer_rules=LayerRules())


def test_other_layers_and_similarities_are_refused(tmp_path: Any) -> None:
    executor, _ = open_gated(tmp_path)
    with pytest.raises(SpecexportError, match="built for"):
        executor.set_layers(np.zeros(len(MASK), np.bool_))
    with pytest.raises(SpecexportError, match="no similarity"):
        executor.measure_similarity(True)
    assert executor.similarity.shape == (4, 0)


@pytest.mark.parametrize("fold", [1, LOOKAHEAD + 1])
def test_the_lowered_graph_drafts_as_the_cpu_does(tmp_path: Any, monkeypatch: Any, fold: int) -> None:
    """Text, drafts and acceptance of a tiny model without its last layer, against ONNX Runtime with gates."""
    from tests.support.tiny_models import VOCAB as vocab

    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))
    result, capacity = trace("llama", "float32"), engine_kv_capacity(64, LOOKAHEAD)
    model = result.ir_model.clone()
    blocks = find_residual_blocks(model).blocks
    lower_tensorrt(model, kv_capacity=capacity, fold=fold, skipped=blocks[2:])
    profiles = plan_profiles(
        "target", lookahead=LOOKAHEAD, max_num_seqs=2, max_num_tokens=16, fold=fold, self_draft=True
    )
    common = {
        "dtype": "float32",
        "vocab_size": vocab,
        "layers": tuple(result.layers),
        "kinds": ("attention", "MLP") * 2,
    }
    entry = make_entry(
        LOOKAHEAD, 2, inputs=step_inputs(model), profiles=profiles, kv_capacity=capacity, skipped_layers=(1,), **common
    )
    gpu = FakeGpu(1 << 26)
    engine = GraphEngine(gpu, entry, model)
    executor, _, _ = open_fake(tmp_path, entry, FakeExecutor(vocab, 2, 8), gpu, load=lambda *_: engine)

    gated = result.ir_model.clone()
    blocks = find_residual_blocks(gated)
    lower_ort_cpu(gated)
    gate_layers(gated, blocks)
    write_onnx(gated, tmp_path)
    entry = make_entry(LOOKAHEAD, 2, path="model.onnx", inputs=step_inputs(gated), files=(), **common)
    cpu = OrtExecutor(tmp_path / "model.onnx", entry, num_rows=2, kv_capacity=capacity, num_threads=1)
    cpu.fixed_layers = executor.fixed_layers

    monkeypatch.setattr("tests.support.loop.VOCAB", vocab)
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[9, 40, 11, 23, 8, 61, 14], [50, 7, 33]])

    def params(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True)

    ours = decode(executor, params, vocab=vocab)
    assert found(ours) == found(decode(cpu, params, vocab=vocab))
    assert 0 < sum(seq.stats.accepted for seq in ours) < sum(seq.stats.drafted for seq in ours)
    assert {"self", "verify"} <= {profile.kind for profile in engine.runs}
