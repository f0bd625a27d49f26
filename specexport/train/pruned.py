"""Training a pruned draft: some layers of the target under its own embedding and LM head, healed on its texts.

What stays learns the target's distribution at every place of the texts (Hinton et al. 2015; Muralidharan et al. 2024).
Consecutive layers that go together hurt least (Gromov et al. 2024): every such choice is run before training, and the
one nearest to the target is taken. On the demo target, what was nearer before training was nearer after it, and the
layers that ShortGPT's Block Influence would keep were the worst.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.atomic import new_folder
from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.loaded import Checkpoint
from specexport.trace.prune import drop_layers, skip_layers
from specexport.train.lm_head import LmHead, chunked_cross_entropy, compare_distributions
from specexport.train.options import HINT, TrainOptions
from specexport.train.pruned_files import check_files, read_layers, round_weights, write_draft, write_layers
from specexport.train.student import Batch, DraftDescription, Guess, shift_left

NUM_PIECES, PIECE_LEN = 8, 256
"""Up to 2,048 tokens, which are read once for each choice."""


class PrunedStudent:
    """A pruned draft in training, over a float32 model with the layers ``kept``. See ``train.student.Student``."""

    def __init__(self, model: Any, kept: Sequence[int], vocab_size: int) -> None:
        self.model, self.kept, self._vocab_size = model, list(kept), vocab_size
        self.modules = model.base_model
        self._read = LmHead(model)
        self.modules.requires_grad_(True)
        for table in self.modules.modules():
            if isinstance(table, torch.nn.Embedding):
                table.requires_grad_(False)

    def describe(self) -> dict[str, Any]:
        """The layers that are kept."""
        return {"layers": self.kept}

    def losses(self, batch: Batch, steps: int) -> Iterator[Tensor]:  # noqa: ARG002  # see below
        """One: a draft model reads its own guesses as it reads any token, so that all places of a text are alike."""
        hidden, places = self._read_tokens(batch)
        yield chunked_cross_entropy(hidden, batch.last[places].to(hidden.dtype), self._read, self._vocab_size)

    def guesses(self, batch: Batch, steps: int) -> Iterator[Guess]:
        """Its best tokens. A further step at a place is the first step at the next place: both read the same text."""
        hidden, places = self._read_tokens(batch)
        found = compare_distributions(hidden, batch.last[places], self._read, self._vocab_size)
        drafted, wanted = torch.zeros_like(batch.tokens), torch.zeros_like(batch.tokens)
        drafted[places], wanted[places] = found.drafted, found.best
        for step in range(steps):
            offset = 1 + step
            told = (None, None) if step else (float(found.loss.mean()), float(found.overlap.mean()))
            valid = shift_left(places, offset)
            yield Guess(shift_left(drafted, offset), shift_left(wanted, offset), valid, offset, *told)

    def _read_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What its LM head reads [n, H], and of which places: bool [B, T], all but the filling."""
        places = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        hidden: Tensor = self.modules(input_ids=batch.tokens, use_cache=False)[0]
        return hidden[places], places


class PrunedPlan:
    """How a pruned draft is made of a target, by token ids that it wrote. See ``train.student.Plan``."""

    taps = ()

    def __init__(self, options: TrainOptions, checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> None:
        self._options, self._target, self._texts = options, checkpoint, texts
        self._num_layers = int(checkpoint.model.config.get_text_config().num_hidden_layers)

    def make(self, note: Callable[[str], None]) -> PrunedStudent:
        """The layers that serve best without training, or the layers of an earlier run, whose files are kept."""
        start = self._options.work_folder / "pruned-start"
        count, target = self._options.layers_kept(self._num_layers), self._target
        before = read_layers(start)
        if (before.get("target"), len(before.get("layers", ()))) == (target.source_sha256, count):
            model, kept = load_checkpoint(str(start)).model, before["layers"]
        else:
            best, *others = measure_choices(target.model, count, self._texts)
            kept = list(best.kept)
            told = f", the next best choice {others[0].loss:.2f}" if others else ""
            note(f"layers {', '.join(map(str, kept))} of {self._num_layers} stay, loss {best.loss:.2f}{told}")
            drop_layers(target, set(range(self._num_layers)) - set(kept), HINT)
            round_weights(target.model)
            with new_folder(start, replace=True) as folder:
                write_draft(folder, target.model, target)
                model = check_files(folder, target.model)
                write_layers(folder, {"target": target.source_sha256, "layers": kept})
        target.model = torch.nn.Identity()  # the rest of it is not needed any more
        self._kept = kept
        return PrunedStudent(model, kept, target.vocab_size)

    def write(self, folder: Path, student: Any) -> None:
        """A checkpoint folder, as transformers writes it."""
        write_draft(folder, student.model, self._target)

    def describe(self) -> DraftDescription:
        """For the model card."""
        name = Path(self._options.target).name
        layers = ", ".join(map(str, self._kept))
        return DraftDescription(
            title=f"A pruned draft for {name}",
            form=f"A model of {len(self._kept)} of the {self._num_layers} layers of {name} (numbers from 0: {layers}), "
            "under its embedding and its LM head, for transformers.",
            use=f"Use it with `specexport build {name} --draft FOLDER`.",
            flag="--draft",
        )


class Choice(NamedTuple):
    """Layers that may be kept."""

    kept: tuple[int, ...]  # their numbers, ascending
    loss: float  # cross entropy under the whole model's distribution, nats a token


def likely_choices(num_layers: int, count: int) -> Iterator[tuple[int, ...]]:
    """All choices that leave one run of consecutive layers out, and the one that spreads ``count`` layers evenly."""
    found = [(*range(first), *range(num_layers - count + first, num_layers)) for first in range(count, -1, -1)]
    if count > 1:
        found.append(tuple(round(i * (num_layers - 1) / (count - 1)) for i in range(count)))
    yield from dict.fromkeys(found)


def measure_choices(model: Any, count: int, texts: Sequence[Sequence[int]]) -> list[Choice]:
    """Each likely choice with its loss on some of the texts, the best one first; the model stays as it is."""
    text = model.config.get_text_config()
    read, vocab_size = LmHead(model), int(model.get_output_embeddings().weight.shape[0])
    pieces = [torch.tensor(list(text[:PIECE_LEN])) for text in texts[:: max(1, len(texts) // NUM_PIECES)]]
    whole = _hidden(model, pieces)
    found = []
    for kept in likely_choices(int(text.num_hidden_layers), count):
        with skip_layers(model, set(range(int(text.num_hidden_layers))) - set(kept), HINT):
            loss = compare_distributions(_hidden(model, pieces), whole, read, vocab_size).loss
        found.append(Choice(kept, round(float(loss.mean()), 6)))
    return sorted(found, key=lambda choice: choice.loss)


def _hidden(model: Any, pieces: Sequence[Tensor]) -> Tensor:
    """What the LM head reads at all places of all pieces [n, H]."""
    with torch.no_grad():
        return torch.cat([model.base_model(input_ids=piece[None], use_cache=False)[0][0] for piece in pieces])
