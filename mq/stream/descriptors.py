"""Connections over unix sockets whose messages may carry file descriptors."""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mq.speed import receive_passing
from mq.stream.conn import StreamConn
from mq.transport import What

if TYPE_CHECKING:
    from mq.stream.link import StreamLink


def rights(descriptors: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    """What `sendmsg` passes copies of these descriptors with.

    `socket.send_fds` forgets its flags.
    """
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]


class DescriptorConn(StreamConn):
    """A connection that passes descriptors beside its bytes.

    The descriptors of a message arrive with its first byte: when `receive` returns a
    message, its own are in `descriptors`, behind those of earlier messages.

    Attributes:
        descriptors: Those that have arrived, in order. Whoever takes one out closes it;
            the others are closed with the connection.
        max_descriptors: How many may wait there before the connection is broken.
    """

    max_descriptors: int = 64

    def __init__(self, link: StreamLink, address: str, news: What) -> None:
        super().__init__(link, address, news)
        self.descriptors: deque[int] = deque()

    def start(self, sock: socket.socket) -> None:
        super().start(sock)
        self._receive_into = self._receive_with

    def try_send_with(
        self,
        head: bytes | bytearray | memoryview,
        descriptors: Sequence[int],
        body: memoryview | None = None,
    ) -> bool:
        """`try_send` of a message with copies of these descriptors; they stay open."""
        sock = self._socket
        if sock is None:
            return self.try_send(head, body)
        passed = rights(descriptors)

        def send_with(
            parts: Sequence[memoryview | bytes], _: Sequence[object], flags: int
        ) -> int:
            return sock.sendmsg(parts, passed, flags)

        usual, self._send = self._send, send_with
        try:
            return self.try_send(head, body)
        finally:
            self._send = usual

    def _receive_with(self, target: memoryview) -> int:
        """`recv_into` that keeps the descriptors that come with the bytes."""
        assert self._socket is not None
        found = receive_passing(self._socket, target)
        if isinstance(found, int):
            return found
        count, descriptors, truncated = found
        self.descriptors.extend(descriptors)
        if truncated:
            self._ran_out()
            raise OSError(
                "descriptors that the peer passed could not be received: this process "
                "has as many as it may; raise `ulimit -n`"
            )
        if len(self.descriptors) > self.max_descriptors:
            self._link.malformed += 1
            self.broke_rules = True
            raise OSError(
                f"the peer passed more than {self.max_descriptors} descriptors that no "
                "message of its took"
            )
        return count

    def _ran_out(self) -> None:
        """There was no descriptor for one that the peer passed."""

    def abandon(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())
        super().abandon()
