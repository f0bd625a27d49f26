"""Heads of decoder layers over an embedding: reading them, loading them, and what they guess.

A head's configuration and its tensors tell what it computes, its name never does. Where writers mean different things
by one key, the layers that feed a head above all, this is where it is settled (``docs/heads.md``).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import OTHER_TARGET, HeadFiles, check_target, is_named, read_size
from specexport.heads.kind import Caches, HeadKind
from specexport.heads.loaded import (
    LoadedHead,
    TargetTables,
    convert_module_errors,
    fill_module,
    kept_ids,
    load_projection,
)
from specexport.heads.modules import DraftHead, FeatureProjection, compute_rotation, make_body
from specexport.heads.reference import CHECK_LENS, HeadReference, causal_reference
from specexport.heads.trace import causal_step, trace_layers
from specexport.trace.layers import get_hidden_state
from specexport_runtime.errors import CheckpointError

_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias", "max_position_embeddings", "sliding_window", "layer_types", "bias", "partial_rotary_factor",
)  # fmt: skip
_BODIES = ("llama", "qwen2", "qwen3", "mistral")


def read_layer_settings(files: HeadFiles) -> dict[str, Any]:
    """What a configuration says of the head's layers; CheckpointError if that is no JSON object."""
    layer = files.values.get("transformer_layer_config", files.values)
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"{files.name}: transformer_layer_config is no JSON object.", "fetch the head again.")
    return dict(layer)


def read_layer_config(files: HeadFiles) -> dict[str, Any]:
    """Configuration of layers that are not made like the target's."""
    layer = read_layer_settings(files)
    config = {key: layer[key] for key in _LAYER_KEYS if layer.get(key) is not None}
    if config.get("model_type") not in _BODIES:
        config["model_type"] = find_body_type(files)
    width, heads = (read_size(files, layer, key) for key in ("hidden_size", "num_attention_heads"))
    config["num_hidden_layers"] = read_size(files, layer, "num_hidden_layers", 1)
    config["head_dim"] = read_size(files, layer, "head_dim", max(1, width // heads))
    return config


def find_body_type(files: HeadFiles) -> str:
    """Heads for any target have layers as Llama has them; a few say the target's model type all the same."""
    return "qwen3" if any("q_norm" in name for name in files.shapes) else "llama"


def read_layered(
    files: HeadFiles,
    target: TargetFacts,
    kind: str,
    layers: Mapping[str, Any],  # transformers' configuration of the head's layers
    taps: tuple[int, ...],
    source_format: str,  # of files without a name of speculators
    *,
    projects: bool = False,  # what it reads goes through a linear layer, and has any width
) -> HeadConfig:
    """What a head computes; CheckpointError if it was made for another target, or a size is none."""
    layer, values = read_layer_settings(files), files.values
    width = read_size(files, layer, "hidden_size")
    read_size(files, layer, "num_attention_heads")
    vocab = read_size(files, layer, "vocab_size", target.vocab_size)
    draft_vocab = read_size(files, values, "draft_vocab_size", vocab)
    given = read_size(files, values, "target_hidden_size", 0 if projects else width, least=0 if projects else 1)
    if not given and "fc.weight" in files.shapes:
        given = files.shapes["fc.weight"][1] // len(taps)
    check_target(files, target, width=given, vocab_size=vocab)
    return HeadConfig(
        kind=kind,
        layer_config=layers,
        taps=taps,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        projects=projects,
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(values.get("norm_before_fc", "input_norm.weight" in files.shapes)),
        fc_norm=bool(values.get("fc_norm", "fc_norm.0.weight" in files.shapes)),
        norm_output=bool(values.get("norm_output", False)),
        source_format="speculators" if is_named(files) else source_format,
    )


def check_taps(files: HeadFiles, num_layers: int, ids: Any, *, key: str, shift: int) -> tuple[int, ...]:
    """The target's hidden states for layers ``ids``, counted ``shift`` lower; CheckpointError names ``key``."""
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{files.name}: {key} is {ids!r}, no list of layers.", OTHER_TARGET)
    taps = tuple(i + shift for i in ids)
    if min(ids) < 0 or max(taps) > num_layers:
        raise CheckpointError(
            f"the head {files.name} reads layers {ids}, and the target has {num_layers}.", OTHER_TARGET
        )
    return taps


def load_layered(
    make: Callable[[HeadConfig], DraftHead],
    files: HeadFiles,
    config: HeadConfig,
    tables: TargetTables,
    dtype: torch.dtype,
    *,
    projection: Callable[[HeadConfig], FeatureProjection] = FeatureProjection,
    load_body: Callable[[HeadFiles, HeadConfig, torch.dtype], Any] | None = None,
) -> LoadedHead:
    """Load a head, layers by ``load_body`` if need be; an embedding or LM head that its files lack is the target's."""
    with convert_module_errors(files):
        with torch.device("meta"):
            head = make(config)
        head.to_empty(device="cpu")
        head.body.rotary_emb = make_body(config).rotary_emb  # its buffers are in no file
    if load_body is not None:
        head.body = load_body(files, config, dtype)
    names = {
        name: name.removeprefix("body.")
        for name in head.state_dict()
        if load_body is None or not name.startswith("body.")
    }
    shared = {"embed_tokens.weight", "lm_head.weight"} - files.shapes.keys()
    fill_module(head, files, {name: stored for name, stored in names.items() if name not in shared})
    made = load_projection(files, config, dtype, projection)
    # offsets from each row's own number
    kept = kept_ids(files, config, "d2t", lambda offsets: np.arange(len(offsets)) + offsets)
    ids = None if kept is None or len(kept) == config.vocab_size else np.sort(kept)
    if shared and tables.embedding.shape[1] != config.hidden_size:
        raise CheckpointError(
            f"the head {files.name} lacks {sorted(shared)[0]}, and the target's does not fit: it has "
            f"{tables.embedding.shape[1]} values a token, and the head {config.hidden_size}.",
            OTHER_TARGET,
        )
    if "embed_tokens.weight" in shared:
        head.embed_tokens.weight = torch.nn.Parameter(tables.embedding, requires_grad=False)
    if "lm_head.weight" in shared:
        rows = tables.lm_head if ids is None else tables.lm_head[torch.from_numpy(ids.astype(np.int64))]
        head.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)
    elif kept is not None:  # rows in the order of their ids
        order = torch.from_numpy(np.argsort(kept, kind="stable"))
        head.lm_head.weight.data = head.lm_head.weight.data[order]
    return LoadedHead(config, head.to(dtype).eval().requires_grad_(False), made, ids)


def layered_reference(loaded: LoadedHead) -> HeadReference:
    """Steps of random tokens and features, with attention as transformers computes it."""
    return compare_steps(loaded, loaded.config.vocab_size, lambda ids, fed: causal_step(loaded.head, ids, fed))


def compare_steps(
    loaded: LoadedHead, num_ids: int, compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> HeadReference:
    """Steps of random token ids below ``num_ids`` and features; ``compute`` gives logits and what is handed on."""
    generator = np.random.default_rng(21)
    tokens = [generator.integers(0, num_ids, n) for n in CHECK_LENS]
    features = [generator.normal(0, 1, (n, loaded.config.feature_size)).astype(np.float32) for n in CHECK_LENS]
    runs = [
        compute(torch.from_numpy(ids), torch.from_numpy(each).to(loaded.head.dtype))
        for ids, each in zip(tokens, features, strict=True)
    ]
    logits, handed = ([run[at].float().numpy() for run in runs] for at in (0, 1))
    return causal_reference(tokens, features, logits, handed)


def layered_guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """See ``HeadKind.guesses``: two steps, or the first guesses of a head that drafts all tokens in one."""
    steps = 2 if loaded.head.head_config.mask_token_id is None else 1
    for step in unroll(loaded.head, tokens[None], features[None], torch.tensor([len(tokens)]), steps):
        yield step.logits[0][step.valid[0]], slice(step.offset, None)


layered_kind = partial(HeadKind, trace=trace_layers, reference=layered_reference, guesses=layered_guesses)
"""A kind of heads whose module says all, in ``DraftHead.hidden``."""


class StepResult(NamedTuple):
    """One draft step at every place of the batch."""

    logits: Tensor  # of the head [B, T-1, N]: at place ``i``, of the token ``i + 2 + step``
    valid: Tensor  # places whose target is known, bool [B, T-1]
    offset: int  # the target's hidden state for place ``i`` is ``last[:, i + offset]``


def unroll(head: DraftHead, tokens: Tensor, features: Tensor, lengths: Tensor, steps: int) -> Iterator[StepResult]:
    """Draft at every place of the texts at once, ``steps`` tokens deep, fed the text's own tokens.

    This is training-time test (Li et al. 2025, section 3.1).
    Step ``s`` at place ``i`` sees the true features of places up to ``i``, and what the head itself gave at this place
    in the steps before: as it will when it drafts. ``tokens`` is int64 [B, T], ``features`` [B, T-1, E] are of all
    tokens but the last, ``lengths`` int64 [B] counts the tokens of each text.
    """
    count, width = features.shape[:2]
    past: dict[int, tuple[Tensor, Tensor]] = {}
    causal = torch.full((width, width), float("-inf")).triu(1)
    diagonal = torch.full((width, width), float("-inf")).fill_diagonal_(0.0)
    places = torch.arange(width)
    for step in range(steps):
        shifted = functional.pad(tokens[:, 1 + step :], (0, step))[:, :width]
        positions = (places + step)[None].expand(count, -1)
        rotary = compute_rotation(head.body, features, positions)
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        state = head.hidden(head.embed(shifted).detach(), features, _LayerRun(past, rotary, mask[None, None]))
        logits, features = head.read(state)
        valid = places[None] + 1 + step < lengths[:, None]
        yield StepResult(logits, valid, 1 + step)


class _LayerRun:
    """Runs modules with attention over the keys and values of all steps so far."""

    def __init__(self, past: dict[int, tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor], mask: Tensor) -> None:
        self._past, self._rotary, self._mask = past, rotary, mask

    def __call__(self, module: Any, hidden: Tensor) -> Tensor:
        output = module(
            hidden_states=hidden,
            position_embeddings=self._rotary,
            attention_mask=self._mask.to(hidden.dtype),
            past_key_values=self,
        )
        return get_hidden_state(output)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As transformers' cache: these after those of the steps before."""
        if layer in self._past:
            old_keys, old_values = self._past[layer]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._past[layer] = keys, values
        return keys, values
