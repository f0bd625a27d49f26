"""A GGUF file is read into the same model as its Hugging Face original."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.frontend import hash_checkpoint, load_checkpoint, reference_logits
from specexport_runtime.errors import CheckpointError
from tests.engine_harness import make_checkpoint
from tests.tiny_models import GROUPED, make_model

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Any, path: Path) -> None:
    """Write a Qwen2 with a byte vocabulary, weights in float32."""
    import gguf
    from tokenizers import pre_tokenizers

    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"<extra{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        if name in NAMES:
            short = NAMES[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            short = f"blk.{layer}.{BLOCK[part]}.{kind}"
        writer.add_tensor(short, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_original_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model("Qwen2", GROUPED)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    checkpoint = load_checkpoint(str(path))
    assert capfd.readouterr().err == ""  # no progress bar of the libraries beside our own
    assert checkpoint.source == "tiny.gguf"
    assert checkpoint.source_sha256 == hash_checkpoint(str(path))
    assert checkpoint.eos_token_ids == (2,)
    sequences = [[5, 9, 200, 31, 7]]
    found, wanted = reference_logits(checkpoint, sequences)[0], reference_logits(make_checkpoint(model), sequences)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not hasattr(checkpoint.model, "hf_quantizer")
    checkpoint.model.save_pretrained(tmp_path / "again")  # fails while a quantizer's marks are left
    assert (tmp_path / "again" / "model.safetensors").is_file()


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        load_checkpoint(str(path))


def test_a_folder_with_only_a_gguf_file_points_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        load_checkpoint(str(tmp_path))
    assert "model.gguf" in (caught.value.hint or "")
