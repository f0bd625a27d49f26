"""The paged graph with joined layers, rotation and head norms in its kernel, and joined norms: logits and nodes."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specexport.lowering.fuse import fuse_norms
from specexport.lowering.ort_cuda import attach_paged_attention, fuse_for_paging
from specexport.passes.pipeline import default_passes, run_passes
from specexport.trace import reference_logits
from tests.lowering.test_ort_cuda import PagedEngine
from tests.support import chance
from tests.support.engine_harness import make_checkpoint, pack
from tests.support.tiny_models import ARCHITECTURES, VOCAB, make_model
from tests.support.tiny_traces import tiny_model, trace_of

PASTS, NEWS = (9, 17, 4), (5, 1, 3)
OWN = {
    "phi_partial": ("Phi", ARCHITECTURES["phi"][1] | {"hidden_size": 128}),
    "qwen3_wide": ("Qwen3", ARCHITECTURES["qwen3"][1] | {"head_dim": 32}),
}
EXPECTED = {
    # Attention nodes that rotate, those that normalize heads, those with q, k and v as one; additions joined.
    "llama": (2, 0, 2, 4),
    "llama_rope_yarn": (2, 0, 2, 4),
    "qwen2": (2, 0, 2, 4),
    "qwen3_wide": (2, 2, 2, 4),
    "qwen3": (0, 0, 0, 4),  # heads of 24: no kernel rotates them
    "cohere2": (1, 0, 2, 0),  # neighbours are pairs, and one layer in two rotates
    "gemma2": (2, 0, 2, 4),
    "gemma3": (2, 2, 2, 4),
    "phi_partial": (2, 0, 2, 2),
    "gpt_oss": (2, 0, 2, 4),
    "deepseek_v3": (0, 0, 0, 4),  # the last channels of a head rotate, and keys are wider than values
}


def fused(model: Any, *, lower: Any = attach_paged_attention) -> tuple[ir.Model, Any, int]:
    """A model's paged graph with all fusions, its layers, and how many additions were joined."""
    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes("float32", pack=True))
    fuse_for_paging(traced.ir_model, 64, None)
    lower(traced.ir_model)
    return traced.ir_model, traced.layers, fuse_norms(traced.ir_model)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", EXPECTED)
def test_logits_equal_eager_transformers(name: str) -> None:
    model = make_model(*OWN[name]) if name in OWN else tiny_model(name)
    graph, layers, joined = fused(model)
    nodes = [node for node in graph.graph if node.op_type == "PagedAttention"]
    rotating = sum(node.attributes.get_int("do_rotary", 0) for node in nodes)
    normed = sum(node.inputs[12] is not None for node in nodes)
    assert (rotating, normed, sum(node.inputs[1] is None for node in nodes), joined) == EXPECTED[name]
    random = np.random.default_rng(chance.seed(7))
    texts = [random.integers(3, VOCAB, past + new).tolist() for past, new in zip(PASTS, NEWS, strict=True)]
    expected = reference_logits(make_checkpoint(model), texts)
    wanted = np.concatenate([logits[past:] for logits, past in zip(expected, PASTS, strict=True)])
    for by_token in (False, True):
        engine = PagedEngine(ir.to_proto(graph), layers, num_rows=4)
        engine.run(pack([text[:past] for text, past in zip(texts, PASTS, strict=True)], (0, 0, 0)), first_row=1)
        step = pack([text[past:] for text, past in zip(texts, PASTS, strict=True)], PASTS)
        outputs = engine.run(step, first_row=1, row_for_each=by_token)
        assert np.abs(outputs["logits"] - wanted).max() < 1e-4
