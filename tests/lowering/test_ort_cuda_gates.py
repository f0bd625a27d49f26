"""Self-drafting over the paged graph: the GPU executor drafts as ONNX Runtime on the CPU does over its own graph."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specexport.backends.ort import write_onnx
from specexport.lowering.common import step_inputs
from specexport.lowering.layer_gate import gate_layers
from specexport.passes.residual_blocks import find_residual_blocks
from specexport_runtime.abi import StepShape
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors import ort_cuda
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.executors.ort_cuda import OrtCudaExecutor
from specexport_runtime.executors.ort_gates import is_gate
from specexport_runtime.executors.paged import CUDNN_SWITCH
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.entries import make_entry
from tests.support.fakes.fake_onnxruntime import FakeBinding, FakeOrt
from tests.support.fakes.requests import request_of
from tests.support.models.half_models import trace
from tests.support.models.tiny_models import VOCAB, make_llama
from tests.support.references.cuda_graphs import ReferenceSession
from tests.support.references.engine_harness import compiled
from tests.support.references.lowered import lower_ort_cpu, lower_ort_cuda

NAME, GATES, LENGTH = "llama", 4, 64
PROMPTS = [[(7 * i + 11) % (VOCAB - 3) + 3 for i in range(9)], [(5 * i + 4) % (VOCAB - 3) + 3 for i in range(6)]]
RULES = {
    "every second layer": (LayerRules(threshold=None, period=2, keep_last=None), 1),
    "attention by similarity": (LayerRules(threshold=0.5, period=None, keep_last=None), 0),
}
"""Rules, and how many of their drafts this model accepts at least."""


class GatedSession(ReferenceSession):
    """Of the paged graph, on the memory of a binding; what is not bound is not fetched."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.outputs = super().get_outputs()

    def get_outputs(self) -> list[Any]:
        return self.outputs

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        to_host = {name for name, bound in binding.inputs.items() if bound[0] == "cpu"}
        assert to_host == {"attention_metadata", "want_similarity", *(f"layer_on.{i}" for i in range(GATES))}
        self.evaluator.output_names_ = [value.name for value in self.outputs if value.name in binding.outputs]
        super().run_with_iobinding(binding, options)


class Executors(NamedTuple):
    cpu: OrtExecutor
    gpu: OrtCudaExecutor


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Executors:
    folder = tmp_path_factory.mktemp("gates")
    cpu = OrtExecutor(folder / "cpu" / "model.onnx", build(folder / "cpu", "float32"), num_rows=2, kv_capacity=LENGTH)
    entry = build(folder / "gpu", "float16")
    with pytest.MonkeyPatch.context() as patch:
        FakeOrt(lambda _, path: GatedSession(path)).install(patch)
        patch.delenv(CUDNN_SWITCH, raising=False)
        patch.setattr(ort_cuda, "compute_capability", lambda device_id: 90)  # a row for each token to verify
        return Executors(cpu, OrtCudaExecutor(folder / "gpu" / "model.onnx", entry, num_rows=2, kv_capacity=LENGTH))


def build(folder: Path, dtype: str) -> ModelEntry:
    result, on_gpu = trace(NAME, dtype), dtype != "float32"
    model = result.ir_model.clone()
    blocks = find_residual_blocks(model)
    (lower_ort_cuda if on_gpu else lower_ort_cpu)(model)
    inputs = step_inputs(model)
    assert gate_layers(model, blocks, separate=on_gpu) == GATES
    write_onnx(model, folder)
    return make_entry(
        backend="ort-cuda" if on_gpu else "ort-cpu", dtype=dtype, vocab_size=VOCAB, layers=tuple(result.layers),
        inputs=inputs if on_gpu else step_inputs(model), kinds=blocks.gate_kinds,
    )  # fmt: skip


def test_an_engine_names_no_gate_among_its_step_inputs(tmp_path: Path) -> None:
    """The executor binds gates apart from them, and refuses an engine that has an input twice."""
    engine = compiled(make_llama(0).half(), tmp_path, backend="ort-cuda", dtype="float16", self_draft=True).engine
    assert engine.gates.kinds
    assert [name for name in engine.inputs if is_gate(name)] == []


def decode(executor: Any, lookahead: int, rules: LayerRules | None = None) -> list[Request]:
    runner = ModelRunner(executor)
    decoder = Decoder(runner, ChainDrafter({"self": SelfDrafter(runner, vocab_size=VOCAB)}))
    plan = (DraftStage("self", lookahead),) if lookahead else ()
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    sequences = [
        request_of(i, prompt, params, vocab_size=VOCAB, max_model_len=LENGTH - 8, draft_plan=plan, layer_rules=rules)
        for i, prompt in enumerate(PROMPTS)
    ]
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
        decoder.check()
    runner.reset()
    assert [seq.error for seq in sequences] == [None, None]
    return sequences


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("rules", "least"), RULES.values(), ids=RULES)
def test_text_layers_and_accepted_drafts_are_those_of_the_cpu(executors, rules, least):
    ours, theirs = (decode(executor, 3, rules) for executor in reversed(executors))
    assert [seq.output for seq in ours] == [seq.output for seq in decode(executors.gpu, 0)]
    assert [(seq.stats.drafted, seq.stats.accepted) for seq in ours] == [
        (seq.stats.drafted, seq.stats.accepted) for seq in theirs
    ]
    drafted, accepted = (sum(getattr(seq.stats, name) for seq in ours) for name in ("drafted", "accepted"))
    assert least <= accepted < drafted, "something was left out"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.stats.layer_choice.mask.tolist() == other.stats.layer_choice.mask.tolist()
        np.testing.assert_allclose(mine.stats.layer_choice.acs, other.stats.layer_choice.acs, atol=1e-3)


def test_cuda_graphs_and_branches_exclude_each_other(executors: Executors, tmp_path: Path) -> None:
    assert executors.gpu._graphs.add([StepShape(0, 1, 1, 1, 1)]) == [], "nobody asked for graphs"
    entry = make_entry(backend="ort-cuda", dtype="float16", kinds=("attention", "MLP"))
    with pytest.raises(InvalidRequestError, match="records no graph with branches"):
        OrtCudaExecutor(tmp_path / "model.onnx", entry, num_rows=1, kv_capacity=8, cuda_graphs=True)


def test_every_gate_is_an_input_that_nothing_but_its_branch_reads() -> None:
    """Anything between would run on the GPU, and the host would wait for it before each layer."""
    model = trace(NAME, "float16").ir_model.clone()
    blocks = find_residual_blocks(model)
    lower_ort_cuda(model)
    gate_layers(model, blocks, separate=True)
    gates = [value for value in model.graph.inputs if str(value.name).startswith("layer_on.")]
    assert [[(use.node.op_type, use.idx) for use in gate.uses()] for gate in gates] == [[("If", 0)]] * GATES
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
