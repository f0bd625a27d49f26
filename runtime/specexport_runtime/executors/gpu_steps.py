"""What executors on a GPU share, whatever the engine: steps by what is wanted of them, and rows that stay there."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import EngineRequest, Int64Array, StepOutput, Want
from specexport_runtime.executors.device_rows import RowSampler
from specexport_runtime.executors.features import WithFeatures
from specexport_runtime.executors.logit_rows import LogitRows, NumpyRows
from specexport_runtime.executors.row_kernels import RowAsk

_log = logging.getLogger(__name__)


class GpuSteps(WithFeatures):
    """An executor whose steps may wait for none before them, with what draws from their rows."""

    rows: RowSampler | None = None  # None where the driver runs no kernels
    _chain: list[Any]  # steps that were not collected
    _asked: list[Sequence[RowAsk]]  # of the steps of a chain

    def reserve_rows(self, request: EngineRequest) -> None:
        """Take the memory with which rounds draw from rows; where the GPU has not so much, the host draws."""
        if self.rows is None:
            return
        is_target = request.role == "target"
        count = request.num_rows * (request.lookahead + 1 if is_target else 1)
        try:
            self.rows.reserve(count, 0 if is_target else request.lookahead)
        except IncompatibleError as error:
            self.rows.close()
            self.rows, self.keeps_rows = None, False
            _log.warning("tokens are drawn on the host: %s", error)

    @abstractmethod
    def _execute(self, with_logits: bool, asks: Sequence[RowAsk] = ()) -> StepOutput:
        """Run the prepared step: logits or token ids."""

    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step; SpecexportError if the GPU or the engine failed. See ``Executor.execute``."""
        return self._execute(want == "logits")

    def execute_rows(self, asks: Sequence[RowAsk]) -> LogitRows:
        """See ``Executor.execute_rows``; the kernels run behind the step, and it has one wait."""
        if not (asks and self.keeps_rows) or self.rows is None or self.head is not None:
            return super().execute_rows(asks)
        return self.rows.collect(asks, self._execute(with_logits=False, asks=asks))

    @abstractmethod
    def _collect(self) -> list[Int64Array]:
        """Wait for the steps of a chain: token ids [R] of each, as ``execute`` gives them."""

    def collect(self) -> list[LogitRows]:
        """See ``Executor.collect``."""
        found = zip(self._asked, self._collect(), strict=False)
        return [
            NumpyRows(ids) if self.rows is None or not asks else self.rows.collect(asks, ids, step=step)
            for step, (asks, ids) in enumerate(found)
        ]

    def _end_chain(self) -> None:
        """Wait for steps that were never collected: their pinned memory is used again."""
        if self._chain:
            self._collect()
