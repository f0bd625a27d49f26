"""The models of a server: the one that it serves, and each LoRA adapter that requests may choose, named as by vLLM."""

from typing import Any

from specexport_runtime.engine import SpecEngine
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.state import ServerState


def resolve_adapter(model: str | None, engine: SpecEngine | None, served: str) -> str | None:
    """The adapter that ``model`` means, None for ``served``; ``ApiError`` 404 if there is no such model."""
    if model in (None, served):
        return None
    adapters = () if engine is None else engine.adapters
    if model not in adapters:
        names = ", ".join(map(repr, (served, *adapters)))
        message = f"There is no model {str(model)[:100]!r} here, only {names}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return model


def describe_models(state: ServerState) -> list[dict[str, Any]]:
    """All of them as OpenAI describes a model, the one that is served first."""
    engine = None if state.engine is None else state.engine.engine
    adapters = () if engine is None else engine.adapters
    return [_describe(state, None), *(_describe(state, adapter) for adapter in adapters)]


def _describe(state: ServerState, adapter: str | None) -> dict[str, Any]:
    """A model, with vLLM's field for the longest sequence; null until the bundle is loaded."""
    served = state.config.model_name
    return {
        "id": adapter or served,
        "object": "model",
        "created": state.started,
        "owned_by": "specexport",
        "root": served,
        "parent": None if adapter is None else served,
        "max_model_len": None if state.engine is None else state.engine.engine.max_model_len,
    }
