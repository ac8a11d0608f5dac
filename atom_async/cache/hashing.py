"""The hash chain over a sequence's token blocks.

Hash i is xxh3_128 over hash i-1 and the token ids of block i, so equal hashes mean equal prefixes. The
chain starts from a root that depends on the extra keys (cache salt; later adapter and image), which
isolates prefixes that must not be shared.
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

HASH_BYTES = 16
_INT_BYTES = 4


def root_hash(salt: str) -> bytes:
    """The parent of block 0's hash."""
    return xxh3_128_digest(salt.encode())


def next_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Hash of a block with int32 little-endian `token_ids` behind `parent`."""
    return xxh3_128_digest(parent + token_ids)


def hash_chain(token_ids: bytes, block_size: int, salt: str = "") -> bytes:
    """Hashes of all full blocks, 16 bytes each, concatenated.

    Args:
        token_ids: int32 little-endian.
        block_size: tokens per block.
        salt: extra key; sequences with different salts share nothing.
    """
    width = block_size * _INT_BYTES
    parent = root_hash(salt)
    chain = bytearray()
    for start in range(0, len(token_ids) - width + 1, width):
        parent = xxh3_128_digest(parent + token_ids[start : start + width])
        chain += parent
    return bytes(chain)


def split_chain(chain: bytes) -> list[bytes]:
    """The single hashes of a chain. Raises ValueError when its length is no multiple of 16."""
    if len(chain) % HASH_BYTES:
        raise ValueError(f"a hash chain is a multiple of {HASH_BYTES} bytes, got {len(chain)}")
    return [chain[i : i + HASH_BYTES] for i in range(0, len(chain), HASH_BYTES)]
