"""NNG's engine in this process, and one of its Pair0 sockets over a descriptor.

NNG cannot be used in a child that was forked after its first use: any call aborts the
process, and so does its clean-up at exit, or it hangs. `engine` knows, and says so.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import select
import socket
import termios
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pynng
from pynng import ffi, lib

from mq import forks
from mq.errors import ForkedProcess, TransportUnavailable
from mq.sigpipe import spared
from mq.stream.sockets import inode, quiet_seconds
from mq.threads import MORE_THREADS

PREFIX_BYTES = 4
HANG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NOW = lib.NNG_FLAG_NONBLOCK
_ERRNO_OF = {lib.NNG_ENOFILES: errno.EMFILE, lib.NNG_EADDRINUSE: errno.EADDRINUSE}


def explain(code: int) -> str:
    """NNG's words for one of its error codes."""
    text: bytes = ffi.string(lib.nng_strerror(code))
    return text.decode()


def check(code: int) -> None:
    """Raises: OSError, unless this is success."""
    if code:
        raise OSError(_ERRNO_OF.get(code, 0), f"NNG: {explain(code)}")


class _Engine:
    """Knows whether NNG may be used in this process, and by how many links it is.

    NNG's threads start with its first socket and stay: nng_fini ends them, but then a
    socket opened later never closes (NNG 1.11).
    """

    def __init__(self) -> None:
        self.links = 0
        self._used = False
        self._forked = False

    def use(self) -> None:
        """A link opens; start NNG.

        Raises:
            ForkedProcess: The parent used NNG before it forked this process.
            TransportUnavailable: There is no memory for NNG, or no thread.
            OSError: NNG cannot start.
        """
        if self._forked:
            raise ForkedProcess(
                "NNG was used before this process was forked, and does not work in "
                "such a child: start it with 'spawn' or 'forkserver', fork before the "
                "first connect, or use a transport that survives a fork, such as zmq"
            )
        if not self._used:
            self._used = True
            first = ffi.new("nng_socket *")
            code = lib.nng_pair0_open(first)
            if code == lib.NNG_ENOMEM:  # which it also says of threads
                raise TransportUnavailable(
                    "NNG gets no memory, or not the threads that it begins with, 6 and "
                    f"up to 3 for each core: {MORE_THREADS}"
                )
            check(code)
            lib.nng_socket_close(first[0])

    def before_fork(self) -> None:
        """The application may use pynng too."""
        self._used = self._used or _runs()

    def after_fork(self) -> None:
        """In the child, whose exit would hang in nng_fini."""
        self._forked = self._used
        if self._forked:
            atexit.unregister(_at_exit)


def _runs() -> bool:
    """Whether NNG's threads are running in this process."""
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text()
        except OSError:  # the thread ended meanwhile
            continue
        if name.startswith("nng:"):
            return True
    return False


def _at_exit() -> None:
    # While queues are open, which the library closes later on at exit, NNG must run.
    if not engine.links:
        lib.nng_fini()


# Registered by pynng itself, it would end NNG under open queues, or hang in a child.
if (_pynng_atexit := getattr(pynng.nng, "_pynng_atexit", None)) is not None:
    atexit.unregister(_pynng_atexit)
atexit.register(_at_exit)

engine = _Engine()
os.register_at_fork(before=engine.before_fork, after_in_child=engine.after_fork)


class Channel(ABC):
    """Moves the messages of one connection: a prefix, a head and perhaps a body.

    The prefix is the size of the head, 4 bytes, little-endian.

    Attributes:
        recv_fd: Readable while `receive` may return something.
        watches: Descriptors, each with the events after which `watched` is due.
        in_band: Whether `recv_fd` also tells that the connection broke.
        problem: Why it broke, where the engine says.
    """

    recv_fd: int
    watches: Sequence[tuple[int, int]]
    in_band: ClassVar[bool] = False
    problem: str = ""

    @abstractmethod
    def send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None
    ) -> bool:
        """Copy a message into the engine; False: no room."""

    @abstractmethod
    def room_fd(self) -> int:
        """Readable when there is room again; -1 where `watches` tell."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a refused message may be tried again."""

    @abstractmethod
    def watched(self) -> bool:
        """Look at what `watches` tell; whether the connection is broken."""

    @abstractmethod
    def receive(self) -> memoryview | None:
        """The next message, valid until `release`, which must follow."""

    def quiet_seconds(self) -> float | None:
        """As `Conn.quiet_seconds`."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Free the message that `receive` returned, if there is one."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether nothing more can be received; asked after a break."""

    @abstractmethod
    def refused(self) -> bool:
        """After the end: whether the engine left unread what the peer had sent."""

    def refusal(self) -> str:
        """Why who tried, but never said hello, was refused; "" where told elsewhere."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Free everything; what was not sent yet is dropped."""

    def describe(self) -> Mapping[str, str]:
        """What people should know of it."""
        return {}

    @abstractmethod
    def freed(self) -> bool:
        """After `close`: whether the engine has let go of everything, too."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the descriptors in a forked child, without a call into NNG."""


class Pair(Channel):
    """A Pair0 socket over a connected stream socket, by NNG's ``socket://``.

    So it never redials, and never speaks to anybody but this one peer.

    Args:
        fd: The stream socket; it is NNG's from now on.
        depth: Messages queued in either direction.
        largest: Bytes of the largest message; NNG hangs up on longer ones.
    """

    def __init__(self, fd: int, depth: int, largest: int) -> None:
        self._fd = fd
        self._copy = -1
        self._inode = inode(fd)
        forks.register(self)
        self._out = ffi.new("nng_msg **")
        self._in = ffi.new("nng_msg **")
        self._view: memoryview | None = None
        self._room = select.poll()
        self._closed = False
        self._heard = False
        self._disposed = False
        # The engine shuts its descriptor down before it closes it, and the copy tells.
        try:
            self._copy = os.dup(fd)
        except OSError:
            os.close(fd)
            raise
        self.watches = ((self._copy, HANG_UP),)
        opened = ffi.new("nng_socket *")
        code = lib.nng_pair0_open(opened)
        if code:
            os.close(fd)
            self._close_copy()
            check(code)
        self._socket: Any = opened[0]
        try:
            self._start(fd, depth, largest)
        except BaseException:
            self.close()
            if self._is_open():  # NNG has not taken it
                os.close(fd)
            self.freed()
            raise

    def quiet_seconds(self) -> float | None:
        return None if self._closed else quiet_seconds(self._copy)

    def _start(self, fd: int, depth: int, largest: int) -> None:
        sock = self._socket
        check(lib.nng_socket_set_size(sock, b"recv-size-max", largest))
        check(lib.nng_socket_set_int(sock, b"send-buffer", depth))
        check(lib.nng_socket_set_int(sock, b"recv-buffer", depth))
        # Both now, and not when they are needed: there may be no descriptors then.
        self.recv_fd = self._descriptor(b"recv-fd")
        self._room_fd = self._descriptor(b"send-fd")
        self._room.register(self._room_fd, select.POLLIN)
        listener = ffi.new("nng_listener *")
        check(lib.nng_listener_create(listener, sock, b"socket://"))
        check(lib.nng_listener_start(listener[0], 0))
        check(spared(lib.nng_listener_set_int, listener[0], b"socket:fd", fd))

    def _descriptor(self, option: bytes) -> int:
        found = ffi.new("int *")
        check(lib.nng_socket_get_int(self._socket, option, found))
        return int(found[0])

    def send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None
    ) -> bool:
        nhead = len(head)
        nbytes = PREFIX_BYTES + nhead
        if body is not None:
            if not self.has_room():
                return False  # before a copy that would be for nothing
            nbytes += body.nbytes
        out = self._out
        if lib.nng_msg_alloc(out, nbytes):
            raise MemoryError(f"NNG has no memory for a message of {nbytes} bytes")
        message = out[0]
        place = lib.nng_msg_body(message)
        move = ffi.memmove
        move(place, nhead.to_bytes(PREFIX_BYTES, "little"), PREFIX_BYTES)
        place += PREFIX_BYTES
        move(place, head, nhead)
        if body is not None:
            move(place + nhead, body, body.nbytes)
        if not spared(lib.nng_sendmsg, self._socket, message, _NOW):
            return True
        lib.nng_msg_free(message)
        return False

    def room_fd(self) -> int:
        return self._room_fd

    def has_room(self) -> bool:
        return bool(self._room.poll(0))

    def watched(self) -> bool:
        return True

    def receive(self) -> memoryview | None:
        message = self._in
        if lib.nng_recvmsg(self._socket, message, _NOW):
            return None
        self._heard = True
        nbytes = lib.nng_msg_len(message[0])
        self._view = memoryview(ffi.buffer(lib.nng_msg_body(message[0]), nbytes))
        return self._view

    def release(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None
            message, self._in[0] = self._in[0], ffi.NULL
            lib.nng_msg_free(message)

    def ended(self) -> bool:
        # NNG closes its descriptor last, when all it has received is in the socket.
        if self._closed or self._is_open():
            return self._closed
        poller = select.poll()
        poller.register(self.recv_fd, select.POLLIN)
        return not poller.poll(0)

    def refused(self) -> bool:
        return unread(self._copy)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.release()
        if self._heard:
            self._dispose()
            self._close_copy()
            return
        # NNG 1.11 never closes the descriptor of a socket that is closed while it still
        # negotiates (6 of 90 times): so first have it see the connection end.
        copy, self._copy = self._copy, -1
        with socket.socket(fileno=copy) as stream:
            with contextlib.suppress(OSError):  # not connected any more
                stream.shutdown(socket.SHUT_RDWR)

    def _dispose(self) -> None:
        if not self._disposed:
            self._disposed = True
            lib.nng_socket_close(self._socket)

    def freed(self) -> bool:
        if self._is_open():
            return False
        self._dispose()
        return True

    def _is_open(self) -> bool:
        """Whether NNG has not closed its descriptor yet."""
        return inode(self._fd) == self._inode

    def _close_copy(self) -> None:
        copy, self._copy = self._copy, -1
        if copy >= 0:
            os.close(copy)

    def abandon(self) -> None:
        # Closed or not: the engine may not have got round to closing its own.
        self._close_copy()
        if self._is_open():
            os.close(self._fd)


def unread(fd: int) -> bool:
    """Whether a stream socket holds bytes that the engine has not read."""
    # It takes no further descriptor: there may be none.
    return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
