"""Sockets made from addresses, and what the system tells of those of engines."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from typing import Final

from mq import addresses

_STATE: Final = 0
_ESTABLISHED: Final = 1
_RETRANSMITS: Final = 2
"""Where `struct tcp_info` has how often the same was repeated."""
_ONE_BYTE: Final = struct.Struct("@B")
_LAST_DATA_RECV: Final = 52
"""Where it has the milliseconds since data was received."""
_MILLISECONDS: Final = struct.Struct("@I")
_BYTES_ACKED: Final = 120
"""Where it has the bytes sent that the peer has acknowledged; since Linux 4.1."""
_BYTES_RECEIVED: Final = 128
"""Where it has the bytes received in all; since Linux 4.1."""
_BYTES: Final = struct.Struct("@Q")


def bound_tcp(address: str) -> socket.socket:
    """A socket bound to the host and port of ``scheme://host:port``.

    Raises:
        OSError: The host is unknown, or the port taken.
    """
    host, port = addresses.split(address)
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    family, target = addresses.look_up(host, port, socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(target)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def copy_of(fd: int) -> Iterator[socket.socket]:
    """An engine's socket, by a descriptor of our own while it is looked at.

    The engine may close its own at any moment, and the number may be any file's then;
    and it would end the process if an interrupt closed that.

    Raises:
        OSError: It is closed, or no socket.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        # Closing the copy of a file gives up this process's POSIX locks of the file.
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copies: list[int] = []
    sock = None
    try:
        copies.append(os.dup(fd))
        sock = socket.socket(fileno=copies[0])
        yield sock
    finally:
        if sock is not None:
            sock.close()
        elif copies:
            os.close(copies[0])  # it is no socket; `socket.fromfd` would leave it open


def inode(fd: int) -> int:
    """Tells whether a descriptor still is the socket that it was; 0: it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def quiet_seconds(fd: int) -> float | None:
    """For how long nothing has come to a TCP socket; None: it is none, or not Linux."""
    told = _tcp_info(fd, _LAST_DATA_RECV, _MILLISECONDS)
    return None if told is None else told / 1000


def is_within_host(fd: int) -> bool:
    """Whether a TCP socket's ends have the same address; not where it is none."""
    try:
        with copy_of(fd) as sock:
            return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except (OSError, IndexError):
        return False


def received_bytes(fd: int, known: int) -> int | None:
    """How much has come to a TCP socket in all; None as for `quiet_seconds`.

    Args:
        known: Its `inode`, as the descriptor may be another file's by now.
    """
    return _tcp_info(fd, _BYTES_RECEIVED, _BYTES, known)


def acked_bytes(fd: int) -> int | None:
    """How much of what a TCP socket has sent has arrived; None as for `quiet_seconds`.

    By its kernel's word: the peer's process may not have read it.
    """
    return _tcp_info(fd, _BYTES_ACKED, _BYTES)


def repeats(fd: int, known: int) -> int:
    """How often TCP has repeated in vain what it sent; 0 where that is not known.

    Nor after `shut`.

    Args:
        known: As for `received_bytes`.
    """
    if _tcp_info(fd, _STATE, _ONE_BYTE, known) != _ESTABLISHED:
        return 0
    return _tcp_info(fd, _RETRANSMITS, _ONE_BYTE, known) or 0


def _tcp_info(
    fd: int, at: int, field: struct.Struct, known: int | None = None
) -> int | None:
    if sys.platform != "linux":  # the structure is Linux's
        return None
    try:
        with copy_of(fd) as sock:
            if known is not None and inode(sock.fileno()) != known:
                return None
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + field.size)
        return int(field.unpack_from(told, at)[0])
    except (OSError, struct.error):
        return None


def shut(fd: int, known: int) -> None:
    """End the connection of an engine's socket, if it has not ended.

    Args:
        known: As for `received_bytes`.
    """
    with contextlib.suppress(OSError), copy_of(fd) as sock:
        if inode(sock.fileno()) == known:
            sock.shutdown(socket.SHUT_RDWR)


def bound_unix(path: str) -> socket.socket:
    """A socket bound to a path; one that a killed process has left there is replaced.

    Raises:
        OSError: The path is too long, or somebody listens there.
    """
    addresses.check_socket_path(path)
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    return sock
