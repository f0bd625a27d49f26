"""What the layers of a model ask for, as one probe forward saw it."""

from typing import NamedTuple

from specexport.frontend.attention import LayerCall
from specexport.frontend.recurrence import RecurrenceCall


class ModelCalls(NamedTuple):
    """The calls of attention and of recurrences, in the order of the forward pass."""

    attention: tuple[LayerCall, ...]
    recurrences: tuple[RecurrenceCall, ...] = ()  # of layers that keep a state
