"""Hydra heads in torch: loading them, what they compute, and the graph of it.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", section 3: head i, from 0, guesses
the token t + i + 2 from the hidden state of token t and the embeddings of the tokens t + 1 to t + i + 1, side by side.
The first of these is the newest token, and the others were guessed by the heads before it. A residual block joins them
(``R x + SiLU(W x)``), others follow, and an LM head. In Hydra++ (section 4) a decoder layer and a norm read the hidden
states first: an entry of its KV cache is of a hidden state alone.

In the graph a row ends in the tokens that a head reads: n of them ask head n - 1. What a step hands on is the hidden
state that its heads read, before the norm. A step of later heads is fed that again, and runs no decoder layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from specexport.heads.config import HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.loaded import LoadedHead, TargetTables, fill_module, load_projection
from specexport.heads.modules import RunModule, answer_by_head, make_body, through_layer
from specexport.heads.read_hydra import EMBEDDING, PREFIX, UNREAD, block_name, first_block, lm_head_name
from specexport_runtime.errors import CheckpointError, UnsupportedModelError


class HydraHead(nn.Module):  # type: ignore[misc]  # torch is not followed
    """One head; the first has number 0."""

    def __init__(self, config: HeadConfig, number: int) -> None:
        super().__init__()
        shape, width = config.hydra, config.hidden_size
        if shape is None:
            raise TypeError("a Hydra configuration is needed.")
        self.linear, self.residual = (nn.Linear((number + 2) * width, width) for _ in range(2))
        blocks = [
            nn.Linear(width, width) for _ in range(min(shape.num_blocks, 1) if shape.one_block else shape.num_blocks)
        ]
        self.blocks = nn.ModuleList(blocks * shape.num_blocks if shape.one_block else blocks)
        self.lm_head = nn.Linear(width, config.draft_vocab_size)

    def forward(self, given: Tensor) -> Tensor:
        """Logits [R, N] for a hidden state and embeddings side by side [R, (number + 2) H]."""
        state = self.residual(given) + functional.silu(self.linear(given))
        for block in self.blocks:
            state = state + functional.silu(block(state))
        logits: Tensor = self.lm_head(state)
        return logits


class HydraHeads(nn.Module):  # type: ignore[misc]
    """Heads over a hidden state and tokens."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape = config.hydra
        if shape is None:
            raise TypeError("a Hydra configuration is needed.")
        self.head_config = config
        # transformers' model of the prefix layer, for its layer, rotary embedding and last norm; None without one
        self.body = make_body(config) if shape.has_prefix else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)  # token embedding [V, H]
        self.heads = nn.ModuleList(HydraHead(config, number) for number in range(shape.num_heads))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embed_tokens.weight.dtype

    @property
    def step_parameters(self) -> int:
        """Parameters that a step reads, on average over a draft of all heads: one of them reads the prefix layer."""
        whole = sum(parameter.numel() for parameter in self.parameters())
        return int(whole - self.embed_tokens.weight.numel()) // len(self.heads)

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule) -> Tensor:  # noqa: ARG002
        """Hidden states behind the prefix layer [1, T, H], before its norm, for features [1, T, H]."""
        state = features
        for layer in () if self.body is None else self.body.layers:
            state = through_layer(layer, state, run)
        return state

    def guess(self, number: int, states: Tensor, embedded: Tensor) -> Tensor:
        """Logits [R, N] of a head for states [R, H] and the embeddings of its tokens [R, number + 1, H]."""
        normed = states if self.body is None else self.body.norm(states)
        logits: Tensor = self.heads[number](torch.cat([normed, embedded.flatten(1)], dim=-1))
        return logits


def heads_asked(input_ids: Tensor, logit_rows: Tensor, cu_new_tokens: Tensor) -> Tensor:
    """Which head each logit row asks, int64 [R]; -1 for the row of an entry without a token.

    A row asks head i if i + 1 tokens stand among its sequence's entries up to it. An entry that has a feature alone has
    ``abi.CONTEXT_ID`` in ``input_ids`` [T]; such entries come first. ``logit_rows`` is [R], ``cu_new_tokens`` [B+1].
    """
    is_token = (input_ids >= 0).to(torch.int64)
    counted = is_token.cumsum(0)
    begins = cu_new_tokens.to(torch.int64)[None]
    begin = torch.where(begins <= logit_rows[:, None], begins, 0).amax(1)
    return counted.index_select(0, logit_rows) - (counted - is_token).index_select(0, begin) - 1


def read_rows(
    heads: HydraHeads, state: Tensor, features: Tensor, input_ids: Tensor, logit_rows: Tensor, cu_new_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [R, N] of a packed step, and the hidden states [R, H] that it hands on.

    ``state`` [T, H] is behind the prefix layer, before its norm; ``features`` [T, H] are what the step was fed. For the
    others see :func:`heads_asked`.
    """
    numbers = heads_asked(input_ids, logit_rows, cu_new_tokens)
    fresh, handed = (each.index_select(0, logit_rows) for each in (state, features))
    states = torch.where((numbers > 0)[:, None], handed, fresh)
    embedded = heads.embed_tokens(input_ids.clamp(min=0))

    def answer(number: int, mine: Tensor) -> Tensor:
        places = (logit_rows.index_select(0, mine) - number)[:, None] + torch.arange(number + 1)
        window = embedded.index_select(0, places.clamp(min=0).flatten()).view(-1, number + 1, embedded.shape[1])
        return heads.guess(number, states.index_select(0, mine), window)

    return answer_by_head(numbers, len(heads.heads), answer), states


def load_hydra(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    """Load heads; see ``load.load_head``."""
    shape = config.hydra
    if shape is None:
        raise TypeError("a Hydra configuration is needed.")
    try:
        with torch.device("meta"):
            heads = HydraHeads(config)
        if heads.body is not None:
            heads.body.rotary_emb = make_body(config).rotary_emb  # its buffers are in no file
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # what the target's configuration makes no layer of
        raise CheckpointError(
            f"the head {files.name}: no prefix layer can be made of the target's configuration "
            f"({type(error).__name__}: {error}).",
            "fetch the target again.",
        ) from error
    names = _names(files, heads)
    unknown = sorted(
        name
        for name in files.shapes.keys() - names.values()
        if not UNREAD.fullmatch(name)
        and not (shape.one_block and _is_copy(name, files, shape.num_heads, shape.num_blocks))
    )
    if unknown:
        raise UnsupportedModelError(
            f"the head {files.name} has {len(unknown)} tensors that Hydra heads do not have, for example {unknown[0]}: "
            "it is a variant that cannot be imported.",
            "give Hydra heads as their authors write them.",
        )
    fill_module(heads, files, names)
    if EMBEDDING not in files.shapes:
        heads.embed_tokens.weight = nn.Parameter(tables.embedding, requires_grad=False)
    heads = heads.to(dtype).eval().requires_grad_(False)
    return LoadedHead(config, heads, load_projection(files, config, dtype), None)


def _names(files: HeadFiles, heads: HydraHeads) -> dict[str, str]:
    """The name in the files of each parameter."""
    shape = heads.head_config.hydra
    assert shape is not None  # noqa: S101 - the heads were made of it
    names = {} if EMBEDDING not in files.shapes else {"embed_tokens.weight": EMBEDDING}
    if heads.body is not None:
        names |= {f"body.{name}": PREFIX + name for name in heads.body.state_dict()}
    for head in range(shape.num_heads):
        kept = first_block(files, head, shape.num_blocks)
        for part in ("weight", "bias"):
            own = {"linear": "linear", "residual": "res_connection"}
            names |= {
                f"heads.{head}.{ours}.{part}": block_name(files, head, 0, f"{theirs}.{part}")
                for ours, theirs in own.items()
            }
            names[f"heads.{head}.lm_head.{part}"] = lm_head_name(files, head, part)
            for at in range(shape.num_blocks):
                block = kept if shape.one_block else at + 1
                names[f"heads.{head}.blocks.{at}.{part}"] = block_name(files, head, block, f"linear.{part}")
    return names


def _is_copy(name: str, files: HeadFiles, num_heads: int, num_blocks: int) -> bool:
    """Whether a tensor is a further copy of a block that is run again."""
    blocks = ((head, at) for head in range(num_heads) for at in range(1, num_blocks + 1))
    return any(name.startswith(block_name(files, head, at, "linear.")) for head, at in blocks)


def first_guesses(heads: HydraHeads, number: int, tokens: Tensor, states: Tensor) -> Tensor:
    """Logits [T-1-number, N] of one head at every place of a text [T], fed the text's own tokens.

    ``states`` [T-1, H] are of all its tokens but the last, as ``HydraHeads.states`` gives them.
    """
    count = len(tokens) - 1 - number
    windows = tokens[1:].unfold(0, number + 1, 1)
    with torch.no_grad():
        return heads.guess(number, states[:count], heads.embed_tokens(windows))
