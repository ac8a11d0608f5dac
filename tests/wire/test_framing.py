import socket
import threading

import pytest

from atom_async.wire.framing import MAX_FRAME, BlockingChannel, FramingError, encode_frame, open_channel
from atom_async.wire.messages import AllocateKv, ControlMessage, Shutdown, WorkerProgress


async def test_both_sides_understand_each_other() -> None:
    ours, theirs = socket.socketpair()
    blocking = BlockingChannel(theirs, ControlMessage)
    channel = await open_channel(ours, ControlMessage)
    progress = [WorkerProgress(rank=0, stage="load", done=n, total=5000) for n in range(5000)]

    def talk() -> None:
        for message in progress:
            blocking.send(message)
        assert blocking.receive() == AllocateKv(num_blocks=7)
        assert blocking.receive() is None
        blocking.close()

    thread = threading.Thread(target=talk)
    thread.start()
    assert [await channel.receive() for _ in progress] == progress
    channel.send(AllocateKv(num_blocks=7))
    await channel.drain()
    await channel.close()
    thread.join()


async def test_a_peer_that_closes_in_mid_message_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours, ControlMessage)
    theirs.sendall(b"\x10\x00\x00\x00half")
    theirs.close()
    assert await channel.receive() is None
    channel.send(Shutdown())
    await channel.close()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ((MAX_FRAME + 1).to_bytes(4, "little"), "the limit is"),
        (b"\x02\x00\x00\x00\xff\xff", "not a message"),
        (b"\x01\x00\x00\x00\x01", "not a message"),
    ],
)
async def test_nonsense_is_an_error_on_both_sides(sent: bytes, message: str) -> None:
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours, ControlMessage)
    theirs.sendall(sent)
    with pytest.raises(FramingError, match=message):
        await channel.receive()
    await channel.close()
    theirs.close()
    left, right = socket.socketpair()
    blocking = BlockingChannel(right, ControlMessage)
    left.sendall(sent)
    with pytest.raises(FramingError, match=message):
        blocking.receive()
    left.close()
    blocking.close()


def test_a_message_above_the_limit_is_not_sent() -> None:
    import msgspec

    with pytest.raises(FramingError, match="above the limit"):
        encode_frame(msgspec.msgpack.Encoder(), b"x" * (MAX_FRAME + 1))
