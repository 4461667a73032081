"""Descriptors that come with the bytes of a socket, compiled and in Python."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest
from test_tcp_link import no_descriptors_left

from mq import speed
from mq.stream import passing

Receive = Callable[[socket.socket, memoryview], passing.Received]
TWINS = [
    passing.receive_passing,
    pytest.param(
        speed.receive_passing,
        id="compiled",
        marks=pytest.mark.skipif(
            not speed.COMPILED, reason="mq._speed was not built or not wanted"
        ),
    ),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends; what is read from has nothing to wait for."""
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        yield near, far


@pytest.mark.parametrize("receive", TWINS)
def test_bytes_alone_are_counted(
    receive: Receive, pair: tuple[socket.socket, socket.socket]
) -> None:
    """As many as there is room for; none at the end; and no wait for more."""
    near, far = pair
    area = bytearray(8)
    with pytest.raises(BlockingIOError):
        receive(far, memoryview(area))
    near.send(b"abcdefghij")
    assert receive(far, memoryview(area)) == 8
    assert bytes(area) == b"abcdefgh"
    assert receive(far, memoryview(area)[2:4]) == 2
    assert bytes(area) == b"abijefgh"
    near.close()
    assert receive(far, memoryview(area)) == 0
    far.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        receive(far, memoryview(area))


@pytest.mark.parametrize("receive", TWINS)
@pytest.mark.parametrize("count", [1, 2, passing.MOST])
def test_descriptors_come_with_their_bytes(
    receive: Receive, count: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    """In order, and no child that is started inherits them."""
    near, far = pair
    area = bytearray(8)
    pipes = [os.pipe() for _ in range(2)]
    sent = [pipes[n % 2][1] for n in range(count)]
    socket.send_fds(near, [b"xy"], sent)
    found = receive(far, memoryview(area))
    assert type(found) is tuple
    nbytes, descriptors, truncated = found
    assert (nbytes, len(descriptors), truncated) == (2, count, False)
    assert not any(map(os.get_inheritable, descriptors))
    for number, fd in enumerate(descriptors):
        assert os.path.sameopenfile(fd, sent[number])
        os.close(fd)
    for fd in (fd for ends in pipes for fd in ends):
        os.close(fd)


@pytest.mark.parametrize("receive", TWINS)
def test_descriptors_without_room_are_told_of(
    receive: Receive, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The bytes are there all the same."""
    near, far = pair
    socket.send_fds(near, [b"xy"], [near.fileno()])
    with no_descriptors_left():
        found = receive(far, memoryview(bytearray(8)))
    assert found == (2, [], True)


@pytest.mark.parametrize("receive", TWINS)
def test_what_cannot_be_written_to_is_refused(
    receive: Receive, pair: tuple[socket.socket, socket.socket]
) -> None:
    """And nothing is lost."""
    near, far = pair
    near.send(b"xy")
    with pytest.raises((TypeError, BufferError)):
        receive(far, memoryview(b"read-only"))
    assert receive(far, memoryview(bytearray(8))) == 2
