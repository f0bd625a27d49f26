"""The lowered graph, the executor and the decoding loop together: the compiler's own graph runs as the engine.

Nothing here runs on a GPU. The graph is evaluated in numpy, over the memory of the fake GPU, at exactly the sizes that
its profile allows; what comes out is held against eager transformers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specexport.backends.profiles import engine_kv_capacity, most_new_tokens, plan_profiles
from specexport.lowering import trt_native
from specexport.lowering.common import step_inputs
from specexport.trace.check import compute_reference_logits
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import make_decoder, run
from tests.support.fakes.trt_fakes import FakeGpu, make_entry, open_fake
from tests.support.fakes.trt_graphs import GraphEngine
from tests.support.models.half_models import trace
from tests.support.models.tiny_models import VOCAB
from tests.support.references.engine_harness import make_checkpoint
from tests.support.references.lowered import lower_tensorrt

pytestmark = pytest.mark.slow

ROWS, LOOKAHEAD, MAX_MODEL_LEN = 3, 3, 40
PROMPTS = ([5, 9, 14, 3, 200, 31, 77], [40, 41, 42], [7] * 12)


@pytest.fixture(autouse=True)
def fused_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU fuses float32 attention, but rounding cannot hide a wrong mask in it."""
    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))


def open_model(name: str, role: str, folder: Path, folds: bool) -> tuple[Any, GraphEngine]:
    """A ``TrtExecutor`` on the graph that a build of tiny model ``name`` would make an engine of."""
    model = trace(name, "float32").ir_model.clone()
    capacity = engine_kv_capacity(MAX_MODEL_LEN, LOOKAHEAD)
    fold = most_new_tokens(role, LOOKAHEAD) if folds else 1
    forms = lower_tensorrt(model, kv_capacity=capacity, fold=fold)
    assert ("folded" in forms) == (fold > 1)
    caches = [value for value in model.graph.inputs if "cache" in str(value.name)]
    sizes = [(int(value.shape[1]), int(value.shape[3])) for value in caches]
    layers = [LayerGeometry(k[0], k[1], v[1]) for k, v in zip(sizes[::2], sizes[1::2], strict=True)]
    profiles = plan_profiles(role, lookahead=LOOKAHEAD, max_num_seqs=ROWS, max_num_tokens=24, fold=fold)
    entry = make_entry(
        LOOKAHEAD, ROWS, MAX_MODEL_LEN, dtype="float32", layers=tuple(layers), profiles=profiles,
        vocab_size=VOCAB, inputs=step_inputs(model), kv_capacity=capacity,
    )  # fmt: skip
    gpu = FakeGpu(1 << 26)
    engine = GraphEngine(gpu, entry, model)
    executor, _, _ = open_fake(folder, entry, FakeExecutor(VOCAB, ROWS, 8), gpu, load=lambda *_: engine)
    return executor, engine


def is_greedy(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Every generated token is the one that eager transformers finds most likely after those before it."""
    (logits,) = compute_reference_logits(make_checkpoint(trace(name, "float32").model), [[*prompt, *tokens]])
    return logits[len(prompt) - 1 : -1].argmax(1).tolist() == list(tokens)


@pytest.mark.parametrize(
    ("name", "folds"),
    [
        ("llama", True), ("gemma3", False), ("gemma2", False),
        pytest.param("llama", False, marks=pytest.mark.whole), pytest.param("gemma3", True, marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_speculative_decoding_over_the_lowered_graph_is_greedy_eager_decoding(name, folds, tmp_path):
    target, target_engine = open_model(name, "target", tmp_path / "target", folds)
    draft, draft_engine = open_model("llama", "draft", tmp_path / "draft", folds)
    decoder = make_decoder(target, draft, LOOKAHEAD, max_chunk=16)
    sequences = [
        Request(i, list(prompt), SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
                 vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
        for i, (prompt, count) in enumerate(zip(PROMPTS, (11, 7, 9), strict=True))
    ]  # fmt: skip
    events = run(decoder, sequences)
    for prompt, seq in zip(PROMPTS, sequences, strict=True):
        assert is_greedy(name, prompt, seq.tokens[len(prompt) :])
    assert {profile.kind for profile in target_engine.runs} >= {"verify", "prefill"}
    assert {profile.kind for profile in draft_engine.runs} >= {"decode", "prefill"}
    drafted, accepted = sum(event.drafted for event in events), sum(event.accepted for event in events)
    assert drafted > 10
    if name == "llama":  # the draft is the target itself
        assert accepted >= drafted - LOOKAHEAD
        assert "catch-up" in {profile.kind for profile in draft_engine.runs}
    target.close()
    draft.close()
