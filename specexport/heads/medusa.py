"""Medusa heads in torch: loading them, what they compute, and the graph of it.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", eq. 1:
``softmax(W2_k (SiLU(W1_k h_t) + h_t))`` guesses the token ``k + 1`` places behind the one that ``h_t`` is of. The
target's own LM head gives the first of them, so here head i, from 0, guesses token t + i + 2.

Every row of a step names its head, as its token id. A head reads its own rows and no others: an LM head that no row
asks costs nothing, one that several sequences ask is read once.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specexport.heads.config import HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.loaded import LoadedHead, TargetTables, fill_module, load_projection
from specexport.heads.modules import answer_by_head
from specexport.heads.read_medusa import ONE_LM_HEAD, TOKEN_MAP, block_name, lm_head_name
from specexport.trace.export import TracedModel, trace_step
from specexport_runtime.abi import LOGITS, NEXT_FEATURES, STEP_INPUTS, TOKEN_FEATURES
from specexport_runtime.errors import CheckpointError
from specexport_runtime.executors.base import Int32Array


class MedusaHeads(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Heads side by side over one hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape, width = config.medusa, config.hidden_size
        if shape is None:
            raise TypeError("a Medusa configuration is needed.")
        self.head_config, self.shape = config, shape
        self.blocks = nn.ModuleList(  # linear layers of the residual blocks, by head
            nn.ModuleList(nn.Linear(width, width, bias=shape.bias) for _ in range(shape.num_blocks))
            for _ in range(shape.num_heads)
        )
        count = 1 if shape.one_lm_head else shape.num_heads
        # [N, H] of each head, or the one that all share
        self.lm_heads = nn.ModuleList(nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(count))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.lm_heads[0].weight.dtype

    @property
    def step_parameters(self) -> int:
        """Parameters of one head: what a step reads for each place of a draft."""
        parts = (*self.blocks[0].parameters(), *self.lm_heads[0].parameters())
        return sum(parameter.numel() for parameter in parts)

    def forward(self, numbers: Tensor, features: Tensor) -> Tensor:
        """Logits [R, N] of heads ``numbers`` int64 [R] over features [R, H], each head over its own rows.

        A number beyond the last head means the last.
        """

        def answer(number: int, mine: Tensor) -> Tensor:
            state = features.index_select(0, mine)
            for block in self.blocks[number]:
                state = state + functional.silu(block(state))
            return state if self.shape.one_lm_head else self.lm_heads[number](state)

        found = answer_by_head(numbers, self.shape.num_heads, answer)
        return self.lm_heads[0](found) if self.shape.one_lm_head else found

    def every_row(self, numbers: Tensor, features: Tensor) -> Tensor:
        """The same as :meth:`forward`, with sizes that depend on no value: a CUDA graph can hold it.

        Each head computes all rows, and gives zeros for those of others: to add zeros changes nothing. Every head is
        read in every step, so a draft of fewer tokens costs as much as one of all.
        """
        numbers = numbers.clamp(0, self.shape.num_heads - 1)
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
    """Heads as the contract sees them: numbers of heads and features in, logits and the same features out.

    With ``fixed_sizes`` no size depends on a value.
    """

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


def trace_medusa(heads: MedusaHeads, *, fixed_sizes: bool = False) -> TracedModel:
    """Trace heads (eval mode) to ONNX IR. There is no attention in it."""
    ir_model = trace_step(
        MedusaStep(heads, fixed_sizes=fixed_sizes).eval(),
        heads.dtype,
        (),
        [*STEP_INPUTS, TOKEN_FEATURES],
        [LOGITS, NEXT_FEATURES],
        {"E": heads.head_config.feature_size},
    )
    return TracedModel(ir_model, ())


def load_medusa(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    """Load heads; see ``load.load_head``."""
    kept = _kept_ids(files, config)
    ids = None if kept is None else np.sort(kept)
    names: dict[str, str] = {}
    with torch.device("meta"):
        heads = MedusaHeads(config)
    for head, blocks in enumerate(heads.blocks):
        for at, block in enumerate(blocks):
            names |= {f"blocks.{head}.{at}.{part}": block_name(files, head, at, part) for part in block.state_dict()}
    stored = [lm_head_name(files, heads.shape, head) for head in range(len(heads.lm_heads))]
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


def _kept_ids(files: HeadFiles, config: HeadConfig) -> Int32Array | None:
    """Token id of each row of the LM heads, in their order; None where they have all."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    if TOKEN_MAP not in files.shapes:
        raise CheckpointError(
            f"the head {files.name} has {config.draft_vocab_size} of {config.vocab_size} tokens, and no {TOKEN_MAP} "
            "that says which.",
            "give the complete head.",
        )
    ids = files.tensor(TOKEN_MAP).flatten().long().numpy()
    known = np.unique(ids)
    whole = len(known) == len(ids) == config.draft_vocab_size
    if not whole or known[0] < 0 or known[-1] >= config.vocab_size:
        raise CheckpointError(
            f"the head {files.name}: {TOKEN_MAP} does not name {config.draft_vocab_size} different tokens below "
            f"{config.vocab_size}.",
            "give the complete head.",
        )
    kept: Int32Array = ids.astype(np.int32)
    return kept
