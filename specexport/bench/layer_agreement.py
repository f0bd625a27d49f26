"""How often a target without some of its layers writes what the whole target wrote.

Texts that the target wrote are read in pieces, as drafts are: a piece is read without some layers, over what all layers
left of the text before it, then by all layers, which overwrite that. So one reading tells of every place of a text
whether a draft token would be accepted there, and many choices of layers share the target's own steps.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.executors.base import BoolArray, StepOutput, Want
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork

PIECE = 4
"""Tokens of a piece: drafts that pay are about as long."""
_ROWS = 8  # of a step
_MASKS = 16  # that are read between two steps of the target; their logits are kept meanwhile

Chances = list[npt.NDArray[np.float64]]
"""Of each text, the chance that a draft token in each place is accepted if those before it were."""


class WrittenText(NamedTuple):
    """Token ids of a prompt, and what the target wrote behind it: one or more."""

    prompt: list[int]
    written: list[int]


class AgreementReader:
    """Reads texts drawn at ``temperature``, one in each row of an engine that runs nothing else meanwhile."""

    def __init__(self, runner: ModelRunner, texts: Sequence[WrittenText], temperature: float = 0.0) -> None:
        self._runner, self._texts = runner, sorted(texts, key=lambda text: len(text.written))
        self._temperature = temperature
        self.similarity = self._read_prompts(measure=True)
        """Mean cosine similarity of each mixer over the prompts, [N]; empty if there is none."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be guessed."""
        return sum(len(text.written) for text in self._texts)

    def agree(self, masks: Sequence[BoolArray]) -> list[Chances]:
        """The chances of drafts with the parts of each mask [2N] on."""
        return [chances for at in range(0, len(masks), _MASKS) for chances in self._agree(masks[at : at + _MASKS])]

    def _agree(self, masks: Sequence[BoolArray]) -> list[Chances]:
        self._rewind()
        found: list[list[list[float]]] = [[[] for _ in self._texts] for _ in masks]
        for first in range(0, len(self._texts), _ROWS):
            texts = self._texts[first : first + _ROWS]
            for at in range(0, len(texts[-1].written), PIECE):
                for chances, own in zip(found, self._read_piece(first, texts, at, masks), strict=True):
                    for row, values in enumerate(own, start=first):
                        chances[row].extend(values)
        return [[np.array(values) for values in chances] for chances in found]

    def _read_piece(
        self, first: int, texts: Sequence[WrittenText], at: int, masks: Sequence[BoolArray]
    ) -> list[list[list[float]]]:
        """The chances in the places from ``at`` on, of each mask and text; the target goes on behind them."""
        runner, executor = self._runner, self._runner.executor
        pieces = [[text.prompt[-1], *text.written[:-1]][at : at + PIECE] for text in texts]
        wanted = [token for text in texts for token in text.written[at : at + PIECE]]
        want: Want = "logits" if self._temperature else "token_ids"
        drafts = [RowWork(piece, len(piece), settles=False) if piece else IDLE for piece in pieces]
        outputs = []
        try:
            for mask in masks:
                executor.set_layers(mask)
                outputs.append(runner.step(first, drafts, want).copy())
        finally:
            executor.set_layers(None)
        whole = [RowWork(piece, len(piece) if self._temperature else 1) if piece else IDLE for piece in pieces]
        own = runner.step(first, whole, want)
        for row, piece in enumerate(pieces, start=first):
            runner.kv.commit(row, runner.kv.kv_len(row) + len(piece))
        ends = np.cumsum([len(piece) for piece in pieces])[:-1]
        chances = [self._chances(output, own, wanted) for output in outputs]
        return [[part.tolist() for part in np.split(values, ends)] for values in chances]

    def _chances(self, draft: StepOutput, own: StepOutput, wanted: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of token ids, whether they are those of the text; of logits, what the distributions have in common."""
        if not self._temperature:
            return np.equal(draft, wanted).astype(np.float64)
        one, other = _distributions(draft, self._temperature), _distributions(own, self._temperature)
        return np.asarray(np.minimum(one, other).sum(axis=1, dtype=np.float64))

    def _rewind(self) -> None:
        """Go back to the ends of the prompts; a state cannot, so that prompts of such models are read again."""
        if self._runner.has_states:
            self._read_prompts()
            return
        for row, text in enumerate(self._texts):
            self._runner.kv.commit(row, len(text.prompt) - 1)

    def _read_prompts(self, *, measure: bool = False) -> list[float]:
        """Read all prompts but for their last tokens; with ``measure`` gives the mean similarity of each mixer."""
        runner, executor = self._runner, self._runner.executor
        runner.reset()
        sums, count = np.zeros(executor.num_gates // 2), 0
        executor.measure_similarity(measure)
        try:
            for row, chunk in self._chunks():
                runner.prefill(row, chunk)
                sums += executor.similarity.sum(axis=1, dtype=np.float64)
                count += len(chunk)
        finally:
            executor.measure_similarity(False)
        return (sums / count).tolist() if measure and count else []

    def _chunks(self) -> Iterator[tuple[int, list[int]]]:
        """Rows and tokens of the steps that read the prompts."""
        size = self._runner.max_chunk
        for row, text in enumerate(self._texts):
            known = text.prompt[:-1]
            yield from ((row, known[at : at + size]) for at in range(0, len(known), size))


def _distributions(logits: StepOutput, temperature: float) -> npt.NDArray[np.float32]:
    """Softmax of each row of logits."""
    powers = np.exp((logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def tokens_a_round(chances: Chances, most: int) -> list[float]:
    """Expected tokens of a round with drafts of 0, 1, … ``most`` tokens, the target's own included."""
    expected = [1.0]
    passed = chances
    for length in range(most):
        if length:
            passed = [before[:-1] * own[length:] for before, own in zip(passed, chances, strict=True)]
        places = sum(map(len, passed))
        expected.append(expected[-1] + (sum(float(values.sum()) for values in passed) / places if places else 0.0))
    return expected
