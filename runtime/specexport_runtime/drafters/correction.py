"""What parallel heads make of a draft's logits, place by place, when the tokens in front of a place are known.

One step of the head's engine gives the logits of all places, each blind to the others' tokens. A head may correct them
by small tables of its own: which token follows which. Places are corrected in the order in which they are drawn, so
that the corrected logits are what is drawn from, and so what is tested against.

A new rule is a class that has :class:`Corrector`'s method, in a file of its own, and a line of ``_RULES``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from specexport_runtime.drafters.markov import Markov
from specexport_runtime.drafters.selector import Selector
from specexport_runtime.errors import SpecexportError
from specexport_runtime.sampling.distribution import Float32Array

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CorrectionTables, MaskInput

_RULES: "Mapping[str, Callable[[CorrectionTables], Corrector]]" = {"selector": Selector, "markov": Markov}


class Correction(Protocol):
    """The logits of one draft."""

    def logits(self, drafted: Sequence[int]) -> Float32Array:
        """Corrected logits [N] after ``drafted``, -inf for tokens it never is; CheckFailedError for NaN or +inf."""
        ...

    def confidence(self, drafted: Sequence[int]) -> float | None:
        """The head's own estimate that the token of that place is accepted, whatever it will be; None without one."""
        ...


class Corrector(Protocol):
    """How a head corrects logits."""

    def begin(self, logits: Float32Array, states: Float32Array, newest: int) -> Correction:
        """A draft after ``newest``; its places' ``logits`` [K, N] and ``states`` [K, E] may be overwritten later."""
        ...


def make_corrector(mask: "MaskInput | None") -> Corrector | None:
    """How a head corrects its logits; None if it does not."""
    tables = None if mask is None else mask.correction
    if tables is None:
        return None
    if tables.rule not in _RULES:
        raise SpecexportError(f"a head that corrects its logits by {tables.rule!r} is not known.")
    return _RULES[tables.rule](tables)
