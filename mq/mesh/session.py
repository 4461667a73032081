"""A session with one peer: numbered frames, resent until received, over any connection.

A session outlives its connections. Every frame but RECEIVED and FENCED has a number;
the peer drops numbers it has seen, so a frame may be sent again at any time. What must
not be lost is first appended where it goes to and only then removed where it came
from: an exception in between makes a repetition, which the peer drops by its number or
by the message's sequence, and never a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mq.mesh import wire
from mq.mesh.frame import Frame
from mq.mesh.handshake import Greeting
from mq.mesh.large import Large, Take
from mq.mesh.outgoing import BATCH_BYTES, BATCH_MESSAGES, Feed, Outgoing, Topic
from mq.mesh.wire import Malformed
from mq.stats import PeerStats

if TYPE_CHECKING:
    from mq.devices import Piece
    from mq.lending import Block
    from mq.mesh.config import Watch
    from mq.transport import Conn

ANSWER_FRAMES: Final = 64
"""Frames after which RECEIVED is sent at once."""
ANSWER_SECONDS: Final = 0.001
"""Seconds after which RECEIVED, or a batch that waits for more, is sent."""
CHUNKS_PER_ANSWER: Final = 4
BYTES_PER_TURN: Final = 4 << 20
"""Sent, or read, on one connection before other threads may have the mesh."""


class Fate(NamedTuple):
    """Why a session was forgotten; see `Mesh.forget`."""

    reason: str
    proven: bool
    superseded: bool


class Session:
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
        batch_at: When a batch that waits for more messages is due, or what is left of a
            turn that was too long; or None.
        had_its_fill: Whether the last turn ended because of `BYTES_PER_TURN`.
        introduced: Whether the peer has told all its subscriptions.
        partial: The chunk whose body is arriving: head, flags, frame number, view.
        peer_waits: Whether the peer's `publish` has waited for us for long.
        fate: Why the session was forgotten; None while it lives.
        sending: Whether a message is being handed to the engine right now.
        lends: Whether large messages are lent to the peer in place of sent.
        devices: Whose tensors travel to the peer, and where they arrive there; None
            before the first connection.
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
    ) -> None:
        self.id = id
        self.peer = peer
        self.name = peer.name
        self.dialler = dialler
        self.timeout = timeout
        self.watch: Watch | None = None
        self._take = take
        self.accepts = frozenset(peer.accepts)
        self.stats = PeerStats()
        self.conn: Conn | None = None
        self.wire = ""
        self.dialled = ""
        self.last_heard = now
        self.last_sent = now
        self.feeds: dict[int, Feed] = {}
        self.busy: deque[Feed] = deque()
        self.frames: deque[Frame] = deque()
        self.sent = 0
        self.blocked = False
        self.number = 0
        self.received = 0
        self.unanswered = 0
        self.batches_unanswered = 0
        self.answer_at: float | None = None
        self.batch_at: float | None = None
        self.had_its_fill = False
        self.malformed_at = (-1, 0)
        self.peer_waits = False
        self.fate: Fate | None = None
        self.sending = False
        self.introduced = False
        self.partial: tuple[wire.Chunk, int, int, memoryview] | None = None
        self.lends = False
        self.devices: dict[str, str] | None = None
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
        self.forget_received(received)
        if not conn.lends and any(f.kind == wire.LENT for f in self.frames):
            raise Malformed("resumed where the memory already lent cannot be read")
        if self.devices not in (None, dict(conn.devices)):
            raise Malformed("resumed where tensors arrive on other devices")
        self.repair()
        self.conn = conn
        self.lends = conn.lends
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
        if conn is not None:
            conn.let_go()  # it may go on sending while it closes
        self.partial = None
        self.blocked = False
        self.conn = None
        return conn

    # -- sending ----------

    def control(self, kind: int, content: object) -> None:
        """Queue a numbered control frame ahead of all messages not yet framed."""
        self._append(self.control_frame(kind, content))

    def control_frame(self, kind: int, content: object) -> Frame:
        """The next frame, to be appended to `frames` by the caller."""
        return Frame(kind, self.number + 1, [wire.encode(content)])

    def introduce(self, parts: Iterable[Sequence[wire.Subscribe]]) -> None:
        """Queue the session's first frames: all subscriptions, the last one marked."""
        frames = [
            Frame(wire.SUBSCRIBE, self.number + n, [wire.encode(part)])
            for n, part in enumerate(parts, 1)
        ]
        frames[-1].flags = wire.FLAG_LAST
        for frame in frames:
            self._append(frame)

    def _append(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.number = frame.number

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
            or type(data) is not bytes
        ):
            return False
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

    def offer(self, feed: Feed) -> None:
        """A message was committed to `feed`."""
        if feed not in self.busy:
            self.busy.append(feed)

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
        if self.answer_at is not None and (flush or now >= self.answer_at):
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
            if head is not None and type(head.data) is Large:
                return True
            messages += feed.queued()
            nbytes += feed.queued_bytes()
        if messages >= BATCH_MESSAGES or nbytes >= BATCH_BYTES:
            return True
        if self.batch_at is None:
            self.batch_at = now + ANSWER_SECONDS
        return False

    def _transmit(self, conn: Conn, frame: Frame, now: float) -> bool:
        head = wire.HEADER.pack(
            frame.kind, frame.flags, 0, frame.number, self.received
        ) + b"".join(frame.parts)
        body: memoryview | Piece | None = None
        self.sending = True
        if frame.large is None:
            accepted = conn.try_send(head)
        elif frame.kind == wire.LENT:
            assert frame.large.block is not None
            assert frame.completes is not None
            feed, sequence = frame.completes[0]
            self.lent[feed.subscription, sequence] = frame.large.block
            segment = frame.large.block.segment
            accepted = conn.lend(segment) and conn.try_send(head)
        else:
            chunk = frame.large.chunks[frame.chunk]
            assert chunk is not None  # kept until this frame is received
            if conn.keeps_body:
                chunk.own(self._take)
            if chunk.piece is None:
                body = chunk.view
                accepted = conn.try_send(head, body)
            else:
                body = chunk.piece
                accepted = conn.try_send_piece(head, body)
        self.sending = False
        if not accepted:
            return False
        self._sent_something(now)
        stats = self.stats
        stats.sent_frames += 1
        stats.sent_bytes += len(head) + (0 if body is None else len(body))
        if frame.sent_before:
            stats.resent_frames += 1
        frame.sent_before = True
        return True

    def _sent_something(self, now: float) -> None:
        self.last_sent = now
        self.answer_at = None
        self.unanswered = 0

    def answer(self, now: float) -> None:
        """Send RECEIVED on its own; it also shows that this member lives."""
        if self.conn is None or self.blocked:
            return
        head = wire.HEADER.pack(wire.RECEIVED, 0, 0, 0, self.received)
        self.sending = True
        accepted = self.conn.try_send(head)
        self.sending = False
        if accepted:
            self._sent_something(now)
            self.stats.sent_frames += 1
        else:
            self.blocked = True

    def _frame_next(self) -> bool:
        """Frame what comes next, topics in turn: one chunk, or a batch.

        The frame is appended before its messages leave their queues: an interrupt in
        between frames them twice, and the peer drops them by their sequence.
        """
        busy = self.busy
        parts: list[bytes] = []
        completes: list[tuple[Feed, int]] = []
        size = count = flags = 0
        for _ in range(len(busy)):
            feed = busy[0]
            message = feed.head()
            if message is None:
                # A keep-last feed comes back when its message has been received.
                busy.popleft()
                continue
            if isinstance(message.data, Large):
                if parts:
                    break
                busy.rotate(-1)
                if self.lends and message.data.block is not None:
                    self._append_lent(feed, message, message.data, message.data.block)
                else:
                    self._append_chunk(feed, message, message.data)
                return True
            run = feed.small(message, BATCH_MESSAGES - count, BATCH_BYTES - size)
            parts += wire.pack_run(feed.subscription, *run)
            size += sum(map(len, run.areas))
            count += len(run.areas)
            if feed.keep is not None:
                flags = wire.FLAG_ANSWER
            completes.append((feed, run.first + len(run.areas) - 1))
            busy.rotate(-1)
            if size >= BATCH_BYTES or count >= BATCH_MESSAGES:
                break
        if not parts:
            return False
        self._append(Frame(wire.DATA, self.number + 1, parts, flags, completes))
        for feed, sequence in completes:
            feed.framed(sequence)
            feed.topic.trim()
            if feed.head() is None:
                busy.remove(feed)
        self.batches_unanswered += 1
        self.batch_at = None
        return True

    def _append_lent(
        self, feed: Feed, message: Outgoing, large: Large, block: Block
    ) -> None:
        sequence = message.sequence
        head = wire.LENT_HEAD.pack(
            feed.subscription,
            block.segment.id,
            sequence,
            message.published_at,
            block.offset,
            len(block.area),
        )
        flags = 0 if feed.keep is None else wire.FLAG_ANSWER
        completes = [(feed, sequence)]
        number = self.number + 1
        self._append(Frame(wire.LENT, number, [head], flags, completes, large))
        feed.framed(sequence)
        feed.topic.trim()

    def _append_chunk(self, feed: Feed, message: Outgoing, large: Large) -> None:
        index = 0 if feed.progress is None else feed.progress[1]
        large.cut_block()
        if not large.devices.issubset(self.devices or ()):
            large = large.stage(self._take)
        chunk = large.chunks[index]
        assert chunk is not None
        last = index + 1 == len(large.chunks)
        head = wire.CHUNK_HEAD.pack(
            feed.subscription,
            len(chunk.part),
            message.sequence,
            message.published_at,
            len(large),
            chunk.offset,
        )
        parts = [head, chunk.part]
        if large.areas:
            place = wire.pack_piece(chunk.area, chunk.start, large.areas)
            parts.insert(1, place)
        flags = wire.FLAG_LAST if last else 0
        if chunk.piece is not None:
            flags |= wire.FLAG_TENSOR
        if last or (index + 1) % CHUNKS_PER_ANSWER == 0:
            flags |= wire.FLAG_ANSWER
        self._append(
            Frame(
                wire.PIECE if large.areas else wire.CHUNK,
                self.number + 1,
                parts,
                flags,
                [(feed, message.sequence)] if last else None,
                large,
                index,
            )
        )
        begins = feed.progress is None
        feed.progress = None if last else (message, index + 1)
        feed.on_wire = feed.keep is not None
        if begins:
            feed.framed(message.sequence)
            feed.topic.trim()

    # -- what the peer has received ----------

    def forget_received(self, number: int) -> bool:
        """The peer has all frames up to `number`; whether that was news.

        Raises:
            Malformed: No frame of that number was sent.
        """
        if number > self.number:
            raise Malformed(f"frame {number} received, but {self.number} is the newest")
        frames = self.frames
        news = False
        while frames and frames[0].number <= number:
            frame = frames[0]
            news = True
            for feed, sequence in frame.completes or ():
                feed.received = max(feed.received, sequence)
                if feed.on_wire:
                    feed.on_wire = False
                    if feed.head() is not None and feed not in self.busy:
                        self.busy.append(feed)
            # Forgotten last, so that an interrupt cannot lose what it completed.
            frames.popleft()
            if self.sent:
                self.sent -= 1
            if frame.kind == wire.DATA:
                self.batches_unanswered -= 1
        return news

    def repair(self) -> None:
        """Derive again what an exception in mid-frame may have left undone."""
        self.batches_unanswered = sum(f.kind == wire.DATA for f in self.frames)
        if self.frames:
            self.number = max(self.number, self.frames[-1].number)
        self.batch_at = None
        leaving = {feed for f in self.frames for feed, _ in f.completes or ()}
        for feed in self.feeds.values():
            begun = feed in leaving or feed.progress is not None
            feed.on_wire = feed.keep is not None and begun
            if feed not in self.busy:
                self.busy.append(feed)

    def unsent(self, topic: Topic, message: Outgoing) -> bool:
        """Whether some keep-all part of a large message has never been handed over."""
        for frame in self.frames:
            if frame.large is message.data and not frame.sent_before:
                return True
        return any(
            (feed.progress is not None and feed.progress[0].data is message.data)
            or (feed.keep is None and feed.needs(message))
            for feed in topic.feeds
            if feed.session is self
        )

    def first_needed(self, topic: Topic, message: Outgoing) -> int:
        """The first chunk of a large message that may still have to be sent."""
        assert isinstance(message.data, Large)
        needed = self.chunks_needed(topic, message)
        return min(needed, default=len(message.data.chunks))

    def chunks_needed(self, topic: Topic, message: Outgoing) -> set[int]:
        """Chunks of a large message that this session may still have to send."""
        large = message.data
        assert isinstance(large, Large)
        needed = {f.chunk for f in self.frames if f.large is large}
        for feed in topic.feeds:
            if feed.session is self:
                if feed.progress is not None and feed.progress[0].data is large:
                    needed.update(range(feed.progress[1], len(large.chunks)))
                if feed.needs(message):
                    needed.update(range(len(large.chunks)))
        return needed
