"""The request router of Ray Serve that keeps requests of one key on one replica while its queue is not too long."""

from functools import cache
from typing import Any

from specexport_runtime.ray_serve.affinity import is_overloaded, rank_replicas


@cache
def _router_class() -> type:
    import random

    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

    class AffinityRouter(RequestRouter):  # type: ignore[misc]
        """The key is a request's session id; without one, or above ``margin``, the power of two choices."""

        def initialize_state(self, margin: int = 4) -> None:
            """Take in ``request_router_kwargs``."""
            self._margin = margin

        async def choose_replicas(
            self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
        ) -> list[list[RunningReplica]]:
            """The preferred replica, then two others; or two of all."""
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            key = "" if pending_request is None else pending_request.metadata.session_id
            two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
            if not key:
                return [two]
            named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            first, *rest = rank_replicas(key, list(named))
            if is_overloaded(self._length(named[first].replica_id), self._lengths(named, rest), self._margin):
                return [two]
            return [[named[first]], [named[name] for name in rest[:2]]]

        def _lengths(self, named: dict[str, RunningReplica], names: list[str]) -> list[int | None]:
            return [self._length(named[name].replica_id) for name in names]

        def _length(self, replica: ReplicaID) -> int | None:
            length: int | None = self.replica_queue_len_cache.get(replica)
            return length

    AffinityRouter.__qualname__ = "AffinityRouter"
    return AffinityRouter


def __getattr__(name: str) -> Any:
    """``AffinityRouter``, made when Ray asks for it: this module is imported where Ray is not installed."""
    if name == "AffinityRouter":
        return _router_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
