"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from specexport_runtime.errors import EngineClosedError, InvalidRequestError, QueueFullError, SpecexportError


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: what is wrong, and how to fix it.
        kind: OpenAI's ``type``, for example ``invalid_request_error``.
        param: name of the parameter that is to blame.
        code: OpenAI's ``code``, for example ``unsupported_parameter``.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; of a defect of ours no more than that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), kind="service_unavailable", code="draining", headers={"Retry-After": "5"})
    if isinstance(error, SpecexportError):
        return ApiError(500, str(error), kind="server_error", code="request_failed")
    return ApiError(500, "the server failed; its log has the reason.", kind="server_error", code="internal_error")
