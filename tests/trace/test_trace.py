"""Tracing: the contract's names, what each layer asked for, and the two nets that catch models which behave oddly."""

from typing import Any

import pytest
import torch

from specexport.ops import UNPADDED_ATTENTION
from specexport.passes.base import attention_nodes
from specexport.trace.check import check_packed, compute_reference_logits, trace_checkpoint
from specexport.trace.geometry import probe_layers
from specexport.trace.quirks import logit_rows
from specexport_runtime.abi import STEP_INPUTS, LayerGeometry
from specexport_runtime.errors import UnsupportedModelError
from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, WINDOW, make_llama, make_model
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.engine_harness import make_checkpoint


@pytest.mark.exports
def test_the_trace_speaks_the_contract() -> None:
    traced = trace_checkpoint(make_checkpoint(make_llama()))
    graph = traced.ir_model.graph
    assert [value.name for value in graph.inputs][: len(STEP_INPUTS)] == [spec.name for spec in STEP_INPUTS]
    shapes = {value.name: [str(dim) for dim in value.shape or ()] for value in (*graph.inputs, *graph.outputs)}
    assert shapes["input_ids"] == shapes["positions"] == shapes["unpad_index"] == ["num_tokens"]
    assert shapes["row_starts"] == shapes["row_ends"] == ["num_seqs", "1"]
    assert shapes["pad_index"] == ["num_seqs", "1", "max_new_tokens"]
    assert shapes["k_cache.1"] == shapes["k_cache_out.1"] == ["num_seqs", "1", "2", "kv_capacity", "16"]
    assert shapes["logits"] == ["num_logit_rows", "320"]
    assert traced.layers == (LayerGeometry(2, 16, 16),) * 2
    assert sum(1 for _ in attention_nodes(traced.ir_model)) == 2


def test_each_layer_keeps_its_own_window_softcap_and_scale() -> None:
    model = tiny_model("gemma2")
    nodes = list(attention_nodes(trace_of(model).ir_model))
    assert [node.attributes["window"].as_int() for node in nodes] == [WINDOW, -1]
    assert [node.attributes["softcap"].as_float() for node in nodes] == [2.0, 2.0]
    assert nodes[0].attributes["scale"].as_float() == pytest.approx(model.config.query_pre_attn_scalar**-0.5)


def test_sinks_reach_the_op() -> None:
    nodes = attention_nodes(trace_of(tiny_model("gpt_oss")).ir_model)
    names = [item.name for item in UNPADDED_ATTENTION.inputs]
    assert all(dict(zip(names, node.inputs, strict=False)).get("sinks") is not None for node in nodes)


def test_latent_attention_has_keys_and_values_of_unequal_size() -> None:
    layers = probe_layers(tiny_model("deepseek_v3")).attention
    assert [call.geometry for call in layers] == [LayerGeometry(4, 24, 16)] * 2


def test_the_model_is_given_back_as_it_was() -> None:
    model = make_model(*ARCHITECTURES["qwen3_moe"])
    before = (model.config._attn_implementation, model.config._experts_implementation)
    logits = compute_reference_logits(make_checkpoint(model), [[3, 4, 5]])
    trace_checkpoint(make_checkpoint(model))
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
    assert (compute_reference_logits(make_checkpoint(model), [[3, 4, 5]])[0] == logits[0]).all()


@pytest.mark.exports  # the masks that it is made of are no part of a model
def test_a_window_is_that_of_the_mask_and_not_what_a_layer_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.llama import modeling_llama

    # Llama's layers announce no window; give the model one anyway.
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    model = make_llama()
    for window in (1, 5, 100, 300_000):
        model.config.sliding_window = window
        assert [call.window for call in probe_layers(model).attention] == [window, window]
    model.config.sliding_window = WINDOW
    nodes = attention_nodes(trace_checkpoint(make_checkpoint(model)).ir_model)
    assert [node.attributes["window"].as_int() for node in nodes] == [WINDOW, WINDOW]


def test_a_window_that_no_mask_has_is_left_out() -> None:
    """Every layer of an EXAONE 4 carries the window; the last one's mask has none."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    model = make_model("Exaone4", GROUPED | layers)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [WINDOW, WINDOW]
    assert [call.window for call in probe_layers(model).attention] == [WINDOW, -1]


def test_a_module_may_mask_for_itself() -> None:
    """The local layers of GPT-Neo, in a mask that the model gives all layers."""
    assert [call.window for call in probe_layers(tiny_model("gpt_neo")).attention] == [-1, WINDOW]


def test_logit_rows_are_taken_in_front_of_the_head_where_the_model_cannot_be_asked() -> None:
    model = make_llama()
    own = model.forward

    def forward(input_ids: Any, position_ids: Any = None, use_cache: bool = False) -> Any:
        return own(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.forward = forward
    ids, rows = torch.arange(3, 9)[None], torch.tensor([1, 4])
    with torch.no_grad():
        wanted = model(ids).logits
        with logit_rows(model, rows) as asked:
            assert asked == {}
            torch.testing.assert_close(model(ids, **asked).logits, wanted[:, rows])
        assert model(ids).logits.shape == wanted.shape
    check_packed(model, probe_layers(model))
    checkpoint, model.get_output_embeddings = make_checkpoint(model), lambda: None
    with pytest.raises(UnsupportedModelError, match="no LM head to select logit rows at"):
        trace_checkpoint(checkpoint)


def test_a_mask_that_looks_positions_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama import modeling_llama

    kinds = torch.zeros(1, 8, dtype=torch.bool)

    def by_kind(**named: Any) -> Any:
        return create_causal_mask(**named, or_mask_function=lambda batch, head, query, key: kinds[batch, key])

    monkeypatch.setattr(modeling_llama, "create_causal_mask", by_kind)
    with pytest.raises(UnsupportedModelError, match="its attention mask depends on more than positions"):
        trace_checkpoint(make_checkpoint(make_llama()))


def test_a_mask_that_is_no_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import create_chunked_causal_mask
    from transformers.models.llama import modeling_llama

    # Longer than any trial sequence, so that only the probe can see it.
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_chunked_causal_mask)
    model = make_llama()
    model.config.attention_chunk_size = 100
    with pytest.raises(UnsupportedModelError, match=r"llama \(LlamaForCausalLM\).*layer 0 masks position"):
        trace_checkpoint(make_checkpoint(model))


def test_a_model_that_mixes_tokens_outside_attention_is_refused() -> None:
    model = make_llama()

    def smear(_module: Any, _inputs: Any, output: Any) -> Any:
        return output + output.cumsum(dim=1)

    model.model.norm.register_forward_hook(smear)
    with pytest.raises(UnsupportedModelError, match="packed tokens change its logits"):
        trace_checkpoint(make_checkpoint(model))


@pytest.mark.whole
def test_half_precision_is_held_to_what_it_can_keep() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = make_model(*ARCHITECTURES["gpt_oss"]).to(dtype)
        traced = trace_checkpoint(make_checkpoint(model))
        assert traced.ir_model.graph.num_nodes() > 50
        model.model.norm.register_forward_hook(lambda _module, _inputs, output: output + 0.2 * output.cumsum(dim=1))
        with pytest.raises(UnsupportedModelError, match="packed tokens change its logits"):
            trace_checkpoint(make_checkpoint(model))


def test_a_forward_that_fails_is_refused_with_its_reason() -> None:
    model = make_llama()

    def explode(_module: Any, _inputs: Any) -> None:
        raise RuntimeError("needs images")

    model.model.register_forward_pre_hook(explode)
    with pytest.raises(UnsupportedModelError, match=r"its forward pass fails on packed tokens .*needs images"):
        trace_checkpoint(make_checkpoint(model))


def test_a_layer_that_runs_twice_has_two_caches() -> None:
    model = make_llama()
    model.model.layers[1] = model.model.layers[0]
    calls = probe_layers(model)
    check_packed(model, calls)
    assert [call.geometry for call in calls.attention] == [LayerGeometry(2, 16, 16)] * 2


def test_layers_that_do_not_call_attention_are_refused() -> None:
    model = make_llama()
    del model.model.layers[1]
    with pytest.raises(UnsupportedModelError, match="only 1 of its 2 layers"):
        trace_checkpoint(make_checkpoint(model))


@pytest.mark.exports
def test_what_the_exporter_cannot_do_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("step 1\n\nDispatchError: no function for aten.unheard_of")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(UnsupportedModelError, match=r"torch cannot export .*no function for aten\.unheard_of"):
        trace_checkpoint(make_checkpoint(make_llama()))


def test_complex_numbers_are_pairs_while_a_model_is_traced() -> None:
    from specexport.trace.quirks import complex_as_pairs

    x, angle = torch.randn(3, 4, 2), torch.randn(4)
    functions = torch.polar, torch.view_as_complex, torch.view_as_real

    def turn() -> torch.Tensor:
        by = torch.polar(torch.ones_like(angle), angle) * 0.5
        found: torch.Tensor = torch.view_as_real(torch.view_as_complex(x) * by.unsqueeze(0).to(x.device))
        return found

    wanted = turn()
    with complex_as_pairs():
        assert torch.allclose(turn(), wanted, atol=1e-6)
    assert (torch.polar, torch.view_as_complex, torch.view_as_real) == functions


def test_chunked_attention_is_refused_by_layer_kind() -> None:
    model = make_llama()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="layers of kind chunked_attention"):
        trace_checkpoint(make_checkpoint(model))


def test_positions_as_old_configurations_spell_them_are_refused_too() -> None:
    model = make_model("Llama", GROUPED | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        trace_checkpoint(make_checkpoint(model))
