"""What is done once to a prompt, on the client's side, before it is submitted: its ids are checked and hashed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from atom_async.cache.hashing import hash_chain
from atom_async.wire.messages import unpack_ints

from .client import EngineInfo, EngineRequest, RequestRejected

LONG_PROMPT_BYTES = 8192 * 4
"""From this size on it is done off the event loop: 8,192 tokens take about 0.2 ms."""

Offload = Callable[..., Awaitable[bytes]]


async def prepared(
    requests: Sequence[EngineRequest],
    info: EngineInfo,
    *,
    caching: bool,
    offload: Offload = asyncio.to_thread,
) -> list[EngineRequest]:
    """The requests with their block_hashes; n choices of one prompt share the work.

    `offload(function, *args)` runs a function off the loop. Raises RequestRejected for an id outside the vocabulary.
    """
    chains: dict[tuple[int, str], bytes] = {}
    ready = []
    for request in requests:
        key = (id(request.prompt_token_ids), request.cache_salt)
        if key not in chains:
            arguments = (request, info, caching)
            long = len(request.prompt_token_ids) >= LONG_PROMPT_BYTES
            chains[key] = await offload(_check_and_hash, *arguments) if long else _check_and_hash(*arguments)
        ready.append(msgspec.structs.replace(request, block_hashes=chains[key]))
    return ready


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestRejected."""
    if len(ids) and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestRejected(f"token id {wrong} is not in the model's vocabulary of {vocab_size}")


def _check_and_hash(request: EngineRequest, info: EngineInfo, caching: bool) -> bytes:
    check_ids(unpack_ints(request.prompt_token_ids), info.vocab_size)
    return hash_chain(request.prompt_token_ids, info.block_size, request.cache_salt) if caching else b""
