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
from typing import Final, NamedTuple

from mq import addresses

_STATE_AND_RETRANSMITS: Final = struct.Struct("=BxB")
"""What `struct tcp_info` begins with: also how often the same was repeated."""
_ESTABLISHED: Final = 1
_LAST_DATA_RECV: Final = 52
"""Where it has the milliseconds since data was received."""
_LAST_AND_RECEIVED: Final = struct.Struct("=I72xQ")
"""From there up to the bytes received in all."""
_BYTES_ACKED: Final = 120
"""Where it has the bytes sent that the peer has acknowledged; since Linux 4.1."""
_BYTES_RECEIVED: Final = 128
"""Where it has the bytes received in all; since Linux 4.1."""
_BYTES: Final = struct.Struct("@Q")
_CREDENTIALS: Final = struct.Struct("3i")
"""What the kernel tells of the peer on a unix socket: process, user and group."""
_NAME_BYTES: Final = 16
"""The longest name of how congestion is controlled, `TCP_CA_NAME_MAX`."""


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


def _credentials(sock: socket.socket) -> tuple[int, ...]:
    size = _CREDENTIALS.size
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return _CREDENTIALS.unpack(told)


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end of a connected unix socket."""
    return _credentials(sock)[1]


def peer_process(sock: socket.socket) -> str:
    """The same process, for people to read."""
    if not hasattr(socket, "SO_PEERCRED"):  # as on macOS
        return "(of this host)"
    pid, user, _ = _credentials(sock)
    return f"(pid {pid} of user {user})"


def quiet_seconds(fd: int) -> float | None:
    """For how long nothing has come to a TCP socket; None: it is none, or not Linux.

    Or nothing has come at all, as where the kernel does not count: that of gVisor says
    0 of everything, by which a dead peer would have been heard of just now, for ever.
    """
    milliseconds, received = _tcp_info(fd, _LAST_DATA_RECV, _LAST_AND_RECEIVED) or (
        0,
        0,
    )
    return milliseconds / 1000 if received else None


def is_within_host(fd: int) -> bool:
    """Whether a TCP socket's ends have the same address; not where it is none."""
    try:
        with copy_of(fd) as sock:
            return _is_near(sock)
    except OSError:
        return False


def _is_near(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except IndexError:  # it has no addresses
        return False


def unpace(fd: int) -> None:
    """Have a TCP socket send at once what it has, if both ends have one address.

    Within a host nothing is congested, but BBR, which some systems use for all
    connections, spaces out what is sent all the same. Where it is used Reno is, which
    each kernel has, and leaves to each user.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError), copy_of(fd) as sock:
            option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
            if not _is_near(sock):
                return
            if sock.getsockopt(*option, _NAME_BYTES).startswith(b"bbr"):
                sock.setsockopt(*option, b"reno")


def let_send_ahead(fd: int, nbytes: int) -> None:
    """Have a unix socket take as much before its reader must run; others as they are.

    No more than the system allows each user (``net.core.wmem_max``), and twice the
    number, as the kernel counts what it needs itself.
    """
    with contextlib.suppress(OSError), copy_of(fd) as sock:
        option = socket.SOL_SOCKET, socket.SO_SNDBUF
        if sock.family == socket.AF_UNIX and sock.getsockopt(*option) < nbytes:
            sock.setsockopt(*option, nbytes)


def received_bytes(fd: int, known: int) -> int | None:
    """How much has come to a TCP socket in all; None: it is none, or not Linux.

    Args:
        known: Its `inode`, as the descriptor may be another file's by now.
    """
    told = _tcp_info(fd, _BYTES_RECEIVED, _BYTES, known)
    return None if told is None else told[0]


def acked_bytes(fd: int) -> int | None:
    """How much of what a TCP socket has sent has arrived; None as `received_bytes`.

    By its kernel's word: the peer's process may not have read it.
    """
    told = _tcp_info(fd, _BYTES_ACKED, _BYTES)
    return None if told is None else told[0]


def repeats(fd: int, known: int) -> int:
    """How often TCP has repeated in vain what it sent; 0 where that is not known.

    Nor after `shut`.

    Args:
        known: As for `received_bytes`.
    """
    state, retransmits = _tcp_info(fd, 0, _STATE_AND_RETRANSMITS, known) or (0, 0)
    return retransmits if state == _ESTABLISHED else 0


class Connected(NamedTuple):
    """A descriptor of this process that is a connected socket with host and port."""

    fd: int
    inode: int
    peer: tuple[str, int]
    own: tuple[str, int]


def connected() -> Iterator[Connected]:
    """All of them, engines' too; none where that is not known.

    As where it is not Linux, or no descriptor is free to look with.
    """
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it is closed, no socket, or not connected
            with copy_of(fd) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer, own = (at[:2] for at in (sock.getpeername(), sock.getsockname()))
                found = Connected(fd, inode(sock.fileno()), peer, own)
            yield found


def listening(own: tuple[str, int]) -> int:
    """The descriptor of this process that listens on host and port.

    -1 where there is none, or where that is not known, as for `connected`.
    """
    for fd in _descriptors():
        with contextlib.suppress(OSError), copy_of(fd) as sock:
            if (
                sock.family in (socket.AF_INET, socket.AF_INET6)
                and sock.getsockname()[:2] == own
                and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                return fd
    return -1


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def _tcp_info(
    fd: int, at: int, field: struct.Struct, known: int | None = None
) -> tuple[int, ...] | None:
    if sys.platform != "linux":  # the structure is Linux's
        return None
    try:
        with copy_of(fd) as sock:
            if known is not None and inode(sock.fileno()) != known:
                return None
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + field.size)
        return field.unpack_from(told, at)
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
        OSError: As from `addresses.check_socket_path`.
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
