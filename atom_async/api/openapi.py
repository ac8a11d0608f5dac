"""The OpenAPI 3.1 document, made from the structs that requests are decoded with."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from atom_async import __version__
from atom_async.api import requests, responses
from atom_async.api.errors import ErrorResponse

Struct = type[msgspec.Struct]

OPERATIONS: list[tuple[str, str, str, Struct | None, Struct | None]] = [
    ("post", "/v1/completions", "Continue a text", requests.CompletionRequest, responses.Completion),
    ("post", "/v1/chat/completions", "Answer a chat", requests.ChatRequest, responses.ChatCompletion),
    ("get", "/v1/models", "The served model under each of its names", None, responses.ModelList),
    ("get", "/v1/models/{name}", "One of them", None, responses.Model),
    ("post", "/tokenize", "Token ids of a text or a chat", requests.TokenizeRequest, responses.Tokens),
    ("post", "/detokenize", "Text of token ids", requests.DetokenizeRequest, responses.Detokenized),
    ("get", "/health", "Whether the engine is alive and makes progress", None, responses.Health),
    ("get", "/ready", "Whether new requests are accepted", None, responses.Health),
    ("get", "/ping", "Whether the server answers", None, None),
    ("get", "/version", "The server's version", None, responses.Version),
    ("get", "/metrics", "Prometheus metrics", None, None),
]
"""(method, path, summary, body, answer)."""
STREAMED: dict[str, Struct] = {"/v1/completions": responses.Completion, "/v1/chat/completions": responses.ChatChunk}
"""What each event of a streamed answer holds."""


@functools.cache
def document() -> bytes:
    """JSON."""
    structs: set[Struct] = {ErrorResponse, *STREAMED.values()}
    structs |= {struct for _, _, _, body, answer in OPERATIONS for struct in (body, answer) if struct is not None}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for method, path, summary, body, answer in OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, answer)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "atom-async", "version": __version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": schemes},
            "security": [{}, {"key": []}],
        }
    )


def _operation(path: str, summary: str, body: Struct | None, answer: Struct | None) -> dict[str, Any]:
    content = {"application/json": _reference(answer)} if answer is not None else {"text/plain": {}}
    if path in STREAMED:
        content["text/event-stream"] = _reference(STREAMED[path])
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "an error", "content": {"application/json": _reference(ErrorResponse)}},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _reference(body)}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _reference(struct: Struct) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}
