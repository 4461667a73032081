"""What one publisher sends by one subscription, on its way into the inbox of `recv`.

As on the publishing side, what may not be half done is one call into C: a message
enters the inbox and becomes its source's newest in the same step, so that a frame whose
handling was interrupted can be handled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mq.borrowing import Key, Returns, arm, is_borrowed
from mq.mesh import wire
from mq.mesh.atomic import append_each
from mq.mesh.copying import Borrow, counter_of
from mq.mesh.large import Take
from mq.mesh.stream import Stream, kept
from mq.mesh.wire import Chunk, Lent, Malformed
from mq.speed import know_arrivals

if TYPE_CHECKING:
    from mq.devices import Piece
    from mq.frames import Spread
    from mq.mesh.copying import Copies, Copying
    from mq.mesh.inbox import Item
    from mq.mesh.session import Session
    from mq.mesh.subscription import Subscription


class Entry(NamedTuple):
    """A received message before it is decoded; `area` is what the codec wrote.

    It comes `again` where there was no memory to decode it.
    """

    source: Source
    sequence: int
    published_at: float
    area: memoryview | Spread
    again: bool = False


class Run:
    """Messages of one publisher and topic, of consecutive sequences, as they arrived.

    Attributes:
        first: Sequence of the first one.
        nbytes: Size of the areas together.
        taken: How many `recv` has taken, where `Inbox.prepared` says nothing newer.
        counted: How many of these the credit and the counters know of.
        copying: Until it is copied into memory of the receiver's own: how far that is.
    """

    __slots__ = (
        "areas",
        "copying",
        "counted",
        "first",
        "nbytes",
        "source",
        "taken",
        "times",
    )

    def __init__(
        self,
        source: Source,
        first: int,
        times: tuple[float, ...],
        areas: Sequence[memoryview | Spread],
    ) -> None:
        self.source = source
        self.first = first
        self.times = times
        self.areas = areas
        self.nbytes = sum(map(len, areas))
        self.copying: Copying | None = None
        self.taken = self.counted = 0

    def entry(self, index: int) -> Entry:
        """One of the messages."""
        return Entry(
            self.source, self.first + index, self.times[index], self.areas[index]
        )


def uncounted(runs: Sequence[Run]) -> tuple[int, int]:
    """Messages and bytes of runs that were not counted yet."""
    messages = sum(len(run.areas) - run.counted for run in runs)
    nbytes = sum(len(area) for run in runs for area in run.areas[run.counted :])
    return messages, nbytes


class Source:
    """The subscriber's side of one subscription and one publisher.

    Attributes:
        told: Whether the request to subscribe was queued.
        active: Whether it has published anything on it yet.
        granted_messages, granted_bytes: Credit given since the subscription began.
        used_messages, used_bytes: At least so much of it has been used.
        asked: What the publisher was asked to give back, until it has answered.
        consumed_messages, consumed_bytes: What `recv` has taken since then.
        at_once: How many messages `recv` may decode ahead, of those it has not counted.
        ahead: What `recv` knows of decoding ahead messages that are not plain: how many
            go by before it tries again, and how many after the next failure.
        taken: Sequence of the last message that `recv` took.
        first: The first sequence published since the subscription began.
        retained: Of the retained message that comes before it, or -1.
        starved: Of the message for which there was no memory, or no device, or -1.
        kept: For keep-last, the newest n messages not yet taken.
        lent: Messages that lie in the publisher's memory and were not released, by
            sequence, each with the token of the view that counts.
    """

    __slots__ = (
        "_stream",
        "active",
        "ahead",
        "arrivals",
        "asked",
        "at_once",
        "consumed_bytes",
        "consumed_messages",
        "first",
        "grant_at_bytes",
        "grant_at_messages",
        "granted_bytes",
        "granted_messages",
        "kept",
        "lent",
        "retained",
        "session",
        "starved",
        "subscription",
        "taken",
        "told",
        "used_bytes",
        "used_messages",
    )

    def __init__(self, subscription: Subscription, session: Session) -> None:
        self.subscription = subscription
        self.session = session
        self.told = self.active = False
        self.granted_messages = self.granted_bytes = 0
        self.consumed_messages = self.consumed_bytes = 0
        self.used_messages = self.used_bytes = 0
        self.asked: wire.Reclaim | None = None
        self.grant_at_messages = self.grant_at_bytes = 0
        self.at_once = 1
        self.ahead = (0, 1)
        self.first = 0
        self.taken = self.retained = self.starved = -1
        self.kept: deque[Entry] = deque(maxlen=subscription.keep)
        self.arrivals: deque[Arrivals] = deque(maxlen=1)
        self.lent: dict[int, object] = {}
        self._stream: Stream | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the publisher has acknowledged the subscription."""
        return bool(self.arrivals)

    @property
    def newest(self) -> int:
        """Sequence of the newest message that has arrived."""
        return self.arrivals[0].newest

    def begin(self, first: int, retained: int, after: int) -> Arrivals:
        """The publisher acknowledged: new messages begin at `first`.

        Messages up to sequence `after` came in an earlier session.

        Returns:
            What the caller appends to `arrivals` to make it true.
        """
        self.first = first
        self.retained = retained
        self.taken = after
        return Arrivals(after, 0, 0)

    def unread(self) -> tuple[int, int]:
        """Messages and bytes that have arrived and were not taken."""
        if not self.arrivals:
            return 0, 0
        _, messages, nbytes = self.arrivals[0]
        return messages - self.consumed_messages, nbytes - self.consumed_bytes

    def count_again(self, left: int, left_bytes: int) -> None:
        """Derive what was taken from what is still in the inbox."""
        if not self.arrivals or self.subscription.keep is not None:
            return
        _, messages, nbytes = self.arrivals[0]
        self.consumed_messages = messages - left
        self.consumed_bytes = nbytes - left_bytes

    def cut(self, newest: int, left: int, left_bytes: int) -> None:
        """Nothing arrived after `newest`: of what did, so much waits in the inbox."""
        messages = self.consumed_messages + left
        nbytes = self.consumed_bytes + left_bytes
        self.arrivals.append(Arrivals(newest, messages, nbytes))

    # -- credit ----------

    def credit(self) -> wire.Credit:
        """The grants as they are now."""
        return wire.Credit(
            self.subscription.id, self.granted_messages, self.granted_bytes
        )

    def _check_turn(self, sequence: int) -> None:
        newest, messages, nbytes = self.arrivals[0]
        if self.subscription.keep is not None:
            return
        if messages >= self.granted_messages or nbytes >= self.granted_bytes:
            raise Malformed(
                f"message {sequence} on {self.subscription.topic!r} without credit"
            )
        stream = self._stream
        if stream is not None and newest < stream.sequence < sequence:
            raise Malformed(
                f"message {stream.sequence} on {self.subscription.topic!r} has no end"
            )

    # -- arrival ----------

    def arrived(self, fifo: deque[Item], run: Run) -> None:
        """Put new messages, in order, into the inbox.

        Raises:
            Malformed: The publisher sent more than it has credit for.
        """
        newest, messages, total = self.arrivals[0]
        if run.first <= newest:
            known = newest + 1 - run.first
            if known >= len(run.areas):
                return
            run = Run(self, newest + 1, run.times[known:], run.areas[known:])
        last = run.first + len(run.areas) - 1
        if self.subscription.keep is not None:
            for index in range(len(run.areas)):
                if self.subscription.ended:
                    self.subscription.outlive(self)
                entry = run.entry(index)
                state = Arrivals(entry.sequence, 0, 0)
                if len(self.kept) == self.kept.maxlen:
                    append_each((self.kept, self.arrivals), (entry, state))
                else:
                    append_each((self.kept, self.arrivals, fifo), (entry, state, self))
            return
        self._check_turn(run.first)
        messages += len(run.areas)
        if messages > self.granted_messages:
            raise Malformed(f"too many messages on {self.subscription.topic!r}")
        state = Arrivals(last, messages, total + run.nbytes)
        append_each((fifo, self.arrivals), (run, state))

    def borrow(
        self,
        lent: Lent,
        filling: bool,
        limit: int,
        fifo: deque[Item],
        borrow: Borrow,
        take: Take,
        returns: Returns,
        copies: Copies,
    ) -> bool:
        """Take a message where it lies in the publisher's memory.

        Who does not view it there gets a copy, which is begun.

        Args:
            filling: It may still be on its way there.

        Returns:
            Whether it is still needed there. False: it was taken before and nobody has
            a view of it any more, or it had to be copied.

        Raises:
            Malformed: There is no such memory, or no credit for it.
        """
        sequence = lent.sequence
        if sequence <= self.newest:
            return sequence in self.lent
        self._check_turn(sequence)
        if lent.nbytes > limit:
            raise Malformed(
                f"announces {lent.nbytes} bytes, max_message_bytes is {limit}"
            )
        self.starved = sequence  # until there is memory for it
        try:
            counter = counter_of(lent, borrow, take) if filling else None
            area = borrow(lent.segment, lent.offset, lent.nbytes, take)
        except ValueError as error:
            raise Malformed(str(error)) from error
        if counter is not None and not self.subscription.follows:
            raise Malformed("a message that is not there yet, for who does not follow")
        in_place = is_borrowed(area)
        run = Run(self, sequence, (lent.published_at,), [area])
        if in_place:
            token = object()
            self.lent[sequence] = token
            arm(area, returns, Key(self, sequence, token))
            if self.subscription.follows:
                copies.begin(run, counter)
        self.starved = -1
        self.arrived(fifo, run)
        return in_place

    def has_returned(self, key: Key) -> bool:
        """Whether it was the view that counts, of a message that was handed over."""
        return self.lent.get(key.sequence) is key.token and key.sequence <= self.newest

    def place(
        self,
        chunk: Chunk,
        nbytes: int,
        limit: int,
        take: Take,
        sizes: tuple[int, ...] = (),
        body: memoryview | None = None,
    ) -> memoryview | None:
        """Put a chunk's first part in its place; where the body of `nbytes` goes.

        None if the chunk is not wanted any more.

        Args:
            nbytes: Of a body in host memory.
            sizes: Of the message's areas on devices.
            body: All of the message, which stays where it is.

        Raises:
            Malformed: The chunk does not fit to those before it, or to the limits.
        """
        if chunk.sequence <= self.newest:
            return None
        stream = self._stream
        if body is not None:
            stream, take = None, partial(kept, body, take)
        if chunk.offset == 0 and (stream is None or stream.sequence != chunk.sequence):
            self._check_turn(chunk.sequence)
            if chunk.total > limit:
                raise Malformed(
                    f"announces {chunk.total} bytes, max_message_bytes is {limit}"
                )
            if chunk.body_place(nbytes).stop > chunk.total - sum(sizes):
                raise Malformed("chunk larger than its message")
            self.starved = chunk.sequence  # until there is memory for it
            stream = self._stream = Stream(chunk, sizes, take)
            self.starved = -1
        if stream is None or stream.sequence != chunk.sequence:
            raise Malformed("chunk of a message that did not begin")
        return stream.place(chunk, nbytes, sizes)

    def land(self, place: wire.Piece, piece: Piece) -> None:
        """Put a tensor in its place, after `place` has taken what came with it.

        Raises:
            Malformed: It does not fit to those before it, or cannot be had.
            MemoryError: There was no memory for it.
        """
        stream = self._stream
        if stream is not None and stream.sequence == place.chunk.sequence:
            self.starved = stream.sequence  # until the device takes it
            stream.land(place, piece)
            self.starved = -1

    def placed(self, chunk: Chunk, nbytes: int, last: bool, fifo: deque[Item]) -> None:
        """The body of a chunk is in its place; the last one completes the message."""
        stream = self._stream
        if stream is None or stream.sequence != chunk.sequence:
            return
        # Until the message is in the inbox its last chunk may come again.
        stream.placed(chunk, nbytes, last)
        if last:
            content = stream.content()
            self.arrived(
                fifo, Run(self, chunk.sequence, (chunk.published_at,), [content])
            )
            self._stream = None

    def end(self) -> None:
        """Nothing more arrives: let go of what has begun to."""
        self._stream = None


class Arrivals(NamedTuple):
    """The newest message that has arrived; how many, and how many bytes, in all."""

    newest: int
    messages: int
    nbytes: int


know_arrivals(Run, Arrivals, Entry)
