"""EAGLE in torch: a head reads the embedding of a token and the feature before it (Li et al. 2024, 2025).

EAGLE-1 and 2 join both in a linear layer before the first decoder layer, EAGLE-3 at the input of its first attention.
P-EAGLE is an EAGLE-3 head that drafts all tokens in one step, with a mask in the place of each unknown one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import OTHER_TARGET, HeadFiles, is_named
from specexport.heads.kind import (
    BEFORE_NORM,
    Reading,
    flipped_flag_reading,
    reversed_taps,
    shifted_taps,
    swapped_reading,
)
from specexport.heads.layered import check_taps, layered_kind, load_layered, read_layer_config, read_layered
from specexport.heads.loaded import LoadedHead, TargetTables
from specexport.heads.modules import DraftHead, RunModule, norm_class, through_layer
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError

MASK = "mask_hidden"
"""The hidden states, side by side, that P-EAGLE has in the place of the target's."""


class EagleHead(DraftHead):
    """EAGLE-1 and 2: a linear layer joins both, and decoder layers follow, without a norm before or after them."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        bias = bool(config.layer_config.get("bias", True))
        self.fc = nn.Linear(config.target_hidden_size + config.hidden_size, config.hidden_size, bias=bias)
        self.body.layers[0].input_layernorm = nn.Identity()  # the file has none
        self.body.norm = nn.Identity()

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """See :meth:`DraftHead.hidden`."""
        state: Tensor = self.fc(self.side_by_side(embedded, features))
        for layer in self.body.layers:
            state = through_layer(layer, state, run)
        return state


class Eagle3Head(DraftHead):
    """EAGLE-3 and P-EAGLE: the attention of the first layer reads both side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, first = config.hidden_size, self.body.layers[0]
        first.hidden_norm = norm_class(config)(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * width, old.out_features, bias=old.bias is not None))

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """See :meth:`DraftHead.hidden`."""
        first, *others = self.body.layers
        normed = first.hidden_norm(features)
        both = self.side_by_side(first.input_layernorm(embedded), normed)
        residual = normed if self.head_config.norm_before_residual else features
        state: Tensor = residual + run(first.self_attn, both)
        state = state + first.mlp(first.post_attention_layernorm(state))
        for layer in others:
            state = through_layer(layer, state, run)
        return state


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 reads of a target of ``num_layers`` layers where nothing else is said (as EAGLE has it)."""
    return 2, num_layers // 2, num_layers - 3


def _read_eagle(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    return read_layered(files, target, "eagle", read_layer_config(files), (AFTER_NORM,), _format_of(files))


def _read_eagle3(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    layers, taps = read_layer_config(files), _taps(files, target.num_layers)
    config = read_layered(files, target, "eagle3", layers, taps, _format_of(files), projects=True)
    return replace(config, mask_token_id=_mask_token(files, target.vocab_size))


def _format_of(files: HeadFiles) -> str:
    return "EAGLE" if any(key.startswith("midlayer.") for _, key in files.stored.values()) else "ModelOpt"


def _taps(files: HeadFiles, num_layers: int) -> tuple[int, ...]:
    """The target's hidden states that a head reads.

    A list at the top level counts hidden states (speculators, vLLM). One in ``eagle_config`` counts layers whose
    *output* is read (ModelOpt, SpecForge, SGLang): one less for the same state.
    """
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    ids, inner = files.values.get(key), files.values.get("eagle_config") or {}
    if ids is None and isinstance(inner, dict) and inner.get(key) is not None:
        ids, shift = inner[key], 1
    return default_taps(num_layers) if ids is None else check_taps(files, num_layers, ids, key=key, shift=shift)


def _mask_token(files: HeadFiles, vocab_size: int) -> int | None:
    """The token that P-EAGLE is fed for unknown ones; None for other heads."""
    if MASK not in files.shapes:
        if files.values.get("speculators_model_type") == "peagle":
            raise CheckpointError(f"the head {files.name} lacks {MASK}, which a parallel head needs.", OTHER_TARGET)
        return None
    token = files.values.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{files.name}: mask_token_id is {token!r}, no token of {vocab_size}.", OTHER_TARGET)
    return token


def _load_eagle3(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    loaded = load_layered(Eagle3Head, files, config, tables, dtype)
    if config.mask_token_id is None:
        return loaded
    states = files.tensor(MASK).flatten().to(next(loaded.projection.parameters()).dtype)
    if len(states) != len(config.taps) * config.target_hidden_size:
        raise CheckpointError(
            f"the head {files.name}: {MASK} has {len(states)} values, and {len(config.taps)} hidden states of "
            f"{config.target_hidden_size} are read.",
            "give a head whose config.json belongs to its weights.",
        )
    with torch.no_grad():
        feature = loaded.projection(list(states.split(config.target_hidden_size))).float().numpy()
    return loaded._replace(mask_feature=feature)


def _readings(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    return [Reading(config), swapped_reading(config), Reading(replace(config, taps=(num_layers,)), BEFORE_NORM)]


def _readings3(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    found = [Reading(config), *shifted_taps(config, num_layers), flipped_flag_reading(config, "norm_before_residual")]
    if config.mask_token_id is None:
        found.append(flipped_flag_reading(config, "norm_output"))
    return [*found, *reversed_taps(config), swapped_reading(config)]


EAGLE3 = layered_kind(
    name="eagle3",
    called="an EAGLE-3 or P-EAGLE head",
    recognizes=lambda files: not is_named(files) and "layers.0.hidden_norm.weight" in files.shapes,
    read=_read_eagle3,
    load=_load_eagle3,
    readings=_readings3,
    speculators=("eagle3", "peagle"),
    prefixes=("eagle_module.", "eagle."),
    make=Eagle3Head,
    architecture="Eagle3DraftModel",
)
EAGLE = layered_kind(
    name="eagle",
    called="an EAGLE-1 or EAGLE-2 head",
    recognizes=lambda files: (
        not is_named(files) and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= files.shapes.keys()
    ),
    read=_read_eagle,
    load=partial(load_layered, EagleHead),
    readings=_readings,
    speculators=("eagle",),
)
