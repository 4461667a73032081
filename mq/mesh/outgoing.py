"""The publishing side: topics, and the messages committed to them.

A topic has one log, and each subscriber a position in it. So a commit is one append,
done in one call into C, whoever is subscribed: a KeyboardInterrupt cannot leave a
message with some subscribers and not with others. Numbers, credit used and what is left
to send are derived from the log and the positions and never stored beside them.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mq import speed
from mq.errors import MessageTooLarge
from mq.mesh.atomic import append_to_all
from mq.mesh.cutting import MOST_JOINED_BYTES, Cutting, cut, whole
from mq.mesh.large import SMALL_BYTES, Large, Take
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.mesh.feed import Feed

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

    @property
    def takes_turns(self) -> bool:
        """Whether it joins no batch, but has a frame, or chunks, of its own."""
        data = self.data
        return type(data) is not bytes or len(data) > SMALL_BYTES


_new_outgoing = tuple.__new__  # what it calls, with one call less for each message

Logged = Outgoing | tuple[float, bytes | Large]
"""What a log holds: a message, with or without its number."""


View = tuple[int, int, list[Logged]]
"""See `Topic.view`."""

NO_LIMIT: Final = 1 << 62
"""A sequence, or a number of bytes, that is never reached."""


def size_of(messages: list[Logged]) -> int:
    """Bytes of messages."""
    return sum(map(len, map(itemgetter(1), messages)))


class Topic:
    """What this member publishes on one topic.

    Attributes:
        view: The sequence of the first message in the log, the bytes published before
            it, and the log: the newest messages, as far back as some subscriber needs
            them. One tuple, so that trimming it is one step.
        gate: Where small messages that only join a batch pass.
    """

    __slots__ = (
        "_retained",
        "_summed",
        "feeds",
        "gate",
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
        self.view: View = (0, 0, [])
        self._summed = (self.view[2], 0, 0)
        self.gate = speed.Gate()
        self.refresh()

    @property
    def newest(self) -> int:
        """Sequence of the message committed last; -1 where there is none."""
        base, _, log = self.view
        return base + len(log) - 1

    def check_size(self, nbytes: int) -> None:
        """Raises: MessageTooLarge, if that is more than some subscriber takes."""
        small = [
            feed.session.peer
            for feed in self.feeds
            if nbytes > feed.session.peer.max_message_bytes
        ]
        if small:
            limits = ", ".join(f"{p.name!r}: {p.max_message_bytes}" for p in small)
            raise MessageTooLarge(
                f"a message of {nbytes} bytes on {self.name!r} exceeds "
                f"max_message_bytes of {limits}; nobody got it. Raise "
                "max_message_bytes of those members or publish smaller parts"
            )

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
        total += size_of(log[count:])
        self._summed = (log, len(log), total)
        return total

    def message(self, sequence: int, view: View | None = None) -> Outgoing:
        """A message that is in the log.

        Args:
            view: That of before: a log that was trimmed since has all that it had.
        """
        base, _, log = view or self.view
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
            default=NO_LIMIT,
        )
        bounded = [feed for feed in self.feeds if feed.keep is None]
        self.limit_sequence = min(
            (feed.limit_sequence for feed in bounded), default=NO_LIMIT
        )
        self.limit_total = min((feed.limit_total for feed in bounded), default=NO_LIMIT)
        self.gate.close()

    def has_credit(self) -> bool:
        """Whether every keep-all subscriber has room for one more message."""
        base, _, log = self.view
        return base + len(log) < self.limit_sequence and self.total() < self.limit_total

    def waits_for(self) -> list[Feed]:
        """The subscribers that have no credit."""
        return [feed for feed in self.feeds if not feed.has_credit()]

    def cut(self, frames: Frames, cutting: Cutting, take: Take, retain: bool) -> Large:
        """The chunks of a message, as its subscribers' connections carry them best."""
        # A retained one may go to others later, of whom nothing is known.
        feeds = () if retain or cutting.mixes else self.feeds
        most = min((feed.session.whole_bytes for feed in feeds), default=0)
        if frames.nbytes <= most and not frames.areas:
            lead = max(feed.session.lead for feed in feeds)
            large = whole(frames, take, lead)
        else:
            joins = frames.nbytes <= MOST_JOINED_BYTES and (retain or self.feeds)
            large = cut(frames, cutting, most, take if joins else None)
        # Now: later there would be nobody to tell that it cannot be copied.
        if any(large.must_be_staged(feed.session.devices) for feed in self.feeds):
            large.stage(take)
        if retain:
            large.own(take, range(len(large.chunks)))
        return large

    def commit(
        self, published_at: float, data: bytes | Large, retain: bool
    ) -> Outgoing:
        """Number the message and put it into the log, in one step."""
        self.gate.close()  # what it knows of credit would not be true any more
        base, _, log = self.view
        message = _new_outgoing(Outgoing, (published_at, data, base + len(log)))
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
            before = total - size_of(left) if left else total
            self.view = (base + count, before, left)
            self._summed = (left, len(left), total)  # lets the old log go
            self.gate.close()

    def drop_all(self) -> None:
        """Let go of the memory of all messages; the counters stay."""
        self._retained.clear()
        total = self.total()
        left: list[Logged] = []
        self.view = (self.newest + 1, total, left)
        self._summed = (left, 0, total)
        self.gate.close()

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
        if self.limit_message < SMALL_BYTES or not self.feeds:
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
        log = self.view[2]
        self.gate.open(log, messages - 1, nbytes, wall + until - now, SMALL_BYTES)
