"""The form of an answer that a body asks for: OpenAI's ``response_format``, and vLLM's ``structured_outputs``."""

from collections.abc import Iterator, Mapping
from typing import Any

from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError, MissingDependencyError
from specexport_runtime.sampling.schema_rules import SchemaPath
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.server.errors import ApiError, invalid_error
from specexport_runtime.server.protocol import Choices, JsonObjectFormat, JsonSchemaFormat, Sampling

MAX_DEPTH = 10
MAX_PROPERTIES = 5000
MAX_ENUM_VALUES = 1000
"""OpenAI's limits of a strict schema."""


def read_form(body: Choices, engine: SpecEngine) -> StructuredOutputs | None:
    """The form that a body asks for, checked, and ready in the engine; None for none. ``ApiError`` 400 if refused."""
    form, param = _parse_form(body)
    if form is None:
        return None
    try:
        engine.check_form(form)
    except InvalidRequestError as error:
        raise invalid_error(param, f"{param}: {error}") from None
    except MissingDependencyError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="unsupported_parameter") from None
    return form


def may_compile(body: Sampling) -> bool:
    """Whether a form is compiled for a body, which may take seconds."""
    strict = [tool for tool in getattr(body, "tools", None) or () if getattr(tool, "function", tool).strict]
    asked = [getattr(body, name, None) for name in ("structured_outputs", "response_format", "text")]
    choice = getattr(body, "tool_choice", None)
    return bool(strict) or any(asked) or getattr(choice, "type", choice) not in (None, "none", "auto")


def _parse_form(body: Choices) -> tuple[StructuredOutputs | None, str]:
    given, asked = body.structured_outputs, body.response_format
    if given is not None and isinstance(asked, (JsonObjectFormat, JsonSchemaFormat)):
        raise invalid_error("structured_outputs", "structured_outputs and response_format are both given: give one.")
    if given is not None:
        fields = given.model_dump(exclude_none=True, by_alias=True)
        try:
            form = StructuredOutputs(**fields)
            return form, form.name
        except InvalidRequestError as error:
            raise invalid_error("structured_outputs", str(error)) from None
    if isinstance(asked, JsonObjectFormat):
        return StructuredOutputs(json_object=True), "response_format"
    if isinstance(asked, JsonSchemaFormat):
        param, schema = "response_format.json_schema.schema", asked.json_schema.schema_
        if schema is None:
            raise invalid_error(param, f"{param} is missing.")
        try:
            form = StructuredOutputs(json=schema)
        except InvalidRequestError as error:
            raise invalid_error(param, str(error)) from None
        if asked.json_schema.strict:  # after the check of its size
            check_strict(schema, param)
        return form, param
    return None, ""


def check_strict(schema: Mapping[str, Any], param: str) -> None:
    """Refuse a schema that breaks OpenAI's rules for ``strict``; ApiError 400, for ``param``, says where."""
    if schema.get("type") != "object" or "anyOf" in schema:
        raise invalid_error(param, f"{param}: the root of a strict schema is of type 'object', and has no anyOf.")
    properties = values = 0
    for where, part, depth in _iterate_subschemas(schema, param):
        if depth > MAX_DEPTH:
            raise invalid_error(param, f"{where}: a strict schema has at most {MAX_DEPTH} levels.")
        own = part.get("properties")
        if part.get("type") == "object" or own is not None:
            required = part.get("required") or []
            if not isinstance(own or {}, Mapping) or not isinstance(required, list):
                raise invalid_error(param, f"{where}: 'properties' must be an object, and 'required' a list.")
            names = set(own or {})
            properties += len(names)
            if part.get("additionalProperties") is not False:
                raise invalid_error(param, f"{where}: 'additionalProperties' must be false in a strict schema.")
            missing = sorted(names - {name for name in required if isinstance(name, str)})
            if missing:
                said = f"'required' must name every property of a strict schema; {missing[0]!r} is missing"
                raise invalid_error(param, f"{where}: {said}.")
        values += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
    if properties > MAX_PROPERTIES or values > MAX_ENUM_VALUES:
        raise invalid_error(
            param,
            f"{param}: a strict schema has at most {MAX_PROPERTIES} properties and {MAX_ENUM_VALUES} values of enums.",
        )


def _iterate_subschemas(schema: Any, param: str) -> Iterator[tuple[SchemaPath, Mapping[str, Any], int]]:
    """All schemas within a schema: where, the schema, and how deep."""
    todo: list[tuple[SchemaPath, Any, int]] = [(SchemaPath(None, param), schema, 1)]
    while todo:
        at, part, level = todo.pop()
        if not isinstance(part, Mapping):
            continue
        yield at, part, level
        if level > MAX_DEPTH:
            continue
        for key in ("properties", "$defs", "definitions"):
            inner = part.get(key)
            if isinstance(inner, Mapping):
                todo += [(SchemaPath(SchemaPath(at, key), name), each, level + 1) for name, each in inner.items()]
        for key in ("anyOf", "allOf", "oneOf"):
            if isinstance(part.get(key), list):
                todo += [(SchemaPath(at, f"{key}[{i}]"), each, level) for i, each in enumerate(part[key])]
        if "items" in part:
            todo.append((SchemaPath(at, "items"), part["items"], level + 1))
