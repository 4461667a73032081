"""The publisher's side of a subscription: what of a topic's log it has been sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from mq.errors import MOST_SHOWN
from mq.mesh.large import SMALL_BYTES, Large
from mq.mesh.outgoing import NO_LIMIT, Outgoing, size_of

if TYPE_CHECKING:
    from mq.mesh.outgoing import Topic
    from mq.mesh.session import Session
    from mq.mesh.wire import Subscribe


def _joins_batches(area: bytes | Large) -> bool:
    return type(area) is bytes and len(area) <= SMALL_BYTES


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
            passed so that it cannot be replaced, the index of its next chunk, and how
            much of that chunk's body is in frames.
        cut: A message's sequence, and a part of one of its chunks that is framed alone:
            the chunk's index, and where the part begins and ends.
        served: Bytes of its large messages that were framed, and of others' while it
            had none; `NO_LIMIT` where none came next when it was looked at, so that it
            need not be looked at each time.
        on_wire: For keep-last, whether a message has left and is not yet received.
        withheld: Size of a retained message that is too large for the subscriber, or 0.
        joined: Sequence of the first message published after the subscription began.
        first: Sequence of the first message that it gets.
        follows: Whether lent messages may be announced before they are written.
        received: Highest sequence that has reached the subscriber's inbox.
        credit_messages: Messages that the subscriber allows since the subscription
            began; likewise `credit_bytes`.
    """

    __slots__ = (
        "base_sequence",
        "base_total",
        "credit_bytes",
        "credit_messages",
        "cut",
        "first",
        "follows",
        "joined",
        "keep",
        "late",
        "next",
        "on_wire",
        "progress",
        "received",
        "served",
        "session",
        "subscription",
        "topic",
        "withheld",
    )

    def __init__(self, session: Session, topic: Topic, request: Subscribe) -> None:
        self.session = session
        self.topic = topic
        self.subscription = request.subscription
        self.keep = request.keep
        self.follows = request.follows and request.keep is None
        self.credit_messages = request.messages
        self.credit_bytes = request.nbytes
        self.progress: tuple[Outgoing, int, int] | None = None
        self.cut = (-1, 0, 0, 0)
        self.served = 0
        self.on_wire = False
        newest = topic.newest
        self.next = self.joined = newest + 1
        self.base_sequence = newest + 1
        self.base_total = topic.total()
        self.first = self.received = newest
        self.late: Outgoing | None = None
        retained = topic.retained
        self.withheld = 0
        if retained is None or retained.sequence <= request.seen:
            return
        if len(retained.data) > session.peer.max_message_bytes:
            self.withheld = len(retained.data)
        else:
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

    def credit(self) -> int:
        """How many more messages may be committed; 0: `publish` waits for this one."""
        left = self.limit_sequence - self.topic.newest - 1
        return left if self.has_credit() else 0

    def give_back(self, messages: int, nbytes: int) -> tuple[int, int]:
        """Go down to these totals, as far as no more was committed; those that hold."""
        used = self.topic.newest + 1 - self.base_sequence
        used_bytes = self.topic.total() - self.base_total
        self.credit_messages = min(self.credit_messages, max(messages, used))
        self.credit_bytes = min(self.credit_bytes, max(nbytes, used_bytes))
        return self.credit_messages, self.credit_bytes

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
        if Large in set(map(type, areas)) or max(map(len, areas)) > SMALL_BYTES:
            areas = list(takewhile(_joins_batches, areas))
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
        self.topic.gate.close()

    def end(self) -> None:
        """Nothing more is framed, whatever is published."""
        self.next = NO_LIMIT  # first: without it the others would mean something else
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
        return size_of(log[self.next - base :])

    def needs(self, message: Outgoing) -> bool:
        """Whether a message of the topic has not begun to be framed."""
        return message.sequence >= self.position() or message is self.late

    # -- what has arrived ----------

    def mark(self) -> int:
        """Sequence of the last message committed to this subscriber."""
        newest = self.topic.newest
        return newest if newest >= self.joined else self.first

    def lacks(self, mark: int) -> int:
        """How many messages up to a mark the subscriber was still to have.

        Of a keep-last subscription those alone that none has replaced.
        """
        if self.keep is None:
            missing = max(0, mark - max(self.received, self.joined - 1))
            return missing + (self.received < self.first)
        newest = self.topic.newest
        missing = mark - max(self.received, self.joined - 1, newest - self.keep)
        return min(self.keep, max(0, missing) + (self.received < self.first))


def in_words(lacking: Sequence[tuple[int, str]]) -> str:
    """How many messages are lacking on which topics, of which some are named."""
    shown = [f"{n} on {name!r}" for n, name in lacking[:MOST_SHOWN]]
    if rest := lacking[MOST_SHOWN:]:
        shown.append(f"{sum(n for n, _ in rest)} on {len(rest)} other topics")
    return ", ".join(shown)
