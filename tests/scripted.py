"""A network in memory under total control of a test, and members that use it.

Nothing moves by itself: `ScriptedNet` keeps every message in flight until the test
delivers it, loses it, or breaks its connection, and time is a number.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from mq.borrowing import Mapping
from mq.devices import Piece
from mq.frames import ALIGNMENT
from mq.lending import Lender
from mq.mappings import address
from mq.mesh import wire
from mq.mesh.poller import Poller
from mq.segments import Segment
from mq.transport import PIECE_BYTES, Capabilities, Conn, Event, Link, What

Body = bytes | Piece
Parcel = tuple[bytes, Body]
"""Head and body of a message."""


class ScriptedConn(Conn):
    """One end of a connection.

    Attributes:
        number: The same at both ends.
        other: The opposite end; None for a dial that never connects.
        flight: What this end has sent and the test has not delivered yet.
        arrived: What was delivered to this end and not yet received.
        broken: Nothing sent from here ever arrives.
        lost_due: LOST is to be reported here once `other.flight` is delivered.
        lost_held: LOST is kept back until the test says otherwise.
        shares: Whether it can lend memory, where both links have some.
        mappings: Segments that the opposite end has lent.
    """

    descriptors_taken: ClassVar[int] = 0

    def __init__(self, link: ScriptedLink, address: str) -> None:
        self.link = link
        self.address = address
        self.whole_bytes = link.whole_bytes
        self.most_unanswered = link.most_unanswered
        self.number = 0
        self.other: ScriptedConn | None = None
        self.flight: deque[Parcel] = deque()
        self.arrived: deque[Parcel] = deque()
        self.broken = self.closed = False
        self.lost_due = self.lost_held = False
        self.shares = link.net.shares
        self.mappings: dict[int, Mapping] = {}
        self._refused = False
        self._body: Body | None = None
        self._pieces = 0

    @property
    def devices(self) -> dict[str, str]:  # type: ignore[override]
        carried = self.link.devices & (self.other.link.devices if self.other else set())
        return {device: device for device in carried}

    @property
    def holds_piece(self) -> bool:  # type: ignore[override]
        return isinstance(self._body, Piece)

    @property
    def lends(self) -> bool:  # type: ignore[override]
        lenders = (self.link.lender, self.other and self.other.link.lender)
        return self.shares and None not in lenders

    def lend(self, segment: Segment) -> bool:
        assert self.other is not None
        if segment.id not in self.other.mappings:
            self.other.mappings[segment.id] = Mapping(segment.fd, segment.nbytes)
        return True

    def borrow(
        self,
        segment: int,
        offset: int,
        nbytes: int,
        take: Callable[[int], memoryview],
    ) -> memoryview:
        if segment not in self.mappings:
            raise ValueError(f"segment {segment} was never lent")
        return self.mappings[segment].borrow(offset, nbytes, take)

    def _is_full(self) -> bool:
        waiting = len(self.other.arrived) if self.other is not None else 0
        return len(self.flight) + waiting >= self.link.capacity

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        return self._send(bytes(head), b"" if body is None else bytes(body))

    def try_send_piece(self, head: bytes, piece: Piece) -> bool:
        assert self.devices, "a tensor on a connection that carries none"
        assert len(piece) <= self.link.piece_bytes
        return self._send(head, piece)

    def _send(self, head: bytes, body: Body) -> bool:
        assert not self.closed, "sent on a connection that was closed"
        if self.broken:
            return True
        if self._is_full():
            self._refused = True
            return False
        self.flight.append((head, body))
        return True

    def report_writable(self) -> None:
        """Report WRITABLE, if something was refused that fits now."""
        if self._refused and not self._is_full() and not self.closed:
            self._refused = False
            self.link.report(What.WRITABLE, self)

    def receive(self) -> tuple[bytes, int] | None:
        assert self._body is None, "received past a body"
        if self.closed or not self.arrived:
            return None
        head, body = self.arrived.popleft()
        if body:
            self._body = body
            self._pieces = self.link.pieces
        if self.other is not None:
            self.other.report_writable()
        return head, len(body)

    def receive_body(self, into: memoryview) -> bool:
        body = self._body
        assert body is not None, "asked for a body that was not announced"
        assert isinstance(body, bytes), "asked for a tensor's bytes"
        assert len(into) == len(body), "body and its place differ in size"
        self._pieces -= 1
        if self._pieces > 0:
            into[:1] = body[:1]
            return False
        into[:] = body
        self._body = None
        return True

    def take_body(self) -> memoryview | None:
        body = self._body
        assert isinstance(body, bytes), "asked for a tensor's bytes"
        if not self.link.whole_bytes:
            return None
        self._body = None
        area = memoryview(bytearray(len(body) + ALIGNMENT))
        start = (self.link.skew - address(area) - self.lead) % ALIGNMENT
        area[start : start + len(body)] = body
        return area[start : start + len(body)]

    def take_piece(self) -> Piece:
        body, self._body = self._body, None
        assert isinstance(body, Piece), "asked for a tensor that is none"
        return Piece(body.tensor.clone())

    def discard_body(self) -> None:
        assert self._body is not None, "discarded a body that was not announced"
        self._body = None

    def is_readable(self) -> bool:
        """Whether `receive` or `receive_body` has something."""
        return not self.closed and (bool(self.arrived) or self._body is not None)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.arrived.clear()
        self.link.conns.pop(self, None)
        if self.other is not None and not self.broken:
            self.broken = self.other.broken = True
            self.other.flight.clear()
            self.other.lost_due = True
        if self.link.abrupt:
            self.flight.clear()


class ScriptedLink(Link):
    """One member's access to the net.

    Attributes:
        capacity: Messages that a connection takes before `try_send` refuses.
        pieces: In how many pieces each body arrives.
        abrupt: Whether `Conn.close` throws away what is still in flight.
        whole_bytes: Of its connections; with any, bodies can be kept where they are.
        most_unanswered: Of its connections.
        skew: Where bodies are that are kept, beyond the alignment of arrays in them.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reach="process")

    def __init__(
        self,
        net: ScriptedNet,
        address: str,
        *,
        chunk_bytes: int,
        lender: Lender | None = None,
        devices: frozenset[str] = frozenset(),
        piece_bytes: int = PIECE_BYTES,
        whole_bytes: int = 0,
        most_unanswered: int | None = None,
    ) -> None:
        self.net = net
        self.whole_bytes = whole_bytes
        self.most_unanswered = most_unanswered
        self.devices = devices
        self.piece_bytes = piece_bytes
        self.lender = lender
        self.address = address
        self.chunk_bytes = chunk_bytes
        self.capacity = 1000
        self.pieces = 1
        self.skew = 0
        self.abrupt = False
        self.conns: dict[ScriptedConn, None] = {}
        self._events: deque[Event] = deque()

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        self.net.links[self.address] = self
        return [self.address]

    def dial(self, address: str) -> Conn:
        return self.net.dial(self, address)

    def rank(self, addresses: Sequence[str], same_host: bool) -> list[str]:
        return [a for a in addresses if a.startswith("script://")]

    def report(
        self, what: What, conn: ScriptedConn, reason: str = "", malformed: bool = False
    ) -> None:
        """Have the next `poll` report this."""
        self._events.append(Event(what, conn, reason, malformed=malformed))

    def has_news(self) -> bool:
        """Whether `poll` would report anything."""
        if self._events:
            return True
        for conn in self.conns:  # asked all the time
            if (conn.arrived or conn._body is not None) and not conn.closed:
                return True
        return False

    def poll(self) -> Iterator[Event]:
        losses = [e for e in self._events if e.what is What.LOST]
        events = [e for e in self._events if e.what is not What.LOST]
        self._events.clear()
        for event in events:
            if not event.conn.closed:  # type: ignore[attr-defined]
                yield event
        for conn in list(self.conns):
            if conn.is_readable():
                yield Event(What.READABLE, conn)
        for event in losses:
            if not event.conn.closed:  # type: ignore[attr-defined]
                yield event

    def is_routable(self, address: str) -> bool:
        return False

    def close(self, linger: float = 0.0) -> None:
        self.net.links.pop(self.address, None)
        for conn in list(self.conns):
            conn.close()

    def abandon(self) -> None:
        raise AssertionError("nobody forks here")


class ScriptedNet:
    """All connections.

    Args:
        leads: Of the connections both of whose ends can keep bodies, in turn.

    Attributes:
        links: Who listens, by address.
        separated: Pairs of addresses between which nothing moves and dials hang.
        on_dial: Asked for each dial: "open", "hang", "fail" or "error".
        shares: Whether memory can be lent over connections dialled from now on.
        tamper: Called with each message before it arrives; returns what arrives.
    """

    def __init__(self, leads: Sequence[int] = (0,)) -> None:
        self._leads = itertools.cycle(leads)
        self.shares = True
        self.links: dict[str, ScriptedLink] = {}
        self.conns: list[ScriptedConn] = []
        self.separated: set[frozenset[str]] = set()
        self.on_dial: Callable[[str, str], str] = lambda source, target: "open"
        self.tamper: Callable[[ScriptedConn, Parcel], Parcel] = lambda conn, parcel: (
            parcel
        )
        self.watcher: Callable[[ScriptedConn, Parcel], None] = lambda conn, parcel: None
        self._serial = itertools.count(1)

    def dial(self, link: ScriptedLink, address: str) -> ScriptedConn:
        """Begin to connect, as the script says."""
        manner = self.on_dial(link.address, address)
        if manner == "error":
            raise OSError("the script refuses to dial")
        near = ScriptedConn(link, address)
        link.conns[near] = None
        target = self.links.get(address)
        if manner == "fail" or target is None:
            near.broken = True
            link.report(What.LOST, near, "connection refused")
        elif manner == "open" and not self.is_separated(link.address, address):
            near.number = next(self._serial)
            far = ScriptedConn(target, f"{link.address}?{near.number}")
            far.number = near.number
            target.conns[far] = None
            near.other, far.other = far, near
            if link.whole_bytes and target.whole_bytes:
                near.lead = far.lead = next(self._leads)
            self.conns += [near, far]
            link.report(What.OPENED, near)
            target.report(What.ACCEPTED, far)
        return near

    def is_separated(self, one: str, other: str) -> bool:
        """Whether nothing moves between two addresses."""
        return frozenset((one, other)) in self.separated

    def between(self, one: ScriptedLink, other: ScriptedLink) -> list[ScriptedConn]:
        """Ends at `one` of the connections with `other` that still work."""
        return [
            conn
            for conn in self.conns
            if conn.link is one
            and conn.other is not None
            and conn.other.link is other
            and not conn.broken
        ]

    # -- what may happen next ----------

    def steps(self) -> list[ScriptedConn]:
        """Ends that have something to deliver, or whose other end waits for LOST."""
        left: list[ScriptedConn] = []
        ready: list[ScriptedConn] = []
        for conn in self.conns:
            other = conn.other
            assert other is not None
            if not conn.flight:
                if conn.broken and (other.closed or not other.lost_due):
                    continue  # it is over
                if not other.lost_due:  # most of all
                    left.append(conn)
                    continue
            left.append(conn)
            if self._can_step(conn):
                ready.append(conn)
        self.conns = left
        return ready

    def _can_step(self, conn: ScriptedConn) -> bool:
        other = conn.other
        assert other is not None
        if not conn.flight and (not other.lost_due or other.lost_held):
            return False
        return not self.is_separated(conn.link.address, other.link.address)

    def deliver(self, conn: ScriptedConn) -> None:
        """The next message that `conn` sent arrives, or the news that it is broken."""
        other = conn.other
        assert other is not None
        if not conn.flight:
            other.lost_due = False
            if not other.closed:
                other.link.report(What.LOST, other, "the script broke it")
            return
        parcel = self.tamper(conn, conn.flight.popleft())
        if not other.closed:
            self.watcher(other, parcel)
            other.arrived.append(parcel)
        conn.report_writable()

    def deliver_all(self) -> bool:
        """Deliver everything; whether there was anything."""
        moved = False
        while steps := self.steps():
            moved = True
            for conn in steps:
                if self._can_step(conn):
                    self.deliver(conn)
        return moved

    def cut(
        self,
        conn: ScriptedConn,
        lose: tuple[int, int] = (0, 0),
        hold: tuple[bool, bool] = (False, False),
    ) -> None:
        """Break a connection.

        Args:
            lose: How many of the last undelivered messages, sent by this end and by
                the other one, never arrive.
            hold: Whether LOST is kept back from this end and from the other one.
        """
        other = conn.other
        assert other is not None
        for end, count, held in ((conn, lose[0], hold[0]), (other, lose[1], hold[1])):
            for _ in range(min(count, len(end.flight))):
                end.flight.pop()
            end.broken = True
            end.lost_due = True
            end.lost_held = held

    def hold_back(self) -> list[ScriptedConn]:
        """Ends from which LOST is kept back."""
        return [c for c in self.conns if c.lost_due and c.lost_held and not c.closed]


def numbered(parcel: Parcel) -> int:
    """The number of a session's frame; 0 for any other message."""
    head = parcel[0]
    if len(head) < wire.HEADER_BYTES or not wire.DATA <= head[0] <= wire.PIECE:
        return 0
    return int(wire.HEADER.unpack_from(head)[3])
