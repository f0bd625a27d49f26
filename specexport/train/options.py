"""What ``specexport train-draft`` was asked for. Imports no torch, so that a bad flag is reported at once."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specexport_runtime.errors import InvalidRequestError

KINDS = ("eagle3", "mtp")


@dataclass(frozen=True)
class TrainOptions:
    """How a draft head is to be trained.

    Attributes:
        target: checkpoint of the target.
        output: folder of the head.
        prompts: files of prompts.
        kind: what is trained: ``"eagle3"`` reads three hidden states of the target, ``"mtp"`` its last one.
        work: folder for what can be used again: texts, hidden states, the state of the training.
        bundle: a bundle of the target that writes the texts; None builds one.
        max_tokens: tokens that are written for each prompt.
        temperature: of every second text; the others are greedy.
        draft_vocab_size: tokens of the head's LM head; None takes all of a small vocabulary, and 16,384 of a large one.
        steps: draft steps of the training-time test.
        batches: batches to learn from; None goes over all texts ``epochs`` times.
        epochs: see ``batches``.
        batch_tokens: tokens of a batch.
        max_states_gb: most disk that hidden states may take, GB.
        rate: learning rate of the matrices.
        seed: of everything random.
        threads: compute threads; None takes the cores there are.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    target: str
    output: Path
    prompts: tuple[Path, ...]
    kind: Literal["eagle3", "mtp"] = "eagle3"
    work: Path | None = None
    bundle: Path | None = None
    max_tokens: int = 192
    temperature: float = 0.7
    draft_vocab_size: int | None = None
    steps: int = 3
    batches: int | None = None
    epochs: int = 4
    batch_tokens: int = 2048
    max_states_gb: float = 8.0
    rate: float = 0.003
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"kind is {self.kind!r}.", f"use one of: {', '.join(KINDS)}.")
        if not self.prompts:
            raise InvalidRequestError(
                "there are no prompts to train on.", 'give `--prompts FILE`, JSON lines like {"prompt": "…"}.'
            )
        for name, low, high in (
            ("max_tokens", 8, 4096),
            ("steps", 1, 8),
            ("epochs", 1, 1000),
            ("batch_tokens", 64, 1 << 20),
            ("seed", 0, 1 << 30),
        ):
            _check_range(name, getattr(self, name), low, high)
        if self.batches is not None:
            _check_range("batches", self.batches, 1, 1 << 30)
        if self.draft_vocab_size is not None:
            _check_range("draft_vocab_size", self.draft_vocab_size, 16, 1 << 24)
        if not 0 < self.temperature <= 2:
            raise InvalidRequestError(f"temperature is {self.temperature:g}.", "give a number in (0, 2].")
        if not self.max_states_gb > 0:
            raise InvalidRequestError(
                f"max_states_gb is {self.max_states_gb:g}.", "give the disk that may be used, in GB."
            )
        if not 0 < self.rate <= 1:
            raise InvalidRequestError(f"rate is {self.rate:g}.", "give a number in (0, 1].")

    @property
    def work_folder(self) -> Path:
        """Where work in progress lies."""
        return self.work or self.output.with_name(f"{self.output.name}.work")

    @property
    def states_folder(self) -> Path:
        """Where the hidden states lie that this kind of head reads."""
        return self.work_folder / f"{self.kind}-states"

    def text_settings(self) -> dict[str, Any]:
        """What decides the texts."""
        return {name: asdict(self)[name] for name in ("max_tokens", "temperature", "seed")}


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}.", f"give {low} to {high:,}.")
