"""DSpark in torch: a head that fills blocks, whose logits a Markov head corrects by the token in front of each place.

The block is DFlash's; as a rule its first place, that of the newest token, guesses too. What is added to the logits is
in ``specexport_runtime.drafters.markov``. A confidence head estimates of each place whether its token will be accepted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
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
    tap_readings,
)
from specexport.heads.files import HeadFiles, is_named, read_size
from specexport.heads.kind import Caches, Reading, flipped_flag_reading
from specexport.heads.loaded import HeadCorrection, LoadedHead, TargetTables, kept_ids
from specexport_runtime.errors import UnsupportedModelError

_ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel")
_TYPES = ("vanilla", "gated", "rnn")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    **{key: values for key, values in dflash.PLAIN.items() if key not in ("markov_rank", "sample_from_anchor")},
    "projector_type": (None, "dflash", "dspark"),
}


class DsparkShape(NamedTuple):
    """What only these heads have."""

    causal: tuple[bool, ...]  # layers whose tokens see none after them
    rank: int  # r of the Markov head
    type: str  # how it makes of a token what it adds, see ``_TYPES``
    # of a head that estimates confidence: what it reads beside the hidden state, "" or "markov"; None for others
    confidence: str | None
    confidence_bias: bool


class MarkovHead(nn.Module):  # type: ignore[misc]  # torch is not followed
    """What is added to logits by the token in front, over hidden states of ``width`` values."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, width, self.type = config.shape.rank, config.hidden_size, config.shape.type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if self.type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, before: Tensor, normed: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What is added [A, N] after the tokens ``before`` [A], and what is remembered; both states are [A, ·]."""
        own = self.markov_w1(before)
        if self.type == "gated":
            own = torch.sigmoid(self.gate_proj(torch.cat([normed, own], -1))) * own
        if self.type == "rnn":
            keep, new, out = self.joint_proj(torch.cat([memory, own, normed], -1)).chunk(3, -1)
            keep = torch.sigmoid(keep)
            memory, own = keep * memory + (1 - keep) * torch.tanh(new), torch.tanh(out)
        return self.markov_w2(own), memory


class ConfidenceHead(nn.Module):  # type: ignore[misc]
    """Estimates of a place whether its token will be accepted."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=bias)


class CorrectedHead(BlockHead):
    """A head that fills blocks, with the tables that correct its logits."""

    def __init__(self, config: HeadConfig) -> None:
        shape: DsparkShape = config.shape
        super().__init__(config, shape.causal)
        self.markov_head = MarkovHead(config)
        if shape.confidence is not None:
            width = config.hidden_size + (shape.rank if shape.confidence else 0)
            self.confidence_head = ConfidenceHead(width, bias=shape.confidence_bias)

    @property
    def step_parameters(self) -> int:
        """See ``DraftHead.step_parameters``; the host reads the tables, not the step."""
        tables: list[Any] = [self.markov_head]
        if self.head_config.shape.confidence is not None:
            tables.append(self.confidence_head)
        return int(super().step_parameters - sum(each.numel() for table in tables for each in table.parameters()))


def _recognizes(files: HeadFiles) -> bool:
    named = files.values.get("architectures")
    by_name = isinstance(named, list) and any(name in named for name in _ARCHITECTURES)
    return (by_name or "dspark_config" in files.values) and not is_named(files)


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    if any("pre_feedforward_layernorm" in name for name in files.shapes):
        raise UnsupportedModelError(
            f"{files.name} is a DSpark head with layers of Gemma 4, which cannot be imported.", dflash.PLAIN_HEAD
        )
    config, causal = read_block(files, target, "dspark", _PLAIN, block_size=7)
    kind = read_value(files, "markov_head_type", "vanilla")
    if kind not in _TYPES:
        raise UnsupportedModelError(
            f"{files.name}: markov_head_type is {kind!r}, and only {', '.join(_TYPES)} can be imported.",
            dflash.PLAIN_HEAD,
        )
    confidence = None
    if read_value(files, "enable_confidence_head", "confidence_head.proj.weight" in files.shapes):
        confidence = "markov" if read_value(files, "confidence_head_with_markov", _reads_markov(files, config)) else ""
    rank = read_size(files, {"markov_rank": read_value(files, "markov_rank")}, "markov_rank", 256)
    shape = DsparkShape(causal, rank, kind, confidence, "confidence_head.proj.bias" in files.shapes)
    # Speculators' files say so where the first place guesses, those of the head's authors where it does not.
    anchor = bool(read_value(files, "sample_from_anchor", not is_named(files)))
    return replace(config, shape=shape, norm_output=True, from_anchor=anchor)


def _reads_markov(files: HeadFiles, config: HeadConfig) -> bool:
    """Whether the confidence head's tensor is wider than a hidden state."""
    return files.shapes.get("confidence_head.proj.weight", (1, 0))[-1] > config.hidden_size


def _load(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    loaded = load_block(CorrectedHead, files, config, tables, dtype)
    head, markov = loaded.head, loaded.head.markov_head
    kept = kept_ids(files, config, "d2t", lambda offsets: np.arange(len(offsets)) + offsets)
    if kept is not None:  # rows in the order of their ids, as those of the LM head
        order = torch.from_numpy(np.argsort(kept, kind="stable"))
        markov.markov_w2.weight.data = markov.markov_w2.weight.data[order]
    weights = {"w1": markov.markov_w1.weight, "w2": markov.markov_w2.weight}
    confidence = getattr(head, "confidence_head", None)
    for name, owner, attribute in (
        ("gate", markov, "gate_proj"), ("joint", markov, "joint_proj"), ("confidence", confidence, "proj"),
    ):  # fmt: skip
        linear = getattr(owner, attribute, None)
        if linear is not None:
            weights[name] = linear.weight
            weights |= {} if linear.bias is None else {f"{name}_bias": linear.bias}
    values = {name: table.detach().float().numpy() for name, table in weights.items()}
    return loaded._replace(correction=HeadCorrection("markov", values, config.draft_vocab_size))


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """Each second place takes a block of its own; the second guess reads the text's own token."""
    head, rows = loaded.head, min(loaded.config.block_size or GUESS_ROWS, GUESS_ROWS)
    states, starts = compute_guess_blocks(head, tokens, features, step=GUESS_STEP, rows=rows)
    memory = torch.zeros(len(starts), head.head_config.shape.rank)
    first = 0 if head.head_config.from_anchor else 1
    for number, place in enumerate(range(first, min(rows, first + 2))):
        behind = starts[starts + number < len(tokens)] + number
        logits, normed = head.read(states[: len(behind), place])
        added, memory = head.markov_head(tokens[behind], normed, memory[: len(behind)])
        yield logits + added, slice(1 + number, None, GUESS_STEP)


def _readings(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    return [*tap_readings(config, num_layers), flipped_flag_reading(config, "from_anchor")]


KIND = block_kind(
    name="dspark",
    called="a DSpark head",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    guesses=_guesses,
    readings=_readings,
    needs=frozenset(["later tokens", "corrected logits"]),
    speculators=("dspark",),
)
