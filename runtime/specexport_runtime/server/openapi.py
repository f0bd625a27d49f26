"""What OpenAPI says of an endpoint that reads its body itself."""

from typing import Any

from pydantic import BaseModel


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route whose JSON body is ``model``."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with every reference replaced by what it means: references would point out of it."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return _inline(named | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
