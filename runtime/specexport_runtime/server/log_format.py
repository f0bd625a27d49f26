"""One line a log record, as JSON or as text. Nothing that a client sends can end a line or begin another."""

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from specexport_runtime.errors import RequestFailedError, SpecexportError

current_state: ContextVar[Mapping[str, Any]] = ContextVar("current_state", default={})  # noqa: B039 never written to
"""``scope["state"]`` of the request that the running task serves: what is logged meanwhile gets its id."""

_MAX_CHARS = 256
_MAX_CAUSES = 5
_FIELDS = "fields"
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;/@+-]+")
# Control characters, the separators that some viewers break lines at, and marks that turn the reading direction.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def log_fields(**values: Any) -> dict[str, Any]:
    """What to give as ``extra`` so that a record has these fields; those that are None are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


class _LineFormatter(logging.Formatter):
    """What both formats have in common."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **log_fields(request_id=current_state.get().get("request_id"))[_FIELDS],
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line |= _describe(record.exc_info[1])
        return self.write({name: _clip(value) if name != "stack" else value for name, value in line.items()})

    def write(self, line: dict[str, Any]) -> str:
        """The line; without line breaks."""
        raise NotImplementedError


class JsonFormatter(_LineFormatter):
    """A JSON object a line."""

    def write(self, line: dict[str, Any]) -> str:
        """The object, in ASCII."""
        return json.dumps(line, default=str)


class TextFormatter(_LineFormatter):
    """Time, level and message, then ``name=value``; values with spaces or odd characters are quoted."""

    def write(self, line: dict[str, Any]) -> str:
        """The line."""
        rest = dict(line)
        head = f"{rest.pop('time')} {rest.pop('level').upper():<7} {_escape(rest.pop('message'))}"
        if rest["logger"].startswith("specexport"):
            del rest["logger"]
        return " ".join([head, *(f"{name}={_plain(value)}" for name, value in rest.items())])


def log_config(log_format: str) -> dict[str, Any]:
    """Settings for ``logging.config.dictConfig``: our lines (``"json"`` or ``"text"``) and uvicorn's."""
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    quiet = {"handlers": ["default"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {
            "default": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"},
        },
        "loggers": {
            "specexport": {**quiet, "level": "INFO"},
            "specexport_runtime": {**quiet, "level": "INFO"},
            "uvicorn": {**quiet, "level": "INFO"},
            "uvicorn.access": {"handlers": [], "propagate": False, "level": "WARNING"},
            "asyncio": {**quiet, "level": "WARNING"},
        },
    }


def _describe(error: BaseException) -> dict[str, Any]:
    """Class and stack of an exception and its causes; text only of ours: another's may hold a piece of a prompt."""
    chain = list(_iterate_causes(error))[::-1]
    stack = "".join("".join(traceback.format_list(traceback.extract_tb(e.__traceback__))) + _name(e) for e in chain)
    described = {"error": type(error).__name__, "stack": stack}
    is_ours = isinstance(error, SpecexportError) and not isinstance(error, RequestFailedError)  # it repeats its cause
    return described | ({"error_message": str(error)} if is_ours else {})


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}\n"


def _clip(value: Any) -> Any:
    return value[:_MAX_CHARS] + "…" if isinstance(value, str) and len(value) > _MAX_CHARS else value


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else _escape(json.dumps(text, ensure_ascii=False))
