"""The one time a prompt is hashed: on the client's side, before it is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from atom_async.cache.hashing import hash_chain

from .client import EngineRequest

LONG_PROMPT_BYTES = 8192 * 4
"""From this size on it is done off the event loop: 8,192 tokens take about 0.1 ms."""

Offload = Callable[..., Awaitable[bytes]]


async def hashed(request: EngineRequest, block_size: int, offload: Offload = asyncio.to_thread) -> EngineRequest:
    """The request with its block_hashes. `offload(function, *args)` runs a function off the loop."""
    if request.block_hashes:
        return request
    arguments = (request.prompt_token_ids, block_size, request.cache_salt)
    if len(request.prompt_token_ids) >= LONG_PROMPT_BYTES:
        chain = await offload(hash_chain, *arguments)
    else:
        chain = hash_chain(*arguments)
    return msgspec.structs.replace(request, block_hashes=chain)
