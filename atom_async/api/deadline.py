"""How long a client is willing to wait for its answer to begin: header `x-request-deadline-ms` or field `deadline_ms`.

The time counts from the request's arrival here, so what reading and tokenizing takes is part of it.
"""

from __future__ import annotations

from starlette.requests import Request

from .errors import ApiError, bad_request
from .requests import SharedFields

HEADER = "x-request-deadline-ms"


def deadline_of(request: Request, body: SharedFields) -> float | None:
    """Milliseconds from arrival; None: the client waits for ever. Raises a 400 for what is not a time."""
    text = request.headers.get(HEADER)
    if text is None:
        return body.deadline_ms
    try:
        given = float(text)
    except ValueError:
        given = -1.0
    if not 0 < given < float("inf"):
        raise bad_request(f"{HEADER}: {text!r} is not a positive number of milliseconds", HEADER)
    if body.deadline_ms is not None and body.deadline_ms != given:
        raise bad_request(
            f"{HEADER} is {given:g} and deadline_ms {body.deadline_ms:g}; give one of them", "deadline_ms"
        )
    return given


def time_left(deadline_ms: float | None, elapsed_s: float) -> float | None:
    """What is left of it for the engine. Raises a 504 when that is nothing."""
    if deadline_ms is None:
        return None
    left = deadline_ms - elapsed_s * 1e3
    if left <= 0:
        raise ApiError(
            504,
            f"reading and tokenizing the request took longer than its deadline of {deadline_ms:g} ms",
            code="deadline_exceeded",
        )
    return left
