"""What ``/openapi.json`` says of bodies and answers: schemas of models, whole in their places."""

from typing import Any

from pydantic import BaseModel

from specexport_runtime.server.errors import ERROR_RESPONSES


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route whose JSON body is ``model``."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(model)}}}}


def responses(
    model: type[BaseModel], events: str = "events of chunks as OpenAI's, then `data: [DONE]`"
) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that answers with ``model``, with events, or with an error."""
    stream = {"description": f"If `stream` is true: {events}."}
    content = {"application/json": {"schema": _schema(model)}, "text/event-stream": {"schema": stream}}
    return {200: {"description": "The answer.", "content": content}, **ERROR_RESPONSES}


def _schema(model: type[BaseModel]) -> Any:
    schema = model.model_json_schema()
    return _inline_references(schema, schema.pop("$defs", {}))


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with every reference replaced by what it means: references would point out of it."""
    if isinstance(schema, list):
        return [_inline_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return _inline_references(named | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    return {key: _inline_references(value, definitions) for key, value in schema.items()}
