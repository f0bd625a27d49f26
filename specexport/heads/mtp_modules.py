"""MTP modules in turn, in torch: module k guesses the k-th token of a draft, from what the one before it made.

DeepSeek-V3 (DeepSeek-AI 2024, section 2.2), for place i and modules k = 1, 2, ...::

    h_k(i) = layer_k(M_k [norm(h_(k-1)(i)), norm(emb(t_(i+k)))])

``h_0`` is the target's. The LM head after a norm guesses the token i+k+1. So each module is one of ``mtp``, a place
reads one token more for each module, and keys and values of a module are of its own places. Some writers give every
module the target's hidden state in the place of the module's before it: the probe tries that too.

In the graph each entry has its feature and the token after it, and modules find further tokens in the entries after.
A row may end in tokens without features: if there are d of them, its logits are module d+1's, of the last entry with a
feature. See ``abi.AHEAD_ID`` and the runtime's ``drafters.in_turn``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import MORE, HeadFiles
from specexport.heads.kind import Caches, HeadKind, Reading
from specexport.heads.layered import load_layered
from specexport.heads.loaded import LoadedHead
from specexport.heads.modules import RunModule, find_row_heads, norm_class, run_by_head
from specexport.heads.mtp import MtpHead, load_body, read_module, readings_of_module
from specexport.heads.mtp_files import EMBED_NORM, num_modules
from specexport.heads.reference import CheckedRow, HeadReference
from specexport.heads.trace import HeadStep, causal_states, run_layers, trace_layers
from specexport.trace.attention import AttentionContext
from specexport_runtime.abi import AHEAD_ID
from specexport_runtime.bundle.entry import MAX_LOOKAHEAD
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

NEW = ((5, 2), (3, 1), (1, 4))
"""New features of each row in each round of the build's proof."""


class ModulesShape(NamedTuple):
    """What modules in turn have beside one module."""

    own_lm_heads: bool = False  # each has another LM head
    from_target: bool = False  # each reads the target's hidden state, not that of the module before it


class _Module(nn.Module):  # type: ignore[misc]  # torch is not followed
    """What is around the layer of a module after the first."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, norm = config.hidden_size, norm_class(config)
        self.embed_norm, self.feature_norm, self.norm = norm(width), norm(width), norm(width)
        self.fc = nn.Linear(2 * width, width, bias=False)
        if config.shape.own_lm_heads:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)


class MtpModules(MtpHead):
    """Modules of which each guesses one token of a draft; the first is the module that it inherits from."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.more = nn.ModuleDict({str(i): _Module(config) for i in range(1, config.num_modules)})

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule, ends: Tensor | None = None) -> Tensor:
        """Normed hidden states of all modules side by side [1, T, M * H] for token ids [T] and features [1, T, E].

        ``ends`` int64 [T] is where the sequence of each entry ends, one past it; None for a single one.
        """
        config, embedded = self.head_config, self.embed(torch.where(input_ids < 0, AHEAD_ID - input_ids, input_ids))
        places = torch.ones_like(input_ids).cumsum(0)
        last = places.amax(0) - 1 if ends is None else ends - 1
        found, state = [], features
        for number, (layer, part) in enumerate(zip(self.body.layers, (self, *self.more.values()), strict=True)):
            tokens = embedded.index_select(0, torch.minimum(places - 1 + number, last)) if number else embedded
            joined = self.side_by_side(part.embed_norm(tokens)[None], part.feature_norm(state))
            made = run(layer, part.fc(joined))
            found.append((part.norm if number else self.body.norm)(made))
            if not config.shape.from_target:
                state = found[-1] if config.norm_output else made
        return torch.cat(found, dim=-1)

    def guess(self, states: Tensor, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, N] of modules ``numbers`` [R] at entries ``rows`` of ``states`` [T, M * H], and states [R, H]."""
        count = self.head_config.num_modules
        numbers = numbers.clamp(0, count - 1)
        flat = states.reshape(-1, self.head_config.hidden_size).index_select(0, rows.clamp(min=0) * count + numbers)
        if not self.head_config.shape.own_lm_heads:
            return self.lm_head(flat), flat
        lm_heads = [self.lm_head, *(part.lm_head for part in self.more.values())]
        return run_by_head(numbers, count, lambda i, mine: lm_heads[i](flat.index_select(0, mine))), flat


class ModulesStep(HeadStep):
    """Modules in turn, which read tokens of the entries after."""

    def states(self, context: AttentionContext, features: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """See ``HeadStep.states``."""
        input_ids, positions, _, _, cu_new_tokens, *_ = step
        places = torch.ones_like(input_ids).cumsum(0) - 1
        bounds = cu_new_tokens.to(torch.int64)[None]
        ends = torch.where(bounds > places[:, None], bounds, bounds.amax(1, keepdim=True)).amin(1)
        return run_layers(self.model, context, input_ids, positions, features, ends)

    def read(self, state: Tensor, features: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See ``HeadStep.read``."""
        input_ids, _, logit_rows, _, cu_new_tokens, *_ = step
        numbers = find_row_heads(AHEAD_ID - input_ids, logit_rows, cu_new_tokens) + 1
        logits: tuple[Tensor, Tensor] = self.model.guess(state, logit_rows - numbers, numbers)
        return logits


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    """What modules compute, as llama.cpp has it of several: hidden states before the last norm."""
    count = num_modules(files)
    if count > MAX_LOOKAHEAD:
        raise CheckpointError(
            f"{files.name} has {count} MTP modules; up to {MAX_LOOKAHEAD} can be read.",
            "give a checkpoint whose config.json belongs to its weights.",
        )
    if _has_different_tensors(files, "embed_tokens.weight", count):
        raise UnsupportedModelError(
            f"{files.name}: each of its MTP modules has another embedding, and only modules that share one are read.",
            "draft with `lookup`.",
        )
    shape = ModulesShape(own_lm_heads=_has_different_tensors(files, "lm_head.weight", count))
    taps = (target.num_layers,)
    return replace(read_module(files, target), kind="mtp-modules", taps=taps, num_modules=count, shape=shape)


def _has_different_tensors(files: HeadFiles, name: str, count: int) -> bool:
    """Whether modules have different tensors of a name; a module that lacks one has the target's."""
    stored = [each for i in range(count) if (each := f"{MORE}{i}.{name}" if i else name) in files.shapes]
    if not stored:
        return False
    if len(stored) < count:
        raise CheckpointError(
            f"{files.name}: {len(stored)} of its {count} MTP modules have {name}.", "give the complete checkpoint."
        )
    first = files.tensor(stored[0])
    return not all(torch.equal(first, files.tensor(each)) for each in stored[1:])


def _readings(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    """Those of one module, and each of these with the target's hidden state for every module."""
    found = list(readings_of_module(config, num_layers))
    change = "the target's hidden state for each module"
    other = config.shape._replace(from_target=True)
    others = [(each.change, replace(each.config, shape=other)) for each in found]
    return [*found, *(Reading(made, f"{told}, {change}" if told else change) for told, made in others)]


def _reference(loaded: LoadedHead) -> HeadReference:
    """Rounds of random features and tokens, with attention as transformers computes it, a sequence at a time."""
    head, config, generator = loaded.head, loaded.config, np.random.default_rng(21)
    count = config.num_modules
    totals = [sum(new[row] for new in NEW) for row in (0, 1)]
    features = [generator.normal(0, 1, (total, config.feature_size)).astype(np.float32) for total in totals]
    tokens = [generator.integers(0, config.vocab_size, total + count - 1) for total in totals]

    def row(index: int, start: int, known: int, ahead: int) -> CheckedRow:
        """Entries from ``start`` on of a sequence with ``known`` features and ``ahead`` tokens after them."""
        fed = tokens[index][: known + ahead].copy()
        given = np.concatenate([features[index][:known], np.zeros((ahead, config.feature_size), np.float32)])
        with torch.no_grad():
            states = causal_states(head, torch.from_numpy(fed), torch.from_numpy(given).to(head.dtype))
            found = head.guess(states, torch.tensor([known - 1]), torch.tensor([ahead]))
        fed[known:] = AHEAD_ID - fed[known:]
        kept = 0 if ahead else max(0, known - start - count + 1)
        return CheckedRow(fed[start:], given[start:], kept, *(each.float().numpy() for each in found))

    steps: list[list[CheckedRow]] = []
    known, begun = [0, 0], [0, 0]
    for new in NEW:
        known = [old + more for old, more in zip(known, new, strict=True)]
        for ahead in range(count):  # rows ask different modules
            steps.append([row(i, begun[i], known[i], max(0, ahead - i)) for i in (0, 1)])
            begun = [start + each.kept for start, each in zip(begun, steps[-1], strict=True)]
    return HeadReference(steps)


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, _: Caches) -> Iterator[tuple[Tensor, slice]]:
    """One module after the other at every place, each fed the text's own tokens."""
    head, states = loaded.head, causal_states(loaded.head, tokens[1:], features)
    for number in range(loaded.config.num_modules):
        rows = torch.arange(len(states) - number)
        yield head.guess(states, rows, torch.full_like(rows, number))[0], slice(1 + number, None)


def _recognizes(files: HeadFiles) -> bool:
    return EMBED_NORM in files.shapes and any(name.startswith(MORE) for name in files.shapes)


_load: Any = partial(load_layered, MtpModules, load_body=load_body)
KIND = HeadKind(
    name="mtp-modules",
    called="MTP modules in turn",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    trace=partial(trace_layers, step=ModulesStep),
    reference=_reference,
    guesses=_guesses,
    readings=_readings,
    needs=frozenset(["earlier guesses"]),
)
