"""The built engine of every supported architecture against eager transformers; the others refused by reason."""

from pathlib import Path

import numpy as np
import pytest

from specexport.passes.residual_blocks import find_residual_blocks
from specexport.trace.check import compute_reference_logits, trace_checkpoint
from specexport_runtime.errors import UnsupportedModelError
from tests.support.cases import chance
from tests.support.models.tiny_models import ARCHITECTURES, REFUSED, VOCAB, make_model
from tests.support.models.tiny_traces import tiny_model
from tests.support.references.engine_harness import Engine, build, make_checkpoint
from tests.support.references.ort_operators import OBSTACLES, assert_known

PREFILL = (9, 17, 4)
VERIFY = (5, 1, 3)  # new tokens a row: ragged, on ragged pasts
CAPACITY = 40
TOLERANCE = 1e-4
EXPERTS = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1}
"""Layers whose experts become one operator; the first of DeepSeek's has none, and JetMoE's are a loop."""


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_logits_equal_eager_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    random = np.random.default_rng(chance.seed(7))
    sequences = [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PREFILL, VERIFY, strict=True)]
    expected = compute_reference_logits(make_checkpoint(model), sequences)
    assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"

    ir_model, layers, _ = build(model, tmp_path, group_experts=True)
    assert_known(ir_model)
    assert sum(node.op_type == "BlockExperts" for node in ir_model.graph) == EXPERTS.get(name, 0)
    blocks = find_residual_blocks(ir_model)
    assert blocks.obstacle == OBSTACLES.get(name)
    assert len(blocks.blocks) == (0 if blocks.obstacle else 2 * len(layers))
    engine = Engine(tmp_path, layers, num_rows=len(sequences), capacity=CAPACITY)
    for row, past in enumerate(PREFILL):
        logits = engine.step([sequences[row][:past]], [0], first_row=row)
        assert np.abs(logits - expected[row][:past]).max() < TOLERANCE
    verify = engine.step([ids[past:] for ids, past in zip(sequences, PREFILL, strict=True)], PREFILL)
    wanted = np.concatenate([logits[past:] for logits, past in zip(expected, PREFILL, strict=True)])
    assert np.abs(verify - wanted).max() < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_exactly_is_refused_by_name_and_reason(name: str) -> None:
    classes, config, reason = REFUSED[name]
    model = make_model(classes, config)
    with pytest.raises(UnsupportedModelError) as caught:
        trace_checkpoint(make_checkpoint(model))
    assert reason in str(caught.value)
    assert model.config.model_type in str(caught.value)
    assert caught.value.exit_code == 2
