"""Handles the frames that arrive in a session.

A frame counts as received only when it has been handled in full: what an exception
left undone comes again on the next connection. So handling a frame twice must be as
good as once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mq.mesh import wire
from mq.mesh.faults import HEADS, LinkFault, Message, no_message
from mq.mesh.session import (
    ANSWER_FRAMES,
    ANSWER_SECONDS,
    BYTES_PER_TURN,
    UNHURRIED_SECONDS,
    Session,
)
from mq.mesh.wire import Malformed

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.transport import Conn

FRAMES_PER_TURN: Final = 64
"""Frames read from one connection before the others have their turn."""
LONG_CONTROL_BYTES: Final = 1024
"""A control frame with more is the last of a turn: thousands of entries take longer to
carry out than a message of their size, of which a turn has many."""
_LARGE_KINDS: Final = (wire.CHUNK, wire.PIECE)
_CONTROL_KINDS: Final = frozenset(
    {
        wire.SUBSCRIBE,
        wire.SUBSCRIBED,
        wire.UNSUBSCRIBE,
        wire.CREDIT,
        wire.RECLAIM,
        wire.RETURNED,
        wire.BYE,
        wire.ACCEPTS,
        wire.WAITING,
        wire.RELEASE,
    }
)


class Arrived(NamedTuple):
    """The next frame of a session, of which a part of a large message has come.

    Attributes:
        nbody: How many bytes its body has as it comes from the connection.
    """

    session: Session
    conn: Conn
    flags: int
    number: int
    nbody: int
    now: float


class Reader:
    """Takes frames from connections and carries them out.

    Attributes:
        stopped_early: Whether a connection had its turn and may have more.
        had_its_fill: Whether that was because of `BYTES_PER_TURN`.
        until_message: Whether to stop at the first message for `recv`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._publisher = mesh.publisher
        self._subscriber = mesh.subscriber
        self._arrive_alone = mesh.subscriber.arrive_alone
        self._faults = mesh.faults
        self._setbacks = mesh.setbacks
        self.stopped_early = False
        self.until_message = False
        self.had_its_fill = False
        self._turn_ends = False

    def read(self, session: Session, conn: Conn, first: Message | None = None) -> None:
        """Handle what has arrived on a session's connection.

        Args:
            first: A message that was already taken from the connection.
        """
        now = self._mesh.clock()
        if session.partial is not None:
            session.last_heard = now  # a piece of a body; the whole may take long
        stats = session.stats
        enough = stats.received_bytes + BYTES_PER_TURN
        self._turn_ends = False
        try:
            for _ in range(FRAMES_PER_TURN):
                if session.partial is not None:
                    if not self._finish_body(session, conn, now):
                        return
                    continue
                if stats.received_bytes >= enough:
                    self.had_its_fill = True
                    break
                try:  # as `Faults.received`, with one call less for each frame
                    message = first or conn.receive()
                    if message is None:
                        return
                    head, nbody = message
                    if (
                        not isinstance(head, HEADS)
                        or not isinstance(nbody, int)
                        or nbody < 0
                    ):
                        raise no_message(message)
                except Exception as error:
                    raise self._faults.fault(conn.receive, error) from error
                first = None
                session.last_heard = now
                if nbody or not self._arrive_alone(session, head, now):
                    self._frame(session, conn, head, nbody, now)
                else:
                    self._mesh.changed += 1
                if session.conn is not conn:
                    return
                if self._turn_ends or (
                    self.until_message and self._subscriber.inbox.fifo
                ):
                    break
        except Malformed as error:
            self._setbacks.malformed(session, error)
            return
        except MemoryError as error:
            self._setbacks.starved(session, error)
            return
        except LinkFault as error:
            self._setbacks.unread(session, error)
            return
        self.stopped_early = True

    def drain(self, session: Session) -> None:
        """Take what a dead peer's connection still holds: it was sent before."""
        while session.alive and session.conn is not None:
            before = session.stats.received_frames
            self.read(session, session.conn)
            if session.stats.received_frames == before:
                return

    def _frame(
        self,
        session: Session,
        conn: Conn,
        head: bytes | memoryview,
        nbody: int,
        now: float,
    ) -> None:
        if len(head) < wire.HEADER_BYTES:
            raise Malformed("frame shorter than its header")
        kind, flags, _, number, received = wire.HEADER.unpack_from(head)
        stats = session.stats
        stats.received_frames += 1
        stats.received_bytes += len(head) + nbody
        if session.frames and session.forget_received(received, now):
            self._mesh.changed += 1
        if not number:
            self._unnumbered(kind, head, nbody)
        elif number != session.received + 1:
            self._out_of_turn(session, conn, number, nbody, now)
        elif nbody or kind in _LARGE_KINDS:
            frame = Arrived(session, conn, flags, number, nbody, now)
            self._large(kind, memoryview(head), frame)
        elif kind == wire.BYE:
            self._bye(session, number, memoryview(head)[wire.HEADER_BYTES :], now)
        else:
            if kind == wire.DATA:
                self._subscriber.data(session, head)
                self._mesh.changed += 1
            elif kind == wire.LENT:
                self._lent(session, conn, flags, memoryview(head))
            else:
                content = memoryview(head)[wire.HEADER_BYTES :]
                self._control(session, kind, flags, content)
            seconds = UNHURRIED_SECONDS if kind in wire.UNHURRIED else ANSWER_SECONDS
            self._received(session, number, flags, now, seconds)

    def _out_of_turn(
        self, session: Session, conn: Conn, number: int, nbody: int, now: float
    ) -> None:
        if number > session.received:
            raise Malformed(f"frame {number} after {session.received}")
        session.stats.duplicate_frames += 1
        if nbody:
            self._faults.asked(conn.discard_body)
        session.answer_at = now

    def _received(
        self,
        session: Session,
        number: int,
        flags: int,
        now: float,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        session.received = number
        session.unanswered += 1
        at_once = flags & wire.FLAG_ANSWER or session.unanswered >= ANSWER_FRAMES
        due = now if at_once else now + seconds
        if session.answer_at is None or due < session.answer_at:
            session.answer_at = due

    def _unnumbered(self, kind: int, head: bytes | memoryview, nbody: int) -> None:
        if nbody:
            raise Malformed(f"frame {kind} with a body")
        if kind == wire.FENCED:
            content = memoryview(head)[wire.HEADER_BYTES :]
            self._mesh.replace(wire.decode(kind, content))
        elif kind != wire.RECEIVED:
            raise Malformed(f"frame {kind} without a number")

    def _lent(self, session: Session, conn: Conn, flags: int, head: memoryview) -> None:
        filling = bool(flags & wire.FLAG_FILLING)
        borrow = self._faults.borrow(conn)
        self._subscriber.lent(session, wire.parse_lent(head), filling, borrow)
        self._mesh.changed += 1

    # -- large messages ----------

    def _large(self, kind: int, head: memoryview, frame: Arrived) -> None:
        """A part of a large message; nothing else may have a body."""
        if kind == wire.PIECE and frame.flags & wire.FLAG_TENSOR:
            self._tensor(head, frame)
        elif frame.nbody and frame.conn.holds_piece:
            raise Malformed(f"frame {kind} with a tensor")
        elif kind == wire.CHUNK:
            self._chunk(wire.parse_chunk(head), (), frame)
        elif kind == wire.PIECE:
            place = wire.parse_piece(head)
            self._chunk(place.chunk, place.sizes, frame)
        else:
            raise Malformed(f"frame {kind} with a body")

    def _chunk(self, chunk: wire.Chunk, sizes: tuple[int, ...], frame: Arrived) -> None:
        session, conn, flags, number, nbody, now = frame
        if not nbody and not chunk.part:
            raise Malformed("chunk of nothing")
        body = None
        is_all = chunk.total and not (chunk.offset or chunk.part)
        if is_all and nbody == chunk.total + conn.lead:
            body = self._faults.asked(conn.take_body)
            if body is not None:
                nbody, body = chunk.total, body[conn.lead :]
        place = self._subscriber.place(session, chunk, nbody, sizes, body)
        if place is None:
            if nbody and body is None:
                self._faults.asked(conn.discard_body)
            self._received(session, number, flags, now)
        elif nbody and body is None:
            session.partial = (chunk, flags, number, place)
            self._finish_body(session, conn, now)
        else:
            self._placed(chunk, nbody, frame)

    def _tensor(self, head: memoryview, frame: Arrived) -> None:
        """A frame whose body is on a device: no memory is taken for it but there."""
        session, conn, flags, number, nbody, now = frame
        if not nbody or not conn.holds_piece:
            raise Malformed("a piece without its tensor")
        place = wire.parse_piece(head)
        chunk = place.chunk
        if self._subscriber.place(session, chunk, 0, place.sizes) is None:
            self._faults.asked(conn.discard_body)
            self._received(session, number, flags, now)
            return
        self._subscriber.land(session, place, self._faults.asked(conn.take_piece))
        self._placed(chunk, 0, frame)

    def _finish_body(self, session: Session, conn: Conn, now: float) -> bool:
        assert session.partial is not None
        chunk, flags, number, place = session.partial
        if not self._faults.is_true(conn.receive_body, place):
            return False
        session.partial = None
        nbody = len(place)
        self._placed(chunk, nbody, Arrived(session, conn, flags, number, nbody, now))
        return True

    def _placed(self, chunk: wire.Chunk, nbody: int, frame: Arrived) -> None:
        """All of a chunk is in its place, with a body of so many bytes there."""
        session, _, flags, number, _, now = frame
        last = bool(flags & wire.FLAG_LAST)
        self._subscriber.placed(session, chunk, nbody, last)
        self._received(session, number, flags, now)
        if last:
            self._mesh.changed += 1

    # -- control ----------

    def _control(
        self, session: Session, kind: int, flags: int, content: memoryview
    ) -> None:
        if kind not in _CONTROL_KINDS:
            raise Malformed(f"unknown frame {kind}")
        value = wire.decode(kind, content)
        self._turn_ends = len(content) > LONG_CONTROL_BYTES
        self._mesh.changed += 1
        if kind in (wire.SUBSCRIBE, wire.RECLAIM):
            session.check_answers()
        if kind == wire.SUBSCRIBE:
            self._publisher.subscribe(session, value)
            if flags & wire.FLAG_LAST:
                session.introduced = True
        elif kind == wire.SUBSCRIBED:
            self._subscriber.subscribed(session, value)
        elif kind == wire.UNSUBSCRIBE:
            self._publisher.unsubscribe(session, value)
        elif kind == wire.CREDIT:
            self._publisher.credit(session, value)
        elif kind == wire.RECLAIM:
            self._publisher.reclaim(session, value)
        elif kind == wire.RETURNED:
            self._subscriber.returned(session, value)
        elif kind == wire.RELEASE:
            self._publisher.release(session, value)
        elif kind == wire.ACCEPTS:
            session.accepts = frozenset(value)
        elif kind == wire.WAITING:
            session.peer_waits = value
            self._mesh.hurry()

    def _bye(
        self, session: Session, number: int, content: memoryview, now: float
    ) -> None:
        reason = wire.decode(wire.BYE, content)
        session.received = number
        session.answer(now)
        session.left = True
        self._mesh.dismiss(session, reason or "left")
