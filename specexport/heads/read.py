"""A draft head's configuration in every dialect, turned into one form.

A head's configuration and its tensors tell what it computes, its name never does. Where writers mean different things
by one key, the layers that feed a head above all, this is where it is settled (``docs/heads.md``).
"""

from collections.abc import Mapping
from typing import Any

from specexport.heads.config import HeadConfig, default_taps
from specexport.heads.files import CONFIG_NAME, EMBED_NORM, MASK, HeadFiles
from specexport.heads.mtp_files import conventions_of, module_config
from specexport.heads.read_assistant import LentCache, is_assistant, read_assistant
from specexport.heads.read_dflash import Said, is_dflash, read_block, read_layer, read_layer_ids
from specexport.heads.read_hydra import is_hydra, read_hydra
from specexport.heads.read_medusa import is_medusa, lossy_setting, read_medusa
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias", "max_position_embeddings", "sliding_window", "layer_types", "bias", "partial_rotary_factor",
)  # fmt: skip
_BODIES = ("llama", "qwen2", "qwen3", "mistral")


def read_config(
    files: HeadFiles,
    *,
    num_layers: int,  # decoder layers of the target
    target_hidden_size: int,
    vocab_size: int,  # V of the target
    # configuration of the target's decoder layers, for heads with one that is made like them
    target_layer: Mapping[str, Any] | None = None,
    # caches of the target that an assistant may read, from ``read_assistant.lent_caches``; None for none
    lent: Mapping[str, LentCache] | None = None,
) -> HeadConfig:
    """What a head computes.

    Raises CheckpointError if it was made for another target, or its tensors contradict its configuration, and
    UnsupportedModelError if its kind is not known, or it asks for what is not lossless.
    """
    values = files.values
    _refuse_lossy(files)
    if is_hydra(files):
        return read_hydra(
            files,
            num_layers=num_layers,
            target_hidden_size=target_hidden_size,
            vocab_size=vocab_size,
            target_layer=target_layer or {},
        )
    if is_medusa(files):
        return read_medusa(files, target_hidden_size=target_hidden_size, vocab_size=vocab_size)
    if is_assistant(files):
        return read_assistant(
            files, target_hidden_size=target_hidden_size, vocab_size=vocab_size, lent={} if lent is None else lent
        )
    layer = values.get("transformer_layer_config", values)
    if not isinstance(layer, dict):
        raise CheckpointError(f"{files.name}: transformer_layer_config is no JSON object.", "fetch the head again.")
    kind = _kind_of(files)
    if kind == "mtp":
        config = module_config(files, layer)
    else:
        config = {key: layer[key] for key in _LAYER_KEYS if layer.get(key) is not None}
        if config.get("model_type") not in _BODIES:
            config["model_type"] = _body_of(files)
    width, heads = (_size(files, layer, key) for key in ("hidden_size", "num_attention_heads"))
    if kind != "mtp":
        config["num_hidden_layers"] = _size(files, layer, "num_hidden_layers", 1)
        config["head_dim"] = _size(files, layer, "head_dim", max(1, width // heads))
    vocab = _size(files, layer, "vocab_size", vocab_size)
    draft_vocab = _size(files, values, "draft_vocab_size", vocab)
    block_size, mask = None, None
    causal_layers: tuple[bool, ...] = ()
    if kind == "dflash":
        said = Said(files.name, values)
        config |= read_layer(said, layer) | {"model_type": _body_of(files)}
        block_size, mask, causal_layers = read_block(said, layer, config["num_hidden_layers"], vocab_size)
    reads_last = kind in ("eagle", "mtp")
    given = _size(files, values, "target_hidden_size", width if reads_last else 0)
    taps = (AFTER_NORM,) if reads_last else _taps(files, num_layers, kind)
    if not given and "fc.weight" in files.shapes:
        given = files.shapes["fc.weight"][1] // len(taps)
    if given != target_hidden_size:
        raise CheckpointError(
            f"the head {files.name} reads hidden states of {given} values, and the target's have {target_hidden_size}.",
            _ELSE,
        )
    if vocab != vocab_size:
        raise CheckpointError(
            f"the head {files.name} is for a vocabulary of {vocab} tokens, and the target has {vocab_size}.", _ELSE
        )
    conventions = conventions_of(files) if kind == "mtp" else {}
    return HeadConfig(
        kind=kind,
        layer_config=config,
        taps=taps,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(values.get("norm_before_fc", "input_norm.weight" in files.shapes)),
        fc_norm=bool(values.get("fc_norm", "fc_norm.0.weight" in files.shapes)),
        norm_output=bool(values.get("norm_output", conventions.get("norm_output", False))),
        feature_first=bool(conventions.get("feature_first", False)),
        mask_token_id=mask if kind == "dflash" else _mask_token(files, vocab_size),
        block_size=block_size,
        causal_layers=causal_layers,
        source_format=_format_of(files),
    )


_ELSE = "give a head that was made for this target."


def _kind_of(files: HeadFiles) -> Any:
    named = files.values.get("speculators_model_type")
    if named in ("eagle3", "eagle", "peagle", "mtp", "dflash"):
        return "eagle3" if named == "peagle" else named
    if named is not None:
        raise UnsupportedModelError(f"{files.name}: heads of kind {named!r} cannot be imported.", _KINDS)
    if EMBED_NORM in files.shapes:
        return "mtp"
    if is_dflash(files.values):
        return "dflash"
    if "layers.0.hidden_norm.weight" in files.shapes:
        return "eagle3"
    if "fc.weight" in files.shapes and "layers.0.self_attn.q_proj.weight" in files.shapes:
        return "eagle"
    raise UnsupportedModelError(f"{files.name} has the tensors of no kind of head that is known.", _KINDS)


_KINDS = (
    "give an EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE, DFlash, Medusa or Hydra head, an MTP module or a Gemma-4 assistant."
)


def _mask_token(files: HeadFiles, vocab_size: int) -> int | None:
    """The token that a parallel head is fed for unknown ones; None for other heads."""
    if MASK not in files.shapes:
        if files.values.get("speculators_model_type") == "peagle":
            raise CheckpointError(f"the head {files.name} lacks {MASK}, which a parallel head needs.", _ELSE)
        return None
    token = files.values.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{files.name}: mask_token_id is {token!r}, no token of {vocab_size}.", _ELSE)
    return token


def _size(files: HeadFiles, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of the configuration."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < (0 if default == 0 else 1):
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has {value!r} for {key}, no size.", "fetch the head again.")
    return value


def _body_of(files: HeadFiles) -> str:
    """Heads for any target have layers as Llama has them; a few say the target's model type all the same."""
    return "qwen3" if any("q_norm" in name for name in files.shapes) else "llama"


def _format_of(files: HeadFiles) -> str:
    if "speculators_model_type" in files.values:
        return "speculators"
    if is_dflash(files.values):
        return "z-lab"
    if EMBED_NORM in files.shapes:
        return "the target's checkpoint"
    return "EAGLE" if any(key.startswith("midlayer.") for _, key in files.stored.values()) else "ModelOpt"


def _taps(files: HeadFiles, num_layers: int, kind: str) -> tuple[int, ...]:
    """The target's hidden states that a head reads.

    A list at the top level counts hidden states (speculators, vLLM). One in ``eagle_config`` counts layers whose
    *output* is read (ModelOpt, SpecForge, SGLang): one less for the same state.
    """
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    ids, inner = files.values.get(key), files.values.get("eagle_config") or {}
    if kind == "dflash":
        key, ids, shift = read_layer_ids(Said(files.name, files.values))
    elif ids is None and isinstance(inner, dict) and inner.get(key) is not None:
        ids, shift = inner[key], 1
    if ids is None:
        return default_taps(num_layers)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{files.name}: {key} is {ids!r}, no list of layers.", _ELSE)
    taps = tuple(i + shift for i in ids)
    if min(ids) < 0 or max(taps) > num_layers:
        raise CheckpointError(f"the head {files.name} reads layers {ids}, and the target has {num_layers}.", _ELSE)
    return taps


def _refuse_lossy(files: HeadFiles) -> None:
    """Refuse settings that accept what the target would not have written."""
    typical = lossy_setting(files.values)
    if typical is not None:
        raise UnsupportedModelError(
            f"{files.name} sets {typical} to {files.values[typical]}: typical acceptance takes tokens that the target "
            "did not choose.",
            f"take {typical} out of {CONFIG_NAME}: text must stay the target's.",
        )
    config = files.values.get("speculators_config") or {}
    methods = config.get("proposal_methods") or [] if isinstance(config, dict) else []
    for method in methods:
        for key, harmless in (("accept_tolerance", (None, 0, 0.0)), ("verifier_accept_k", (None, 1))):
            value = method.get(key) if isinstance(method, dict) else None
            if value not in harmless:
                raise UnsupportedModelError(
                    f"{files.name} sets {key} to {value}, which accepts tokens that the target did not choose.",
                    f"take {key} out of {CONFIG_NAME}: text must stay the target's.",
                )
