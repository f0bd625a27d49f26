"""Requests by the names of what is said of them."""

from collections.abc import Iterable

from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import Delivery, DraftPlan, Request


def request_of(*given: object, draft_plan: Iterable[DraftStage] = (), **options: object) -> Request:
    """A request; whatever its plan and its delivery have a field for goes there."""
    plan, delivery = (
        {name: options.pop(name) for name in kind._fields if name in options} for kind in (DraftPlan, Delivery)
    )
    return Request(*given, plan=DraftPlan(tuple(draft_plan), **plan), delivery=Delivery(**delivery), **options)
