"""Collecting a target's hidden states on texts that it wrote."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from specexport.frontend.taps import tapped
from specexport.train.store import Example, StoreWriter
from specexport_runtime.abi import AFTER_NORM

_BATCH = 8  # texts that are read together


def collect_states(
    model: Any,  # the target, a transformers causal language model
    texts: Seq[Seq[int]],  # token ids
    taps: Seq[int],
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
