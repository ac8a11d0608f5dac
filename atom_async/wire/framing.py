"""Length-prefixed msgpack messages over a stream socket, for the asyncio side and the blocking side.

Frame: u32 little-endian length, then one msgpack value of the given (tagged union) type.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20
"""Bytes. A longer frame is an error, not an allocation."""

T = TypeVar("T")
U = TypeVar("U")


class FramingError(Exception):
    """The peer sent something that is no message of the protocol."""


def encode_frame(encoder: msgspec.msgpack.Encoder, message: Any) -> bytes:
    """Raises FramingError for a message above MAX_FRAME."""
    payload = encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise FramingError(f"a message of {len(payload)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(payload)) + payload


def _check_length(length: int) -> None:
    if length > MAX_FRAME:
        raise FramingError(f"the peer announces {length} bytes; the limit is {MAX_FRAME}")


class AsyncChannel(Generic[T, U]):
    """Receives T and sends U on an event loop. Make one with `open_channel`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]):
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not read yet and the kernel did not take."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: U) -> None:
        """Queues a message; never waits. Silently nothing once the peer is gone, which `receive` reports."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(self._encoder, message))

    async def drain(self) -> None:
        """Waits until the peer has caught up. Raises ConnectionError when it is gone."""
        await self._writer.drain()

    async def receive(self) -> T | None:
        """The next message; None when the peer has closed. Raises FramingError."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _check_length(length)
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise FramingError(f"not a message of the protocol: {error}") from error

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


async def open_channel(sock: socket.socket, receives: Any) -> AsyncChannel[Any, Any]:
    """Takes over a connected unix socket. `receives` is the type, or union of tagged structs, that comes in."""
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_FRAME)
    return AsyncChannel(reader, writer, msgspec.msgpack.Decoder(receives))


class BlockingChannel(Generic[T, U]):
    """The same protocol without an event loop."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def send(self, message: U) -> None:
        """Raises OSError when the peer is gone."""
        self._socket.sendall(encode_frame(self._encoder, message))

    def receive(self) -> T | None:
        """The next message; None when the peer has closed. Raises FramingError."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        _check_length(length)
        payload = self._read(length)
        if payload is None:
            return None
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise FramingError(f"not a message of the protocol: {error}") from error

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        self._socket.close()
