"""Hidden states of a target on disk: what a head learns from, in files of a bounded size."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specexport.heads.write import write_tensors
from specexport.trace.layers import record_taps
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import InvalidRequestError

FILE_TOKENS, FILE_SECONDS = 16_384, 120.0
"""A file is closed when it has so many tokens, or was so long in the making."""

BATCH = 8
"""Texts that the target reads together. A file ends where a batch does: a text's neighbours may change last bits."""


class Example(NamedTuple):
    """A text as the target read it."""

    tokens: Tensor  # int64 [n]
    states: Tensor  # tapped hidden states, and the one that its LM head reads last, bfloat16 [n, taps + 1, H]


def file_name(number: int) -> str:
    """Of the files of a store, from 0."""
    return f"states-{number:05d}.safetensors"


class FeatureStore:
    """Texts with hidden states in a folder, which ``made_of`` names; InvalidRequestError for others' files."""

    def __init__(self, folder: Path, made_of: str) -> None:
        self.folder, self.made_of = folder, made_of
        self.num_files = 0
        self._places: list[tuple[Path, int, int]] = []
        for path in sorted(folder.glob("states-*.safetensors")):
            start, lengths = 0, self._lengths(path)
            self.num_files += 1
            for length in lengths:
                self._places.append((path, start, start + length))
                start += length

    def _lengths(self, path: Path) -> list[int]:
        """Tokens of each text of the next file."""
        hint = f"remove {self.folder}, and give the same command again: hidden states are made again."
        try:
            with safe_open(path, framework="pt") as file:
                told = file.metadata()
                lengths, before = [int(length) for length in json.loads(told["lengths"])], told.get("made_of")
                if sum(lengths) != file.get_slice("tokens").get_shape()[0]:
                    raise ValueError("its lengths are of other texts")
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"{path} is damaged ({error}).", hint) from error
        if before != self.made_of:
            raise InvalidRequestError(f"{path} holds hidden states of other texts or layers.", hint)
        if path.name != (wanted := file_name(self.num_files)):
            raise InvalidRequestError(f"{self.folder} lacks {wanted}.", hint)
        return lengths

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

    def writer(self) -> "StoreWriter":
        """What adds texts after those that are there."""
        return StoreWriter(self.folder, self.made_of, self.num_files)


class StoreWriter:
    """Adds texts to a folder, a file at a time; ``number`` is that of the next file."""

    def __init__(self, folder: Path, made_of: str, number: int) -> None:
        self.folder, self._made_of, self._next = folder, made_of, number
        self._waiting: list[Example] = []
        self._since = time.monotonic()

    def add(self, batch: Sequence[Example]) -> None:
        """Keep a batch of texts; written when there are enough."""
        self._waiting += batch
        tokens = sum(len(each.tokens) for each in self._waiting)
        if tokens >= FILE_TOKENS or time.monotonic() - self._since > FILE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        self.folder.mkdir(exist_ok=True)
        path = self.folder / file_name(self._next)
        data = {
            "tokens": torch.cat([each.tokens for each in self._waiting]).int(),
            "states": torch.cat([each.states for each in self._waiting]).contiguous(),
        }
        lengths = [len(each.tokens) for each in self._waiting]
        write_tensors(path, data, {"lengths": json.dumps(lengths), "made_of": self._made_of})
        self._waiting, self._next, self._since = [], self._next + 1, time.monotonic()


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
    """Run the target over texts and keep what it has at ``taps`` and after its last norm."""
    wanted = [*taps, AFTER_NORM]
    for at in range(0, len(texts), BATCH):
        group = texts[at : at + BATCH]
        longest = max(map(len, group))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in group])
        with torch.no_grad(), record_taps(model, wanted) as found:
            model.base_model(input_ids=ids, use_cache=False)
        states = torch.stack([found[tap] for tap in wanted], dim=2).bfloat16()
        writer.add(
            [Example(torch.tensor(list(text)), states[row, : len(text)].clone()) for row, text in enumerate(group)]
        )
        on_batch(at + len(group))
