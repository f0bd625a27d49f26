"""Hydra heads in torch: loading them, what they compute, and the graph of it.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", section 3: head i, from 0, guesses
the token t + i + 2 from the hidden state of token t and the embeddings of the tokens t + 1 to t + i + 1, side by side.
The first of these is the newest token, and the others were guessed by the heads before it. A residual block joins them
(``R x + SiLU(W x)``), others follow, and an LM head. In Hydra++ (section 4) a decoder layer and a norm read the hidden
states first: an entry of its KV cache is of a hidden state alone.

In the graph a row ends in the tokens that a head reads: n of them ask head n - 1. What a step hands on is the hidden
state that its heads read, before the norm. A step of later heads is fed that again, and runs no decoder layer.

In files, as their authors write them (zankner/Hydra), ``hydra_mlp.{i}.{j}`` is block j of head i. The first has two
linear layers over all that the head reads side by side, ``linear`` and ``res_connection``; the others have one.
``hydra_lm_head.{i}`` is the head's LM head, with a bias. Where the heads were trained with dropout layers, each of
these counts too: blocks are 1, 3, 5, and the LM head is its part 1. ``prefix_embeding_layer`` (it is spelled so) is the
decoder layer of Hydra++, with the target's own sizes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import OTHER_TARGET, HeadFiles, check_target, read_size
from specexport.heads.kind import Caches, HeadKind, list_state_readings
from specexport.heads.loaded import (
    LoadedHead,
    TargetTables,
    convert_module_errors,
    fill_module,
    load_projection,
    refuse_variant,
)
from specexport.heads.modules import HeadModule, RunModule, find_row_heads, make_body, run_by_head, through_layer
from specexport.heads.reference import CheckedRow, HeadReference
from specexport.heads.trace import HeadStep, causal_states, trace_layers
from specexport_runtime.abi import AFTER_NORM, CONTEXT_ID
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

EMBEDDING, PREFIX = "input_embed_fn.weight", "prefix_embeding_layer."
UNREAD = re.compile(r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.\w+)")
"""The target's embedding, which is stored along, and tables that follow from the configuration."""
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_MAX_BLOCKS = 64
_ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""``hydra_head_arch``, and whether it has a prefix layer."""
_OTHERS = "give Hydra heads of the architecture 'mlp' or 'prefix-mlp', or another kind of head."

READ = ((5, 2), (1, 3), (2, 1))
"""New features of each row in each step of first heads in the build's proof. After it come steps of later ones, as in
a draft."""


class HydraShape(NamedTuple):
    """Heads of which each reads the tokens that those before it guessed (Ankner et al. 2024)."""

    num_blocks: int  # residual blocks of each head after the one that joins what it reads
    one_block: bool = False  # these are one and the same, run again and again, as their writer has them
    has_prefix: bool = False  # a decoder layer reads the hidden states first (Hydra++)


class HydraHead(nn.Module):  # type: ignore[misc]  # torch is not followed
    """One head; the first has number 0."""

    def __init__(self, config: HeadConfig, number: int) -> None:
        super().__init__()
        shape, width = config.shape, config.hidden_size
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


class HydraHeads(HeadModule):
    """Heads over a hidden state and tokens."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        # transformers' model of the prefix layer, for its layer, rotary embedding and last norm; None without one
        self.body = make_body(config) if config.shape.has_prefix else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)  # token embedding [V, H]
        self.heads = nn.ModuleList(HydraHead(config, number) for number in range(config.num_draft_heads))

    @property
    def step_parameters(self) -> int:
        """Parameters that a step reads, on average over a draft of all heads: one of them reads the prefix layer."""
        whole = sum(parameter.numel() for parameter in self.parameters())
        return int(whole - self.embed_tokens.weight.numel()) // len(self.heads)

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule) -> Tensor:  # noqa: ARG002
        """Hidden states after the prefix layer [1, T, H], before its norm, for features [1, T, H]."""
        state = features
        for layer in () if self.body is None else self.body.layers:
            state = through_layer(layer, state, run)
        return state

    def guess(self, number: int, states: Tensor, embedded: Tensor) -> Tensor:
        """Logits [R, N] of a head for states [R, H] and the embeddings of its tokens [R, number + 1, H]."""
        normed = states if self.body is None else self.body.norm(states)
        logits: Tensor = self.heads[number](torch.cat([normed, embedded.flatten(1)], dim=-1))
        return logits


def read_rows(
    heads: HydraHeads, state: Tensor, features: Tensor, input_ids: Tensor, logit_rows: Tensor, cu_new_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [R, N] of a packed step, and the hidden states [R, H] that it hands on.

    ``state`` [T, H] is after the prefix layer, before its norm; ``features`` [T, H] are what the step was fed. For the
    others see :func:`find_row_heads`.
    """
    numbers = find_row_heads(input_ids, logit_rows, cu_new_tokens)
    fresh, handed = (each.index_select(0, logit_rows) for each in (state, features))
    states = torch.where((numbers > 0)[:, None], handed, fresh)
    embedded = heads.embed_tokens(input_ids.clamp(min=0))

    def answer(number: int, mine: Tensor) -> Tensor:
        places = (logit_rows.index_select(0, mine) - number)[:, None] + torch.arange(number + 1)
        window = embedded.index_select(0, places.clamp(min=0).flatten()).view(-1, number + 1, embedded.shape[1])
        return heads.guess(number, states.index_select(0, mine), window)

    return run_by_head(numbers, len(heads.heads), answer), states


class HydraStep(HeadStep):
    """Hydra heads, which read the tokens of their rows too."""

    def read(self, state: Tensor, features: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """See ``HeadStep.read``."""
        input_ids, _, logit_rows, _, cu_new_tokens, *_ = step
        return read_rows(self.model, state, features.to(self.model.dtype), input_ids, logit_rows, cu_new_tokens)


def _load(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    shape: HydraShape = config.shape
    with convert_module_errors(files, what="prefix layer", whose="the target's configuration"):
        with torch.device("meta"):
            heads = HydraHeads(config)
        if heads.body is not None:
            heads.body.rotary_emb = make_body(config).rotary_emb  # its buffers are in no file
    names = _parameter_names(files, heads)
    unknown = {
        name
        for name in files.shapes.keys() - names.values()
        if not UNREAD.fullmatch(name)
        and not (shape.one_block and _is_copy(name, files, config.num_draft_heads, shape.num_blocks))
    }
    refuse_variant(files, unknown, "Hydra heads do not have", "give Hydra heads as their authors write them.")
    fill_module(heads, files, names)
    if EMBEDDING not in files.shapes:
        heads.embed_tokens.weight = nn.Parameter(tables.embedding, requires_grad=False)
    heads = heads.to(dtype).eval().requires_grad_(False)
    return LoadedHead(config, heads, load_projection(files, config, dtype), None)


def _parameter_names(files: HeadFiles, heads: HydraHeads) -> dict[str, str]:
    """The name in the files of each parameter."""
    shape: HydraShape = heads.head_config.shape
    names = {} if EMBEDDING not in files.shapes else {"embed_tokens.weight": EMBEDDING}
    if heads.body is not None:
        names |= {f"body.{name}": PREFIX + name for name in heads.body.state_dict()}
    for head in range(len(heads.heads)):
        kept = _first_block(files, head, shape.num_blocks)
        for part in ("weight", "bias"):
            own = {"linear": "linear", "residual": "res_connection"}
            names |= {
                f"heads.{head}.{ours}.{part}": _block_name(files, head, 0, f"{theirs}.{part}")
                for ours, theirs in own.items()
            }
            names[f"heads.{head}.lm_head.{part}"] = _lm_head_name(files, head, part)
            for at in range(shape.num_blocks):
                block = kept if shape.one_block else at + 1
                names[f"heads.{head}.blocks.{at}.{part}"] = _block_name(files, head, block, f"linear.{part}")
    return names


def _is_copy(name: str, files: HeadFiles, num_heads: int, num_blocks: int) -> bool:
    """Whether a tensor is a further copy of a block that is run again."""
    blocks = ((head, at) for head in range(num_heads) for at in range(1, num_blocks + 1))
    return any(name.startswith(_block_name(files, head, at, "linear.")) for head, at in blocks)


def _recognizes(files: HeadFiles) -> bool:
    """Whether a head's configuration or its tensors say that it is of this kind."""
    return "hydra_num_heads" in files.values or any(name.startswith("hydra_mlp.") for name in files.shapes)


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    """What Hydra heads compute; CheckpointError if they are another target's. The prefix layer is as the target's."""
    has_prefix = _has_prefix(files)
    if not files.values.get("grounded_heads", any("res_connection" in name for name in files.shapes)):
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads that are not grounded (grounded_heads): they read no tokens.",
            _OTHERS,
        )
    found = [match for name in files.shapes if (match := _BLOCK.fullmatch(name))]
    counted = max((int(match[2]) for match in found if match[1] == "0"), default=-1)
    told = read_size(files, files.values, "hydra_num_heads", 1, least=0)
    num_heads = max(told, *(int(match[1]) + 1 for match in found), 0)
    num_blocks = read_size(files, files.values, "hydra_num_layers", counted // _stride(files) + 1, least=0) - 1
    if not 1 <= num_heads <= MAX_LOOKAHEAD or not 0 <= num_blocks <= _MAX_BLOCKS:
        raise CheckpointError(
            f"{files.name} has {num_heads} Hydra heads of {num_blocks + 1} blocks; 1 to {MAX_LOOKAHEAD} of 1 to "
            f"{_MAX_BLOCKS + 1} can be read.",
            "give the folder that holds their weights and their configuration.",
        )
    stored = files.shapes.get(_lm_head_name(files, 0, "weight"), ())
    rows, width = stored if len(stored) == 2 else (target.vocab_size, target.hidden_size)
    check_target(files, target, width=width, vocab_size=rows)
    offset = read_size(files, files.values, "hidden_state_offset", 0, least=0)
    if offset > target.num_layers:
        raise CheckpointError(
            f"the head {files.name} reads the hidden state {offset} layers before the last, and the target has "
            f"{target.num_layers}.",
            OTHER_TARGET,
        )
    plain = {"model_type": "hydra", "hidden_size": width, "num_hidden_layers": 0}
    return HeadConfig(
        kind="hydra",
        layer_config=_read_prefix_config(files, target) if has_prefix else plain,
        taps=(target.num_layers - offset if offset else AFTER_NORM,),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_draft_heads=num_heads,
        reads_draft=True,
        source_format="zankner",
        shape=HydraShape(num_blocks, _is_one_block(files, num_heads, num_blocks), has_prefix),
    )


def _block_name(files: HeadFiles, head: int, block: int, part: str) -> str:
    """The name in the files of a part of a residual block, ``"linear.weight"`` for example; the first joins."""
    stride = _stride(files)
    return f"hydra_mlp.{head}.{block * stride + stride - 1}.{part}"


def _first_block(files: HeadFiles, head: int, num_blocks: int) -> int:
    """Number of the first block after the one that joins which is stored: of one that is run again, one may be."""
    stored = (at for at in range(1, num_blocks + 1) if _block_name(files, head, at, "linear.weight") in files.shapes)
    return next(stored, 1)


def _lm_head_name(files: HeadFiles, head: int, part: str) -> str:
    """The name in the files of the ``part``, ``"weight"`` or ``"bias"``, of a head's LM head."""
    plain = f"hydra_lm_head.{head}.{part}"
    behind_dropout = f"hydra_lm_head.{head}.1.{part}"
    return behind_dropout if behind_dropout in files.shapes else plain


def _stride(files: HeadFiles) -> int:
    """Modules that a block counts for."""
    return 2 if "hydra_mlp.0.1.res_connection.weight" in files.shapes else 1


def _has_prefix(files: HeadFiles) -> bool:
    found = any(name.startswith(PREFIX) for name in files.shapes)
    named = files.values.get("hydra_head_arch", "prefix-mlp" if found else "mlp")
    if named not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads of the architecture {named!r}, which cannot be imported.", _OTHERS
        )
    return _ARCHITECTURES[named]


def _is_one_block(files: HeadFiles, num_heads: int, num_blocks: int) -> bool:
    """Whether the blocks after the first of each head hold the same values: their writer stores one of them again."""
    for head in range(num_heads):
        kept = _first_block(files, head, num_blocks)
        for part in ("linear.weight", "linear.bias"):
            own = _block_name(files, head, kept, part)
            copies = [_block_name(files, head, at, part) for at in range(1, num_blocks + 1)]
            stored = [name for name in copies if name != own and name in files.shapes]
            if stored and (own not in files.shapes or not all(_has_equal_tensors(files, own, name) for name in stored)):
                return False
    return num_blocks > 1


def _has_equal_tensors(files: HeadFiles, one: str, other: str) -> bool:
    return files.shapes[one] == files.shapes[other] and bool((files.tensor(one) == files.tensor(other)).all())


def _read_prefix_config(files: HeadFiles, target: TargetFacts) -> dict[str, Any]:
    """Configuration of the prefix layer: one layer of Llama's with the target's sizes. Refuses other layers."""
    layer = {} if target.text is None else target.text.to_dict()
    kind = layer.get("model_type")
    if kind != "llama":
        raise UnsupportedModelError(
            f"{files.name} has Hydra heads after a prefix layer, which is one of Llama's with its target's sizes, and "
            f"this target's layers are of {kind}.",
            OTHER_TARGET,
        )
    return {**{key: value for key, value in layer.items() if value is not None}, "num_hidden_layers": 1}


def _reference(loaded: LoadedHead) -> HeadReference:
    """Steps with random features and tokens, and what the heads compute of them in torch, a sequence at a time."""
    head, config = loaded.head, loaded.config

    def compute(features: np.ndarray, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(features).to(head.dtype)
        with torch.no_grad():
            state = causal_states(head, torch.zeros(len(given), dtype=torch.int64), given)[-1:]
            logits = head.guess(len(tokens) - 1, state, head.embed_tokens(torch.tensor([list(tokens)])))
        return logits[0].float().numpy(), state[0].float().numpy()

    return hydra_steps(compute, config.num_draft_heads, config.feature_size, config.vocab_size)


def hydra_steps(
    compute: Callable[[np.ndarray, Sequence[int]], tuple[np.ndarray, np.ndarray]],
    num_heads: int,
    feature_size: int,
    vocab_size: int,
) -> HeadReference:
    """Steps with random features [n, H] and tokens; ``compute`` gives logits [N] and what goes on [H]."""
    generator = np.random.default_rng(21)
    known = [np.zeros((0, feature_size), np.float32) for _ in READ[0]]
    steps = []
    for counts in READ:
        fresh = [generator.normal(0, 1, (count, feature_size)).astype(np.float32) for count in counts]
        known = [np.concatenate(pair) for pair in zip(known, fresh, strict=True)]
        windows = [generator.integers(0, vocab_size, num_heads) for _ in counts]
        rows = []
        for row, window in enumerate(windows):
            logits, handed_on = compute(known[row], window[:1].tolist())
            context = [CONTEXT_ID] * (counts[row] - 1)
            tokens = np.array([*context, window[0]])
            rows.append(CheckedRow(tokens, fresh[row], counts[row], logits[None], handed_on[None]))
        steps.append(rows)
        for width in range(2, num_heads + 1):
            depths = (width, max(2, width - 1))  # rows ask different heads
            later = []
            for row, depth in enumerate(depths):
                tokens = windows[row][:depth]
                logits, handed_on = compute(known[row], tokens.tolist())
                later.append(CheckedRow(tokens, np.tile(handed_on, (depth, 1)), 0, logits[None], handed_on[None]))
            steps.append(later)
    return HeadReference(steps)


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """One head after the other at every place, each fed the text's own tokens."""
    heads, states = loaded.head, causal_states(loaded.head, tokens[1:], features)
    for number in range(min(2, loaded.config.num_draft_heads)):
        windows = tokens[1:].unfold(0, number + 1, 1)
        yield heads.guess(number, states[: len(windows)], heads.embed_tokens(windows)), slice(1 + number, None)


KIND = HeadKind(
    name="hydra",
    called="Hydra heads",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    trace=partial(trace_layers, step=HydraStep),
    reference=_reference,
    guesses=_guesses,
    readings=list_state_readings,
    needs=frozenset(["earlier guesses"]),
)
