"""Accepted connections of ZeroMQ's whose peers have proven nothing, or were sent away.

ZeroMQ bounds the parts of a message and the messages that wait, but not the parts of a
message that never ends: it keeps them all. Nor can a ROUTER hang up on a peer. So of
such connections the kernel's counter is looked at, and the socket is shut down under
the engine where a peer sends too much or stays for too long.
"""

from __future__ import annotations

import socket
import time
from typing import Final, NamedTuple

from mq.addresses import bracketed, origin
from mq.descriptors import most_open, pushed_out
from mq.stream.sockets import copy_of, peer_process, received_bytes, shut

STRANGER_SECONDS: Final = 10.0
"""How long a peer may stay that proves nothing; the mesh gives it half of that."""
MOST_STRANGERS: Final = 512
"""Beyond, one of them has to go."""
SILENT_BYTES: Final = 1 << 20
"""What a peer may send before its first message is complete, which has no content."""
_LOOK_SECONDS: Final = 0.05


class _Stranger(NamedTuple):
    """What is known of one.

    Attributes:
        origin: Where it comes from, as `mq.addresses.origin` has it.
        inode: Of its socket, as the engine may have closed that descriptor.
        until: When it has to be gone, by `time.monotonic`.
        most_bytes: What it may send until then; None: any amount.
    """

    origin: str
    inode: int
    until: float
    most_bytes: int | None


def peer_of(fd: int) -> str:
    """Who is at the other end; the engine tells no port. "": it is gone."""
    try:
        with copy_of(fd) as found:
            if found.family == socket.AF_UNIX:
                return f"ipc://{peer_process(found)}"
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return ""  # the number is that of something else by now
            host, port = found.getpeername()[:2]
            return f"tcp://{bracketed(host)}:{port}"
    except OSError:
        return ""


class Strangers:
    """Those of one link.

    Attributes:
        known: By the descriptors of their sockets.
    """

    def __init__(self) -> None:
        self.known: dict[int, _Stranger] = {}
        self._look_at = 0.0

    def add(self, fd: int, inode: int, most_bytes: int | None) -> None:
        """Look after a connection from now on.

        Args:
            inode: Of its socket, from when it was there for certain.
        """
        until = time.monotonic() + STRANGER_SECONDS
        self.known.pop(fd, None)
        if len(self.known) >= most_open(MOST_STRANGERS):
            origins = {other: known.origin for other, known in self.known.items()}
            self._hang_up(pushed_out(origins))
        self.known[fd] = _Stranger(origin(peer_of(fd)), inode, until, most_bytes)

    def forget(self, fd: int) -> None:
        """The peer has proven who it is, or the connection is over; idempotent."""
        self.known.pop(fd, None)

    def look(self) -> list[int]:
        """Hang up on those who do what no member does; who has sent too much."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_SECONDS
        too_much = []
        for fd, stranger in list(self.known.items()):
            most = stranger.most_bytes
            received = None if most is None else received_bytes(fd, stranger.inode)
            if most is not None and received is not None and received > most:
                too_much.append(fd)
                self._hang_up(fd)
            elif now >= stranger.until:
                self._hang_up(fd)
        return too_much

    def _hang_up(self, fd: int) -> None:
        """Have the engine find that the connection has ended."""
        shut(fd, self.known[fd].inode)
        del self.known[fd]
