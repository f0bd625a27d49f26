"""Prometheus metrics of an engine, by vLLM's names and definitions where they exist (extra ``serve``)."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from specexport_runtime.observe import RoundRecord
    from specexport_runtime.sequence import Sequence


class EngineMetrics:
    """Metrics of one engine; an ``EngineObserver``.

    Args:
        model_name: value of the label ``model_name``.
        registry: where they are registered; None makes one of their own.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.model_name = model_name
        self.registry = registry or CollectorRegistry()

    def on_round(self, record: "RoundRecord") -> None:
        """Count a step."""

    def on_finish(self, sequence: "Sequence") -> None:
        """Count the end of a sequence."""
