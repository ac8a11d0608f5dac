"""A single-producer single-consumer ring of messages in anonymous shared memory.

    header   magic u64 | version u64 | capacity u64          written once
    written  u64, own cache line: bytes produced, ever       producer only
    taken    u64, own cache line: bytes consumed, ever       consumer only
    data     capacity bytes of frames: seq u64 | length u32 | xxh3_64 of the payload, low u32 | payload | padding

A frame never wraps: where it would, a frame without payload fills the rest and the message starts over at 0.
The producer copies the frame first and moves `written` last; the doorbell's system calls on both sides order
these stores for the consumer, and sequence number, length and checksum make a torn or overwritten frame an
error instead of a wrong message. The memory is a memfd: it has no name, so a killed process leaves nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from typing import TypeVar

from xxhash import xxh3_64_intdigest

MAGIC = 0x61746F6D72696E67
VERSION = 1
_LINE = 64
_WRITTEN, _TAKEN = 1 * _LINE // 8, 2 * _LINE // 8
_DATA = 3 * _LINE
_FRAME = struct.Struct("<QII")
_ALIGN = 16
_SKIP = 0xFFFFFFFF
_U64 = 2**64 - 1

T = TypeVar("T")


class RingFull(Exception):
    """The consumer has not taken enough yet for this message to fit."""


class RingCorrupt(Exception):
    """What lies in the ring was not written by its producer as it stands."""


class Ring:
    """One end of a ring. `fd` may be inherited by the process at the other end, which calls `attach`."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self.max_message = capacity // 2 - _FRAME.size
        """Largest payload, bytes: it fits into an empty ring wherever the ring stands."""
        self._map = mmap.mmap(fd, _DATA + capacity)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:_DATA].cast("Q")
        self._data = self._bytes[_DATA:]
        self._next_write = 1
        self._next_read = 1

    @classmethod
    def create(cls, capacity: int) -> Ring:
        """A new ring with room for at least `capacity` bytes of frames."""
        if capacity < 4 * _ALIGN:
            raise ValueError(f"a ring of {capacity} bytes is too small; use at least {4 * _ALIGN}")
        capacity = _aligned(capacity)
        fd = os.memfd_create("atom-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, _DATA + capacity)
        ring = cls(fd, capacity)
        ring._words[0], ring._words[1], ring._words[2] = MAGIC, VERSION, capacity
        return ring

    @classmethod
    def attach(cls, fd: int) -> Ring:
        """The other end. Raises RingCorrupt when the memory is no ring of this version."""
        size = os.fstat(fd).st_size
        if size < _DATA:
            raise RingCorrupt(f"{size} bytes are too few for a ring")
        magic, version, capacity = struct.unpack("<QQQ", os.pread(fd, 24, 0))
        if magic != MAGIC:
            raise RingCorrupt(f"magic {magic:#x} instead of {MAGIC:#x}")
        if version != VERSION:
            raise RingCorrupt(f"ring version {version}; this build speaks {VERSION}")
        if capacity != size - _DATA:
            raise RingCorrupt(f"capacity {capacity} in {size} bytes of memory")
        return cls(fd, capacity)

    def write(self, payload: bytes | bytearray | memoryview) -> None:
        """Publishes one message.

        Raises ValueError when it can never fit, RingFull when it does not fit now.
        """
        length = len(payload)
        if length > self.max_message:
            raise ValueError(f"a message of {length} bytes is too large; the ring takes {self.max_message}")
        written = self._words[_WRITTEN]
        size = _aligned(_FRAME.size + length)
        position = written % self.capacity
        rest = self.capacity - position
        skip = rest if size > rest else 0
        if written + skip + size - self._words[_TAKEN] > self.capacity:
            raise RingFull(f"no room for {length} bytes: {written - self._words[_TAKEN]} of {self.capacity} are taken")
        if skip:
            _FRAME.pack_into(self._data, position, self._next_write, _SKIP, 0)
            position = 0
        start = position + _FRAME.size
        self._data[start : start + length] = payload
        _FRAME.pack_into(self._data, position, self._next_write, length, _checksum(payload))
        self._next_write = (self._next_write + 1) & _U64
        self._words[_WRITTEN] = written + skip + size

    def take(self, decode: Callable[[memoryview], T]) -> T | None:
        """The next message, decoded in place and then removed; None when there is none.

        Raises RingCorrupt, and whatever `decode` raises (the message is removed then, too).
        """
        taken = self._words[_TAKEN]
        available = self._words[_WRITTEN] - taken
        if available == 0:
            return None
        if not 0 < available <= self.capacity:
            raise RingCorrupt(f"{available} bytes to take from a ring of {self.capacity}")
        position = taken % self.capacity
        sequence, length, checksum = _FRAME.unpack_from(self._data, position)
        if length == _SKIP:
            taken += self.capacity - position
            position = 0
            sequence, length, checksum = _FRAME.unpack_from(self._data, 0)
        if sequence != self._next_read:
            raise RingCorrupt(f"message {sequence} where {self._next_read} should be")
        start = position + _FRAME.size
        if length > self.max_message or start + length > self.capacity:
            raise RingCorrupt(f"message {sequence} claims {length} bytes; the ring takes {self.max_message}")
        payload = self._data[start : start + length]
        try:
            if _checksum(payload) != checksum:
                raise RingCorrupt(f"the contents of message {sequence} do not match their checksum")
            return decode(payload)
        finally:
            payload.release()
            self._next_read = (self._next_read + 1) & _U64
            self._words[_TAKEN] = taken + _aligned(_FRAME.size + length)

    def close(self) -> None:
        """Unmaps and closes this end. Idempotent."""
        if self.fd >= 0:
            self._data.release()
            self._words.release()
            self._bytes.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _checksum(payload: bytes | bytearray | memoryview) -> int:
    return xxh3_64_intdigest(payload) & 0xFFFFFFFF
