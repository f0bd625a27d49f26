"""Hidden states of a target on disk: what a head learns from, in files of a bounded size."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from specexport.heads.write import write_tensors
from specexport.trace.layers import tapped
from specexport_runtime.abi import AFTER_NORM

FILE_TOKENS = 16_384
"""A file is closed when it has so many tokens."""

_BATCH = 8  # texts that are read together


class Example(NamedTuple):
    """A text as the target read it."""

    tokens: Tensor  # int64 [n]
    states: Tensor  # tapped hidden states, and the one that its LM head reads last, bfloat16 [n, taps + 1, H]


class FeatureStore:
    """Texts with hidden states, in a folder. A file is written under another name, then renamed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: list[tuple[Path, int, int]] = []
        for path in sorted(folder.glob("states-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                lengths = json.loads(file.metadata()["lengths"])
            start = 0
            for length in lengths:
                self._places.append((path, start, start + length))
                start += length

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(stop - start for _, start, stop in self._places)

    def length(self, index: int) -> int:
        """Tokens of one text."""
        _, start, stop = self._places[index]
        return stop - start

    def read(self, index: int) -> Example:
        """One text."""
        path, start, stop = self._places[index]
        with safe_open(path, framework="pt") as file:
            return Example(file.get_slice("tokens")[start:stop].long(), file.get_slice("states")[start:stop])


class StoreWriter:
    """Adds texts to a folder, a file at a time; ``first`` is the number of the next file."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder, self._next = folder, first
        self._waiting: list[Example] = []

    def add(self, example: Example) -> None:
        """Keep a text; written when there are enough."""
        self._waiting.append(example)
        if sum(len(each.tokens) for each in self._waiting) >= FILE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        path = self.folder / f"states-{self._next:05d}.safetensors"
        data = {
            "tokens": torch.cat([each.tokens for each in self._waiting]).int(),
            "states": torch.cat([each.states for each in self._waiting]).contiguous(),
        }
        lengths = [len(each.tokens) for each in self._waiting]
        write_tensors(path, data, {"lengths": json.dumps(lengths)})
        self._waiting, self._next = [], self._next + 1


def batches(
    store: FeatureStore, indices: Sequence[int], max_tokens: int, max_len: int, seed: int
) -> Iterator[list[int]]:
    """Texts of like lengths together, in an order that ``seed`` decides; no batch has more than ``max_tokens``."""
    generator = torch.Generator().manual_seed(seed)
    order = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    groups: list[list[int]] = []
    for at in range(0, len(order), 64):
        near = sorted(order[at : at + 64], key=store.length)
        batch: list[int] = []
        for index in near:
            width = min(store.length(index), max_len)
            if batch and width * (len(batch) + 1) > max_tokens:
                groups.append(batch)
                batch = []
            batch.append(index)
        groups.append(batch)
    for at in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[at]


def collect_states(
    model: Any,  # the target, a transformers causal language model
    texts: Sequence[Sequence[int]],  # token ids
    taps: Sequence[int],
    writer: StoreWriter,
    *,
    on_batch: Callable[[int], None] = lambda _: None,  # hears how many texts are done
) -> None:
    """Run the target over texts and keep what it has at ``taps`` and behind its last norm."""
    wanted = [*taps, AFTER_NORM]
    for at in range(0, len(texts), _BATCH):
        group = texts[at : at + _BATCH]
        longest = max(map(len, group))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in group])
        with torch.no_grad(), tapped(model, wanted) as found:
            model.base_model(input_ids=ids, use_cache=False)
        states = torch.stack([found[tap] for tap in wanted], dim=2).bfloat16()
        for row, text in enumerate(group):
            writer.add(Example(torch.tensor(list(text)), states[row, : len(text)].clone()))
        on_batch(at + len(group))
