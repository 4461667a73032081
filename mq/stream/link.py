"""What listens, dials and polls for connections over stream sockets."""

from __future__ import annotations

import os
import socket
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from mq.mesh.poller import Poller
from mq.stream.conn import StreamConn
from mq.stream.listening import Listening
from mq.stream.watching import EVENTS
from mq.transport import LINGER_SECONDS, Conn, Event, What

_LOOK_SECONDS: Final = 0.005


class StreamLink(Listening[StreamConn]):
    """Stream sockets without waiting: one descriptor for each connection.

    A subclass says which sockets there are: `bind`, `targets`, and what it does with
    them: `tune`, `objection`.

    Attributes:
        hello: What both ends of a connection say first, of `HELLO_BYTES`.
        conn_class: What its connections are.
    """

    hello: ClassVar[bytes] = b"MQSTRM\1\n"
    conn_class: ClassVar[type[StreamConn]] = StreamConn

    # -- what a subclass says ----------

    @abstractmethod
    def bind(self, address: str, directory: str | None) -> tuple[socket.socket, str]:
        """A socket bound to an address, and the address under which peers reach it.

        Raises:
            OSError: It cannot be had.
        """

    @abstractmethod
    def targets(self, address: str) -> Sequence[tuple[int, Any]]:
        """Families and socket addresses to try, in order, to reach an address.

        Raises:
            OSError: The host is unknown.
            ValueError: The address is malformed or of another scheme.
        """

    def tune(self, sock: socket.socket) -> None:
        """Set the options of a socket that has just been connected or accepted."""

    def objection(self, sock: socket.socket) -> str:
        """Why a peer is not to be talked to, in words; empty: it is."""
        return ""

    def explain(self, code: int) -> str:
        """Why a dial failed with an error of the system, in words."""
        return os.strerror(code)

    def unsent(self, sock: socket.socket) -> bool:
        """Whether the kernel holds something that a close might throw away."""
        return False

    # -- opening ----------

    def listen(
        self, poller: Poller, addresses: Sequence[str], directory: str | None
    ) -> list[str]:
        """Start, and listen on these addresses; those under which peers reach them.

        Raises:
            OSError: An address cannot be listened on.
        """
        self._is_open = True
        self._begin_watching(poller)
        self._signalled = self._epoll.poll
        try:
            return [self._listen(address, directory) for address in addresses]
        except BaseException:
            self.close()
            raise

    def _listen(self, address: str, directory: str | None) -> str:
        sock, advertised = self.bind(address, directory)
        sock.setblocking(False)
        self._hear(sock)
        return advertised

    def _new(self, address: str, news: What) -> StreamConn:
        conn = self.conn_class(self, address, news)
        self.conns[conn] = None
        return conn

    def dial(self, address: str) -> Conn:
        try:
            targets, problem = self.targets(address), ""
        except OSError as error:
            targets, problem = (), str(error)
        conn = self._new(address, What.OPENED)
        if targets:
            conn.dial(targets)
        else:
            conn.end(f"cannot dial {address}: {problem}")
        return conn

    def notice(self, conn: StreamConn) -> None:
        """Have the next `poll` look at a connection."""
        if conn in self.conns:
            self.busy[conn] = None

    # -- events ----------

    def poll(self) -> Iterator[Event]:
        if not self._is_open:
            return
        busy, readers = self.busy, self._readers
        for fd, _ in self._signalled(0, EVENTS):
            conn = readers.get(fd)
            if conn is not None:
                conn.drained = False
                busy[conn] = None
            else:
                self._look()
        if self.closing or self.strangers or self._deaf:
            self._expire()
        for conn in list(busy):
            if conn not in busy:
                continue
            if not conn.special:
                yield conn.readable
            if conn.special and conn in busy:  # it may have ended while it was read
                yield from conn.report()

    def _expire(self) -> None:
        for conn in [conn for conn in self.closing if conn.delivered()]:
            conn.drop()
        super()._expire()

    # -- closing ----------

    def close(self, linger: float = LINGER_SECONDS) -> None:
        if not self._is_open:
            return
        try:
            self._stop_listening()
            for conn in list(self.conns):
                conn.close()
            deadline = time.monotonic() + linger
            while self.closing and time.monotonic() < deadline:
                self._epoll.poll(_LOOK_SECONDS, EVENTS)
                for _ in self.poll():
                    pass
        finally:
            for conn in list(self.conns):
                conn.drop()
            self._is_open = False
            self._end_watching()
