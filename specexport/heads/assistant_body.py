"""The decoder layers of a Gemma-4 assistant, made by transformers."""

from collections.abc import Mapping
from typing import Any

from specexport_runtime.errors import CheckpointError, UnsupportedModelError


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
