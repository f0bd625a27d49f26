"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from specexport_runtime.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OwnerLimitError,
    QueueFullError,
    SpecexportError,
)


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is wrong; the message names the parameter.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        421: "The Host header names another server.",
        429: "Too many requests wait, or are of this key; try again later.",
        500: "The server failed.",
        503: "The server is loading, shutting down or broken; try again later, or another one.",
        504: "The request took too long.",
    }.items()
}
"""For OpenAPI: what both endpoints may answer besides success."""


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,  # HTTP status
        message: str,  # what is wrong, and how to fix it
        *,
        kind: str = "invalid_request_error",  # OpenAI's ``type``
        param: str | None = None,
        code: str | None = None,  # OpenAI's, ``unsupported_parameter`` say
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, _format_sentence(message, param), kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, scope: Mapping[str, Any]) -> JSONResponse:
        """The whole answer to a request, in the form of the API that it is of; its log hears of it."""
        state = scope.get("state", {})
        if (log := state.get("log")) is not None:
            log.error_code = self.code or self.kind
        body = build_messages_error(self, state.get("request_id")) if is_messages_request(scope) else self.body()
        return JSONResponse(body, self.status, headers=self.headers)


_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by their status; any other is that of a request that is wrong."""


def is_messages_request(scope: Mapping[str, Any]) -> bool:
    """Whether a request is of Anthropic's Messages API."""
    return re.match(r"/v1/messages(/|$)", scope["path"]) is not None


def build_messages_error(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error as Anthropic's clients expect it."""
    kind = _MESSAGES_KINDS.get(error.status, "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param == "thread":  # the official client's loop of tools asks for one, and goes on without it
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told, "request_id": request_id}


def _format_sentence(message: str, param: str | None) -> str:
    """A message with a capital letter at its beginning, though a parameter's name has none, and a full stop."""
    if param and re.match(rf"{re.escape(param)}(?!\w)", message):
        message = f"Parameter {message}"
    return message[:1].upper() + message[1:] + ("" if message.endswith((".", "!", "?")) else ".")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; of a defect of ours no more than that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        code = "rate_limit_exceeded" if isinstance(error, OwnerLimitError) else "queue_full"
        return ApiError(429, str(error), kind="rate_limit_error", code=code, headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return unavailable_error("engine_dead", "The engine has failed, and the server must be started again.")
    if isinstance(error, EngineClosedError):
        return unavailable_error("draining", "The server is shutting down.")
    code = "request_failed" if isinstance(error, SpecexportError) else "internal_error"
    return ApiError(500, "The server failed; its log has the reason.", kind="server_error", code=code)


def unavailable_error(code: str, message: str) -> ApiError:
    """503: the server is loading, shutting down, or broken."""
    return ApiError(503, message, kind="service_unavailable", code=code, headers={"Retry-After": "5"})


def request_timeout_error(seconds: float) -> ApiError:
    """504: the request took longer than the server allows."""
    return ApiError(504, f"The request took more than {seconds:g} s.", kind="timeout_error", code="request_timeout")


def client_gone_error() -> ApiError:
    """499, as nginx calls it: the client is gone, and the log alone reads the answer."""
    return ApiError(499, "The client closed the connection.", code="client_closed_request")


def invalid_error(param: str, message: str) -> ApiError:
    """400: a parameter has a value that it cannot have."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported_error(param: str, message: str) -> ApiError:
    """400: a parameter that OpenAI has and this server cannot honour."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def over_limit_error(param: str, what: str, most: int) -> ApiError:
    """400: more than the server was set to take."""
    return ApiError(400, f"{what}: this server takes up to {most} ({param}).", param=param, code="limit_exceeded")


def shown(number: int) -> str:
    """A number as a message repeats it: it may have thousands of digits."""
    return str(number) if number < 2**63 else "over 2**63"
