"""DFlash in torch (Chen et al. 2026): a head that fills a block of masks in one step.

In every layer, keys and values come from the target's projected hidden states, one entry for each token so far, and
from the block; queries come from the block alone: the newest token, and a mask for each token to guess. All of the
block sees all of the context and all of the block, unless a layer is causal.

Configurations have two dialects. Its authors (z-lab) have keys of their own in ``dflash_config``, some of them at the
top level; ``target_layer_ids`` counts layers whose *output* is read. speculators has them at the top level;
``aux_hidden_state_layer_ids`` counts hidden states.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import HeadFiles, is_named
from specexport.heads.kind import Caches, HeadKind, Reading, reversed_taps, shifted_taps
from specexport.heads.layered import (
    check_taps,
    find_body_type,
    load_layered,
    read_layer_config,
    read_layer_settings,
    read_layered,
)
from specexport.heads.loaded import LoadedHead, TargetTables, refuse_variant
from specexport.heads.modules import DraftHead, FeatureProjection, RunModule, norm_class
from specexport.heads.reference import CheckedRow, HeadReference
from specexport.heads.trace import trace_layers
from specexport.trace.export import TracedModel
from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_ARCHITECTURE = "DFlashDraftModel"
_SLIDING = "sliding_attention"
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "projector_type": (None, "dflash"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "markov_rank": (None, 0),
    "selector_rank": (None, 0),
    "conv_kernel_size": (None, 0),
    "causal_head": (None, False),
}
"""Keys of variants (DSpark, Domino, JetSpec, DFlash 2, windows and sinks of other writers): with what asks for none."""
_NAMES = {"causal_head": "JetSpec"}
"""What is known by another name than its key."""
_SECTIONS = ("dflash_config", "dspark_config")
"""Parts of a configuration with keys of its own; they come before the top level."""
PLAIN_HEAD = "give a plain DFlash head, or an EAGLE-3 or P-EAGLE head."
_AGAIN = "give the complete head, with the config.json that belongs to its weights."
BLOCK_STEPS = (((5, 3), (2, 2)), ((1, 3), (3, 4)), ((2, 2), (1, 3)))
"""New context entries and tokens of the block, of each row in each step of the build's proof."""
GUESS_STEP, GUESS_ROWS = 2, 5
"""Where guesses are looked at: every second place, and blocks as a draft of 4 tokens has them."""


class ContextProjection(FeatureProjection):
    """From hidden states of the target to the context that every layer reads: ``hidden_norm(fc(.))``."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.hidden_norm = norm_class(config)(config.hidden_size)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Features [..., E] of the tapped hidden states [..., H] each."""
        context: Tensor = self.hidden_norm(super().forward(states))
        return context


class BlockHead(DraftHead):
    """A head that reads context entries, which have a feature and no token, and a block of tokens after them."""

    def __init__(self, config: HeadConfig, causal: Sequence[bool]) -> None:  # layers that hide what follows a token
        super().__init__(config)
        # compute the rows of context entries too, so that no size depends on a value: a CUDA graph can hold it
        self.every_row = False
        for layer, hides in zip(self.body.layers, causal, strict=True):
            layer.self_attn.is_causal = hides
            whole = layer.self_attn.o_proj
            layer.self_attn.o_proj = _BlockLinear(whole.in_features, whole.out_features, whole.bias is not None)

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """The hidden state after the last layer [1, T, H]; that of a context entry means nothing.

        A context entry, ``abi.CONTEXT_ID`` in the token ids [T], gives keys and values of its feature in every layer,
        and has no hidden state: what comes after attention is computed for the block alone. The block's ``features``
        [1, T, E] are not read.
        """
        is_token = input_ids >= 0
        block = places = None
        self.see(is_token)
        state = self.embed(input_ids.clamp(min=0))[None]
        if not self.every_row:
            block = is_token.nonzero().flatten()
            counted = is_token.to(torch.int64).cumsum(0)
            places = torch.where(is_token, counted - 1, counted[-1])  # after the block is a row of zeros
            state = state.index_select(1, block)
        for layer in self.body.layers:
            given = layer.input_layernorm(state)
            mix = self.mixer(layer, "attention", given)
            own = _spread(mix(0, given), places)
            layer.self_attn.o_proj.rows = block
            state = state + mix(1, run(layer.self_attn, torch.where(is_token[None, :, None], own, features)))
            given = layer.post_attention_layernorm(state)
            mix = self.mixer(layer, "mlp", given)
            state = state + mix(1, layer.mlp(mix(0, given)))
        return _spread(state, places)

    def see(self, is_token: Tensor) -> None:
        """A step begins: which of its entries [T] are of blocks. In front of each block is an entry that is not."""

    def mixer(self, layer: Any, part: str, given: Tensor) -> Callable[[int, Tensor], Tensor]:  # noqa: ARG002
        """What mixes a block's rows [1, n, H], before (0) and after (1) a part of a layer that reads ``given``."""
        return lambda _, rows: rows


class PlainBlockHead(BlockHead):
    """A head without more than that; ``shape`` of its configuration: which layers are causal."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, config.shape)


class _BlockLinear(nn.Linear):  # type: ignore[misc]  # torch is not followed
    """The linear layer after attention, for the block's rows alone."""

    rows: Tensor | None = None  # which of the step's rows these are, int64 [n]; None for all

    def forward(self, attended: Tensor) -> Tensor:
        """[1, n, H] of what attention gave for all rows [1, T, ·]."""
        result: Tensor = super().forward(attended if self.rows is None else attended.index_select(1, self.rows))
        return result


def _spread(state: Tensor, places: Tensor | None) -> Tensor:
    """The block's rows [1, n, H] at their places among all rows [1, T, H], zeros elsewhere; all rows as they are."""
    if places is None:
        return state
    zero = state.new_zeros(1, 1, state.shape[2])
    return torch.cat([state, zero], dim=1).index_select(1, places)


def block_states(head: DraftHead, features: Tensor, starts: Tensor, blocks: Tensor) -> Tensor:
    """Hidden states [A, R, H] of blocks of token ids [A, R] over one sequence; no block sees another.

    Attention is as transformers computes it. ``starts`` [A] is the position of each block's first token, at most n: it
    sees the ``features`` [n, E] before it.
    """
    count, known = len(blocks), len(features)
    # In front of each block is an entry that no block sees, as in a step: it parts the block from the one before.
    blocks = torch.cat([torch.full((count, 1), CONTEXT_ID), blocks], dim=1)
    width = blocks.shape[1]
    at = torch.cat([torch.arange(known), (starts[:, None] - 1 + torch.arange(width)).flatten()])
    own = torch.cat([torch.full((known,), -1), torch.arange(count).repeat_interleave(width)])
    begin = torch.cat([torch.zeros(known, dtype=torch.long), starts.repeat_interleave(width)])
    whole = torch.where(own[None] < 0, at[None] < begin[:, None], own[:, None] == own[None])
    rotary = head.body.rotary_emb(features[None], at[None])

    def run(module: Any, hidden: Tensor) -> Tensor:
        seen = whole.clone()
        if module.is_causal:
            seen = seen & (at[None] <= at[:, None])
        if module.sliding_window:
            seen = seen & (at[None] > at[:, None] - module.sliding_window)
        seen[known:, known::width] = False
        seen = seen | torch.eye(len(at), dtype=torch.bool)  # a context entry sees something, so that it is a number
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, float("-inf"))[None, None]
        output: Tensor = module(hidden_states=hidden, position_embeddings=rotary, attention_mask=mask)[0]
        return output

    ids = torch.cat([torch.full((known,), CONTEXT_ID), blocks.flatten()])
    rows = torch.cat([features, features.new_zeros(count * width, features.shape[1])])
    with torch.no_grad():
        state = head.states(ids, rows[None], run)[0, known:]
    return state.view(count, width, -1)[:, 1:]


def _recognizes(files: HeadFiles) -> bool:
    """Whether a configuration is of a DFlash head, in the dialect of its authors."""
    named = files.values.get("architectures")
    of_authors = (isinstance(named, list) and _ARCHITECTURE in named) or "dflash_config" in files.values
    return of_authors and not is_named(files)


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    config, causal = read_block(files, target, "dflash", PLAIN)
    return replace(config, shape=causal)


def read_block(
    files: HeadFiles, target: TargetFacts, kind: str, plain: Mapping[str, tuple[Any, ...]], *, block_size: int = 16
) -> tuple[HeadConfig, tuple[bool, ...]]:
    """What a head that fills blocks computes, and which of its layers are causal.

    ``plain`` has keys of what it does not compute, and the values that ask for none of it; ``block_size`` is that of
    files that have none. Raises as ``HeadKind.read``.
    """
    layer, layers = read_layer_settings(files), read_layer_config(files)
    layers |= _windows(files, layer) | {"model_type": find_body_type(files)}
    key, ids, shift = _layer_ids(files)
    taps = check_taps(files, target.num_layers, ids, key=key, shift=shift)
    config = read_layered(files, target, kind, layers, taps, "z-lab", projects=True)
    for name, values in plain.items():
        value = read_value(files, name, layer.get(name))
        if value not in values:
            raise UnsupportedModelError(
                f"{files.name} sets {name} to {value!r}, a variant of DFlash{_named(name)} that cannot be imported.",
                PLAIN_HEAD,
            )
    size, mask = _read_block_size(files, target.vocab_size, block_size)
    causal = _causal_layers(files, layer, layers["num_hidden_layers"])
    return replace(config, block_size=size, mask_token_id=mask), causal


def _windows(files: HeadFiles, layer: Mapping[str, Any]) -> dict[str, Any]:
    """What its layers' configuration has besides that of other heads: which have windows."""
    default = layer.get("model_type") not in ("qwen2", "qwen3")  # the others have no such switch
    windows = bool(layer.get("use_sliding_window", default))
    if layer.get("use_sliding_window") and layer.get("layer_types") is None:
        raise UnsupportedModelError(
            f"{files.name} sets use_sliding_window and has no layer_types that say which layers have a window.", _AGAIN
        )
    return {"use_sliding_window": windows}


def _named(key: str) -> str:
    return f" ({_NAMES[key]})" if key in _NAMES else ""


def _read_block_size(files: HeadFiles, vocab_size: int, default: int) -> tuple[int, int]:
    """Block size and mask token; CheckpointError if a value is out of range or missing."""
    size = read_value(files, "block_size", default)
    if type(size) is not int or size < 2:
        raise CheckpointError(
            f"{files.name}: block_size is {size!r}; a block has 2 tokens or more, the newest and one to guess.", _AGAIN
        )
    mask = read_value(files, "mask_token_id", read_value(files, "noise_token_id"))
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise CheckpointError(
            f"{files.name}: mask_token_id is {mask!r}, no token of {vocab_size}; a DFlash head reads it in the place "
            "of each token that it guesses.",
            _AGAIN,
        )
    return size, mask


def _layer_ids(files: HeadFiles) -> tuple[str, Any, int]:
    """Which layers of the target feed it: the key that says so, its value, and what to add for hidden states."""
    for key, shift in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        ids = read_value(files, key)
        if ids is not None:
            return key, ids, shift
    raise CheckpointError(f"{files.name}: target_layer_ids, the target's layers that it reads, are not given.", _AGAIN)


def _causal_layers(files: HeadFiles, layer: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Layers with a window are causal, unless something else is said; the others never are."""
    types = layer.get("layer_types") or ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count:
        raise CheckpointError(f"{files.name}: layer_types is {types!r}, and there are {count} layers.", _AGAIN)
    told = [read_value(files, key) for key in ("causal", "is_causal")]
    for value in told:
        if value is not None:
            return (bool(value),) * count
    non_causal = bool(files.values.get("sliding_window_non_causal", False))
    return tuple(kind == _SLIDING and not non_causal for kind in types)


def read_value(files: HeadFiles, key: str, default: Any = None) -> Any:
    """A value of a section of the kind's own, or else of the top level."""
    inner = [files.values.get(section) for section in _SECTIONS]
    for values in (*(each for each in inner if isinstance(each, dict)), files.values):
        if values.get(key) is not None:
            return values[key]
    return default


def load_block(
    make: Callable[[HeadConfig], BlockHead],
    files: HeadFiles,
    config: HeadConfig,
    tables: TargetTables,
    dtype: torch.dtype,
) -> LoadedHead:
    """Load a head that fills blocks; raises as ``HeadKind.load``, and for tensors that it has no use for."""
    loaded = load_layered(make, files, config, tables, dtype, projection=ContextProjection)
    known = {name.removeprefix("body.") for name in loaded.head.state_dict()} | {*loaded.projection.state_dict(), "d2t"}
    refuse_variant(files, files.shapes.keys() - known, "its kind does not have", PLAIN_HEAD)
    return loaded


def trace_block(head: BlockHead, *, fixed_sizes: bool, group_experts: bool) -> TracedModel:
    """The head as a graph; with ``fixed_sizes`` it gives logits of every row."""
    head.every_row = fixed_sizes
    return trace_layers(head, group_experts=group_experts)


def block_reference(loaded: LoadedHead) -> HeadReference:
    """Steps with random features and tokens, and what the head computes of them in torch, a sequence at a time."""
    generator, head, config = np.random.default_rng(21), loaded.head, loaded.config
    dtype = head.dtype
    known = [np.zeros((0, config.feature_size), np.float32) for _ in BLOCK_STEPS[0]]
    steps = []
    for sizes in BLOCK_STEPS:
        rows = []
        for row, (context, width) in enumerate(sizes):
            fresh = generator.normal(0, 1, (context, config.feature_size)).astype(np.float32)
            known[row] = np.concatenate([known[row], fresh])
            block = generator.integers(0, config.vocab_size, width)
            with torch.no_grad():
                features = torch.from_numpy(known[row]).to(dtype)
                starts = torch.tensor([len(features)])
                states = block_states(head, features, starts, torch.from_numpy(block)[None])[0]
                logits, handed_on = (each.float().numpy() for each in head.read(states))
            tokens = np.concatenate([np.full(context, CONTEXT_ID), block])
            fed = np.concatenate([fresh, np.zeros((width, config.feature_size), np.float32)])
            rows.append(CheckedRow(tokens, fed, context, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps)


def first_guesses(head: DraftHead, tokens: Tensor, features: Tensor, *, step: int, rows: int) -> Tensor:
    """Logits [A, N] after each ``step``-th token of a text [T], from the second on, of blocks of ``rows``."""
    states, _ = compute_guess_blocks(head, tokens, features, step=step, rows=rows)
    logits: Tensor = head.read(states[:, 1])[0]
    return logits


def compute_guess_blocks(
    head: DraftHead, tokens: Tensor, features: Tensor, *, step: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Hidden states [A, R, H] of blocks as a draft has them, and the place of each block's first token in the text."""
    starts = torch.arange(1, len(tokens), step)
    blocks = torch.full((len(starts), rows), head.head_config.mask_token_id)
    blocks[:, 0] = tokens[starts]
    return block_states(head, features, starts, blocks), starts


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """Each second place takes a block of its own; second guesses come with the first."""
    rows = min(loaded.config.block_size or GUESS_ROWS, GUESS_ROWS)
    yield first_guesses(loaded.head, tokens, features, step=GUESS_STEP, rows=rows), slice(1, None, GUESS_STEP)


def tap_readings(config: HeadConfig, num_layers: int) -> list[Reading]:
    """The hidden states that are named, all of them a layer earlier or later, and in the other order."""
    return [Reading(config), *shifted_taps(config, num_layers), *reversed_taps(config)]


block_kind = partial(HeadKind, trace=trace_block, reference=block_reference, readings=tap_readings)
"""A kind of heads that fill blocks."""

KIND = block_kind(
    name="dflash",
    called="a DFlash head",
    recognizes=_recognizes,
    read=_read,
    load=partial(load_block, PlainBlockHead),
    guesses=_guesses,
    needs=frozenset(["later tokens"]),
    speculators=("dflash",),
)
