"""What executors on a GPU share, whatever the engine: steps by what is wanted of them, and rows that stay there."""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import EngineRequest, Int64Array, StepOutput, Want
from specexport_runtime.executors.device_rows import RowSampler
from specexport_runtime.executors.features import FeaturesMixin
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.gpu_memory import GpuFeatures, HostOutput
from specexport_runtime.executors.logit_rows import LogitRows, NumpyRows
from specexport_runtime.executors.row_kernels import RowAsk

_log = logging.getLogger(__name__)


class IssuedStep(NamedTuple):
    """A step on the stream: what it is, and where its results lie on the device until the next one."""

    placed: Any  # of the executor
    shape: StepShape  # as the engine sees it
    rows: int  # of logits
    tokens: slice | Int64Array  # where its tokens stand among those of ``shape``
    ids: HostOutput  # takes its token ids
    logits: int
    token_ids: int
    features: int = 0


class GpuSteps(FeaturesMixin):
    """An executor whose steps may wait for none before them, with what draws from their rows."""

    driver: GpuDriver
    rows: RowSampler | None = None  # None where the driver runs no kernels
    _features: GpuFeatures
    _logits: HostOutput

    def _set_up_steps(self, driver: GpuDriver, rows: RowSampler | None) -> None:
        """Set up what steps need."""
        self.driver, self.rows, self.keeps_rows = driver, rows, rows is not None
        self._chain: list[IssuedStep] = []  # steps that were not collected
        self._asked: list[Sequence[RowAsk]] = []  # of these

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
    def _enqueue_step(self, number: int | None, *, fed: bool) -> IssuedStep:
        """Put the prepared step on the stream, as the ``number``-th of a chain or alone; ``fed`` by the one before."""

    def _on_steps_done(self, steps: Sequence[IssuedStep]) -> None:
        """Called when the results of steps are here, and nothing runs."""

    @contextmanager
    def _time_engine(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.engine_seconds += time.perf_counter() - start

    def _execute(self, with_logits: bool, asks: Sequence[RowAsk] = ()) -> StepOutput:
        """Run the prepared step: logits or token ids."""
        self._end_chain()
        with self._time_engine():
            step = self._enqueue_step(None, fed=False)
            output = self._logits if with_logits else step.ids
            output.fetch(step.logits if with_logits else step.token_ids, step.rows)
            if self.rows is not None and asks:
                self.rows.put(asks, step.logits)
            self._features.copy_out(step.shape, step.features)
            self.driver.synchronize()
        self._bound = self._features.bound(step.tokens, step.rows)
        self._on_steps_done([step])
        return output.array[: step.rows]

    def enqueue(self, *, fed: bool, asks: Sequence[RowAsk] = ()) -> None:
        """See ``Executor.enqueue``."""
        if not fed:
            self._end_chain()
        number = len(self._chain)
        with self._time_engine():
            step = self._enqueue_step(number, fed=fed)
            if self.rows is not None and asks:
                self.rows.put(asks, step.logits, token_ids=step.token_ids, step=number)
            step.ids.fetch(step.token_ids, step.rows)
        self._chain.append(step)
        self._asked = [*self._asked[:number], asks]

    def _collect(self) -> list[Int64Array]:
        """Wait for the steps of a chain: token ids [R] of each, as ``execute`` gives them."""
        chain, self._chain = self._chain, []
        with self._time_engine():
            self.driver.synchronize()
        self._on_steps_done(chain)
        return [step.ids.array[: step.rows] for step in chain]

    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step; SpecexportError if the GPU or the engine failed. See ``Executor.execute``."""
        return self._execute(want == "logits")

    def execute_rows(self, asks: Sequence[RowAsk]) -> LogitRows:
        """See ``Executor.execute_rows``; the kernels run after the step, and it has one wait."""
        if not (asks and self.keeps_rows) or self.rows is None or self.head is not None:
            return super().execute_rows(asks)
        return self.rows.collect(asks, self._execute(with_logits=False, asks=asks))

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
