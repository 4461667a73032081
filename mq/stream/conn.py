"""One connection over a stream socket, from dialling or accepting to its end.

Each end first says the `hello` of its link, 8 bytes; the connection is reported once
the peer's has come. So a stranger is never a connection, and a dialled address where
something else listens is never open.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from mq.sigpipe import QUIET
from mq.stream.framing import Framing, not_open
from mq.transport import LINGER_SECONDS, Event, What

if TYPE_CHECKING:
    from mq.stream.link import StreamLink

HELLO_BYTES: Final = 8
_DISCARDS: Final = 16  # reads at a time while a connection closes


class StreamConn(Framing):
    """A connection of a `StreamLink`.

    A subclass may put a handshake of its own before the hello (`_establish`), and calls
    of its own in place of the socket's (`_send`, `_receive_into`).

    Attributes:
        news: What is to be reported once the peer has said hello; then None.
        target: The socket address that was dialled last; None: there was none.
        fd: The socket's descriptor; -1: there is none.
        refused: Whether the peer speaks another version of the format.
    """

    def __init__(self, link: StreamLink, address: str, news: What) -> None:
        super().__init__(link, address)
        self.news: What | None = news
        self.readable = Event(What.READABLE, self)
        self.target: Any = None
        self.fd = -1
        self.refused = False
        self._socket: socket.socket | None = None
        self._targets: list[tuple[int, Any]] = []
        self._greeting = False  # the connection stands, and our hello is sent
        self._room = False  # what was refused may be tried again
        self._said_all = False

    # -- opening ----------

    def dial(self, targets: Sequence[tuple[int, Any]]) -> None:
        """Begin to connect to the first of these (family, address) that answers."""
        self._targets = list(targets)
        try:
            self._dial_next()
        except OSError as error:  # out of descriptors, most likely
            self.end(f"cannot dial {self.address}: {error}")

    def _dial_next(self) -> None:
        family, self.target = self._targets.pop(0)
        sock = self._socket = socket.socket(family, socket.SOCK_STREAM)
        self.fd = sock.fileno()
        sock.setblocking(False)
        code = sock.connect_ex(self.target)
        if code == errno.EINPROGRESS:
            self._link.watch(self.fd, select.EPOLLOUT, lambda: self._dialled(sock))
        else:
            self._answered(sock, code)

    def _dialled(self, sock: socket.socket) -> None:
        self._link.unwatch(self.fd)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and sock.getsockname() == sock.getpeername() != "":
                # A free port of this host may connect to itself.
                code = errno.ECONNREFUSED
        except OSError as error:  # the peer has gone already
            code = error.errno or errno.ENOTCONN
        self._answered(sock, code)

    def _answered(self, sock: socket.socket, code: int) -> None:
        if not code:
            self.start(sock)
        elif self._targets:
            sock.close()
            self._socket, self.fd = None, -1  # the number may be another's soon
            self.dial(self._targets)
        else:
            self.end(f"cannot dial {self.address}: {self._link.explain(code)}")

    def start(self, sock: socket.socket) -> None:
        """The connection stands: shake hands, then say hello."""
        sock.setblocking(False)
        self._socket = sock
        self.fd = sock.fileno()
        try:
            self._link.tune(sock)
            objection = self._link.objection(sock)
        except OSError as error:  # it has gone already
            objection = str(error)
        if objection:
            self.end(f"no connection with {self.address}: {objection}")
            return
        self._send = sock.sendmsg
        self._receive_into = sock.recv_into
        self._link.read(self.fd, self)
        self._link.busy[self] = None

    def _establish(self) -> bool:
        """Go on with the handshake, if there is one; whether it is done.

        Raises:
            OSError: It has failed.
        """
        return True

    def _greeted(self) -> bool:
        """Shake hands and exchange hellos, as far as it goes; whether it is done."""
        hello = self._link.hello
        if not self._greeting:
            try:
                if not self._establish():
                    self.drained = True
                    return False
                self._greeting = self._send((hello,), (), QUIET) == HELLO_BYTES
            except OSError as error:  # the first bytes of all always find room
                self.end(f"no connection with {self.address}: {error}")
                if not isinstance(error, ConnectionError):  # it only looked who is here
                    self._tell(misfit=False)
        while self._end - self._start < HELLO_BYTES:
            if self.drained or not self._fill(HELLO_BYTES):
                return False
        said = bytes(self._view[self._start : self._start + HELLO_BYTES])
        if said != hello:
            if (said[:-2], said[-1]) == (hello[:-2], hello[-1]):
                self._misfit(said[-2], hello[-2])
            else:
                self.malformed(f"{said!r} in place of {hello!r}")
                self._tell(misfit=False)
            return False
        self._start += HELLO_BYTES
        return True

    def _misfit(self, theirs: int, ours: int) -> None:
        self.refused = True
        self.turn_away(
            f"it speaks version {theirs} of the stream format and this member version "
            f"{ours}; install the same version of tensormq on both"
        )
        self._tell(misfit=True)

    def _tell(self, *, misfit: bool) -> None:
        if self.news is What.ACCEPTED:  # else LOST tells of it
            self._link.refusals.tell(self.address, self.reason, misfit=misfit)

    # -- events ----------

    def report(self) -> Iterator[Event]:
        """What happened to a connection that is `special`."""
        busy = self._link.busy
        if self._closed:
            self._wind_up()
            return
        if self.news is not None:
            if self._gone or not self._greeted():
                if self._gone:
                    yield from self._lose()
                else:
                    busy.pop(self, None)
                return
            news, self.news = self.news, None
            self._link.strangers.pop(self, None)
            self._shut = False
            self._room = self._refused
            yield Event(news, self)
        if self._room:
            self._room = self._refused = False
            yield Event(What.WRITABLE, self)
        self.special = self._gone
        if self not in busy or self._closed:
            return
        if self._gone and not self._held():
            self._exhausted = True
        if not self._exhausted and (self._held() or not self.drained):
            yield self.readable
        if self._closed:
            return
        if self._exhausted:
            yield from self._lose()
        elif self.drained and not (self._held() or self._gone):
            busy.pop(self, None)

    def _held(self) -> bool:
        """Whether there may be a message in the buffer."""
        return self._end > self._start

    def _lose(self) -> Iterator[Event]:
        if self.news is What.ACCEPTED and not self._exhausted:
            self._link.malformed += 1  # it left without a hello
        told = self.news is not What.ACCEPTED
        self.drop()
        if told:
            yield Event(What.LOST, self, self.reason, self.refused, self.broke_rules)

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._gone = self._shut = self.special = True
        self._exhausted |= self.fd < 0
        self._rest.clear()
        if self.fd >= 0:
            self._link.unread(self.fd)
            self._link.unwatch(self.fd)
        self._link.notice(self)

    def _idle(self) -> None:
        if self._gone:
            self._exhausted = True
        else:
            self._link.busy.pop(self, None)

    def _await_room(self) -> None:
        self._link.watch(self.fd, select.EPOLLOUT, self.flush)

    def _found_room(self) -> None:
        self._link.unwatch(self.fd)
        if self._refused:
            self._room = self.special = True
        self._link.notice(self)

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    # -- closing ----------

    def close(self) -> None:
        if self._closed or self not in self._link.conns:
            return
        self._closed = self.special = True
        self.reason = self.reason or "closed"
        self._shut = True
        self._start = self._end = self._body = 0
        self.let_go()
        if self._gone or self.torn or self.news is not None or self.delivered():
            self.drop()
            return
        # The kernel throws away what it has not sent when a socket is closed while
        # something is there to be read, so wait for the peer, which closes its end.
        self._link.closing[self] = time.monotonic() + LINGER_SECONDS
        self._wind_up()

    def delivered(self) -> bool:
        """Whether the peer's kernel has everything that was sent."""
        return not (self._rest or self._sealed) and not (
            self._socket is not None and self._link.unsent(self._socket)
        )

    def _wind_up(self) -> None:
        sock = self._socket
        if not (self._rest or self._sealed or self._said_all) and sock is not None:
            self._said_all = True
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        for _ in range(_DISCARDS):
            if self._gone:
                self.drop()
                return
            if not self._take(self._view):
                self._link.busy.pop(self, None)
                return

    def drop(self) -> None:
        """Free everything at once."""
        self._gone = self._shut = self._closed = True
        self._start = self._end = self._body = 0
        link = self._link
        if self.fd >= 0:
            link.unread(self.fd)
            link.unwatch(self.fd)
        self.abandon()
        link.forget(self)  # not before: a child forked meanwhile finds what it inherits
        # Python may not look for cycles for a long time, and its buffers are large.
        self._send = self._receive_into = not_open
        with contextlib.suppress(AttributeError):  # an interrupt had this repeated
            del self.readable

    def abandon(self) -> None:
        """Close the descriptors, and nothing else."""
        self._rest.clear()
        self.fd = -1
        sock, self._socket = self._socket, None  # first: an interrupt may come
        if sock is not None:
            sock.close()
