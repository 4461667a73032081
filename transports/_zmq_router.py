"""The accepting end of ZeroMQ: one ROUTER socket and the peers behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import zmq

from mq.transport import Event, What
from transports._zmq_conns import BURST, FAILURES, IN, NOW, Port, ZmqConn
from transports._zmq_strangers import peer_of

LISTENER = b"listener"
"""The name under which the monitor of the ROUTER reports."""


class Accepted(ZmqConn):
    """The accepting end: one of the peers of the ROUTER."""

    def __init__(self, router: Router, identity: bytes, address: str, fd: int) -> None:
        super().__init__(router.port, peer_of(fd) or address)
        self.identity = identity
        self._fd = fd
        self._router = router

    def describe(self) -> Mapping[str, str]:
        return super().describe() if "://" in self.address else {}

    @property
    def fd(self) -> int:
        return self._fd

    def guard(self, most_bytes: int | None) -> None:
        self.port.link.guard(self.fd, most_bytes)

    def fail(self, reason: str, finished: bool = False) -> None:
        if not self.reason:
            self._router.lost[self] = self.port.taken
        super().fail(reason, finished)

    def _send(
        self, *parts: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        return self.port.send(self.identity, *parts, body=body)

    def _settle(self, refused: bool) -> None:
        if refused:
            self._router.refused[self] = None
        self.port.link.keep(self.port)

    def receive(self) -> tuple[bytes, int] | None:
        self.port.link.keep(self.port)
        while not self.finished and self._router.front() is self:
            if (message := self._read()) is not None:
                return message
        return None

    def close(self) -> None:
        if self._router.accepted.get(self.identity) is self:
            self.reason = self.reason or "closed"
            self._router.dismiss(self)


class Router:
    """The ROUTER and its peers, whose messages come out of it in turn."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.accepted: dict[bytes, Accepted] = {}
        self.refused: dict[Accepted, None] = {}
        self.lost: dict[Accepted, int] = {}  # and how many messages were read by then
        self._owners: dict[int, Accepted] = {}  # by descriptor of the connection
        self._fresh: list[Accepted] = []
        self._farewells: dict[bytes, None] = {}
        port.report = self._report

    def front(self) -> ZmqConn | None:
        """The connection whose message is next in the socket, its envelope read."""
        port = self.port
        while port.current is None or port.parsing:
            if port.parsing:
                self._interrupted()
            if not port.events() & IN:
                return None
            port.parsing = True
            try:
                identity = port.receive()
            except zmq.Again:  # the signal was for something else
                port.parsing = False
                continue
            conn = self.accepted.get(identity)
            if conn is None:
                self._admit(identity)
            elif conn.finished:
                port.drain()
            else:
                port.current = conn
            port.parsing = False
        return port.current

    def _interrupted(self) -> None:
        known = self.port.current
        self.port.drain()
        for conn in list(self.accepted.values()) if known is None else [known]:
            conn.interrupted()

    def _admit(self, identity: bytes) -> None:
        """Make a connection of a peer's first message, which is empty."""
        link, first = self.port.link, self.port.socket.recv(NOW, copy=False)
        try:
            fd, address = int(first.get(zmq.SRCFD)), str(first.get("Peer-Address"))
        except zmq.ZMQError:  # noise that passed for the protocol's first version
            fd, address = -1, ""
        link.watch()  # what became of earlier connections of the same descriptor
        introduced = not (first.more or len(first) or fd < 0)
        link.spoke(fd, introduced)
        if not introduced:
            self.port.drain()
            link.malformed += 1
            return
        conn = self.accepted[identity] = Accepted(self, identity, address, fd)
        previous = self._owners.pop(fd, None)
        self._owners[fd] = conn
        self._fresh.append(conn)
        if previous is not None:
            previous.fail(FAILURES[zmq.EVENT_DISCONNECTED])
        if (LISTENER, fd) not in link.descriptors:
            conn.fail(FAILURES[zmq.EVENT_DISCONNECTED])

    def saw(self, code: int, fd: int) -> None:
        """Take note of what the monitor of the ROUTER says."""
        if code == zmq.EVENT_DISCONNECTED and fd in self._owners:
            self._owners.pop(fd).fail(FAILURES[zmq.EVENT_DISCONNECTED])

    def _report(self) -> Iterator[Event]:
        port, busy = self.port, self.port.link.busy
        if self._farewells:
            self._say_goodbye()
        for _ in range(BURST):
            conn, taken = self.front(), port.taken
            while self._fresh:
                yield Event(What.ACCEPTED, self._fresh.pop(0))
            if port not in busy:
                return
            if conn is None or conn is not port.current or conn.body_nbytes:
                break
            yield conn.readable
            if port not in busy or port.taken == taken:  # the mesh comes back
                return
        if self.refused:
            yield from self._report_room()
        if self.lost and port in busy:
            yield from self._report_lost()
        if port in busy and (not port.events() & IN or port.current is not None):
            del busy[port]

    def _report_room(self) -> Iterator[Event]:
        # A ROUTER does not say which peer has room, so each is asked by an empty
        # message. Asking may use up the signal of one asked before: ask twice.
        for conn in [*self.refused] * (2 if len(self.refused) > 1 else 1):
            if conn not in self.refused:
                continue
            try:
                room = self.port.send(conn.identity, b"")
            except zmq.ZMQError as error:
                conn.fail(f"the peer is gone ({error})")
                room = True
            if room:
                del self.refused[conn]
                yield conn.writable

    def _report_lost(self) -> Iterator[Event]:
        # What arrived before the break is still in the socket, among other messages.
        drained = not self.port.events() & IN
        turns = self.port.link.hwm * (len(self.accepted) + 1)
        for conn, mark in list(self.lost.items()):
            if drained or conn.finished or self.port.taken - mark > turns:
                if self.accepted.get(conn.identity) is conn:
                    self.dismiss(conn)
                    broke = conn.broke_rules
                    yield Event(What.LOST, conn, conn.reason, malformed=broke)

    def dismiss(self, conn: Accepted) -> None:
        """Forget a connection, and ask the peer to break it."""
        conn.finished = True
        del self.accepted[conn.identity]
        self.lost.pop(conn, None)
        self.refused.pop(conn, None)
        if self._owners.get(conn.fd) is conn:
            del self._owners[conn.fd]
        if self.port.current is conn:
            self.port.drain()
        self._farewells[conn.identity] = None
        self._say_goodbye()
        self.port.link.keep(self.port)
        self.port.link.sent_away(conn.fd)

    def _say_goodbye(self) -> None:
        for identity in list(self._farewells):
            try:
                sent = self.port.send(identity, b"", b"bye")
            except zmq.ZMQError:  # it is gone already
                sent = True
            if sent:
                del self._farewells[identity]
