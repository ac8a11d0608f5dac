"""The little of an OpenAI client that the terminal needs, on the standard library's HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec

CONNECT_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server cannot be reached, or refuses; the message is fit for people."""


def get_json(url: str, key: str | None, path: str) -> Any:
    """Raises ServerError."""
    connection, response = _request(url, key, "GET", path, None)
    with closing(connection):
        return _decoded(response.read())


def stream_chat(url: str, key: str | None, body: dict[str, Any]) -> Generator[str, None, None]:
    """The text of the answer's first choice, piece by piece. Closing the iterator aborts the request.

    Raises ServerError, also in the middle.
    """
    connection, response = _request(url, key, "POST", "/v1/chat/completions", msgspec.json.encode(body))
    with closing(connection):
        for event in _events(response):
            if "error" in event:
                raise ServerError(event["error"]["message"])
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text


def _request(
    url: str, key: str | None, method: str, path: str, body: bytes | None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    connection = kind(parts.netloc, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        connection.sock.settimeout(None)  # an answer may take its time; Ctrl-C ends the wait
        connection.request(method, parts.path + path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ServerError(_message(response))
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise ServerError(f"no answer from {url}: {error}; is `atom-async serve` running?") from error
    except BaseException:
        connection.close()
        raise
    return connection, response


def _message(response: http.client.HTTPResponse) -> str:
    data = response.read()
    try:
        return str(_decoded(data)["error"]["message"])
    except (ServerError, KeyError, TypeError):
        return f"HTTP status {response.status}"


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Our server writes one `data:` line an event. Raises ServerError when the stream ends before [DONE]."""
    try:
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                yield _decoded(data)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"the connection broke off: {error}") from error
    raise ServerError("the answer ended before it was complete")


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"the server's answer is not JSON: {error}") from error
