"""The publishing side: topics, the messages committed to them, and their subscribers.

A topic has one log, and each subscriber a position in it. So a commit is one append,
done in one call into C, whoever is subscribed: a KeyboardInterrupt cannot leave a
message with some subscribers and not with others. Numbers, credit used and what is left
to send are derived from the log and the positions and never stored beside them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mq.mesh.atomic import append_to_all
from mq.mesh.large import INLINE_BYTES, Large
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.mesh.session import Session

BATCH_BYTES: Final = 64 * 1024
BATCH_MESSAGES: Final = 256
"""A batch of this size does not wait for more."""


class Outgoing(NamedTuple):
    """A committed message, shared by all its subscribers.

    Attributes:
        published_at: Unix time.
        data: The whole area of a small message, or the chunks of a large one.
        sequence: Its number on the topic.
    """

    published_at: float
    data: bytes | Large
    sequence: int


Logged = Outgoing | tuple[float, bytes | Large]
"""What a log holds: a message, with or without its number."""


class Small(NamedTuple):
    """Small messages of one topic, to be framed together."""

    first: int
    times: list[float]
    areas: list[bytes]


class Feed:
    """The publisher's side of one subscription of one peer.

    Attributes:
        keep: None for keep-all, else the n of keep-last.
        next: Sequence of the message to be framed next; see `position`.
        late: A retained message that comes before all others, until it is framed.
        progress: The large message that is being sent chunk by chunk, which `next` has
            passed so that it cannot be replaced, and the index of its next chunk.
        on_wire: For keep-last, whether a message has left and is not yet received.
        joined: Sequence of the first message published after the subscription began.
        first: Sequence of the first message that it gets.
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
        "late",
        "next",
        "on_wire",
        "progress",
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
        self.progress: tuple[Outgoing, int] | None = None
        self.on_wire = False
        newest = topic.newest
        self.next = self.joined = newest + 1
        self.base_sequence = newest + 1
        self.base_total = topic.total()
        self.first = self.received = newest
        self.late: Outgoing | None = None
        retained = topic.retained
        if retained is not None and retained.sequence > seen:
            # It counts against the credit as one message of its size.
            self.base_sequence -= 1
            self.base_total -= len(retained.data)
            self.first = retained.sequence
            self.received = retained.sequence - 1
            self.late = retained

    # -- credit ----------

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
        topic = self.topic
        return (
            topic.newest + 1 < self.limit_sequence and topic.total() < self.limit_total
        )

    # -- what is left to send ----------

    def position(self) -> int:
        """Sequence of the first message of the log that is still to be framed."""
        if self.keep is None:
            return self.next
        return max(self.next, self.topic.newest + 1 - self.keep)

    def head(self) -> Outgoing | None:
        """The message to be framed next, or None where there is none now."""
        if self.progress is not None:
            return self.progress[0]
        if self.on_wire:
            return None
        topic = self.topic
        if self.late is not None and (
            self.keep is None or topic.newest + 1 - self.next < self.keep
        ):
            return self.late
        position = self.position()
        return topic.message(position) if position <= topic.newest else None

    def small(self, head: Outgoing, messages: int, nbytes: int) -> Small:
        """The small messages to be framed next, of which `head` is the first.

        Args:
            messages: How many at most.
            nbytes: After how many bytes it is enough.
        """
        if self.keep is not None or head is self.late:
            assert isinstance(head.data, bytes)
            return Small(head.sequence, [head.published_at], [head.data])
        base, _, log = self.topic.view
        start = head.sequence - base
        if start + 1 == len(log):
            assert isinstance(head.data, bytes)
            return Small(head.sequence, [head.published_at], [head.data])
        run = log[start : start + messages]
        areas: list[Any] = [logged[1] for logged in run]
        if Large in set(map(type, areas)):
            areas = list(takewhile(lambda area: type(area) is bytes, areas))
        sums = list(accumulate(map(len, areas)))
        if sums[-1] > nbytes:
            del areas[bisect_left(sums, nbytes) + 1 :]
        times = [logged[0] for logged in run[: len(areas)]]
        return Small(head.sequence, times, areas)

    def framed(self, sequence: int) -> None:
        """The messages up to `sequence` are in frames; `head` comes after them."""
        if self.late is None or self.late.sequence != sequence:
            self.next = sequence + 1
        self.late = None
        self.on_wire = self.keep is not None
        self.topic.close_gate()

    def end(self) -> None:
        """Nothing more is framed, whatever is published."""
        self.next = _NO_LIMIT  # first: without it the others would mean something else
        self.late = self.progress = None
        self.keep = None

    def queued(self) -> int:
        """How many messages are committed and not in a frame."""
        late = self.head() is self.late is not None
        return late + max(0, self.topic.newest + 1 - self.position())

    def queued_bytes(self) -> int:
        """Their size; of keep-all subscriptions only, the retained message left out."""
        base, before, log = self.topic.view
        if self.keep is not None:
            return 0
        if self.next == base:
            return self.topic.total() - before
        return _size(log[self.next - base :])

    def needs(self, message: Outgoing) -> bool:
        """Whether a message of the topic has not begun to be framed."""
        return message.sequence >= self.position() or message is self.late

    # -- what has arrived ----------

    def mark(self) -> int:
        """Sequence of the last message committed to this subscriber."""
        newest = self.topic.newest
        return newest if newest >= self.joined else self.first

    def undelivered(self) -> int:
        """How many messages were committed and have not reached the subscriber."""
        newest = self.topic.newest
        missing = newest - max(self.received, self.joined - 1)
        return missing + (self.received < self.first)


def _size(messages: list[Logged]) -> int:
    return sum(map(len, map(itemgetter(1), messages)))


_NO_LIMIT: Final = 1 << 62


class Topic:
    """What this member publishes on one topic.

    Attributes:
        view: The sequence of the first message in the log, the bytes published before
            it, and the log: the newest messages, as far back as some subscriber needs
            them. One tuple, so that trimming it is one step.
        gate_messages, gate_bytes, gate_time: While the log is shorter than the first,
            the second is left, and the wall clock is below the third, a small message
            need only be appended: there is credit, and it joins batches that are held
            and will leave in time. Zero: the gate is closed.
    """

    __slots__ = (
        "_retained",
        "_summed",
        "feeds",
        "gate_bytes",
        "gate_messages",
        "gate_time",
        "limit_message",
        "limit_sequence",
        "limit_total",
        "name",
        "stats",
        "view",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.stats = TopicStats()
        self.feeds: deque[Feed] = deque()
        self._retained: deque[Outgoing] = deque(maxlen=1)
        self.view: tuple[int, int, list[Logged]] = (0, 0, [])
        self._summed = (self.view[2], 0, 0)
        self.refresh()

    @property
    def newest(self) -> int:
        """Sequence of the message committed last; -1 where there is none."""
        base, _, log = self.view
        return base + len(log) - 1

    def total(self) -> int:
        """Bytes published so far."""
        _, total, log = self.view
        known, count, sum_ = self._summed
        if known is log:
            total = sum_
            left = len(log) - count
            if left < 2:  # so it is for messages that go alone
                if left:
                    total += len(log[-1][1])
                    self._summed = (log, count + 1, total)
                return total
        else:
            count = 0
        total += _size(log[count:])
        self._summed = (log, len(log), total)
        return total

    def message(self, sequence: int) -> Outgoing:
        """A message that is in the log."""
        base, _, log = self.view
        logged = log[sequence - base]
        return Outgoing(logged[0], logged[1], sequence)

    @property
    def retained(self) -> Outgoing | None:
        """What each later subscriber gets first; set to None to drop it."""
        return self._retained[0] if self._retained else None

    @retained.setter
    def retained(self, message: None) -> None:
        self._retained.clear()

    def refresh(self) -> None:
        """Derive the limits; call after any change of a feed."""
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
        self.close_gate()

    def has_credit(self) -> bool:
        """Whether every keep-all subscriber has room for one more message."""
        base, _, log = self.view
        return base + len(log) < self.limit_sequence and self.total() < self.limit_total

    def waits_for(self) -> list[Feed]:
        """The subscribers that have no credit."""
        return [feed for feed in self.feeds if not feed.has_credit()]

    def commit(
        self, published_at: float, data: bytes | Large, retain: bool
    ) -> Outgoing:
        """Number the message and put it into the log, in one step."""
        base, _, log = self.view
        message = Outgoing(published_at, data, base + len(log))
        if retain:
            append_to_all((log, self._retained), message)
        else:
            log.append(message)
        return message

    def trim(self) -> None:
        """Drop what every subscriber has had framed."""
        base, _, log = self.view
        count = len(log)
        for feed in self.feeds:
            count = min(count, feed.position() - base)
        if count > 0:
            left = log[count:]
            total = self.total()
            before = total - _size(left) if left else total
            self.view = (base + count, before, left)
            self._summed = (left, len(left), total)  # lets the old log go
            self.close_gate()

    def drop_all(self) -> None:
        """Let go of the memory of all messages; the counters stay."""
        self._retained.clear()
        total = self.total()
        left: list[Logged] = []
        self.view = (self.newest + 1, total, left)
        self._summed = (left, 0, total)
        self.close_gate()

    # -- the gate ----------

    def open_gate(self, now: float, wall: float) -> None:
        """Open it, if every subscriber is keep-all and has its batch held.

        Args:
            now: The mesh's time.
            wall: The Unix time of the same moment.
        """
        base = self.view[0]
        messages = self.limit_sequence - base
        nbytes = self.limit_total - self.total()
        until = now + 1.0
        if self.limit_message < INLINE_BYTES or not self.feeds:
            return
        for feed in self.feeds:
            batch_at = feed.session.batch_at
            if batch_at is None or feed.keep is not None or feed.late is not None:
                return
            if feed.next > self.newest:
                return  # it is another topic's batch that is held
            until = min(until, batch_at)
            messages = min(messages, feed.next - base + BATCH_MESSAGES)
            nbytes = min(nbytes, BATCH_BYTES - feed.queued_bytes())
        # The last one is left to `publish`, which sends the batch or waits for credit.
        self.gate_messages, self.gate_bytes = messages - 1, nbytes
        self.gate_time = wall + until - now

    def close_gate(self) -> None:
        """Have the next message looked at."""
        self.gate_messages = self.gate_bytes = 0
        self.gate_time = 0.0

    def pass_gate(self, published_at: float, data: bytes) -> bool:
        """Commit a small message, if the gate is open; else nothing is done."""
        log = self.view[2]
        if (
            len(log) < self.gate_messages
            and published_at < self.gate_time
            and self.gate_bytes > 0
            and len(data) <= INLINE_BYTES
        ):
            self.gate_bytes -= len(data)
            log.append((published_at, data))
            return True
        return False
