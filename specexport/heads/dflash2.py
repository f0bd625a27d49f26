"""DFlash 2 in torch: blocks whose rows are mixed with those before them, and a selector over each place's best tokens.

Around attention and MLP of every layer, short convolutions along the block read a row and the ones before it, with
weights that depend on what the part reads. After the last layer, the likeliest tokens of each place get a score that
depends on the token in front of it: a product of three small tables (``specexport_runtime.drafters.selector``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specexport.heads import dflash
from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.dflash import (
    GUESS_ROWS,
    GUESS_STEP,
    BlockHead,
    block_kind,
    compute_guess_blocks,
    load_block,
    read_block,
    read_value,
)
from specexport.heads.files import HeadFiles, is_named, read_size
from specexport.heads.kind import Caches
from specexport.heads.loaded import HeadCorrection, LoadedHead, TargetTables
from specexport_runtime.errors import CheckpointError

_ARCHITECTURE = "DFlash2DraftModel"
_OWN = frozenset(
    ["input_embedding_scale", "output_multiplier", "final_logit_softcapping", "selector_rank", "conv_kernel_size"]
)
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    **{key: values for key, values in dflash.PLAIN.items() if key not in _OWN},
    "projector_type": (None, "dflash", "dflash2"),
}


class Dflash2Shape(NamedTuple):
    """What only these heads have."""

    causal: tuple[bool, ...]  # layers whose tokens see none after them
    taps: int  # rows that a convolution reads, the own one among them
    group: int  # neighbouring values of a row that have the same dynamic weight
    rank: int  # r of the selector's tables
    most: int  # tokens of a place that the selector looks at
    scale: float  # of embeddings
    multiplier: float  # of logits
    softcap: float  # of logits; 0 for none


class BlockConv(nn.Module):  # type: ignore[misc]  # torch is not followed
    """The two convolutions around a part of a layer: ``sum_j (base_j + dynamic_j) * row_(t-j)``, each value by itself.

    ``dynamic`` is a linear function of what the part reads, for each group of values.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)
        self.group = group

    def weights(self, given: Tensor) -> Tensor:
        """Weights [2, taps, n, groups, group] for the rows of a block; its part reads ``given`` [1, n, H]."""
        _, taps, width = self.base_kernel.shape
        groups = width // self.group
        dynamic = self.kernel_projection(given[0]).view(-1, 2, taps, groups, 1).permute(1, 2, 0, 3, 4)
        found: Tensor = self.base_kernel.view(2, taps, 1, groups, self.group) + dynamic
        return found


class SelectorModule(nn.Module):  # type: ignore[misc]
    """The tables that score a token by the one in front of it."""

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class MixingHead(BlockHead):
    """A head whose blocks are mixed along their rows, and whose logits a selector changes afterwards."""

    def __init__(self, config: HeadConfig) -> None:
        shape: Dflash2Shape = config.shape
        super().__init__(config, shape.causal)
        for layer in self.body.layers:
            for part in ("attention", "mlp"):
                layer.register_module(f"{part}_conv", BlockConv(config.hidden_size, shape.taps, shape.group))
        self.candidate_selector = SelectorModule(config.vocab_size, config.hidden_size, shape.rank)
        self._before: list[tuple[Tensor, Tensor]] = []  # for each tap but the own row: which row, and whether it counts

    @property
    def step_parameters(self) -> int:
        """See ``DraftHead.step_parameters``; of the selector a step reads a few rows."""
        selector = sum(parameter.numel() for parameter in self.candidate_selector.parameters())
        return int(super().step_parameters - selector)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [..., H], scaled."""
        embedded, scale = super().embed(input_ids), self.head_config.shape.scale
        return embedded if scale == 1.0 else embedded * scale

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftHead.read``; logits before the selector."""
        (logits, normed), shape = super().read(state), self.head_config.shape
        if shape.multiplier != 1.0:
            logits = logits * shape.multiplier
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        return logits, normed

    def see(self, is_token: Tensor) -> None:
        """See ``BlockHead.see``."""
        block = is_token.nonzero().flatten()
        row = is_token.to(torch.int64).cumsum(0).index_select(0, block) - 1
        at = torch.ones_like(is_token, dtype=torch.int64).cumsum(0) - 1
        reach, self._before = is_token, []
        for tap in range(1, self.head_config.shape.taps):  # by index: a slice would fix the least size of a step
            reach = reach.index_select(0, (at - 1).clamp(min=0)) & (at > 0) & is_token
            self._before.append(((row - tap).clamp(min=0), reach.index_select(0, block)))

    def mixer(self, layer: Any, part: str, given: Tensor) -> Callable[[int, Tensor], Tensor]:
        """See ``BlockHead.mixer``."""
        conv = getattr(layer, f"{part}_conv")
        weights = conv.weights(given)

        def mix(side: int, rows: Tensor) -> Tensor:
            own = rows[0].unflatten(-1, (-1, conv.group))
            mixed = weights[side, 0] * own
            for tap, (before, counts) in enumerate(self._before, 1):
                other = own.index_select(0, before)
                mixed = mixed + weights[side, tap] * other * counts[:, None, None].to(rows.dtype)
            return mixed.flatten(-2)[None]

        return mix

    def select(self, state: Tensor, before: Tensor, ids: Tensor | None) -> Tensor:
        """Scores [A, N] after tokens ``before`` [A], -inf for all but the best; ``ids`` [N] are those of the rows."""
        (logits, normed), own = self.read(state), self.candidate_selector
        values, rows = logits.topk(min(self.head_config.shape.most, logits.shape[-1]), dim=-1)
        pair = own.predecessor_codebook[before] * own.hidden_projection(normed)
        successors = own.successor_codebook[rows if ids is None else ids[rows]]
        scores = values + (successors * pair[:, None]).sum(-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, rows, scores)


def _recognizes(files: HeadFiles) -> bool:
    named = files.values.get("architectures")
    return isinstance(named, list) and _ARCHITECTURE in named and not is_named(files)


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    config, causal = read_block(files, target, "dflash2", _PLAIN, block_size=8)

    def size(key: str, default: int) -> int:
        return read_size(files, {key: read_value(files, key)}, key, default)

    def factor(key: str, default: float) -> float:
        value = read_value(files, key, default)
        if type(value) not in (int, float):
            raise CheckpointError(f"{files.name}: {key} is {value!r}, no number.", "fetch the head again.")
        return float(value)

    shape = Dflash2Shape(
        causal,
        taps=size("conv_kernel_size", 2),
        group=size("conv_group_size", 16),
        rank=size("selector_rank", 256),
        most=size("selector_top_k", 16),
        scale=factor("input_embedding_scale", 1.0),
        multiplier=factor("output_multiplier", 1.0),
        softcap=factor("final_logit_softcapping", 0.0),
    )
    if config.hidden_size % shape.group:
        raise CheckpointError(
            f"{files.name}: conv_group_size {shape.group} does not divide a width of {config.hidden_size}.",
            "give the complete head, with the config.json that belongs to its weights.",
        )
    return replace(config, shape=shape, norm_output=True)


def _load(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    loaded = load_block(MixingHead, files, config, tables, dtype)
    own = loaded.head.candidate_selector
    successors = own.successor_codebook.float().numpy()
    correction = HeadCorrection(
        "selector",
        {
            "predecessors": own.predecessor_codebook.float().numpy(),
            "successors": successors if loaded.ids is None else successors[loaded.ids],
            "projection": own.hidden_projection.weight.float().numpy(),
        },
        config.shape.most,
    )
    return loaded._replace(correction=correction)


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """Each second place takes a block of its own; the second guess reads the text's own token."""
    head, rows = loaded.head, min(loaded.config.block_size or GUESS_ROWS, GUESS_ROWS)
    ids = None if loaded.ids is None else torch.from_numpy(loaded.ids).long()
    states, starts = compute_guess_blocks(head, tokens, features, step=GUESS_STEP, rows=rows)
    for place in range(1, min(rows, 3)):
        behind = starts[starts + place - 1 < len(tokens)] + place - 1
        found = head.select(states[: len(behind), place], tokens[behind], ids)
        yield found, slice(place, None, GUESS_STEP)


KIND = block_kind(
    name="dflash2",
    called="a DFlash 2 head",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    guesses=_guesses,
    needs=frozenset(["later tokens", "corrected logits"]),
    speculators=("dflash2",),
)
