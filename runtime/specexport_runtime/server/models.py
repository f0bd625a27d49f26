"""The models of a server: those that it serves, and each LoRA adapter that requests may choose, named as by vLLM."""

from collections.abc import Sequence
from typing import Any

from specexport_runtime.engine import SpecEngine
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.state import ServerState

_MAX_NAMED = 16


def resolve_adapter(model: str | None, engine: SpecEngine | None, served: str) -> str | None:
    """The adapter that ``model`` means, None for ``served``; ``ApiError`` 404 if there is no such model."""
    if model in (None, served):
        return None
    adapters = () if engine is None else engine.adapters
    if model not in adapters:
        raise no_such_model(model, (served, *adapters))
    return model


def no_such_model(model: str | None, names: Sequence[str]) -> ApiError:
    """404: a request asks for another model than those of these names."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    message = f"There is no model {str(model)[:100]!r} here, only {', '.join(map(repr, names[:_MAX_NAMED]))}{more}."
    return ApiError(404, message, param="model", code="model_not_found")


def describe_models(state: ServerState) -> list[dict[str, Any]]:
    """All of them as OpenAI describes a model, each before its adapters."""
    return [_describe(each, adapter) for each in state.states for adapter in (None, *each.adapters)]


def _describe(state: ServerState, adapter: str | None) -> dict[str, Any]:
    """A model, with vLLM's field for the longest sequence; null until that is known."""
    served = state.config.model_name
    return {
        "id": adapter or served,
        "object": "model",
        "created": state.started,
        "owned_by": "specexport",
        "root": served,
        "parent": None if adapter is None else served,
        "max_model_len": state.max_model_len,
    }
