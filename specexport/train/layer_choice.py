"""Which layers of a target a pruned draft keeps: of a few likely choices the one that is nearest to the target.

Consecutive layers that go together hurt least (Gromov et al. 2024), and which ones is asked of the model itself: every
choice is run, and its distributions are compared with the whole model's, before anything is trained. On the demo
target, choices that were clearly nearer before training were nearer after it, and of two layers that ShortGPT's Block
Influence would keep, the first two, that was the worst.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.frontend.prune import left_out
from specexport.train.lm_head import LmHead
from specexport.train.refuse import HINT
from specexport.train.wide_loss import compare

NUM_PIECES, PIECE_LEN = 8, 256
"""Up to 2,048 tokens, which are read once for each choice."""


class Choice(NamedTuple):
    """Layers that may be kept."""

    kept: tuple[int, ...]  # their numbers, ascending
    loss: float  # cross entropy under the whole model's distribution, nats a token


def likely_choices(num_layers: int, count: int) -> Iterator[tuple[int, ...]]:
    """All choices that leave one run of consecutive layers out, and the one that spreads what stays evenly.

    ``count`` layers stay, fewer than ``num_layers``.
    """
    found = [(*range(first), *range(num_layers - count + first, num_layers)) for first in range(count, -1, -1)]
    if count > 1:
        found.append(tuple(round(i * (num_layers - 1) / (count - 1)) for i in range(count)))
    yield from dict.fromkeys(found)


def measure_choices(model: Any, count: int, texts: Seq[Seq[int]]) -> list[Choice]:
    """Each likely choice with its loss on some of the texts, the best one first; the model stays as it is.

    ``model`` is a transformers causal language model, of which ``count`` layers stay; ``texts`` are token ids.
    UnsupportedModelError: its layers cannot be found or watched, or its LM head cannot be run alone.
    """
    text = model.config.get_text_config()
    read, vocab_size = LmHead(model), int(model.get_output_embeddings().weight.shape[0])
    pieces = [torch.tensor(list(text[:PIECE_LEN])) for text in texts[:: max(1, len(texts) // NUM_PIECES)]]
    whole = _hidden(model, pieces)
    found = []
    for kept in likely_choices(int(text.num_hidden_layers), count):
        with left_out(model, set(range(int(text.num_hidden_layers))) - set(kept), HINT):
            loss = compare(_hidden(model, pieces), whole, read, vocab_size).loss
        found.append(Choice(kept, round(float(loss.mean()), 6)))
    return sorted(found, key=lambda choice: choice.loss)


def _hidden(model: Any, pieces: Seq[Tensor]) -> Tensor:
    """What the LM head reads at all places of all pieces [n, H]."""
    with torch.no_grad():
        return torch.cat([model.base_model(input_ids=piece[None], use_cache=False)[0][0] for piece in pieces])
