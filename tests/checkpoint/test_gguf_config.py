"""What a GGUF file says of its model is honoured, also where transformers' conversion leaves it out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.checkpoint.gguf_config import correct_config
from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import Source
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_llama, make_model
from tests.support.references.engine_harness import make_checkpoint

SEQUENCE = [(37 * i + 5) % 256 + 3 for i in range(60)]


class _Field:
    def __init__(self, value: Any) -> None:
        self._value = value

    def contents(self) -> Any:
        return self._value


class _Reader:
    """As much of a header as is read; the tensors are names only."""

    def __init__(self, tensors: tuple[str, ...] = (), **stated: Any) -> None:
        self.fields = {key.replace("__", "."): _Field(value) for key, value in stated.items()}
        self.tensors = [type("Tensor", (), {"name": name}) for name in tensors]


def _correct(config: Any, reader: _Reader) -> Any:
    correct_config(Source("tiny.gguf", Path(), "tiny.gguf", ()), reader, config)
    return config


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED = [
    ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    ({"rope_type": "linear", "factor": 2.0}, {"scale_linear": 2.0}),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
    ),
    ({"rope_type": "llama3", **LLAMA3}, {}),
]


@pytest.mark.parametrize(("parameters", "stated"), SCALED, ids=["linear", "old linear", "yarn", "llama3"])
def test_scaled_positions_give_the_original_model(tmp_path, parameters, stated):
    rope = {"rope_parameters": {"rope_theta": 500000.0, **parameters}, "max_position_embeddings": 128}
    model = make_model("Qwen2", GROUPED | rope)
    path, tensors = tmp_path / "tiny.gguf", {}
    if parameters["rope_type"] == "llama3":  # such a file has only what divides the frequencies
        plain = LlamaConfig(**(GROUPED | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}))
        factors = LlamaRotaryEmbedding(plain).inv_freq / model.model.rotary_emb.inv_freq
        assert factors.max() > 7
        tensors["rope_freqs.weight"] = factors.numpy()
    write_gguf(model, path, stated={f"qwen2.rope.{key}": value for key, value in stated.items()}, tensors=tensors)
    found = load_checkpoint(str(path))
    torch.testing.assert_close(found.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    result = compute_reference_logits(found, [SEQUENCE])[0]
    np.testing.assert_allclose(result, compute_reference_logits(make_checkpoint(model), [SEQUENCE])[0], atol=1e-4)


def test_factors_that_no_parameters_give_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    own = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    write_gguf(make_llama(), path, architecture="llama", tensors=own)
    with pytest.raises(CheckpointError, match=r"factors of its own \(rope_freqs\.weight\)"):
        load_checkpoint(str(path))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_unknown_scaling_is_refused(kind: str) -> None:
    stated = {"general__architecture": "llama", "llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 2.0}
    with pytest.raises(CheckpointError, match=f"scales its positions by {kind}"):
        _correct(LlamaConfig(**GROUPED), _Reader(**stated))


def test_long_factors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="longrope"):
        _correct(Phi3Config(**GROUPED), _Reader(("rope_factors_long.weight",), general__architecture="phi3"))


def test_factors_of_yarn_are_taken_over() -> None:
    stated = {"general__architecture": "llama", "llama__rope__scaling__type": "yarn"}
    stated |= {"llama__rope__scaling__factor": 4.0, "llama__rope__scaling__attn_factor": 1.0}
    stated |= {"llama__rope__scaling__yarn_beta_fast": 16.0}
    parameters = _correct(LlamaConfig(**GROUPED), _Reader(**stated)).rope_parameters
    assert parameters["beta_fast"] == 16.0
    assert parameters["attention_factor"] == pytest.approx(1.138629)
    assert parameters["original_max_position_embeddings"] == 256


def test_gemma3_scales_only_the_layers_that_see_everything() -> None:
    stated = {"general__architecture": "gemma3", "gemma3__rope__scaling__type": "linear"}
    stated |= {"gemma3__rope__scaling__factor": 8.0, "gemma3__rope__freq_base_swa": 20000.0}
    parameters = _correct(Gemma3TextConfig(**GROUPED), _Reader(**stated)).rope_parameters
    assert parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    assert parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 20000.0}


@pytest.mark.parametrize(("layers", "scalar"), [(48, 128), (62, 168)])
def test_gemma3_27b_scales_attention_by_its_width(layers: int, scalar: int) -> None:
    config = Gemma3TextConfig(hidden_size=5376, num_attention_heads=32, head_dim=128, num_hidden_layers=layers)
    assert _correct(config, _Reader(general__architecture="gemma3")).query_pre_attn_scalar == scalar


@pytest.mark.parametrize("pattern", [3, [True, True, False]])
def test_the_files_pattern_of_windows_is_taken_over(pattern: Any) -> None:
    config = Gemma3TextConfig(**(GROUPED | {"num_hidden_layers": 3}))
    stated = {"general__architecture": "gemma3", "gemma3__attention__sliding_window_pattern": pattern}
    assert _correct(config, _Reader(**stated)).layer_types == ["sliding_attention"] * 2 + ["full_attention"]


def test_windows_caps_and_turned_parts_of_heads_are_taken_over() -> None:
    config = _correct(Phi3Config(**GROUPED), _Reader(general__architecture="phi3", phi3__attention__sliding_window=7))
    assert config.sliding_window == 7
    stated = {"general__architecture": "stablelm", "stablelm__rope__dimension_count": 8}
    stated |= {"stablelm__rope__freq_base": 5000.0}
    config = _correct(StableLmConfig(**GROUPED), _Reader(**stated))
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.rope_parameters["rope_theta"] == 5000.0
    config = _correct(
        Gemma3TextConfig(**GROUPED), _Reader(general__architecture="gemma3", gemma3__final_logit_softcapping=30.0)
    )
    assert config.final_logit_softcapping == 30.0
