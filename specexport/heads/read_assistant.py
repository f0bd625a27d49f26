"""The configuration of a Gemma-4 assistant, as transformers writes it, whether it fits the target, and its layers.

Its layers have queries and no keys: a layer with a window reads the keys and values of the target's last layer with a
window, any other those of the target's last layer without one. Layers of the target that share keys themselves are not
counted.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specexport.heads.config import AssistantShape, HeadConfig
from specexport.heads.files import CONFIG_NAME, HeadFiles
from specexport_runtime.abi import AFTER_NORM, LayerGeometry
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING, FULL = "sliding_attention", "full_attention"
ORDERING = "masked_embedding.token_ordering"
_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_ELSE = "give the assistant that was made for this target."
_FETCH = "fetch the assistant again."
_ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "vocab_size_per_layer_input")


class LentCache(NamedTuple):
    """A KV cache of the target that an assistant may read."""

    layer: int  # which layer fills it
    geometry: LayerGeometry


def is_assistant(files: HeadFiles) -> bool:
    """Whether a configuration says that it is of this kind."""
    named = files.values.get("architectures")
    architectures = named if isinstance(named, list) else []
    return files.values.get("model_type") in MODEL_TYPES or any(name in _ARCHITECTURES for name in architectures)


def lent_caches(text: Any) -> dict[str, LentCache]:
    """The last cache of each kind of layer in a target; none where it says nothing of kinds.

    ``text`` is transformers' configuration of the target's text model.
    """
    types = getattr(text, "layer_types", None) or []
    sharing = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    found = {}
    for layer, kind in enumerate(types[: len(types) - sharing]):
        own = text.per_layer_config[layer]
        size = int(getattr(own, "head_dim", 0) or own.hidden_size // own.num_attention_heads)
        found[kind] = LentCache(layer, LayerGeometry(int(own.num_key_value_heads), size, size))
    return found


def read_assistant(
    files: HeadFiles, *, target_hidden_size: int, vocab_size: int, lent: Mapping[str, LentCache]
) -> HeadConfig:
    """What an assistant computes; ``lent`` has the target's caches by the kind of layer that fills them.

    Raises CheckpointError if it was made for another target, or its configuration holds no sizes, and
    UnsupportedModelError if it is a variant.
    """
    values = files.values
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has no text_config, which an assistant needs.", _FETCH)
    odd = next((key for key in _ABSENT if text.get(key)), None)
    if odd is not None:
        raise UnsupportedModelError(
            f"{files.name} sets {odd} to {text[odd]!r}, which an assistant of Gemma 4 does not have.",
            "give a plain assistant.",
        )
    width = _size(files, values, "backbone_hidden_size")
    if width != target_hidden_size:
        raise CheckpointError(
            f"the head {files.name} reads hidden states of {width} values, and the target's have {target_hidden_size}.",
            _ELSE,
        )
    vocab = _size(files, text, "vocab_size")
    if vocab != vocab_size:
        raise CheckpointError(
            f"the head {files.name} is for a vocabulary of {vocab} tokens, and the target has {vocab_size}.", _ELSE
        )
    own = {**text, **dict.fromkeys(_ABSENT, 0), "enable_moe_block": False, "use_double_wide_mlp": False}
    own["model_type"] = text.get("model_type", "gemma4_text")
    return HeadConfig(
        kind="assistant",
        layer_config=own | {"num_hidden_layers": _size(files, text, "num_hidden_layers")},
        taps=(AFTER_NORM,),
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        source_format="transformers",
        assistant=_shape(files, own, lent, vocab_size),
    )


def _shape(files: HeadFiles, text: Mapping[str, Any], lent: Mapping[str, LentCache], vocab_size: int) -> AssistantShape:
    config = body_config(files.name, text)
    kinds = list(config.layer_types)
    caches: list[LentCache] = []
    for layer, kind in enumerate(kinds):
        cache = lent.get(kind)
        if cache is None:
            raise CheckpointError(
                f"the head {files.name} has layers of kind {kind}, and the target has "
                f"{'layers of ' + ', '.join(lent) if lent else 'no kinds of layers'} to read from.",
                _ELSE,
            )
        own = config.per_layer_config[layer]
        if (int(own.num_key_value_heads), int(own.head_dim)) != cache.geometry[:2]:
            raise CheckpointError(
                f"the head {files.name}: its layer {layer} reads {own.num_key_value_heads} heads of {own.head_dim} "
                f"values, and layer {cache.layer} of the target, its last one of kind {kind}, has "
                f"{cache.geometry.kv_heads} of {cache.geometry.k_dim}.",
                _ELSE,
            )
        if cache not in caches:
            caches.append(cache)
    num_centroids, chosen = _centroids(files, vocab_size)
    return AssistantShape(
        tuple(cache.layer for cache in caches),
        tuple(cache.geometry for cache in caches),
        tuple(caches.index(lent[kind]) for kind in kinds),
        num_centroids,
        chosen,
    )


def _centroids(files: HeadFiles, vocab_size: int) -> tuple[int, int]:
    """Groups of tokens, and how many of them are chosen; 0 for an LM head over all tokens."""
    if not files.values.get("use_ordered_embeddings", False):
        return 0, 0
    count = _size(files, files.values, "num_centroids")
    chosen = _size(files, files.values, "centroid_intermediate_top_k")
    if vocab_size % count or chosen > count:
        raise CheckpointError(
            f"{files.name}: {count} groups, of which {chosen} are chosen, do not divide {vocab_size} tokens.", _FETCH
        )
    return count, chosen


def _size(files: HeadFiles, values: Mapping[str, Any], key: str) -> int:
    """A whole number of the configuration, at least 1."""
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has {value!r} for {key}, no size.", _FETCH)
    return value


def body_config(name: str, text: Mapping[str, Any]) -> Any:
    """Transformers' configuration of an assistant's layers, with a vocabulary of one token.

    ``text`` is its ``text_config``. Raises CheckpointError if that is no configuration, and UnsupportedModelError if
    transformers has no such layers.
    """
    from transformers import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[text["model_type"]]
    except KeyError:
        raise UnsupportedModelError(
            f"{name}: transformers has no layers of {text['model_type']!r}.", "give an assistant of Gemma 4."
        ) from None

    # Transformers 5.23 counts layers that share keys against those of the same model that have some, and an assistant
    # has none.
    class AllShared(kind):  # type: ignore[misc, valid-type]
        @property
        def kv_sharing_modes(self) -> list[str]:
            """All layers read what another model has stored."""
            return ["reuse"] * int(self.num_hidden_layers)

    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # it has no vocabulary to have them in
    try:
        config = AllShared.from_dict({**text, **none, "vocab_size": 1, "num_kv_shared_layers": 0})
        config.num_kv_shared_layers = config.num_hidden_layers
        if len(config.layer_types) != config.num_hidden_layers:
            raise ValueError(f"{len(config.layer_types)} layer_types for {config.num_hidden_layers} layers")
    except Exception as error:  # values of the wrong type, sizes that do not fit one another
        raise CheckpointError(
            f"{name}: its text_config cannot be read ({type(error).__name__}: {error}).", "fetch the assistant again."
        ) from error
    return config


def make_body(name: str, text: Mapping[str, Any]) -> Any:
    """Transformers' model of an assistant's layers, without its embedding; see :func:`body_config`."""
    from transformers import MODEL_MAPPING

    config = body_config(name, text)
    body = MODEL_MAPPING[type(config).__mro__[1]]._from_config(config)
    del body.embed_tokens  # tokens come through the target's
    return body
