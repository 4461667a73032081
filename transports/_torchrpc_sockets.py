"""The sockets of the link: its listeners, and the one beside each connection.

Who has not greeted yet is a stranger: their number and their time are bounded, and
nothing of theirs reaches TensorPipe.
"""

from __future__ import annotations

import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from mq import forks
from mq.addresses import bracketed
from mq.descriptors import most_open, pushed_out
from mq.stream.listening import DEAF_SECONDS, Complaint, Refusals
from mq.stream.names import Names
from transports import _torchrpc_control as control
from transports._torchrpc_control import BadNote, Control, Misfit
from transports._torchrpc_net import SCHEME

if TYPE_CHECKING:
    from transports._torchrpc_conns import RpcConn
    from transports.torchrpc import TorchRpcLink

MAX_STRANGERS: Final = 256
"""Sockets that have not greeted yet; beyond, one that was accepted is closed."""


class Sockets:
    """Every socket of a link, behind one descriptor.

    Attributes:
        epoll: Readable when `look` has something to do.
        conns: The connection that a socket belongs to, by its descriptor.
        strangers: Until when a socket may take to greet, by its descriptor.

    Args:
        link: It reads the notes.
        greeting_timeout: Seconds that a socket may take to greet.
    """

    def __init__(self, link: TorchRpcLink, greeting_timeout: float) -> None:
        self.epoll = select.epoll()
        self.conns: dict[int, RpcConn] = {}
        self.strangers: dict[int, float] = {}
        self._link = link
        self._greeting_timeout = greeting_timeout
        self._listeners: dict[int, socket.socket] = {}
        self._deaf: dict[int, float] = {}
        self._complaint = Complaint()
        self._refusals = Refusals()
        self._controls: dict[int, Control] = {}
        self._names = Names()
        self._tried: dict[int, tuple[str, Any]] = {}  # a host, and a target of it
        self._met: dict[int, Any] = {}  # the target, where one has greeted
        forks.register(self)

    def listen(self, host: str, port: int) -> int:
        """Listen on an address; its port."""
        sock = control.listen(host, port)
        self._listeners[sock.fileno()] = sock
        self.epoll.register(sock.fileno(), select.EPOLLIN)
        found: int = sock.getsockname()[1]
        return found

    def dial(self, sock: Control, conn: RpcConn, host: str, port: int) -> None:
        """Connect a socket; where that fails the host's next address is tried next.

        Raises:
            OSError: It cannot even begin, or the host is unknown or still looked up.
        """
        found = self._names.targets(host, port)
        # Members listen on IPv4 in general, as TensorPipe's own listeners do.
        _, at = next((t for t in found if t[0] == socket.AF_INET), found[0])
        try:
            sock.connect(*at[:2])
        except OSError:
            self._names.failed(host, at[0])
            raise
        self.add(sock, conn)
        self._tried[sock.fd] = host, at

    def add(self, sock: Control, conn: RpcConn | None = None) -> None:
        """Watch a socket that must greet; `conn`: the connection that dialled it."""
        if conn is None:
            self._make_room()
        self._controls[sock.fd] = sock
        self.epoll.register(sock.fd, sock.events)
        self.strangers[sock.fd] = time.monotonic() + self._greeting_timeout
        if conn is not None:
            self.conns[sock.fd] = conn

    def _make_room(self) -> None:
        origins = {
            fd: self._controls[fd].origin
            for fd in self.strangers
            if fd not in self.conns
        }
        if len(origins) >= most_open(MAX_STRANGERS):
            self._turn_away(pushed_out(origins), "too many strangers")

    def know(self, sock: Control, conn: RpcConn) -> None:
        """A stranger has greeted, and is the peer of this connection."""
        if tried := self._tried.pop(sock.fd, None):
            self._met[sock.fd] = tried[1]
        self.strangers.pop(sock.fd, None)
        self.conns[sock.fd] = conn

    def send(self, sock: Control, note: dict[str, Any]) -> None:
        """Send a note, now or when the socket takes it."""
        sock.send(note)
        if self._controls.get(sock.fd) is sock:
            self.epoll.modify(sock.fd, sock.events)

    def look(self) -> None:
        """Accept, and read what has come."""
        for fd, mask in self.epoll.poll(0, 64):
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd in self._controls:
                self._serve(self._controls[fd], mask)

    @property
    def waits(self) -> bool:
        """Whether `expire` will have something to do."""
        return bool(self.strangers or self._deaf)

    def expire(self, now: float) -> None:
        """Close the strangers that have not greeted in time; listen again."""
        for fd in [fd for fd, until in self.strangers.items() if until < now]:
            self._turn_away(fd, f"no greeting within {self._greeting_timeout:g} s")
        for fd in [fd for fd, until in self._deaf.items() if until < now]:
            del self._deaf[fd]
            self.epoll.register(fd, select.EPOLLIN)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, (host, port, *_) = listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer is gone already
            return
        except OSError as error:  # no descriptor is free
            self._complaint.make(error)
            self.epoll.unregister(listener)
            self._deaf[listener.fileno()] = time.monotonic() + DEAF_SECONDS
            return
        self.add(Control(sock, f"{SCHEME}{bracketed(host)}:{port}"))

    def _serve(self, sock: Control, mask: int) -> None:
        if mask & select.EPOLLOUT:
            sock.flush()
        try:
            while (note := sock.take()) is not None:
                self._link.read(sock, note)
            if not sock.ended:
                self.epoll.modify(sock.fd, sock.events)
                return
        except (BadNote, OSError) as error:
            self._refuse(sock, error)
            return
        self._ended(sock)

    def _refuse(self, sock: Control, error: BadNote | OSError) -> None:
        """End a socket over what came from it; its peer is told why."""
        reason, final = str(error), isinstance(error, Misfit)
        self._link.malformed += 1
        if sock.fd in self.strangers:
            sock.send({"refused": reason, "final": final})
            # Else LOST tells of it; and who has gone since has not been refused.
            if isinstance(error, BadNote) and sock.fd not in self.conns:
                self._refusals.tell(sock.address, reason, misfit=final)
        self._drop(sock, reason, final)

    def _ended(self, sock: Control) -> None:
        conn = self.conns.get(sock.fd)
        if sock.fd in self.strangers:
            self._link.malformed += conn is None
            self._drop(sock, f"nobody answers at this address ({sock.ended})")
            return
        self.forget(sock)
        if conn is not None:
            conn.control_ended()

    def _turn_away(self, fd: int, reason: str) -> None:
        self._link.malformed += fd not in self.conns  # else LOST tells of it
        self._drop(self._controls[fd], reason)

    def _drop(self, sock: Control, reason: str, final: bool = False) -> None:
        conn = self.conns.get(sock.fd)
        self.forget(sock)
        if conn is not None:
            conn.refused = final
            conn.fail(reason)

    def forget(self, sock: Control) -> None:
        """Close a socket; idempotent."""
        if self._controls.get(sock.fd) is sock:
            del self._controls[sock.fd]
            self.strangers.pop(sock.fd, None)
            self.conns.pop(sock.fd, None)
            self.epoll.unregister(sock.fd)
            self._met.pop(sock.fd, None)
            if tried := self._tried.pop(sock.fd, None):
                self._names.unanswered(*tried, self._met.values())
        sock.close()

    def close(self) -> None:
        """Close everything; idempotent."""
        self.epoll.close()
        for listener in self._listeners.values():
            listener.close()
        for sock in self._controls.values():
            sock.close()

    abandon = close
