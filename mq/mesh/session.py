"""A session with one peer: numbered frames, resent until received, over any connection.

A session outlives its connections. Every frame but RECEIVED and FENCED has a number;
the peer drops numbers it has seen, so a frame may be sent again at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mq.mesh import wire
from mq.mesh.backlog import Backlog
from mq.mesh.faults import Faults, LinkFault, neither
from mq.mesh.feed import Feed, in_words
from mq.mesh.frame import Frame
from mq.mesh.handshake import Greeting
from mq.mesh.large import Large, Take
from mq.mesh.outgoing import BATCH_BYTES, BATCH_MESSAGES, Outgoing, Topic
from mq.mesh.setbacks import Setback
from mq.mesh.wire import Malformed
from mq.stats import PeerStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from mq.devices import Piece
    from mq.mesh.config import Watch
    from mq.segments import Block
    from mq.transport import Conn

ANSWER_FRAMES: Final = 64
"""Frames after which RECEIVED is sent at once."""
ANSWER_SECONDS: Final = 0.001
"""Seconds after which RECEIVED, or a batch that waits for more, is sent."""
UNHURRIED_SECONDS: Final = 0.02
"""The same where the sender waits for no answer; a flush does not hasten that."""
_LAST_WORDS: Final = wire.UNHURRIED | {wire.RECLAIM, wire.RETURNED, wire.BYE}
"""What a peer that is gone need not have had."""
BYTES_PER_TURN: Final = 4 << 20
"""Sent, or read, on one connection before other threads may have the mesh."""


class Fate(NamedTuple):
    """Why a session was forgotten; see `Mesh.forget`."""

    reason: str
    proven: bool
    superseded: bool


class Session(Backlog):
    """What this member knows about, owes to and expects from one peer.

    Attributes:
        id: Chosen by the side that accepted the first connection.
        peer: The greeting of the peer.
        dialler: Whether this side dialled and therefore dials again after a break.
        dialled: The address that this side dialled, or "".
        conn: The connection, or None while it is broken.
        last_heard: When something of the peer arrived last, by the mesh's clock.
        received: Number of the last frame received in order.
        answer_at: When RECEIVED is due, or None.
        had_its_fill: Whether the last turn ended because of `BYTES_PER_TURN`.
        introduced: Whether the peer has told all its subscriptions.
        left: Whether it has said that it leaves, and so wants nothing more.
        partial: The chunk whose body is arriving: head, flags, frame number, view.
        inward, outward: What has gone wrong with receiving, and with sending.
        fault: How the link has failed in a call to send, on this connection, which is
            sent nothing more; `Setbacks.send` sees to it.
        rests_until: Until then it is not resumed, as that would go wrong again.
        peer_waits: Whether the peer's `publish` has waited for us for long.
        fate: Why the session was forgotten; None while it lives.
        sending: Whether a message is being handed to the engine right now.
        lent: By subscription and sequence, the memory of messages that the peer was
            told of and has not released.
    """

    def __init__(
        self,
        id: str,
        peer: Greeting,
        *,
        dialler: bool,
        timeout: float | None,
        now: float,
        take: Take,
        faults: Faults,
    ) -> None:
        super().__init__(take)
        self._faults = faults
        self.id = id
        self.peer = peer
        self.name = peer.name
        self.dialler = dialler
        self.timeout = timeout
        self.watch: Watch | None = None
        self.accepts = frozenset(peer.accepts)
        self.stats = PeerStats()
        self.conn: Conn | None = None
        self.wire = ""
        self.dialled = ""
        self.last_heard = now
        self.last_sent = now
        self.blocked = False
        self.received = 0
        self.unanswered = 0
        self.answer_at: float | None = None
        self.had_its_fill = False
        self.inward, self.outward = Setback(), Setback()
        self.fault: LinkFault | None = None
        self.rests_until = 0.0
        self.peer_waits = False
        self.fate: Fate | None = None
        self.sending = False
        self.introduced = self.left = False
        self.partial: tuple[wire.Chunk, int, int, memoryview] | None = None
        self.lent: dict[tuple[int, int], Block] = {}

    @property
    def alive(self) -> bool:
        """False once the session is forgotten."""
        return self.fate is None

    def can_send(self) -> bool:
        """Whether the connection is there and, as far as is known, has room."""
        return self.conn is not None and not self.blocked

    def lent_bytes(self) -> int:
        """Bytes of messages that the peer may read in this process's memory."""
        return sum(len(block.area) for block in self.lent.values())

    def is_borrower(self, topic: Topic) -> bool:
        """Whether the peer holds memory by a subscription to it that keeps all."""
        feeds = map(self.feeds.get, (subscription for subscription, _ in self.lent))
        return any(
            feed is not None and feed.topic is topic and feed.keep is None
            for feed in feeds
        )

    # -- connection ----------

    def attach(self, conn: Conn, received: int, now: float) -> None:
        """Go on over a new connection; the peer has received up to `received`.

        Raises:
            Malformed: The peer claims frames that were never sent.
        """
        self.forget_received(received, now)
        if self.devices not in (None, dict(conn.devices)):
            raise Malformed("resumed where tensors arrive on other devices")
        if not conn.lends:
            self.send_what_was_lent()
        self.repair()
        self.pace.begin()
        self.conn = conn
        self.lends = conn.lends
        self.lead = conn.lead
        self.whole_bytes = conn.whole_bytes
        self.most_unanswered = conn.most_unanswered
        self.devices = dict(conn.devices)
        self.wire = conn.address
        self.sent = 0
        self.blocked = False
        self.last_heard = now
        self.answer_at = now
        self.stats.connections += 1

    def detach(self) -> Conn | None:
        """The connection is broken; the session waits for the next."""
        conn = self.conn
        self.let_go()  # it may go on sending while it closes
        self.partial = None
        self.fault = None
        self.blocked = False
        self.conn = None
        return conn

    def let_go(self) -> None:
        """Have the link read no more of the bodies that it was given."""
        if self.conn is not None:
            try:
                self._faults.asked(self.conn.let_go)
            except LinkFault as error:
                self.fault = error

    def drop_frames(self) -> None:
        """Whoever still knows the session need not keep what was never received."""
        self.frames.clear()
        self.sent = 0

    def owes_bye(self) -> bool:
        """Whether the peer has not confirmed the BYE of this member, which leaves."""
        return any(frame.kind == wire.BYE for frame in self.frames)

    def is_done(self) -> bool:
        """Whether the peer need have nothing more of this member, which leaves."""
        return not self.owes_bye() or all(f.kind in _LAST_WORDS for f in self.frames)

    def describe_undelivered(self) -> str:
        """What never reached a peer that is given up, as the end of a sentence."""
        feeds = self.feeds.values()
        lacking = [(feed.lacks(feed.mark()), feed.topic.name) for feed in feeds]
        counts = [(n, name) for n, name in lacking if n]
        return f"; messages undelivered: {in_words(counts)}" if counts else ""

    # -- sending ----------

    def send_alone(self, feed: Feed, message: Outgoing, now: float) -> bool:
        """Send the small message just committed, where nothing else is to be sent.

        What `offer` and `pump` would do, in a fraction of the steps: the time of a
        message that somebody waits for.

        Returns:
            False: nothing was done, for there is more to do.
        """
        conn, data = self.conn, message.data
        if (
            conn is None
            or self.blocked
            or self.busy
            or self.batches_unanswered
            or self.sent != len(self.frames)
            or feed.keep is not None
            or feed.late is not None
            or message.takes_turns
        ):
            return False
        assert isinstance(data, bytes)
        sequence = message.sequence
        head = wire.ALONE.pack(
            feed.subscription, 1, sequence, message.published_at, len(data)
        )
        completes = [(feed, sequence)]
        frame = Frame(wire.DATA, self.number + 1, [head, data], 0, completes)
        self._append(frame)
        feed.next = sequence + 1
        self.batches_unanswered += 1
        if self._transmit(conn, frame, now):
            self.sent += 1
        else:
            self.blocked = True
        return True

    def pump(self, now: float, flush: bool = False) -> bool:
        """Send what the connection takes; whether that was anything.

        A batch of small messages waits for more while an earlier one is unanswered,
        until it is full or `batch_at`; `flush` sends it now.
        """
        conn = self.conn
        self.had_its_fill = False
        if conn is None or self.blocked:
            return False
        before = self.stats.sent_frames
        enough = self.stats.sent_bytes + BYTES_PER_TURN
        frames = self.frames
        while True:
            if self.sent == len(frames):
                if self.busy and not (flush or self._batch_due(now)):
                    break
                if not (self.busy and self._frame_next()):
                    self.batch_at = None
                    break
            if not self._transmit(conn, frames[self.sent], now):
                self.blocked = True
                return self.stats.sent_frames != before
            self.sent += 1
            if self.stats.sent_bytes >= enough:
                self.had_its_fill = True
                self.batch_at = now
                return True
        soon = now + ANSWER_SECONDS if flush else now
        if self.answer_at is not None and soon >= self.answer_at:
            self.answer(now)
        return self.stats.sent_frames != before

    def _batch_due(self, now: float) -> bool:
        if not self.batches_unanswered:
            return True
        if self.batch_at is not None and now >= self.batch_at:
            return True
        messages = nbytes = 0
        for feed in self.busy:
            head = feed.head()
            if head is not None and head.takes_turns:
                if self.is_ahead():
                    continue
                return True
            messages += feed.queued()
            nbytes += feed.queued_bytes()
            if messages >= BATCH_MESSAGES or nbytes >= BATCH_BYTES:
                return True
        if self.batch_at is None and messages:
            self.batch_at = now + ANSWER_SECONDS
        return False

    def _transmit(self, conn: Conn, frame: Frame, now: float) -> bool:
        head = wire.HEADER.pack(
            frame.kind, frame.flags, 0, frame.number, self.received
        ) + b"".join(frame.parts)
        send: Callable[..., bool] = conn.try_send
        body: memoryview | Piece | None = None
        if frame.large is not None:
            if frame.kind != wire.LENT:
                send, body = self._body(conn, frame, frame.large)
            elif not self._lend(conn, frame, frame.large):
                return False
        if not self._hand_over(send, head, body, now):
            return False
        if frame.sent_before:
            self.stats.resent_frames += 1
        elif frame.body_nbytes or (frame.kind != wire.DATA and frame.large is None):
            self.pace.left(frame.number, self.under_way, now)
        frame.sent_before = True
        return True

    def _body(
        self, conn: Conn, frame: Frame, large: Large
    ) -> tuple[Callable[..., bool], memoryview | Piece | None]:
        """What of a large message goes with the head, and by which call."""
        chunk = large.chunks[frame.chunk]
        assert chunk is not None  # kept until this frame is received
        if conn.keeps_body:
            chunk.own(self._take)
        if chunk.piece is not None:
            return conn.try_send_piece, chunk.piece
        body = chunk.view
        if frame.part is not None:
            assert body is not None
            begin, end = frame.part
            body = body[chunk.lead + begin : chunk.lead + end]
        elif chunk.lead != conn.lead and body is not None:
            body = body[chunk.lead :]  # cut for another connection's link
        return conn.try_send, body

    def _lend(self, conn: Conn, frame: Frame, large: Large) -> bool:
        """See that the peer has mapped what a message lies in when it hears of it."""
        assert large.block is not None
        assert frame.completes is not None
        feed, sequence = frame.completes[0]
        self.lent[feed.subscription, sequence] = large.block
        self.sending = True
        try:
            accepted = self._faults.is_true(conn.lend, large.block.segment)
        except LinkFault as error:
            self.fault = error
            accepted = False
        self.sending = False
        return accepted

    def _hand_over(
        self,
        send: Callable[..., bool],
        head: bytes,
        body: memoryview | Piece | None,
        now: float,
    ) -> bool:
        """Give a message to the link by one of its calls; whether it takes it."""
        self.sending = True
        try:
            accepted = send(head) if body is None else send(head, body)
            if accepted is None:
                raise neither()
        except Exception as error:
            self.fault = self._faults.fault(send, error)
            accepted = False
        self.sending = False
        if not accepted:
            return False
        self.last_sent = now
        self.answer_at = None
        self.unanswered = 0
        stats = self.stats
        stats.sent_frames += 1
        stats.sent_bytes += len(head) + (0 if body is None else len(body))
        return True

    def answer(self, now: float) -> None:
        """Send RECEIVED on its own; it also shows that this member lives."""
        if self.conn is None or self.blocked:
            return
        head = wire.HEADER.pack(wire.RECEIVED, 0, 0, 0, self.received)
        if not self._hand_over(self.conn.try_send, head, None, now):
            self.blocked = True
