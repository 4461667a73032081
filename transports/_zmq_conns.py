"""A ZeroMQ socket and what it carries: messages in parts, and the dialling end.

A message is one frame, the head, or two: the head with the size of the body appended
(4 bytes, little-endian), and the body; so the receiver learns the size before it takes
the body, straight from the socket, into the mesh's memory. A single empty frame means
nothing: it is the dialler's first, which makes it known to the ROUTER, and a way to
learn whether a peer has room again. An empty frame followed by another says goodbye,
because a ROUTER cannot hang up on one of its peers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import zmq

from mq import addresses
from mq.stream.sockets import is_within_host, quiet_seconds
from mq.transport import (
    CHUNK_BYTES,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    Conn,
    Event,
    What,
)

if TYPE_CHECKING:
    from transports.zmq import ZmqLink

IN, OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
NOW = int(zmq.NOBLOCK)
BURST = 32
"""Messages taken from one socket before the others have their turn."""
SIZE_BYTES = 4
"""Bytes in which a head tells the size of its body."""
WHOLE_BYTES = 12 * CHUNK_BYTES
"""The largest body."""
LEAD_BYTES = 8
"""The engine's memory for a body begins 8 bytes after a multiple of 16."""
_AHEAD_BYTES = 8 * CHUNK_BYTES
_AHEAD_BYTES_FAR = 16 * CHUNK_BYTES  # another host's answer takes the wire's round trip

_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)

FAILURES = {
    int(zmq.EVENT_DISCONNECTED): "the connection was lost",
    int(zmq.EVENT_CONNECT_RETRIED): "nobody answers at this address",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the ZeroMQ handshake was broken off",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer does not speak ZeroMQ",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the peer refused the ZeroMQ handshake",
}
"""Events of a socket's monitor that end a dialled connection."""


class Port:
    """A socket, what is known of its readiness, and where in a message it stands."""

    def __init__(self, link: ZmqLink, sock: zmq.Socket[bytes]) -> None:
        self.link = link
        self.socket = sock
        # Without what `zmq.Socket.send` does for other kinds of sockets, a third of it.
        self.send_part = super(zmq.Socket, sock).send
        self.fd = int(sock.getsockopt(zmq.FD))
        self.report: Callable[[], Iterator[Event]]
        self.current: ZmqConn | None = None  # whose message is being read
        self.parsing = False
        self.taken = 0
        self._sending = False
        self._events: int | None = None

    def signalled(self) -> None:
        """Its descriptor is readable: most likely a message, which `receive` tells."""
        self._events = IN
        self.link.busy[self] = None

    def stale(self) -> None:
        """Have `events` ask the engine again."""
        self._events = None

    def events(self) -> int:
        """The socket's readiness; asks the engine only after something happened."""
        if self._events is None:
            self._events = int(self.socket.getsockopt(_EVENTS))
        return self._events

    def receive(self) -> bytes:
        self._events = None
        return self.socket.recv(NOW)

    def receive_frame(self) -> zmq.Frame:
        """`receive` where `more` comes next: a frame tells that for a third of it."""
        self._events = None
        return self.socket.recv(NOW, copy=False)

    def more(self) -> bool:
        return bool(self.socket.getsockopt(_RCVMORE))

    def drain(self) -> None:
        """Throw away the rest of the message that is being read."""
        while self.more():
            self.receive()
        self.current = None
        self.parsing = False

    def send(
        self, *parts: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        """Send all parts as one message, or none; False: no room.

        The engine reads the body, which comes last, where it is.

        Raises:
            zmq.ZMQError: The peer is gone.
        """
        if self._sending:
            self._finish_sending()
        send, last = self.send_part, len(parts) - 1
        self._events = None
        self._sending = True
        whole = True
        try:
            for index in range(last):
                send(parts[index], _MORE)
            if body is None:
                send(parts[last], NOW)
            else:
                send(parts[last], _MORE)
                whole = False
                send(body, NOW, False)
        except zmq.Again:  # at the first part only: there is room for all, or none
            self._sending = False
            return False
        except zmq.ZMQError:  # there, too; or the body finds no thread that frees it
            self._sending = not whole
            raise
        self._sending = False
        return True

    def _finish_sending(self) -> None:
        # Something came between two parts: what follows must not become part of that
        # message. The peer finds it malformed and breaks the connection.
        try:
            self.socket.send(b"", NOW)
        except zmq.ZMQError:  # the message was complete after all
            pass
        self._sending = False

    def close(self, linger: float) -> None:
        self.link.forget(self)
        self.socket.disable_monitor()
        self.socket.close(int(linger * 1000))


class ZmqConn(Conn):
    """What both ends of a connection share: the parts of a message."""

    keeps_body = True
    lead = LEAD_BYTES

    def __init__(self, port: Port, address: str) -> None:
        self.address = address
        self.port = port
        self.readable = Event(What.READABLE, self)
        self.writable = Event(What.WRITABLE, self)
        self.reason = ""  # why it is lost or closed
        self.finished = False  # nothing more is read from it
        self.broke_rules = False
        self.body_nbytes = 0

    def describe(self) -> Mapping[str, str]:
        return {"wire": self.address.partition("://")[0]}

    def fail(self, reason: str, finished: bool = False) -> None:
        """Have LOST reported, after what arrived before it unless `finished`."""
        self.reason = self.reason or reason
        self.finished |= finished
        self.port.stale()  # what came before the break may not have been seen yet
        self.port.link.keep(self.port)

    def _malformed(self, what: str) -> None:
        self.port.drain()
        self.port.link.malformed += 1
        self.broke_rules = True
        self.fail(f"the peer sent {what}, which no member does", finished=True)

    def interrupted(self) -> None:
        """A Ctrl-C came between two parts, so that a message is lost."""
        self.port.drain()
        self.fail("a message was interrupted while it was received", finished=True)

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        if self.reason:
            return True
        try:
            if body is None:
                sent = self._send(head)
            else:
                size = body.nbytes.to_bytes(SIZE_BYTES, "little")
                sent = self._send(bytes(head) + size, body=body)
        except zmq.ZMQError as error:
            self.fail(f"the peer is gone ({error})")
            return True
        self._settle(not sent)
        return sent

    @property
    @abstractmethod
    def fd(self) -> int:
        """The engine's descriptor for it; -1: there is none."""

    def _is_ipc(self) -> bool:
        return self.describe().get("wire") == "ipc"

    def quiet_seconds(self) -> float | None:
        return quiet_seconds(self.fd)

    @property
    def whole_bytes(self) -> int:  # type: ignore[override]
        # The engine tells of nothing of a body before all of it is there, which over a
        # slow wire would pass for silence where the kernel cannot be asked.
        is_seen = self._is_ipc() or self.quiet_seconds() is not None
        return WHOLE_BYTES - LEAD_BYTES if is_seen else 0

    @property
    def most_unanswered(self) -> int:  # type: ignore[override]
        # The engine counts messages, not bytes; large ones would be too many.
        is_near = self._is_ipc() or is_within_host(self.fd)
        return _AHEAD_BYTES if is_near else _AHEAD_BYTES_FAR

    @abstractmethod
    def _send(
        self, *parts: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool: ...

    @abstractmethod
    def _settle(self, refused: bool) -> None:
        """After a send, which may have used up the signal for something else."""

    def _read(self) -> tuple[bytes, int] | None:
        """Read a message up to its body; None: it was none for the mesh."""
        port = self.port
        port.taken += 1
        port.parsing = True
        try:
            frame = port.receive_frame()
        except zmq.Again:  # the signal was for something else
            port.parsing = False
            return None
        head, more = frame.bytes, bool(frame.more)
        nbytes = 0
        if more and head:
            nbytes = int.from_bytes(head[-SIZE_BYTES:], "little")
            head = head[:-SIZE_BYTES]
            if not head or not 0 < nbytes <= WHOLE_BYTES:
                self._malformed(f"a body of {nbytes} bytes")
                return None
        if not 0 < len(head) <= MAX_HEAD_BYTES:
            self._read_signal(head, more)
            return None
        self.body_nbytes = nbytes
        port.current = self if more else None
        port.parsing = False
        return head, nbytes

    def _read_signal(self, head: bytes, more: bool) -> None:
        if head:
            self._malformed(f"a head of {len(head)} bytes")
        self.port.drain()
        if more and not head:
            self.fail("the peer closed the connection", finished=True)

    def receive_body(self, into: memoryview) -> bool:
        port = self.port
        if not self.body_nbytes:  # `take_body` has seen that it is malformed
            return False
        arrived = port.socket.recv_into(into, flags=NOW)
        port.stale()
        return self._ends_with(arrived, port.more())

    def take_body(self) -> memoryview | None:
        frame = self.port.receive_frame()
        body = frame.buffer
        return body if self._ends_with(len(body), bool(frame.more)) else None

    def _ends_with(self, nbytes: int, more: bool) -> bool:
        """Whether the message ends as it should, with a body of so many bytes."""
        port = self.port
        port.link.keep(port)
        announced, self.body_nbytes = self.body_nbytes, 0
        if nbytes != announced or more:
            self._malformed(f"a body unlike the {announced} bytes it announced")
            return False
        port.current = None
        return True

    def discard_body(self) -> None:
        self.body_nbytes = 0
        self.port.link.keep(self.port)
        self.port.drain()


class Dialled(ZmqConn):
    """The dialling end: a DEALER of its own, so that close and loss are its alone.

    Attributes:
        target: The socket address that is dialled; None: it is that of a file.
        endpoint: The same as the engine takes it; a name would hold up its only thread.
        opened: Whether the peer's engine has answered, which was reported.
    """

    def __init__(self, port: Port, address: str, name: bytes, target: Any) -> None:
        super().__init__(port, address)
        self.target = target
        self.endpoint = address
        if target is not None:
            zone = f"%{target[3]}" if any(target[3:]) else ""
            host = addresses.bracketed(target[0] + zone)
            self.endpoint = f"tcp://{host}:{target[1]}"
        port.report = self._report
        self._name = name
        self._opening = False
        self.opened = False
        self._refused = False

    def saw(self, code: int, fd: int) -> None:
        """Take note of what the monitor of the socket says."""
        if code == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._opening = True
            self.port.link.keep(self.port)
        elif code in FAILURES:
            self.fail(FAILURES[code])

    def _send(
        self, *parts: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        return self.port.send(*parts, body=body)

    def _settle(self, refused: bool) -> None:
        self._refused = refused
        self.port.link.keep(self.port)

    @property
    def fd(self) -> int:
        fds = [fd for name, fd in self.port.link.descriptors if name == self._name]
        return fds[-1] if fds else -1

    def receive(self) -> tuple[bytes, int] | None:
        self.port.link.keep(self.port)
        while not self.finished and self.port.events() & IN:
            if self.port.parsing:
                self.interrupted()
            elif (message := self._read()) is not None:
                return message
        return None

    def _report(self) -> Iterator[Event]:
        port, busy = self.port, self.port.link.busy
        if self._opening:
            self._opening, self.opened = False, True
            yield Event(What.OPENED, self)
        for _ in range(BURST):
            if port not in busy:
                return
            events, taken = port.events(), port.taken
            if self._refused and events & OUT:
                self._refused = False
                yield self.writable
            elif events & IN and not self.finished and not self.body_nbytes:
                yield self.readable
                if port.taken == taken:  # the mesh comes back
                    return
            else:
                del busy[port]
                if self.reason:
                    self._shut(0.0)
                    broke = self.broke_rules
                    yield Event(What.LOST, self, self.reason, malformed=broke)
                return

    def _shut(self, linger: float) -> None:
        self.finished = True
        if not self.opened:
            self.port.link.unanswered(self)
        self.port.link.dialled.pop(self._name, None)
        self.port.close(linger)

    def close(self, linger: float = LINGER_SECONDS) -> None:
        if not self.port.socket.closed:
            lingers = self.opened and not self.reason
            self.reason = self.reason or "closed"
            self._shut(linger if lingers else 0.0)
