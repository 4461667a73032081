"""The publishing side: topics, the messages committed to them, and their subscribers.

A commit must be one step: a KeyboardInterrupt between two bytecodes may not leave a
message with some subscribers and not with others. So all that a commit changes are
deques, appended to by one call into C (`mq.mesh.atomic`); sequence numbers, credit used
and what is left to send are derived from those deques and never stored beside them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mq.mesh.atomic import append_to_all
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.mesh.session import Session

INLINE_BYTES: Final = 32 * 1024
"""Messages up to this size travel in batches; larger ones in chunks of their own."""
GATHER_BYTES: Final = 64 * 1024
"""Buffers below this size are copied together into one chunk."""

Take = Callable[[int], memoryview]


class Chunk:
    """A part of a large message.

    Attributes:
        offset: Where it lies in the message's area.
        view: Its bytes; the caller's memory until `own`.
        owned: Whether nobody will write to that memory while a view of it exists.
    """

    __slots__ = ("offset", "owned", "view")

    def __init__(self, offset: int, view: memoryview, owned: bool) -> None:
        self.offset = offset
        self.view = view
        self.owned = owned

    def own(self, take: Take) -> None:
        """Copy it into memory of the pool, once for all subscribers."""
        if not self.owned:
            copy = take(len(self.view))
            copy[:] = self.view
            self.view = copy
            self.owned = True


class Outgoing:
    """A committed message, shared by all its subscribers.

    Attributes:
        sequence: Its number on the topic.
        total: Bytes published on the topic up to and including this message.
        data: The whole area of a small message, owned; None for a large one.
        chunks: The chunks of a large message; None is one that nobody needs any more.
        owned: Whether nothing of it is the caller's memory.
    """

    __slots__ = (
        "chunks",
        "data",
        "nbytes",
        "owned",
        "published_at",
        "sequence",
        "total",
    )

    def __init__(
        self,
        sequence: int,
        total: int,
        published_at: float,
        nbytes: int,
        data: bytes | None,
        chunks: list[Chunk | None],
    ) -> None:
        self.sequence = sequence
        self.total = total
        self.published_at = published_at
        self.nbytes = nbytes
        self.data = data
        self.chunks = chunks
        self.owned = data is not None

    def own(self, take: Take, needed: Iterable[int]) -> None:
        """Copy the chunks still needed, so that the caller's memory is free again."""
        if self.owned:
            return
        keep = set(needed)
        for index, chunk in enumerate(self.chunks):
            if chunk is not None and index in keep:
                chunk.own(take)
            else:
                self.chunks[index] = None
        self.owned = True

    def free_before(self, index: int) -> None:
        """Every subscriber has the chunks before this one: let their memory go."""
        while index > 0 and self.chunks[index - 1] is not None:
            index -= 1
            self.chunks[index] = None


def cut(frames: Frames, chunk_bytes: int, take: Take) -> list[Chunk | None]:
    """Cut an area into chunks: slices of large buffers, small ones gathered."""
    chunks: list[Chunk | None] = []
    run: list[tuple[int, memoryview]] = []
    gathered = min(GATHER_BYTES, chunk_bytes)

    def gather() -> None:
        if not run:
            return
        start = run[0][0]
        stop = run[-1][0] + len(run[-1][1])
        copy = take(stop - start)
        copy[:] = bytes(stop - start)  # the gaps: never send what was there before
        for offset, view in run:
            copy[offset - start : offset - start + len(view)] = view
        chunks.append(Chunk(start, copy, True))
        run.clear()

    for offset, view in frames.segments():
        if len(view) < gathered:
            if run and offset + len(view) - run[0][0] > chunk_bytes:
                gather()
            run.append((offset, view))
            continue
        gather()
        chunks.extend(
            Chunk(offset + start, view[start : start + chunk_bytes], False)
            for start in range(0, len(view), chunk_bytes)
        )
    gather()
    return chunks


class Feed:
    """The publisher's side of one subscription of one peer.

    Attributes:
        keep: None for keep-all, else the n of keep-last.
        queue: Messages committed and not yet begun; for keep-last the newest n.
        progress: The large message that is being sent chunk by chunk, no longer in
            `queue` so that it cannot be replaced, and the index of its next chunk.
        on_wire: For keep-last, whether a message has left and is not yet received.
        received: Highest sequence that has reached the subscriber's inbox.
        credit_messages: Messages that the subscriber allows since the subscription
            began; likewise `credit_bytes`.
    """

    __slots__ = (
        "base_sequence",
        "base_total",
        "credit_bytes",
        "credit_messages",
        "first",
        "joined",
        "keep",
        "on_wire",
        "progress",
        "queue",
        "received",
        "session",
        "subscription",
        "topic",
    )

    def __init__(
        self,
        session: Session,
        topic: Topic,
        subscription: int,
        keep: int | None,
        credit_messages: int,
        credit_bytes: int,
        seen: int,
    ) -> None:
        self.session = session
        self.topic = topic
        self.subscription = subscription
        self.keep = keep
        self.credit_messages = credit_messages
        self.credit_bytes = credit_bytes
        self.queue: deque[Outgoing] = deque(maxlen=keep)
        self.progress: tuple[Outgoing, int] | None = None
        self.on_wire = False
        newest = topic.newest
        self.joined = newest.sequence + 1
        self.base_sequence = newest.sequence + 1
        self.base_total = newest.total
        self.first = self.received = newest.sequence
        retained = topic.retained
        if retained is not None and retained.sequence > seen:
            # It counts against the credit as one message of its size.
            self.base_sequence -= 1
            self.base_total -= retained.nbytes
            self.first = retained.sequence
            self.received = retained.sequence - 1
            self.queue.append(retained)

    @property
    def limit_sequence(self) -> int:
        """The first sequence that is not allowed yet."""
        return self.base_sequence + self.credit_messages

    @property
    def limit_total(self) -> int:
        """While the topic's total is below this, one more message is allowed."""
        return self.base_total + self.credit_bytes

    def has_credit(self) -> bool:
        """Whether the next message of the topic may be committed."""
        if self.keep is not None:
            return True
        newest = self.topic.newest
        return (
            newest.sequence + 1 < self.limit_sequence
            and newest.total < self.limit_total
        )

    def head(self) -> Outgoing | None:
        """The message to be framed next, or None where there is none now."""
        if self.progress is not None:
            return self.progress[0]
        if self.on_wire or not self.queue:
            return None
        return self.queue[0]

    def mark(self) -> int:
        """Sequence of the last message committed to this subscriber."""
        newest = self.topic.newest.sequence
        return newest if newest >= self.joined else self.first

    def undelivered(self) -> int:
        """How many messages were committed and have not reached the subscriber."""
        newest = self.topic.newest.sequence
        missing = newest - max(self.received, self.joined - 1)
        return missing + (self.received < self.first)


_NO_LIMIT: Final = 1 << 62


class Topic:
    """What this member publishes on one topic."""

    __slots__ = (
        "_last",
        "_retained",
        "feeds",
        "limit_message",
        "limit_sequence",
        "limit_total",
        "name",
        "queues",
        "stats",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.stats = TopicStats()
        self.feeds: deque[Feed] = deque()
        self._retained: deque[Outgoing] = deque(maxlen=1)
        self._last = deque([Outgoing(-1, 0, 0.0, 0, b"", [])], maxlen=1)
        self.refresh()

    @property
    def newest(self) -> Outgoing:
        """The message committed last; sequence -1 where there is none."""
        return self._last[0]

    @property
    def retained(self) -> Outgoing | None:
        """What each later subscriber gets first; set to None to drop it."""
        return self._retained[0] if self._retained else None

    @retained.setter
    def retained(self, message: None) -> None:
        self._retained.clear()

    def refresh(self) -> None:
        """Derive what `commit` and `open_for` use; call after any change of a feed."""
        self.queues: tuple[deque[Outgoing], ...] = (
            self._last,
            *(feed.queue for feed in self.feeds),
        )
        self.limit_message = min(
            (feed.session.peer.max_message_bytes for feed in self.feeds),
            default=_NO_LIMIT,
        )
        bounded = [feed for feed in self.feeds if feed.keep is None]
        self.limit_sequence = min(
            (feed.limit_sequence for feed in bounded), default=_NO_LIMIT
        )
        self.limit_total = min(
            (feed.limit_total for feed in bounded), default=_NO_LIMIT
        )

    def has_credit(self) -> bool:
        """Whether every keep-all subscriber has room for one more message."""
        newest = self._last[0]
        return (
            newest.sequence + 1 < self.limit_sequence
            and newest.total < self.limit_total
        )

    def waits_for(self) -> list[Feed]:
        """The subscribers that have no credit."""
        return [feed for feed in self.feeds if not feed.has_credit()]

    def commit(
        self,
        published_at: float,
        nbytes: int,
        data: bytes | None,
        chunks: list[Chunk | None],
        retain: bool,
        take: Take,
    ) -> Outgoing:
        """Number the message and queue it for every subscriber, in one step."""
        newest = self._last[0]
        sequence, total = newest.sequence + 1, newest.total + nbytes
        message = Outgoing(sequence, total, published_at, nbytes, data, chunks)
        queues = self.queues
        if retain:
            message.own(take, range(len(chunks)))
            queues = (*queues, self._retained)
        append_to_all(queues, message)
        return message
