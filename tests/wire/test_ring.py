import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_async.wire.doorbell import Doorbell
from atom_async.wire.ring import Ring, RingCorrupt, RingFull


class Pair:
    """Both ends of a ring in one process."""

    def __init__(self, capacity: int) -> None:
        self.producer = Ring.create(capacity)
        self.consumer = Ring.attach(os.dup(self.producer.fd))

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.close()
        self.consumer.close()


@given(st.lists(st.one_of(st.none(), st.binary(max_size=150)), max_size=80), st.sampled_from([512, 528, 1024]))
@settings(max_examples=150, deadline=None)
def test_messages_come_out_as_they_went_in(events: list[bytes | None], capacity: int) -> None:
    """None takes one message; a full ring refuses and loses nothing."""
    queued: list[bytes] = []
    with Pair(capacity) as pair:
        for event in events:
            if event is None:
                assert pair.consumer.take(bytes) == (queued.pop(0) if queued else None)
                continue
            try:
                pair.producer.write(event)
                queued.append(event)
            except RingFull:
                assert queued, "an empty ring takes every message up to max_message"
        while queued:
            assert pair.consumer.take(bytes) == queued.pop(0)
        assert pair.consumer.take(bytes) is None


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_largest_message_fits_wherever_an_empty_ring_stands(sizes: list[int]) -> None:
    with Pair(512) as pair:
        for size in sizes:
            pair.producer.write(b"x" * size)
            assert pair.consumer.take(len) == size
            pair.producer.write(b"y" * pair.producer.max_message)
            assert pair.consumer.take(len) == pair.producer.max_message


def test_what_can_never_fit_is_refused() -> None:
    with Pair(512) as pair, pytest.raises(ValueError, match=r"too large; the ring takes 240"):
        pair.producer.write(b"x" * 241)
    with pytest.raises(ValueError, match="too small"):
        Ring.create(16)


@given(st.binary(min_size=1, max_size=100), st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_byte_of_a_frame_is_noticed(message: bytes, data: st.DataObject) -> None:
    with Pair(512) as pair:
        pair.producer.write(message)
        position = data.draw(st.integers(0, 16 + len(message) - 1))
        change = data.draw(st.integers(1, 255))
        pair.producer._data[position] ^= change
        with pytest.raises(RingCorrupt):
            pair.consumer.take(bytes)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [(0, 1, "magic"), (1, 99, "ring version 99"), (2, 10, "capacity 10")],
)
def test_foreign_memory_is_no_ring(word: int, value: int, message: str) -> None:
    with Pair(512) as pair:
        pair.producer._words[word] = value
        with pytest.raises(RingCorrupt, match=message):
            Ring.attach(pair.producer.fd)


def test_memory_too_small_for_a_ring_is_none() -> None:
    fd = os.memfd_create("x")
    try:
        with pytest.raises(RingCorrupt, match="too few"):
            Ring.attach(fd)
    finally:
        os.close(fd)


def test_a_wild_cursor_is_noticed() -> None:
    with Pair(512) as pair:
        pair.producer._words[8] = 1 << 40
        with pytest.raises(RingCorrupt, match="bytes to take"):
            pair.consumer.take(bytes)


def test_a_message_that_does_not_decode_is_removed() -> None:
    def fails(view: memoryview) -> bytes:
        raise KeyError("x")

    with Pair(512) as pair:
        pair.producer.write(b"bad")
        pair.producer.write(b"good")
        with pytest.raises(KeyError):
            pair.consumer.take(fails)
        assert pair.consumer.take(bytes) == b"good"


CONSUMER = """
import sys
from atom_async.wire.doorbell import BlockingWait, Doorbell
from atom_async.wire.ring import Ring
ring, bell, back = Ring.attach(int(sys.argv[1])), Doorbell(int(sys.argv[2])), Doorbell(int(sys.argv[3]))
wait, expected = BlockingWait(bell.fd), 0
while expected < 3000:
    message = ring.take(bytes)
    if message is None:
        wait()
        bell.hear()
        continue
    assert int.from_bytes(message[:4], "little") == expected and len(message) == 4 + expected % 300
    expected += 1
    back.ring()
print("all", expected)
"""


@pytest.mark.process
def test_across_processes_nothing_is_lost_or_reordered() -> None:
    ring, bell, back = Ring.create(4096), Doorbell.create(), Doorbell.create()
    fds = (ring.fd, bell.fd, back.fd)
    child = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
    )
    os.set_blocking(back.fd, True)
    for number in range(3000):
        payload = struct.pack("<I", number) + b"z" * (number % 300)
        while True:
            try:
                ring.write(payload)
                break
            except RingFull:
                os.eventfd_read(back.fd)  # sleeps until the consumer has taken something
        bell.ring()
    assert child.communicate()[0] == "all 3000\n"
    for part in (ring, bell, back):
        part.close()
