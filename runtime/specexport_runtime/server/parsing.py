"""From bytes to a checked body: JSON without its loopholes, and one short message for what is wrong."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from specexport_runtime.intake.drafting import MAX_NODES
from specexport_runtime.server.errors import ApiError, client_gone_error
from specexport_runtime.server.protocol import MAX_STOP_CHARS, OFF

Body = TypeVar("Body", bound=BaseModel)

_WANTED = {
    "prompt": "must be a text, a list of texts, a list of token ids or a list of lists of token ids, no list empty",
    "stop": f"must be a text or a list of up to 16 texts, none empty or longer than {MAX_STOP_CHARS} characters",
    "content": "must be a text or a list of parts that are text",
    "num_speculative_tokens": 'must be an integer of at least 1, or "auto"',
    "tree_size": f'must be an integer from 0 to {MAX_NODES}, or "auto"',
    "tool_choice": 'must be "none", "auto", "required", or {"type": "function", …} with the name of a function',
}
_FORMS = {"prompt", "stop", "num_speculative_tokens", "tree_size"}
"""Parameters of several forms: which one was meant is not known, so that what is wrong is told of the whole."""
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""What a half of a surrogate pair is written with, if it is one."""
MAX_DEPTH = 512
MAX_OBJECTS = 2**14  # of a body, and lists: 4,096 messages of three parts have as many
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_MAX_KEYS = 2**13  # of one object: OpenAI's schemas have up to 5,000 properties
_MAX_NAMED = 8
_SHOWN = 100  # characters of a name or a value that a message repeats


async def read_request_body(request: Request) -> bytes:
    """The body of a request as it came; ``ApiError`` 499 if the client goes away before its end."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise client_gone_error() from None


def parse_body(data: bytes, model: type[Body]) -> Body:
    """The body of a request; ``ApiError`` names the parameter that is not what ``model`` says."""
    value = parse_json(data)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error, value, model) from None


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object as the standard has it: UTF-8, no key twice, no NaN, no half characters; else an ``ApiError``."""
    try:
        text = data.decode("utf-8")
        if _count_brackets(text) > MAX_OBJECTS and _count_brackets(_STRING.sub("", text)) > MAX_OBJECTS:
            raise _invalid_json_error(f"The body has more than {MAX_OBJECTS} objects, or lists.")
        value = json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise _invalid_json_error("The body is not UTF-8.") from None
    except RecursionError:
        raise _invalid_json_error("The body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise _invalid_json_error(
            f"The body is not JSON: {error.msg} (line {error.lineno} column {error.colno})."
        ) from None
    except ValueError:  # an integer of thousands of digits
        raise _invalid_json_error("The body has a number that is too long.") from None
    if not isinstance(value, dict):
        raise _invalid_json_error("The body must be a JSON object.")
    if text.count("{") + text.count("[") > MAX_DEPTH and is_deep(value):
        raise _invalid_json_error("The body is nested too deeply.")
    if _HALF.search(text):
        _check_surrogates(value)
    return value


def _count_brackets(text: str) -> int:
    return max(text.count("["), text.count("{"))


def is_deep(value: Any) -> bool:
    """Whether JSON is nested so deeply that what reads it may run out of stack; any thread and version of Python."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = itertools.chain.from_iterable([each.values() if isinstance(each, dict) else each for each in level])
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _invalid_json_error(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_KEYS:
        raise _invalid_json_error(f"The body has an object of {len(pairs)} keys; {_MAX_KEYS} are taken.")
    value = dict(pairs)
    if len(value) != len(pairs):
        name = _short(Counter(key for key, _ in pairs).most_common(1)[0][0])
        raise ApiError(
            400, f"The key {json.dumps(name)} is there twice.", param=_replace_surrogates(name), code="duplicate_key"
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json_error(f"The body is not JSON: {name} is no number.")


def _check_surrogates(value: dict[str, Any]) -> None:
    """Refuse halves of surrogate pairs: they are no text, and no tokenizer takes them."""
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, str):
            if _replace_surrogates(item) != item:
                param = _path(path)
                message = f"{param or 'A key'} has half a surrogate pair, which is no text."
                raise ApiError(400, message, param=param or None, code="invalid_unicode")
        elif isinstance(item, dict):
            for key, each in reversed(item.items()):
                todo += [((*path, key), each), (path, key)]
        elif isinstance(item, list):
            todo += [((*path, i), each) for i, each in reversed([*enumerate(item)])]


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _explain(error: ValidationError, body: dict[str, Any], model: type[BaseModel]) -> ApiError:
    """One error in OpenAI's words: of an unknown parameter if there is one, else the first."""
    errors = error.errors(include_url=False, include_input=False)
    first = next((item for item in errors if item["type"] == "extra_forbidden" and len(item["loc"]) == 1), errors[0])
    kind = first["type"]
    loc = first["loc"]
    if kind.startswith("union_tag"):  # all objects of several kinds are told apart by the same key
        loc, kind = (*loc, "type"), "missing" if kind.endswith("not_found") else kind
    path = _find_body_path(loc, body, missing=kind == "missing")
    param = _path(path)
    refused = _is_refused(model, path)
    if kind == "extra_forbidden" and not refused:
        unknown = _list_unknown_parameters([each["loc"] for each in errors if each["type"] == kind], body, model)
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        there = "is no parameter" if len(unknown) == 1 else "are no parameters"
        message = f"There {there} {', '.join(unknown[:_MAX_NAMED])}{more}."
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is missing.", param=param, code="missing_required_parameter")
    parts = json.JSONEncoder(ensure_ascii=False).iterencode(_value_at(body, path))
    given = _short("".join(itertools.islice(parts, _SHOWN + 1)))  # of what may be a megabyte
    if refused:
        better = _INSTEAD.get(str(path[0]))
        fix = f"use {better}" if better else "leave it out"
        message = f"{param} = {given} is not supported by this server: {fix}."
        return ApiError(400, message, param=param, code="unsupported_parameter")
    wanted = _WANTED | getattr(model, "WANTED", {})
    for name in reversed(path):
        if name in _FORMS or (name in wanted and name == path[-1]):
            param = _path(path[: path.index(name) + 1])
            return ApiError(400, f"{param} {wanted[str(name)]}.", param=param, code="invalid_value")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    told = f"Input should be one of {first['ctx']['expected_tags']}" if kind == "union_tag_invalid" else first["msg"]
    return ApiError(400, f"{param} is {given}: {told}.", param=param, code=code)


def _list_unknown_parameters(locs: Sequence[Sequence[str | int]], body: Any, model: type[BaseModel]) -> list[str]:
    """Names of unknown parameters, without those that are known and refused."""
    paths = dict.fromkeys(_find_body_path(loc, body, missing=False) for loc in locs)
    return [_path(path) for path in paths if not _is_refused(model, path)]


def _is_refused(model: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Whether a parameter on the way to a location is declared only to be refused."""
    models = [model]
    for key in path:
        if isinstance(key, int):
            continue
        declared = [each.model_fields[key] for each in models if key in each.model_fields]
        if any(OFF in field.metadata for field in declared):
            return True
        models = [found for field in declared for found in _iterate_models(field.annotation)]
    return False


def _iterate_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _iterate_models(part)


def _find_body_path(loc: Sequence[str | int], body: Any, *, missing: bool) -> tuple[str | int, ...]:
    """The part of a location that is in the body; pydantic also names the variants of a union, and marks keys."""
    path: list[str | int] = []
    value = body
    for i, key in enumerate(loc):
        if isinstance(value, Mapping) and (key in value or (missing and i == len(loc) - 1)):
            following = loc[i + 1] if i + 1 < len(loc) else None
            if isinstance(value.get(key), str) and following in value and following != key:
                continue  # a variant that is named as one of its keys is
            path.append(key)
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path.append(key)
            value = value[key]
    return tuple(path)


def _value_at(body: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        body = body[key]
    return body


def _path(path: Sequence[str | int]) -> str:
    name = ""
    for key in path:
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else key
    return _short(name)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
