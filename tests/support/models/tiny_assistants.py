"""Tiny random Gemma-4 targets and assistants, and what transformers itself drafts with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.tiny_models import make_tokenizer, randomize

HIDDEN, OWN, VOCAB, WINDOW, LAYERS = 64, 32, 259, 6, 6
"""Width of the target and of the assistant, all tokens that the tokenizer has, and what cuts every text here."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "max_position_embeddings": 256, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
SHARED = {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
"""As the small models have it: the last layers read others' keys, and each has an embedding of its own."""
ONE_KEY = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""As the large models have it: keys are values too in layers without a window."""
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 37, "centroid_intermediate_top_k": 3}


def make_target(seed: int = 0, *, unified: bool = False, **overrides: Any) -> Any:
    """A target: a text model, or the whole of a model that reads images too."""
    import transformers as t

    if not unified:
        return randomize(t.Gemma4ForCausalLM(t.Gemma4TextConfig(**(TEXT | overrides))), seed)
    text = {key: value for key, value in TEXT.items() if "per_layer_input" not in key} | overrides
    config = t.Gemma4UnifiedConfig(text_config=text, vision_config=None, audio_config=None)
    return randomize(t.Gemma4UnifiedForConditionalGeneration(config), seed)


@contextmanager
def sharing_all_layers() -> Iterator[None]:
    """Transformers 5.23 makes no text model whose layers all share their keys, which is what an assistant is."""
    import transformers as t

    with pytest.MonkeyPatch.context() as patch:
        for kind in (t.Gemma4TextConfig, t.Gemma4UnifiedTextConfig):
            before = kind.kv_sharing_modes.fget

            def modes(config: Any, before: Any = before) -> Any:
                whole = config.num_kv_shared_layers == config.num_hidden_layers
                return ["reuse"] * config.num_hidden_layers if whole else before(config)

            patch.setattr(kind, "kv_sharing_modes", property(modes))
        yield


def make_assistant(seed: int = 1, *, unified: bool = False, text: Any = None, **config: Any) -> Any:
    import transformers as t

    own = TEXT | {"hidden_size": OWN, "intermediate_size": 48, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
    own |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]} | (text or {})
    if unified:
        own = {key: value for key, value in own.items() if "per_layer_input" not in key}
    kinds = (t.Gemma4UnifiedTextConfig, t.Gemma4UnifiedAssistantConfig, t.Gemma4UnifiedAssistantForCausalLM)
    layers, whole, model = (
        kinds if unified else (t.Gemma4TextConfig, t.Gemma4AssistantConfig, t.Gemma4AssistantForCausalLM)
    )
    with sharing_all_layers():
        made = model(whole(text_config=layers(**own), backbone_hidden_size=HIDDEN, **config))
    randomize(made, seed)
    if made.masked_embedding is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
        made.masked_embedding.token_ordering.copy_(order)
    return made


def save_target(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer(folder, VOCAB)
    return folder


def save_assistant(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def outputs_of(target: Any, tokens: Sequence[int]) -> Any:
    """What transformers hands to an assistant of a text that the target has read: keys, values and hidden states."""
    from transformers import DynamicCache

    kept = DynamicCache()
    with torch.no_grad():
        ids = torch.tensor([list(tokens)])
        found = target(
            input_ids=ids, past_key_values=kept, use_cache=True, output_hidden_states=True, return_shared_kv_states=True
        )
    if not found.shared_kv_states:
        types = target.config.get_text_config().layer_types
        found.shared_kv_states = {
            kind: (layer.keys, layer.values) for kind, layer in zip(types, kept.layers, strict=True)
        }
    return found


def draft(target: Any, assistant: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The draft that transformers makes after ``tokens``, all but the last of which the target has read."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    assistant.generation_config.num_assistant_tokens = count
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), GenerationConfig(max_length=1000)
    )
    ids = torch.tensor([list(tokens)])
    mask = {"attention_mask": torch.ones_like(ids)}
    found, _ = generator.get_candidates(ids, mask, outputs_of(target, tokens[:-1]), False, 0)
    return list(found[0, len(tokens) :].tolist())


def step(assistant: Any, token: int, feature: Tensor, position: int, caches: dict[str, Any], scale: float) -> Any:
    """One step of transformers' assistant: logits [V] and what it hands on [E]."""
    table = assistant.target_table[token] * scale
    with torch.no_grad():
        found = assistant(
            inputs_embeds=torch.cat([table, feature])[None, None],
            position_ids=torch.tensor([[position]]),
            attention_mask=None,
            shared_kv_states=caches,
        )
    return found.logits[0, 0], found.last_hidden_state[0, 0]
