"""What the training loop asks of that which it trains: a draft head, or a smaller model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional


class Batch(NamedTuple):
    """Texts of a training step."""

    tokens: Tensor  # int64 [B, T]
    states: list[Tensor]  # tapped hidden states, [B, T, H] each
    last: Tensor  # what the target's LM head reads, [B, T, H]
    lengths: Tensor  # tokens of each text, int64 [B]


class Guess(NamedTuple):
    """One draft step at every place of a batch."""

    drafted: Tensor  # the draft's best token for ``i + 1 + offset``, int64 [B, T-1]
    wanted: Tensor  # the target's, int64 [B, T-1]
    valid: Tensor  # places where that is known, bool [B, T-1]
    offset: int  # 1 for the first step, and one more for each further one
    # mean cross entropy under the target's distribution, nats a token; of the first step only
    loss: float | None = None
    # chance that a token drawn from the draft's distribution is accepted, the sum of min(p, q) (Leviathan et al. 2023,
    # section 3.3), mean over valid places; of the first step only, where it is measured
    overlap: float | None = None


def shift_left(values: Tensor, offset: int) -> Tensor:
    """What of values [B, T] lies ``offset`` places after each place but the last [B, T-1]; 0 beyond the end."""
    return functional.pad(values[:, offset:], (0, offset))[:, : values.shape[1] - 1]


class DraftDescription(NamedTuple):
    """What a model card says of a draft."""

    title: str  # a few words
    form: str  # what it is, in sentences
    use: str  # how it is used, and what its files hold, in sentences
    flag: str  # of ``specexport build``


class Student(Protocol):
    """A draft in training."""

    @property
    def modules(self) -> nn.Module:
        """Its parameters: the ones that require a gradient are trained and saved, the others are the target's."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a saved state must have been made of to fit, as JSON types."""
        ...

    def losses(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Mean cross entropy under the target's distribution, nats a token: of each draft step that it learns."""
        ...

    def guesses(self, batch: Batch, steps: int) -> Iterator[Guess]:
        """What it drafts at every place, step by step, where all tokens before are the text's own."""
        ...


class Plan(Protocol):
    """How a draft of one kind is made of a target, and written."""

    @property
    def taps(self) -> Sequence[int]:
        """Hidden states of the target that it learns from, beside the one that the LM head reads."""
        ...

    def make(self, note: Callable[[str], None]) -> Student:
        """The draft, not yet trained; the target's model is let go of. UnsupportedModelError: it can have none."""
        ...

    def write(self, folder: Path, student: Any) -> None:
        """Write what :meth:`make` made, trained: all files but the record of the training."""
        ...

    def describe(self) -> DraftDescription:
        """For the model card."""
        ...
