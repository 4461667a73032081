"""What a member still owes one peer: messages in turn, and the frames made of them.

It sends nothing itself. What must not be lost is first appended where it goes to and
only then removed where it came from: an exception in between makes a repetition, which
the peer drops by its number or by the message's sequence, and never a gap.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from mq.mesh import wire
from mq.mesh.feed import Feed
from mq.mesh.frame import Frame, chunk_frame, unlent
from mq.mesh.large import Large, Take
from mq.mesh.outgoing import BATCH_BYTES, BATCH_MESSAGES, NO_LIMIT, Outgoing, Topic
from mq.mesh.pace import Pace
from mq.mesh.wire import Malformed

if TYPE_CHECKING:
    from mq.mesh.large import Chunk
    from mq.segments import Block

MOST_ANSWER_BYTES: Final = 64 << 20
"""Of answers that a peer may have asked for and not received."""
_FRAME_BYTES: Final = 256
"""About what a frame takes beside its content."""
SLACK_BYTES: Final = 256 << 10
"""What topics with large messages may have had more than others, and have a turn."""
ANSWERED_PART: Final = 0.25
"""Of what may be under way without an answer: what is beyond is answered at once."""


class Backlog:
    """Messages of one peer's subscriptions, and the frames that it has not received.

    Attributes:
        feeds: The peer's subscriptions by id.
        busy: Those with something to be framed, in turn; none is searched for in there.
        served: What who has none to be sent has no claim to: the least `Feed.served`
            when feeds were compared, and that of one that was alone since.
        frames: Numbered frames until the peer has received them.
        sent: How many of these were sent over the present connection.
        number: Of the newest frame.
        batches_unanswered: How many of the frames are batches.
        batch_at: When a batch that waits for more messages is due, or what is left of a
            turn that was too long; or None.
        lends: Whether large messages are lent to the peer in place of sent.
        devices: Whose tensors travel to the peer, and where they arrive there; None
            before the first connection.
        lead: What bodies that are whole messages begin with.
        whole_bytes: How large a body may be; 0: as the link says.
        most_unanswered: How many bytes of bodies may be under way without an answer,
            if the wire does not hold more; None: any.
        pace: How many of them the connection takes in a short while.
        under_way: How many bytes of bodies the frames have.
        answer_bytes: What those of them take that answer the peer.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self.feeds: dict[int, Feed] = {}
        self.busy: OrderedDict[Feed, None] = OrderedDict()
        self.served = 0
        self.frames: deque[Frame] = deque()
        self.sent = 0
        self.number = 0
        self.batches_unanswered = 0
        self.batch_at: float | None = None
        self.lends = False
        self.devices: dict[str, str] | None = None
        self.lead = self.whole_bytes = 0
        self.most_unanswered: int | None = None
        self.pace = Pace()
        self.under_way = 0
        self.answer_bytes = 0

    # -- queueing ----------

    def control(self, kind: int, content: object) -> None:
        """Queue a numbered control frame ahead of all messages not yet framed."""
        frame = self.control_frame(kind, content)
        self._append(frame)
        self.count_answer(frame)

    def count_answer(self, frame: Frame) -> None:
        """A control frame was appended; see `check_answers`."""
        if frame.kind in wire.ANSWERS:
            self.answer_bytes += _weight(frame)

    def check_answers(self) -> None:
        """Raises: Malformed, if the peer asks on and on without taking the answers."""
        if self.answer_bytes > MOST_ANSWER_BYTES:
            raise Malformed(f"{self.answer_bytes} bytes of answers wait to be received")

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
        self.under_way += frame.body_nbytes

    def offer(self, feed: Feed) -> None:
        """A message was committed to `feed`, which keeps its turn if it has one."""
        self.busy[feed] = None

    # -- framing ----------

    def _frame_next(self) -> bool:
        """Frame what comes next, topics in turn: one chunk, or a batch.

        The turn of a large message is that of the topic which has had the fewest bytes:
        else one of 100 KB would leave for each of 10 MB on another.

        The frame is appended before its messages leave their queues: an interrupt in
        between frames them twice, and the peer drops them by their sequence.
        """
        busy = self.busy
        parts: list[bytes] = []
        completes: list[tuple[Feed, int]] = []
        size = count = flags = 0
        waiting = len(busy)
        for _ in range(waiting):
            feed = next(iter(busy))
            message = feed.head()
            if message is None:
                # A keep-last feed comes back when its message has been received.
                del busy[feed]
                continue
            if message.takes_turns:
                if parts:
                    break
                busy.move_to_end(feed)
                if self.is_ahead():
                    continue
                feed, message = self._least_served(feed, message)
                self._append_part(feed, message)
                served = max(feed.served, self.served) + self.frames[-1].served_nbytes
                feed.served = served
                if waiting == 1:  # what others have had before is made up for by this
                    self.served = served
                return True
            run = feed.small(message, BATCH_MESSAGES - count, BATCH_BYTES - size)
            parts += wire.pack_run(feed.subscription, *run)
            size += sum(map(len, run.areas))
            count += len(run.areas)
            if feed.keep is not None:
                flags = wire.FLAG_ANSWER
            completes.append((feed, run.first + len(run.areas) - 1))
            busy.move_to_end(feed)
            if size >= BATCH_BYTES or count >= BATCH_MESSAGES:
                break
        if not parts:
            return False
        self._append(Frame(wire.DATA, self.number + 1, parts, flags, completes))
        for feed, sequence in completes:
            feed.framed(sequence)
            feed.topic.trim()
            if feed.head() is None:
                del busy[feed]
        self.batches_unanswered += 1
        self.batch_at = None
        return True

    def _least_served(self, feed: Feed, message: Outgoing) -> tuple[Feed, Outgoing]:
        """Whose turn it is, who has had the fewest bytes, and the message.

        Or about so: thousands of them are not looked at for each message. Who had none
        to be sent for a while has no claim to what others had meanwhile.

        Args:
            feed: One whose next message takes turns, which is `message`.
        """
        if feed.served == NO_LIMIT:
            feed.served = self.served
        least = feed.served
        if least <= self.served + SLACK_BYTES:
            return feed, message
        for other in self.busy:
            if other.served < least:
                head = other.head()
                if head is not None and head.takes_turns:
                    feed, message, least = other, head, other.served
                else:
                    other.served = NO_LIMIT
        self.served = max(self.served, least)
        return feed, message

    def is_ahead(self, part: float = 1.0) -> bool:
        """Whether this part of what may be under way without an answer is."""
        most = self.pace.window
        if self.most_unanswered is not None:
            most = min(most, max(self.most_unanswered, self.pace.held))
        return self.under_way >= part * most

    def _append_part(self, feed: Feed, message: Outgoing) -> None:
        """Frame what is next of a message that takes turns: all of it, or a chunk."""
        data = message.data
        if not isinstance(data, Large):
            self._append_inline(feed, message, data)
        # What has begun in chunks goes on so, where another link lends, too.
        elif self.lends and data.block is not None and feed.progress is None:
            self._append_lent(feed, message, data, data.block)
        else:
            self._append_chunk(feed, message, data)

    def _append_inline(self, feed: Feed, message: Outgoing, data: bytes) -> None:
        number, sequence = self.number + 1, message.sequence
        run = wire.pack_run(feed.subscription, sequence, [message.published_at], [data])
        answers = feed.keep is not None or self.is_ahead(ANSWERED_PART)
        flags = wire.FLAG_ANSWER if answers else 0
        frame = Frame(wire.DATA, number, run, flags, [(feed, sequence)])
        frame.turn_nbytes = len(data)
        self._append(frame)
        feed.framed(sequence)
        feed.topic.trim()

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
        if block.counter is not None and feed.follows:
            flags |= wire.FLAG_FILLING
        completes = [(feed, sequence)]
        number = self.number + 1
        self._append(Frame(wire.LENT, number, [head], flags, completes, large))
        feed.framed(sequence)
        feed.topic.trim()

    def _append_chunk(self, feed: Feed, message: Outgoing, large: Large) -> None:
        index, begin = (0, 0) if feed.progress is None else feed.progress[1:]
        large.cut_block()
        if large.must_be_staged(self.devices):
            assert large.staged is not None  # before it was this subscriber's
            large = large.staged
        chunk = large.chunks[index]
        assert chunk is not None
        end = self._end(feed, message, chunk, index, begin)
        ahead = self.is_ahead(ANSWERED_PART)
        part = begin, end
        frame = chunk_frame(self.number + 1, feed, message, large, index, part, ahead)
        self._append(frame)
        begins = feed.progress is None
        if frame.completes:
            feed.progress = None
        elif end == chunk.body_nbytes:
            feed.progress = (message, index + 1, 0)
        else:
            feed.progress = (message, index, end)
        feed.on_wire = feed.keep is not None
        if begins:
            feed.framed(message.sequence)
            feed.topic.trim()

    def _end(
        self, feed: Feed, message: Outgoing, chunk: Chunk, index: int, begin: int
    ) -> int:
        """Where the part of a chunk's body ends that is framed next.

        It is all of it, unless so much at once would make others wait.
        """
        nbytes = chunk.body_nbytes
        # An interrupt may have this framed again: as it was, or else something is lost.
        if feed.cut[:3] != (message.sequence, index, begin):
            end = min(nbytes, begin + self.pace.window // 2)
            feed.cut = (message.sequence, index, begin, end)
        return feed.cut[3]

    # -- what the peer has received ----------

    def first_lacking(self) -> int:
        """Number of the first frame that it has not received; if none, of the last."""
        return self.frames[0].number if self.frames else self.number

    def forget_received(self, number: int, now: float) -> bool:
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
                    if feed.head() is not None:
                        self.offer(feed)
            self.under_way -= frame.body_nbytes
            # Forgotten last, so that an interrupt cannot lose what it completed.
            frames.popleft()
            if self.sent:
                self.sent -= 1
            if frame.is_batch:
                self.batches_unanswered -= 1
            elif frame.kind in wire.ANSWERS:
                self.answer_bytes -= _weight(frame)
            if frame.number >= self.pace.timed:
                self.pace.answered(now)
        return news

    def send_what_was_lent(self) -> None:
        """The peer cannot read it over the next connection; `repair` gives the numbers.

        It has received none of the frames, so those that follow may get other ones.
        """
        self.frames = deque(new for frame in self.frames for new in unlent(frame))

    def repair(self) -> None:
        """Derive again what an exception in mid-frame may have left undone."""
        for number, frame in enumerate(self.frames, self.first_lacking()):
            frame.number = number
        self.batches_unanswered = sum(f.is_batch for f in self.frames)
        self.under_way = sum(f.body_nbytes for f in self.frames)
        answers = (f for f in self.frames if f.kind in wire.ANSWERS)
        self.answer_bytes = sum(map(_weight, answers))
        if self.frames:
            self.number = max(self.number, self.frames[-1].number)
        self.batch_at = None
        leaving = {feed for f in self.frames for feed, _ in f.completes or ()}
        for feed in self.feeds.values():
            begun = feed in leaving or feed.progress is not None
            feed.on_wire = feed.keep is not None and begun
            self.offer(feed)

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


def _weight(frame: Frame) -> int:
    return _FRAME_BYTES + sum(map(len, frame.parts))
