"""What listens, dials and polls for connections over stream sockets."""

from __future__ import annotations

import select
import socket
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from mq.descriptors import most_open
from mq.log import Log
from mq.mesh.poller import Poller
from mq.stream.conn import StreamConn
from mq.stream.watching import EVENTS, Watching
from mq.transport import LINGER_SECONDS, Conn, Event, Link, What

logger = Log(__name__)

_BACKLOG: Final = 1024
_ACCEPTS: Final = 32  # at a time, before the others have their turn
_STRANGERS: Final = 128
_GREETING_SECONDS: Final = 5.0
_DEAF_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.005


class StreamLink(Watching[StreamConn], Link):
    """Stream sockets without waiting: one descriptor for each connection.

    A subclass says which sockets there are: `bind`, `targets`, and what it does with
    them: `tune`, `objection`.

    Attributes:
        hello: What both ends of a connection say first, of `HELLO_BYTES`.
        conn_class: What its connections are.
        busy: Connections to be looked at by the next `poll`.
        conns: All connections, until they are closed.
        closing: Those that still deliver, and until when.
        strangers: Those accepted that have not said hello, and since when.
    """

    hello: ClassVar[bytes] = b"MQSTRM\1\n"
    conn_class: ClassVar[type[StreamConn]] = StreamConn

    def __init__(self) -> None:
        super().__init__()
        self.malformed = 0
        self.busy: dict[StreamConn, None] = {}
        self.conns: dict[StreamConn, None] = {}
        self.closing: dict[StreamConn, float] = {}
        self.strangers: dict[StreamConn, float] = {}
        self._listeners: list[socket.socket] = []
        self._deaf: dict[socket.socket, float] = {}
        self._is_open = False

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
        self._listeners.append(sock)
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._hear(sock)
        return advertised

    def _hear(self, listener: socket.socket) -> None:
        fd = listener.fileno()
        self.watch(fd, select.EPOLLIN, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, ConnectionError):  # none, or it has left again
                return
            except OSError as error:  # out of descriptors: for a while, or one is free
                logger.warning("cannot accept a connection: %s", error)
                self.unwatch(listener.fileno())
                self._deaf[listener] = time.monotonic() + _DEAF_SECONDS
                return
            sock.setblocking(False)
            conn = self._new(self.name_peer(peer), What.ACCEPTED)
            self.strangers[conn] = time.monotonic()
            if len(self.strangers) > most_open(_STRANGERS):
                self._turn_away(next(iter(self.strangers)))
            conn.start(sock)

    def name_peer(self, peer: Any) -> str:
        """The address of an accepted peer, for people to read."""
        return str(peer)

    def _new(self, address: str, news: What) -> StreamConn:
        conn = self.conn_class(self, address, news)
        self.conns[conn] = None
        return conn

    def _turn_away(self, stranger: StreamConn) -> None:
        self.malformed += 1
        stranger.drop()

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

    def forget(self, conn: StreamConn) -> None:
        """A connection is over."""
        self.conns.pop(conn, None)
        self.busy.pop(conn, None)
        self.closing.pop(conn, None)
        self.strangers.pop(conn, None)

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
        now = time.monotonic()
        for conn, deadline in list(self.closing.items()):
            if now >= deadline or conn.delivered():
                conn.drop()
        for stranger, since in list(self.strangers.items()):
            if now < since + _GREETING_SECONDS:
                break
            self._turn_away(stranger)
        for listener, until in list(self._deaf.items()):
            if now >= until:
                del self._deaf[listener]
                self._hear(listener)

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

    def _stop_listening(self) -> None:
        self._deaf.clear()
        for listener in self._listeners:
            self.unwatch(listener.fileno())
            listener.close()
        self._listeners.clear()

    def abandon(self) -> None:
        # The sets of descriptors are shared with the parent: nothing is taken out.
        self._is_open = False
        for conn in self.conns:
            conn.abandon()
        for listener in self._listeners:
            listener.close()
        self._abandon_watching()
