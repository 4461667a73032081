"""Bytes that came over a unix socket with descriptors beside them."""

from __future__ import annotations

import os
import socket
from array import array
from typing import Final, TypeAlias

MOST: Final = 253
"""Descriptors that the kernel passes with one call at most."""
_ROOM: Final = socket.CMSG_SPACE(MOST * array("i").itemsize)
# As numbers: socket's enumerations take microseconds to combine.
_CLOEXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # macOS has none
_TRUNCATED: Final = int(socket.MSG_CTRUNC)

Received: TypeAlias = "int | tuple[int, list[int], bool]"


def receive_passing(sock: socket.socket, target: memoryview) -> Received:
    """`recv_into` that keeps the descriptors that come with the bytes.

    The compiled twin is in ``_passing.c``.

    Returns:
        How many bytes; and where descriptors were passed, those that have arrived, and
        whether there were more, for which this process had no room.

    Raises:
        OSError: As `recv_into` does.
    """
    count, extras, flags, _ = sock.recvmsg_into((target,), _ROOM, _CLOEXEC)
    truncated = bool(flags & _TRUNCATED)
    if not (extras or truncated):
        return count
    found: list[int] = []
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % array("i").itemsize
            found += array("i", data[:whole])
    if not _CLOEXEC:
        for fd in found:
            os.set_inheritable(fd, False)
    return count, found, truncated
