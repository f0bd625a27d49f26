"""Heads of every kind whose files lack something, are of another shape or of a variant: each is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models.loading import load
from tests.support.models.tiny_corrected import deepspec, zlab2
from tests.support.models.tiny_dflash import zlab
from tests.support.models.tiny_heads import (
    IDS,
    LAYER,
    VOCAB,
    edit,
    medusa,
    medusa_tensors,
    medusa_vllm,
    numbered,
    peagle,
    speculators,
    tensors,
    write,
)
from tests.support.models.tiny_hydra import hydra

UNKNOWN = UnsupportedModelError
STRANGE = {"strange.weight": torch.ones(2, 2)}


def plain(folder: Path, _: Any) -> None:
    write(folder, LAYER, tensors())


def strange(folder: Path, _: Any) -> None:
    write(folder, LAYER, STRANGE)


def no_medusa(folder: Path, _: Any) -> None:
    write(folder, {"model_type": "medusa"}, STRANGE)


def small_medusa(folder: Path, _: Any) -> None:
    write(folder, {"medusa_num_heads": 3, "medusa_num_layers": 1}, numbered(medusa_tensors(3, 1), 1))


def case(
    make: Callable[[Path, Any], Any], said: str, error: type[Exception] = CheckpointError, *,
    inner: dict[str, Any] | None = None, gone: str = "-", stored: dict[str, Any] | None = None, **values: Any,
) -> Any:  # fmt: skip
    """What ``make`` writes, with other values of its configuration, without a tensor, or with others."""
    return pytest.param(make, said, error, inner, gone, stored or {}, values, id=f"{make.__name__}: {said[:50]}")


CASES = [
    case(speculators, "sets accept_tolerance to 0.1", UNKNOWN,
         speculators_config={"proposal_methods": [{"accept_tolerance": 0.1}]}),
    case(speculators, "sets verifier_accept_k to 3", UNKNOWN,
         speculators_config={"proposal_methods": [{"verifier_accept_k": 3}]}),
    case(speculators, "kind 'oracle'", UNKNOWN, speculators_model_type="oracle"),
    case(strange, "no kind of head that is known", UNKNOWN),
    case(speculators, "lacks 1 tensors, for example layers.0.mlp.down_proj.weight", gone="layers.0.mlp.down_proj"),
    case(speculators, r"norm.weight is \[63\], and by its configuration it would be \[64\]",
         stored={"norm.weight": torch.ones(63)}),
    case(speculators, "no d2t that says which", gone="d2t"),
    case(speculators, "d2t does not name", stored={"d2t": -torch.arange(len(IDS))}),
    case(speculators, "lacks mask_hidden", speculators_model_type="peagle"),
    case(peagle, "mask_token_id is 320, no token of 320", mask_token_id=320),
    case(plain, "has '64' for hidden_size, no size", hidden_size="64"),
    case(plain, "has 0 for num_attention_heads, no size", num_attention_heads=0),
    case(plain, "has True for num_hidden_layers, no size", num_hidden_layers=True),
    case(plain, r"gate_proj.weight is \[96, 64\], and by its configuration it would be \[80, 64\]",
         intermediate_size=80),
    case(plain, "lacks .* tensors, for example layers.1", num_hidden_layers=2),
    case(plain, "no layers can be made", rope_parameters={"rope_type": "unheard-of", "rope_theta": 1.0}),
    case(plain, r"reads layers \[-1, 3, 4\]", eagle_aux_hidden_state_layer_ids=[-1, 3, 4]),
    case(plain, "is 'all', no list of layers", eagle_aux_hidden_state_layer_ids="all"),
    case(medusa, "sets posterior_threshold to 0.09: typical acceptance", UNKNOWN, posterior_threshold=0.09),
    case(medusa, "sets typical_acceptance_sampler_posterior_alpha to 0.3: typical acceptance", UNKNOWN,
         typical_acceptance_sampler_posterior_alpha=0.3),
    case(medusa, "sets typical_acceptance to True: typical acceptance", UNKNOWN, typical_acceptance=True),
    case(small_medusa, "lacks 1 tensors, for example 1.0.linear.weight", gone="1.0.linear.weight"),
    case(small_medusa, "lacks 2 tensors, for example 3.0.linear.weight", medusa_num_heads=4),
    case(small_medusa, r"2.1.weight is \[320, 63\], .* it would be \[320, 64\]",
         stored={"2.1.weight": torch.ones(VOCAB, 63)}),
    case(small_medusa, "has 65 Medusa heads of 1 blocks; 1 to 64", medusa_num_heads=65),
    case(small_medusa, "'three' for medusa_num_heads", medusa_num_heads="three"),
    case(no_medusa, "has 0 Medusa heads"),
    case(medusa_vllm, "no token_map that says which", gone="token_map"),
    *(case(medusa_vllm, "does not name", stored={"token_map": torch.tensor(ids)})
      for ids in ([*IDS[:-1], IDS[0]], [*IDS[:-1], VOCAB], IDS[:-1])),
    case(zlab, "mask_token_id is None, no token of 320", inner={"mask_token_id": None}),
    case(zlab, "mask_token_id is 320, no token of 320", inner={"mask_token_id": VOCAB}),
    case(zlab, "block_size is 1; a block has 2 tokens or more", inner={"block_size": 1}),
    case(zlab, "block_size is '16'", block_size="16"),
    case(zlab, "target_layer_ids, the target's layers that it reads, are not given", inner={"target_layer_ids": None}),
    case(zlab, r"reads layers \[0, 2, 6\], and the target has 6", inner={"target_layer_ids": [0, 2, 6]}),
    case(zlab, "target_layer_ids is '1', no list of layers", inner={"target_layer_ids": "1"}),
    case(zlab, "there are 3 layers", layer_types=["full_attention"]),
    case(zlab, "sets use_swa to True, a variant of DFlash", UNKNOWN, inner={"use_swa": True}),
    case(zlab, "sets attention_sink_bias to True, a variant of DFlash", UNKNOWN, inner={"attention_sink_bias": True}),
    case(zlab, "sets sample_from_anchor to True, a variant of DFlash", UNKNOWN, sample_from_anchor=True),
    case(zlab, "sets markov_rank to 256, a variant of DFlash", UNKNOWN, markov_rank=256),
    case(zlab, "sets projector_type to 'domino', a variant of DFlash", UNKNOWN, projector_type="domino"),
    case(zlab, "sets final_logit_softcapping to 30.0, a variant", UNKNOWN, inner={"final_logit_softcapping": 30.0}),
    case(zlab, r"sets causal_head to True, a variant of DFlash \(JetSpec\)", UNKNOWN, causal_head=True),
    case(zlab, "lacks 1 tensors, for example layers.1.self_attn.q_norm.weight", gone="layers.1.self_attn.q_norm"),
    case(zlab, "for example markov_head.markov_w1.weight", UNKNOWN,
         stored={"markov_head.markov_w1.weight": torch.ones(VOCAB, 4)}),
    case(zlab, "LiLiCorr", UNKNOWN, architectures=["LiLiCorrDraftModel"]),
    case(zlab, "EAGLE-4", UNKNOWN, architectures=["LlamaForCausalLMEagle4"]),
    case(zlab, "Jacobi passes", UNKNOWN, speculators_model_type="xpress"),
    case(zlab, "by Jacobi passes", UNKNOWN, speculators_config={"algorithm": "xpress"}),
    case(zlab2, "sets projector_type to 'domino'", UNKNOWN, projector_type="domino"),
    case(zlab2, "sets markov_rank to 8", UNKNOWN, markov_rank=8),
    case(zlab2, "conv_group_size 24 does not divide a width of 64", inner={"conv_group_size": 24}),
    case(zlab2, "has '8' for selector_rank, no size", inner={"selector_rank": "8"}),
    case(zlab2, "output_multiplier is '2', no number", inner={"output_multiplier": "2"}),
    case(deepspec, "layers of DeepSeek-V4", UNKNOWN, architectures=["DeepseekV4DSparkModel"]),
    case(deepspec, "markov_head_type is 'lstm', and only vanilla, gated, rnn", UNKNOWN, markov_head_type="lstm"),
    case(hydra, "architecture 'eagle-attn', which cannot", UNKNOWN, hydra_head_arch="eagle-attn"),
    case(hydra, "architecture 'cross-attn', which cannot", UNKNOWN, hydra_head_arch="cross-attn"),
    case(hydra, "heads that are not grounded", UNKNOWN, grounded_heads=False),
    case(hydra, "'three' for hydra_num_heads, no size", hydra_num_heads="three"),
    case(hydra, "has 65 Hydra heads of 2 blocks; 1 to 64", hydra_num_heads=65),
    case(hydra, "has 3 Hydra heads of 0 blocks", hydra_num_layers=0),
    case(hydra, "reads the hidden state 7 layers before the last, .* has 6", hidden_state_offset=7),
    case(hydra, "lacks 8 tensors, for example hydra_lm_head.3.bias", hydra_num_heads=4),
    case(hydra, "6 tensors that Hydra heads do not have, for example hydra_mlp.0.1", UNKNOWN, hydra_num_layers=1),
    case(hydra, "lacks .* for example prefix_embeding_layer.layers.0", hydra_head_arch="prefix-mlp"),
    case(hydra, r"hydra_mlp.1.0.linear.bias is \[63\], .* it would be \[64\]",
         stored={"hydra_mlp.1.0.linear.bias": torch.ones(63)}),
    case(hydra, r"hydra_lm_head.0.weight is \[64\], .* it would be \[320, 64\]",
         stored={"hydra_lm_head.0.weight": torch.ones(64)}),
    case(hydra, r"do not have, for example hydra_mlp\.1\.gate", UNKNOWN,
         stored={"hydra_mlp.1.gate.weight": torch.ones(1, 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said", "error", "inner", "gone", "stored", "values"), CASES)
def test_what_cannot_be_read_as_it_is_meant_is_refused_by_name(
    make: Any, said: str, error: Any, inner: Any, gone: str, stored: Any, values: Any, target: Any, tmp_path: Path
) -> None:
    make(tmp_path, target)
    edit(tmp_path, inner, **values)
    path = tmp_path / "model.safetensors"
    if gone != "-" or stored:
        kept = {name: value for name, value in load_file(path).items() if not name.startswith(gone)}
        save_file(kept | stored, path)
    with pytest.raises(error, match=said) as caught:
        load(tmp_path, target)
    assert caught.value.exit_code == 2
