"""What the training loop asks of that which it trains: a draft head, or a smaller model."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

from specexport.train.batch import Batch


class Guess(NamedTuple):
    """One draft step at every place of a batch.

    Attributes:
        drafted: the draft's best token for ``i + 1 + offset``, int64 [B, T-1].
        wanted: the target's, int64 [B, T-1].
        valid: places where that is known, bool [B, T-1].
        offset: 1 for the first step, and one more for each further one.
        loss: mean cross entropy under the target's distribution, nats a token; of the first step only.
        overlap: chance that a token drawn from the draft's distribution is accepted, the sum of min(p, q) (Leviathan et
            al. 2023, section 3.3), mean over valid places; of the first step only, where it is measured.
    """

    drafted: Tensor
    wanted: Tensor
    valid: Tensor
    offset: int
    loss: float | None = None
    overlap: float | None = None


def at_offset(values: Tensor, offset: int) -> Tensor:
    """What of values [B, T] lies ``offset`` places behind each place but the last [B, T-1]; 0 beyond the end."""
    return functional.pad(values[:, offset:], (0, offset))[:, : values.shape[1] - 1]


class Described(NamedTuple):
    """What a model card says of a draft.

    Attributes:
        title: a few words.
        form: what it is, in sentences.
        use: how it is used, and what its files hold, in sentences.
        flag: of ``specexport build``.
    """

    title: str
    form: str
    use: str
    flag: str


class Student(Protocol):
    """A draft in training.

    Attributes:
        modules: its parameters; those that require a gradient are trained and saved, the others are the target's.
    """

    @property
    def modules(self) -> nn.Module:
        """See above."""
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
    """How a draft of one kind is made of a target, and written.

    Attributes:
        taps: hidden states of the target that it learns from, beside the one that the LM head reads.
    """

    @property
    def taps(self) -> Seq[int]:
        """See above."""
        ...

    def make(self, note: Callable[[str], None]) -> Student:
        """The draft, not yet trained. The target's model is let go of.

        Args:
            note: told of what takes long.

        Raises:
            UnsupportedModelError: there is none of this kind for such a target.
        """
        ...

    def write(self, folder: Path, student: Any) -> None:
        """Write what :meth:`make` made, trained: all files but those that tell of the training.

        Raises:
            UserInputError: a file cannot be written.
        """
        ...

    def describe(self) -> Described:
        """For the model card."""
        ...
