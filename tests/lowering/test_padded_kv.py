"""The padded-KV graph: padding entries in the cache change no logit, and its weights are the engine's own file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.backends.ort import write_padded_onnx
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import CheckFailedError
from tests.support.cases import chance
from tests.support.models.tiny_models import VOCAB, WINDOW
from tests.support.models.tiny_traces import tiny_model
from tests.support.references.engine_harness import Engine, build, make_checkpoint

CAPACITY = 64
LENGTHS = (38, 30, 34)
STEP = ["input_ids", "positions", "logit_rows", "kv_lens", "cu_new_tokens"]
KINDS = {"llama": "full", "gemma2": "windows, softcap", "gpt_oss": "sinks", "deepseek_v3": "portable"}


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param)
    _, layers, _ = build(model, folder)
    random = np.random.default_rng(chance.seed(5))
    sequences = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    return folder, layers, sequences, compute_reference_logits(make_checkpoint(model), sequences)


@pytest.mark.fuzz
@pytest.mark.parametrize("padded_input", [False, True])
def test_rows_padded_to_one_length_give_eager_logits(built: Any, padded_input: bool) -> None:
    """The vanilla padded method by hand: uneven acceptance, gaps filled with padding, also inside the windows."""
    folder, layers, sequences, expected = built
    engine = Engine(folder, layers, num_rows=3, capacity=CAPACITY, graph="model.padded.onnx", poison=3.0)
    random = np.random.default_rng(1)
    held: list[list[int]] = [[], [], []]
    done, gaps_in_window = [0, 0, 0], 0
    for _ in range(7):
        own = [int(random.integers(1, 5)) for _ in sequences]
        fed = [max(own)] * 3 if padded_input else own
        tokens = [[*ids[at : at + n], *[7] * (m - n)] for ids, at, n, m in zip(sequences, done, own, fed, strict=True)]
        logits = engine.step(tokens, [len(row) for row in held], held=held)
        starts = np.cumsum([0, *fed])
        for b, count in enumerate(own):
            wanted = expected[b][done[b] : done[b] + count]
            np.testing.assert_allclose(logits[starts[b] : starts[b] + count], wanted, atol=1e-4, rtol=0)
            held[b] += range(done[b], done[b] + count)
            done[b] += count
        longest = max(map(len, held))
        held = [[*row, *[-1] * (longest - len(row))] for row in held]
        gaps_in_window += sum(-1 in row[-WINDOW:] for row in held)
    assert gaps_in_window > 5, "the schedule must put padding where a window would look"


def test_only_kv_positions_tells_padding_apart(built: Any) -> None:
    """A position that counts padding gives other logits: the test above can fail."""
    folder, layers, sequences, expected = built
    engine = Engine(folder, layers, num_rows=1, capacity=CAPACITY, graph="model.padded.onnx", poison=3.0)
    engine.step([sequences[0][:8]], [0], held=[[]])
    right = engine.step([sequences[0][8:10]], [11], held=[[*range(8), -1, -1, -1]])
    np.testing.assert_allclose(right, expected[0][8:10], atol=1e-4)
    wrong = engine.step([sequences[0][8:10]], [11], held=[[*range(8), 8, -1, -1]])
    assert np.abs(wrong - expected[0][8:10]).max() > 1e-3


def test_it_takes_the_padded_step_inputs(built: Any) -> None:
    folder, layers, *_ = built
    engine = Engine(folder, layers, num_rows=2, capacity=CAPACITY, graph="model.padded.onnx")
    assert {name for name in engine.inputs if "cache" not in name} == {*STEP, "kv_positions"}


def test_it_holds_no_weight_of_its_own(built: Any) -> None:
    import onnx

    folder = built[0]
    graphs = [onnx.load(folder / name, load_external_data=False).graph for name in ("model.onnx", "model.padded.onnx")]
    places = [
        {t.name: sorted((e.key, e.value) for e in t.external_data) for t in graph.initializer if t.external_data}
        for graph in graphs
    ]
    assert places[0] == places[1]
    assert places[0]
    assert all(t.external_data or len(t.raw_data) <= 1024 for t in graphs[1].initializer)
    assert (folder / "model.padded.onnx").stat().st_size < 1.25 * (folder / "model.onnx").stat().st_size


def test_a_weight_that_the_engine_has_not_is_an_error(tmp_path: Path) -> None:
    import onnx_ir as ir

    model, _, _ = build(tiny_model("llama"), tmp_path)
    tensor = ir.tensor(np.zeros(2, np.float32), name="stray")
    model.graph.initializers["stray"] = ir.Value(name="stray", const_value=tensor)
    with pytest.raises(CheckFailedError, match="a weight of its own, stray"):
        write_padded_onnx(model, tmp_path)
