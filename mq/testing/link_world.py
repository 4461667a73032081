"""Links pumped by hand, in one thread, with a deadline on every wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from mq.mappings import address
from mq.mesh.poller import Poller
from mq.transport import Conn, Event, Link, What

MakeLink = Callable[[], Link]
Content = tuple[bytes, bytes]
PATIENCE = 30.0


class Member:
    """A link that is pumped by hand, and everything that it reported.

    Attributes:
        reading: Whether `pump` receives what is READABLE.
        skews: How far what follows the lead of each body that was kept is from the
            last multiple of 64.
    """

    def __init__(self, make: MakeLink, poller: Poller) -> None:
        self.link = make()
        self.addresses = self.link.open(poller, [], None)
        self.events: list[Event] = []
        self.received: dict[Conn, list[Content]] = {}
        self.reading = True
        self.skews: list[int] = []
        self._bodies: dict[Conn, tuple[bytes, bytearray]] = {}
        self._number = 0

    def pump(self) -> None:
        """Take every event there is, once."""
        for event in self.link.poll():
            if event.what is not What.READABLE:
                self.events.append(event)
            elif self.reading:
                assert event.conn not in self.conns(What.LOST), "READABLE after LOST"
                self._receive(event.conn)

    def _receive(self, conn: Conn) -> None:
        while True:
            if conn not in self._bodies:
                message = conn.receive()
                if message is None:
                    return
                if message[1] and self._takes_body(conn, bytes(message[0]), message[1]):
                    continue
                self._bodies[conn] = bytes(message[0]), bytearray(message[1])
            head, body = self._bodies[conn]
            if body and not conn.receive_body(memoryview(body)):
                return
            del self._bodies[conn]
            self.received.setdefault(conn, []).append((head, bytes(body)))

    def _takes_body(self, conn: Conn, head: bytes, nbytes: int) -> bool:
        """Keep every other body where the link has it, if it can be kept there."""
        self._number += 1
        body = conn.take_body() if self._number % 2 else None
        if body is None:
            return False
        assert len(body) == nbytes
        self.skews.append((address(body) + conn.lead) % 64)
        assert conn.lead or not self.skews[-1]
        body[-1:] = bytes(body[-1:])  # it is writable
        self.received.setdefault(conn, []).append((head, bytes(body)))
        return True

    def conns(self, what: What) -> list[Conn]:
        """The connections of which this was reported."""
        return [event.conn for event in self.events if event.what is what]


class World:
    """Links in one thread that share a poller; a context that closes them.

    Attributes:
        nap: How many seconds `until` waits between pumps where nothing happens.
    """

    nap = 1.0

    def __init__(self, make: MakeLink, count: int = 2) -> None:
        self.poller = Poller()
        self.members = [Member(make, self.poller) for _ in range(count)]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *args: object) -> None:
        for member in self.members:
            member.link.close()
        self.poller.close()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Pump all members until the condition holds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for member in self.members:
                member.pump()
            if condition():
                return
            left = deadline - time.monotonic()
            assert left > 0, f"not within {PATIENCE} s: {what}"
            self.poller.wait(min(left, self.nap))

    def connect(self, dialler: int = 0, listener: int = 1) -> tuple[Conn, Conn]:
        """The two ends of a new connection: the dialling and the accepting one."""
        ours, theirs = self.members[dialler], self.members[listener]
        known = len(theirs.conns(What.ACCEPTED))
        conn = ours.link.dial(theirs.addresses[0])
        self.until(
            lambda: (
                conn in ours.conns(What.OPENED)
                and len(theirs.conns(What.ACCEPTED)) > known
            ),
            "OPENED here and ACCEPTED there",
        )
        return conn, theirs.conns(What.ACCEPTED)[-1]

    def send(
        self, conn: Conn, head: bytes | bytearray, body: bytes | bytearray = b""
    ) -> None:
        """Send a message, pumping while it is refused."""
        view = memoryview(body) if body else None
        self.until(lambda: conn.try_send(head, view), "room for a message")

    def arrive(self, received: list[Content], count: int) -> None:
        """Pump until so many messages were received."""
        self.until(lambda: len(received) >= count, f"{count} messages")

    def lost(self, member: int, conn: Conn) -> Event:
        """Pump until the connection is reported LOST, with a reason."""
        events = self.members[member].events
        found: list[Event] = []

        def is_lost() -> bool:
            found[:] = [e for e in events if e.what is What.LOST and e.conn is conn]
            return bool(found)

        self.until(is_lost, "LOST")
        assert all(e.reason for e in events if e.what is What.LOST)
        return found[0]
