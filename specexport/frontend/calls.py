"""What the layers of a model ask for, as one probe forward saw it."""

from typing import NamedTuple

from specexport.frontend.attention import LayerCall
from specexport.frontend.recurrence import RecurrenceCall


class ModelCalls(NamedTuple):
    """In the order of the forward pass.

    Attributes:
        attention: calls of attention.
        recurrences: calls of layers that keep a state.
    """

    attention: tuple[LayerCall, ...]
    recurrences: tuple[RecurrenceCall, ...] = ()
