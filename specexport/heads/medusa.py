"""Medusa heads in torch: loading them, what they compute, and the graph of it.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", eq. 1:
``softmax(W2_k (SiLU(W1_k h_t) + h_t))`` guesses the token ``k + 1`` places after the one that ``h_t`` is of. The
target's own LM head gives the first of them, so here head i, from 0, guesses token t + i + 2.

Every row of a step names its head, as its token id. A head reads its own rows and no others: an LM head that no row
asks costs nothing, one that several sequences ask is read once.

Files have two dialects. FasterDecoding numbers what a head is made of: ``{i}.{j}.linear.weight`` is its block j,
``{i}.{blocks}.weight`` its LM head. vLLM has names: ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight``, and a
``token_map`` where the LM heads have some tokens only.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import CONFIG_NAME, HeadFiles, check_target, is_named, read_size
from specexport.heads.kind import Caches, HeadKind, list_state_readings
from specexport.heads.layered import compare_steps
from specexport.heads.loaded import (
    LoadedHead,
    TargetTables,
    convert_module_errors,
    fill_module,
    kept_ids,
    load_projection,
)
from specexport.heads.modules import HeadModule, run_by_head
from specexport.heads.reference import HeadReference
from specexport.heads.trace import trace_head_step
from specexport.trace.export import TracedModel
from specexport_runtime.abi import AFTER_NORM, STEP_INPUTS
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD
from specexport_runtime.errors import CheckpointError

TOKEN_MAP, ONE_LM_HEAD = "token_map", "lm_head.weight"
_NUMBERED = re.compile(r"(\d+)\.(\d+)\.(linear\.)?weight")
_NAMED = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|lm_heads\.(\d+))\.weight")
_MAX_BLOCKS = 64


class MedusaShape(NamedTuple):
    """Heads that stand side by side over one hidden state (Cai et al. 2024)."""

    num_blocks: int  # residual blocks of each head
    bias: bool  # the blocks' linear layers have one
    one_lm_head: bool = False  # all heads share an LM head
    logit_scale: float = 1.0  # what logits are multiplied by


class MedusaHeads(HeadModule):
    """Heads side by side over one hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        shape: MedusaShape = config.shape
        width, num_heads = config.hidden_size, config.num_draft_heads
        self.shape = shape
        self.blocks = nn.ModuleList(  # linear layers of the residual blocks, by head
            nn.ModuleList(nn.Linear(width, width, bias=shape.bias) for _ in range(shape.num_blocks))
            for _ in range(num_heads)
        )
        count = 1 if shape.one_lm_head else num_heads
        # [N, H] of each head, or the one that all share
        self.lm_heads = nn.ModuleList(nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(count))

    @property
    def step_parameters(self) -> int:
        """Parameters of one head: what a step reads for each place of a draft."""
        parts = (*self.blocks[0].parameters(), *self.lm_heads[0].parameters())
        return sum(parameter.numel() for parameter in parts)

    def forward(self, numbers: Tensor, features: Tensor) -> Tensor:
        """Logits [R, N] of heads ``numbers`` int64 [R] (the last at most) over features [R, H], each over its rows."""

        def answer(number: int, mine: Tensor) -> Tensor:
            state = features.index_select(0, mine)
            for block in self.blocks[number]:
                state = state + functional.silu(block(state))
            return state if self.shape.one_lm_head else self.lm_heads[number](state)

        found = run_by_head(numbers, len(self.blocks), answer)
        return self.lm_heads[0](found) if self.shape.one_lm_head else found

    def every_row(self, numbers: Tensor, features: Tensor) -> Tensor:
        """The same as :meth:`forward`, with sizes that depend on no value: a CUDA graph can hold it.

        Each head computes all rows, and gives zeros for those of others: to add zeros changes nothing. Every head is
        read in every step, so a draft of fewer tokens costs as much as one of all.
        """
        numbers = numbers.clamp(0, len(self.blocks) - 1)
        parts = []
        for number, blocks in enumerate(self.blocks):
            state = features
            for block in blocks:
                state = state + functional.silu(block(state))
            own = torch.where((numbers == number)[:, None], state, torch.zeros_like(state))
            parts.append(own if self.shape.one_lm_head else self.lm_heads[number](own))
        found = sum(parts[1:], parts[0])
        return self.lm_heads[0](found) if self.shape.one_lm_head else found


class MedusaStep(nn.Module):  # type: ignore[misc]
    """Heads as the contract sees them: numbers of heads and features in, logits and the same features out."""

    def __init__(self, heads: MedusaHeads, *, fixed_sizes: bool = False) -> None:
        super().__init__()
        self.model = heads
        self._fixed_sizes = fixed_sizes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step. Inputs: the step inputs, then the features; there are no caches."""
        input_ids, _, logit_rows, *_ = inputs[: len(STEP_INPUTS)]
        features = inputs[len(STEP_INPUTS)].index_select(0, logit_rows)
        heads = self.model.every_row if self._fixed_sizes else self.model
        logits = heads(input_ids.index_select(0, logit_rows), features.to(self.model.dtype))
        return logits, features


def _trace(heads: MedusaHeads, *, fixed_sizes: bool, group_experts: bool) -> TracedModel:  # noqa: ARG001
    return TracedModel(trace_head_step(MedusaStep(heads, fixed_sizes=fixed_sizes), ()), ())


def _load(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    kept = None if config.draft_vocab_size == config.vocab_size else kept_ids(files, config, TOKEN_MAP)
    ids = None if kept is None else np.sort(kept)
    names: dict[str, str] = {}
    with convert_module_errors(files), torch.device("meta"):
        heads = MedusaHeads(config)
    for head, blocks in enumerate(heads.blocks):
        for at, block in enumerate(blocks):
            names |= {f"blocks.{head}.{at}.{part}": _block_name(files, head, at, part) for part in block.state_dict()}
    stored = [_lm_head_name(files, heads.shape, head) for head in range(len(heads.lm_heads))]
    # Rows in the order of their ids.
    order: np.ndarray | None = None if kept is None else np.argsort(kept, kind="stable")
    if files.shapes.get(stored[0]) == (config.vocab_size, config.hidden_size):
        order = ids  # rows of all tokens, of which some are kept
        for lm_head in heads.lm_heads:
            lm_head.weight = nn.Parameter(torch.empty(files.shapes[stored[0]], device="meta"), requires_grad=False)
    if stored == [ONE_LM_HEAD] and ONE_LM_HEAD not in files.shapes:  # it is the target's own
        heads.lm_heads[0].weight = nn.Parameter(tables.lm_head, requires_grad=False)
        order = ids
    else:
        names |= {f"lm_heads.{head}.weight": name for head, name in enumerate(stored)}
    fill_module(heads, files, names)
    for lm_head in heads.lm_heads:
        rows = lm_head.weight if order is None else lm_head.weight[torch.from_numpy(order.astype(np.int64))]
        rows = rows if heads.shape.logit_scale == 1 else rows * heads.shape.logit_scale
        lm_head.weight = nn.Parameter(rows, requires_grad=False)
    heads = heads.to(dtype).eval().requires_grad_(False)
    return LoadedHead(config, heads, load_projection(files, config, dtype), ids)


def _recognizes(files: HeadFiles) -> bool:
    """Whether a head's configuration or its tensors say that it is of this kind."""
    values = files.values
    if is_named(files):
        return False
    named = "medusa_num_heads" in values or values.get("model_type") == "medusa"
    return named or any(_NUMBERED.fullmatch(name) or _NAMED.fullmatch(name) for name in files.shapes)


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    """What Medusa heads compute; the tensors say how many there are, as published files say too few."""
    numbered = _is_numbered(files)
    found_heads, found_blocks = _count_heads(files, numbered)
    num_heads = max(found_heads, _read_count(files, ("medusa_num_heads", "num_heads"), found_heads))
    num_blocks = _read_count(files, ("medusa_num_layers", *(() if numbered else ("num_hidden_layers",))), found_blocks)
    if not 1 <= num_heads <= MAX_LOOKAHEAD or num_blocks > _MAX_BLOCKS:
        raise CheckpointError(
            f"{files.name} has {num_heads} Medusa heads of {num_blocks} blocks; 1 to {MAX_LOOKAHEAD} of at most "
            f"{_MAX_BLOCKS} can be read.",
            "give the folder that holds their weights and their configuration.",
        )
    shape = MedusaShape(
        num_blocks,
        bias=bool(num_blocks) and _block_name(files, 0, 0, "bias") in files.shapes,
        one_lm_head=bool(files.values.get("original_lm_head", False)),
        logit_scale=_read_logit_scale(files),
    )
    rows, width = _lm_head_size(files, shape, target)
    ids = files.shapes.get(TOKEN_MAP)
    width = _read_count(files, ("hidden_size",), width)
    vocab = _read_count(files, ("vocab_size",), target.vocab_size if ids else rows)
    check_target(files, target, width=width, vocab_size=vocab)
    draft_vocab = _read_count(files, ("truncated_vocab_size",), ids[0] if ids else vocab)
    return HeadConfig(
        kind="medusa",
        layer_config={"model_type": "medusa", "hidden_size": width, "num_hidden_layers": 0},
        taps=(AFTER_NORM,),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        source_format="FasterDecoding" if numbered else "vLLM",
        num_draft_heads=num_heads,
        shape=shape,
    )


def _block_name(files: HeadFiles, head: int, block: int, part: str) -> str:
    """The name in the files of the ``part``, ``"weight"`` or ``"bias"``, of a residual block's linear layer."""
    if _is_numbered(files):
        return f"{head}.{block}.linear.{part}"
    return f"blocks.{head}.layers.{block}.{part}"


def _lm_head_name(files: HeadFiles, shape: MedusaShape, head: int) -> str:
    """The name in the files of a head's LM head."""
    if _is_numbered(files):
        return f"{head}.{shape.num_blocks}.weight"
    own = f"lm_heads.{head}.weight"
    return ONE_LM_HEAD if shape.one_lm_head and own not in files.shapes else own


def _is_numbered(files: HeadFiles) -> bool:
    return not any(_NAMED.fullmatch(name) for name in files.shapes)


def _count_heads(files: HeadFiles, numbered: bool) -> tuple[int, int]:
    """How many heads the tensors are of, and how many blocks they have."""
    heads, blocks = 0, 0
    for name in files.shapes:
        if numbered and (match := _NUMBERED.fullmatch(name)):
            heads = max(heads, int(match[1]) + 1)
            blocks = max(blocks, int(match[2]) + 1 if match[3] else 0)
        elif match := _NAMED.fullmatch(name):
            heads = max(heads, int(match[1] or match[3]) + 1)
            blocks = max(blocks, int(match[2] or -1) + 1)
    return heads, blocks


def _lm_head_size(files: HeadFiles, shape: MedusaShape, target: TargetFacts) -> tuple[int, int]:
    """Rows and columns of the first LM head; the target's, where the files have none."""
    found = files.shapes.get(_lm_head_name(files, shape, 0))
    if found is not None and len(found) == 2:
        return found[0], found[1]
    block = files.shapes.get(_block_name(files, 0, 0, "weight")) if shape.num_blocks else None
    return target.vocab_size, target.hidden_size if block is None else block[0]


def _read_count(files: HeadFiles, keys: tuple[str, ...], default: int) -> int:
    """The first of some keys of the configuration, a whole number."""
    key = next((key for key in keys if files.values.get(key) is not None), keys[0])
    return read_size(files, files.values, key, default, least=0)


def _read_logit_scale(files: HeadFiles) -> float:
    value = files.values.get("logit_scale", 1.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has {value!r} for logit_scale.", "fetch the head again.")
    return float(value)


def _reference(loaded: LoadedHead) -> HeadReference:
    """Steps in which token ids are numbers of heads; features are handed on as they are."""

    def compute(numbers: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return loaded.head(numbers, features), features

    return compare_steps(loaded, loaded.config.num_draft_heads, compute)


def _guesses(loaded: LoadedHead, _: Tensor, features: Tensor, __: Caches) -> Iterator[tuple[Tensor, slice]]:
    for number in range(min(2, loaded.config.num_draft_heads)):
        known = features[: len(features) - number]
        yield loaded.head(torch.full((len(known),), number), known), slice(1 + number, None)


KIND = HeadKind(
    name="medusa",
    called="Medusa heads",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    trace=_trace,
    reference=_reference,
    guesses=_guesses,
    readings=list_state_readings,
    prefixes=("medusa_heads.", "medusa_head."),
)
