"""An engine's Prometheus metrics as Ray metrics, which every node of a cluster exports for all its replicas."""

import asyncio
import logging
from typing import Any

PERIOD_S = 5.0
_log = logging.getLogger(__name__)


class MetricsMirror:
    """Copies the samples of a Prometheus ``CollectorRegistry`` to gauges of Ray, with the tags of the replica.

    A counter's sample stays cumulative, so ``rate()`` works on it. ``vllm:x`` becomes ``vllm_x``, and Ray puts ``ray_``
    before it.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._gauges: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Copy every few seconds, for as long as the event loop runs."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def copy(self) -> int:
        """Copy all samples once; returns how many."""
        from ray.serve.metrics import Gauge

        count = 0
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                keys = tuple(sample.labels)
                name = sample.name.replace(":", "_")
                gauge = self._gauges.get((name, keys))
                if gauge is None:
                    gauge = self._gauges[name, keys] = Gauge(name, family.documentation, tag_keys=keys)
                gauge.set(sample.value, tags=dict(sample.labels))
                count += 1
        return count

    async def _run(self) -> None:
        while True:
            try:
                self.copy()
            except Exception:  # Ray's metrics come and go with its agents; answers must not depend on them
                _log.exception("metrics could not be handed to Ray")
            await asyncio.sleep(PERIOD_S)
