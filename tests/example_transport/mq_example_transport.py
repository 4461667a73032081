"""A transport in one file, as a model: plain Unix stream sockets.

On the wire a message is two little-endian 32-bit sizes, then the head, then the body.
Nothing is read ahead, so what the kernel says is readable is all there is to know, and
a body goes straight from the socket into the memory that the mesh chose.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence

from mq.mesh.poller import Poller
from mq.sigpipe import QUIET
from mq.transport import (
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    Capabilities,
    Conn,
    Event,
    Link,
    What,
)

SCHEME = "unix://"
SIZES = struct.Struct("<II")
SEND_BUFFER = 1024 * 1024


class ExampleConn(Conn):
    """One connected stream socket."""

    def __init__(self, link: ExampleLink, sock: socket.socket, address: str) -> None:
        self.address = address
        self.sock = sock
        self.unsent = memoryview(b"")
        self.refused = False
        self.lost = False
        self._link = link
        self._sizes = bytearray(SIZES.size)
        self._head = bytearray()
        self._body = 0
        self._part = 0  # 0: sizes, 1: head, 2: body to take, 3: body to discard
        self._done = 0  # bytes of that part that have been read
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        if self.lost:
            return True
        if self.unsent:
            self.refused = True
            self._link.watch(self)
            return False
        parts = [SIZES.pack(len(head), len(body) if body else 0), head, body or b""]
        try:
            sent = self.sock.sendmsg(parts, (), QUIET)
        except BlockingIOError:
            self.refused = True
            self._link.watch(self)
            return False
        except OSError as error:
            self._link.lose(self, str(error))
            return True
        if sent < sum(len(part) for part in parts):
            # All or nothing: the caller may change its memory, so keep the rest.
            self.unsent = memoryview(b"".join(parts))[sent:]
            self._link.watch(self)
        return True

    def send_rest(self) -> None:
        """Send what `try_send` accepted and the kernel did not take at once."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent, QUIET) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._link.lose(self, str(error))

    def receive(self) -> tuple[bytes | memoryview, int] | None:
        if self._part == 3 and not self._skip():
            return None
        if self._part == 0:
            if not self._fill(memoryview(self._sizes)):
                return None
            head_bytes, self._body = SIZES.unpack(self._sizes)
            if not 0 < head_bytes <= MAX_HEAD_BYTES:
                self._link.lose(self, f"a head of {head_bytes} bytes")
                return None
            if self._body > self._link.chunk_bytes:
                self._link.lose(self, f"a body of {self._body} bytes")
                return None
            self._head = bytearray(head_bytes)
            self._next(1)
        if self._part != 1 or not self._fill(memoryview(self._head)):
            return None
        self._next(2 if self._body else 0)
        return memoryview(self._head), self._body

    def receive_body(self, into: memoryview) -> bool:
        if not self._fill(into):
            return False
        self._next(0)
        return True

    def discard_body(self) -> None:
        self._part = 3
        self._skip()

    def _skip(self) -> bool:
        """Read the rest of an unwanted body into nowhere."""
        scratch = bytearray(64 * 1024)
        while (left := self._body - self._done) > 0:
            read = self._read(memoryview(scratch)[:left])
            if read == 0:
                return False
            self._done += read
        self._next(0)
        return True

    def _next(self, part: int) -> None:
        self._part = part
        self._done = 0

    def _fill(self, into: memoryview) -> bool:
        """Go on reading the current part; whether it is complete."""
        while self._done < len(into):
            read = self._read(into[self._done :])
            if read == 0:
                return False
            self._done += read
        return True

    def _read(self, into: memoryview) -> int:
        """Read what is there; 0: nothing now, or the connection is lost."""
        if self.lost:
            return 0
        try:
            read = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._link.lose(self, str(error))
            return 0
        if read == 0:
            self._link.lose(self, "closed by the peer")
        return read

    def close(self) -> None:
        self.send_rest()
        self._link.drop(self)


class ExampleLink(Link):
    """Listens on a socket file; dials those of others.

    Args:
        backlog: Connections that may wait to be accepted.
    """

    capabilities = Capabilities(reach="host")

    def __init__(self, *, backlog: int = 128) -> None:
        self._backlog = backlog
        self._conns: dict[int, ExampleConn] = {}
        self._listeners: dict[int, tuple[socket.socket, str]] = {}
        self._events: deque[Event] = deque()
        self._own_directory = ""
        self._epoll: select.epoll | None = None
        self._poller: Poller | None = None

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        # An epoll is readable when one of its sockets is readable or writable.
        self._poller, self._epoll = poller, select.epoll()
        poller.register(self._epoll.fileno())
        if not listen:
            if directory is None:
                directory = self._own_directory = tempfile.mkdtemp(prefix="mq-")
            listen = [f"{SCHEME}{directory}/{uuid.uuid4().hex[:16]}.sock"]
        for address in listen:
            path = _path(address)
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            try:
                sock.bind(path)
                sock.listen(self._backlog)
            except OSError as error:
                sock.close()
                raise OSError(f"cannot listen on {address}: {error}") from error
            self._listeners[sock.fileno()] = (sock, path)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        return list(listen)

    def dial(self, address: str) -> ExampleConn:
        sock = socket.socket(socket.AF_UNIX)
        conn = ExampleConn(self, sock, address)
        try:
            sock.connect(
                _path(address)
            )  # to a unix socket it succeeds or fails at once
        except OSError as error:
            self.lose(conn, f"cannot connect to {address}: {error}")
        else:
            self._add(conn, What.OPENED)
        return conn

    def _add(self, conn: ExampleConn, what: What) -> None:
        assert self._epoll is not None
        self._conns[conn.sock.fileno()] = conn
        self._epoll.register(conn.sock.fileno(), select.EPOLLIN)
        self._report(Event(what, conn))

    def _report(self, event: Event) -> None:
        self._events.append(event)
        if self._poller is not None:
            self._poller.wake()

    def rank(self, addresses: Sequence[str], same_host: bool) -> list[str]:
        return [a for a in addresses if same_host and a.startswith(SCHEME)]

    def poll(self) -> Iterator[Event]:
        yield from self._reported()
        if self._epoll is None:
            return
        for fd, mask in self._epoll.poll(0):
            if fd in self._listeners:
                self._accept(self._listeners[fd][0])
            elif (conn := self._conns.get(fd)) is not None:
                if mask & select.EPOLLOUT:
                    yield from self._writable(conn)
                if mask & ~select.EPOLLOUT and not conn.lost:
                    yield Event(What.READABLE, conn)
        yield from self._reported()

    def _reported(self) -> Iterator[Event]:
        while self._events:
            yield self._events.popleft()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the peer is gone already, or no descriptor is free
            return
        self._add(ExampleConn(self, sock, SCHEME + "(accepted)"), What.ACCEPTED)

    def _writable(self, conn: ExampleConn) -> Iterator[Event]:
        conn.send_rest()
        if conn.lost:
            return
        if not conn.unsent and conn.refused:
            conn.refused = False
            yield Event(What.WRITABLE, conn)
        self.watch(conn)

    def watch(self, conn: ExampleConn) -> None:
        """Ask the kernel for what the connection waits for."""
        if self._epoll is not None and not conn.lost:
            waits = conn.refused or conn.unsent
            mask = select.EPOLLIN | (select.EPOLLOUT if waits else 0)
            self._epoll.modify(conn.sock.fileno(), mask)

    def lose(self, conn: ExampleConn, reason: str) -> None:
        """The connection is broken: free it and report that, once."""
        if not conn.lost:
            self.drop(conn)
            self._report(Event(What.LOST, conn, reason))

    def drop(self, conn: ExampleConn) -> None:
        """Free a connection; what is reported of it is forgotten."""
        if conn.lost:
            return
        conn.lost = True
        if self._conns.pop(conn.sock.fileno(), None) is not None:
            assert self._epoll is not None
            self._epoll.unregister(conn.sock.fileno())
        conn.sock.close()
        self._events = deque(e for e in self._events if e.conn is not conn)

    def is_routable(self, address: str) -> bool:
        return False

    def close(self, linger: float = LINGER_SECONDS) -> None:
        deadline = time.monotonic() + linger
        while unsent := [conn for conn in self._conns.values() if conn.unsent]:
            wait = deadline - time.monotonic()
            if wait <= 0:
                break
            writable = select.poll()
            for conn in unsent:
                writable.register(conn.sock, select.POLLOUT)
            writable.poll(wait * 1000)
            for conn in unsent:
                conn.send_rest()
        for conn in list(self._conns.values()):
            self.drop(conn)
        if self._epoll is not None and self._poller is not None:
            self._poller.unregister(self._epoll.fileno())
        self._close_descriptors()
        for _, path in self._listeners.values():
            if os.path.exists(path):
                os.unlink(path)
        self._listeners.clear()
        if self._own_directory:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def abandon(self) -> None:
        # Only close: to unregister here would take it from the parent's epoll too.
        for conn in self._conns.values():
            conn.lost = True
            conn.sock.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None
        for sock, _ in self._listeners.values():
            sock.close()


def _path(address: str) -> str:
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/"):
        raise ValueError(f"{address!r} is not of the form {SCHEME}/path")
    return path
