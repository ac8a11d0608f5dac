"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from atom_async.engine.client import (
    EngineDead,
    EngineDraining,
    EngineError,
    EngineOutput,
    EngineStopped,
    QueueFull,
    RequestRejected,
)


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    """The field of the request that is wrong."""
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """Ends a request with an HTTP status and a message that is fit for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorResponse:
        return ErrorResponse(ErrorBody(self.message, _type_of(self.status), self.param, self.code))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


def from_engine(error: EngineError) -> ApiError:
    """What the engine says, as a client hears it."""
    match error:
        case RequestRejected():
            too_long = "maximum context length" in str(error)
            return bad_request(str(error), "prompt", "context_length_exceeded" if too_long else None)
        case QueueFull():
            wait = str(math.ceil(error.retry_after_s))
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": wait})
        case EngineDraining():
            return ApiError(503, str(error), code="draining", headers={"retry-after": "5"})
        case EngineStopped():
            return ApiError(503, "the server was stopped before the request had ended", code="engine_stopped")
        case EngineDead():
            return ApiError(503, f"the engine has failed: {error}", code="engine_failed")
        case _:
            return ApiError(500, str(error), code="engine_error")


def ended_badly(output: EngineOutput) -> ApiError | None:
    """The error in an output that ends its request without a result, if it does."""
    if output.finish_reason == "error" and output.error_kind == "deadline":
        return ApiError(504, output.error, code="deadline_exceeded")
    if output.finish_reason == "error":
        return ApiError(500, output.error or "the engine ended the request with an error", code="engine_error")
    if output.finish_reason == "abort":
        return ApiError(503, f"the request was aborted: {output.error}", code="aborted")
    return None
