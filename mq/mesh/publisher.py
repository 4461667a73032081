"""What this member publishes, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mq.errors import CodecError, MessageTooLarge
from mq.mesh import wire
from mq.mesh.atomic import append_each
from mq.mesh.outgoing import INLINE_BYTES, Chunk, Feed, Outgoing, Take, Topic, cut
from mq.mesh.wire import Malformed, Subscribe, Subscribed

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.mesh.session import Session

_NO_CHUNKS: list[Chunk | None] = []  # shared by all small messages, never changed
MAX_FEEDS_PER_PEER = 65536
"""Subscriptions that one peer may have."""


class Publisher:
    """Topics of this member and the feeds of their subscribers."""

    def __init__(self, take: Take, chunk_bytes: int) -> None:
        self.topics: dict[str, Topic] = {}
        self._take = take
        self._chunk_bytes = chunk_bytes

    def topic(self, name: str) -> Topic:
        """The topic of this name, made when first asked for."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = Topic(name)
        return topic

    def check(self, topic: Topic, frames: Frames) -> None:
        """Refuse what some subscriber would refuse.

        Raises:
            MessageTooLarge, CodecError: Naming the members.
        """
        nbytes = frames.nbytes
        small = [
            feed.session
            for feed in topic.feeds
            if nbytes > feed.session.peer.max_message_bytes
        ]
        if small:
            limits = ", ".join(f"{s.name!r}: {s.peer.max_message_bytes}" for s in small)
            raise MessageTooLarge(
                f"a message of {nbytes} bytes on {topic.name!r} exceeds "
                f"max_message_bytes of {limits}; nobody got it. Raise "
                "max_message_bytes of those members or publish smaller parts"
            )
        if not frames.needs:
            return
        for feed in topic.feeds:
            missing = frames.needs - feed.session.accepts
            if missing:
                names = ", ".join(sorted(missing))
                raise CodecError(
                    f"{feed.session.name!r}, subscribed to {topic.name!r}, does not "
                    f"accept {names}; nobody got the message. Call "
                    "mq.add_safe_types there, or connect with allow_pickle=True on "
                    "both sides"
                )

    def publish(
        self, topic: Topic, frames: Frames, published_at: float, retain: bool
    ) -> Outgoing:
        """Commit a message; the caller has seen that there is credit."""
        data: bytes | None = None
        chunks = _NO_CHUNKS
        nbytes = frames.nbytes
        if nbytes <= INLINE_BYTES:
            data = frames.pack()
        else:
            chunks = cut(frames, self._chunk_bytes, self._take)
        message = topic.commit(published_at, nbytes, data, chunks, retain, self._take)
        stats = topic.stats
        stats.published += 1
        stats.published_bytes += nbytes
        if not topic.feeds:
            stats.nobody += 1
        for feed in topic.feeds:
            feed.session.offer(feed, nbytes)
        return message

    @staticmethod
    def free_received(message: Outgoing, sessions: Sequence[Session]) -> None:
        """Let go of the chunks of a large message that every subscriber has."""
        message.free_before(min(session.first_needed(message) for session in sessions))

    def release(self, message: Outgoing, sessions: Sequence[Session]) -> None:
        """Copy what of a large message is still needed; the caller's memory is free."""
        if message.owned:
            return
        needed: set[int] = set()
        for session in sessions:
            needed |= session.chunks_needed(message)
        message.own(self._take, needed)

    # -- what peers ask for ----------

    def subscribe(self, session: Session, requests: Sequence[Subscribe]) -> None:
        """A peer subscribes; it is told where its stream begins.

        The answer and the feeds come into being in one step, so that a message
        published next is either before the answer or in the stream.
        """
        feeds: dict[int, Feed] = {}
        answers = []
        for request in requests:
            if request.subscription in session.feeds:
                continue  # an interrupt made the peer's frame come again
            if len(session.feeds) + len(feeds) >= MAX_FEEDS_PER_PEER:
                raise Malformed("too many subscriptions")
            if request.subscription in feeds:
                raise Malformed("the same subscription twice")
            topic = self.topic(request.topic)
            feed = feeds[request.subscription] = Feed(
                session,
                topic,
                request.subscription,
                request.keep,
                request.messages,
                request.nbytes,
                request.seen,
            )
            retained = feed.queue[0].sequence if feed.queue else -1
            answers.append(Subscribed(request.subscription, feed.joined, retained))
        if not answers:
            return
        frame = session.control_frame(wire.SUBSCRIBED, answers)
        append_each(
            (session.frames, *(feed.topic.feeds for feed in feeds.values())),
            (frame, *feeds.values()),
        )
        session.number = frame.number
        for feed in feeds.values():
            self._adopt(feed)

    @staticmethod
    def _adopt(feed: Feed) -> None:
        feed.session.feeds[feed.subscription] = feed
        feed.topic.refresh()
        if feed.queue:
            feed.session.offer(feed, 0)

    def unsubscribe(self, session: Session, subscription: int) -> None:
        """A peer unsubscribes; publishers no longer wait for it."""
        feed = session.feeds.get(subscription)
        if feed is not None:
            self._drop(feed)
            del session.feeds[subscription]

    def credit(self, session: Session, grants: Sequence[wire.Credit]) -> None:
        """A peer has taken messages; totals only grow, so a repetition is harmless."""
        for grant in grants:
            feed = session.feeds.get(grant.subscription)
            if feed is not None:
                feed.credit_messages = max(feed.credit_messages, grant.messages)
                feed.credit_bytes = max(feed.credit_bytes, grant.nbytes)
                feed.topic.refresh()

    def remove(self, session: Session) -> None:
        """The peer is gone."""
        for feed in session.feeds.values():
            feed.topic.stats.undelivered += feed.undelivered()
            self._drop(feed)
        session.feeds.clear()

    @staticmethod
    def _drop(feed: Feed) -> None:
        if feed in feed.topic.feeds:
            feed.topic.feeds.remove(feed)
            feed.topic.refresh()
        feed.queue.clear()
        feed.progress = None

    def repair(self, sessions: Sequence[Session]) -> None:
        """Derive again what an exception may have left undone."""
        alive = set(sessions)
        for topic in self.topics.values():
            for feed in list(topic.feeds):
                if feed.session in alive:
                    self._adopt(feed)
                else:
                    self._drop(feed)
            topic.refresh()
        for session in sessions:
            for message in session.large_messages():
                self.release(message, sessions)

    # -- questions ----------

    def subscribers(self, name: str) -> list[str]:
        """Names of the peers subscribed to a topic."""
        topic = self.topics.get(name)
        return [] if topic is None else sorted(f.session.name for f in topic.feeds)

    def marks(self) -> list[tuple[Feed, int]]:
        """What `flush` waits for: every feed and the last message committed to it."""
        return [
            (feed, feed.mark())
            for topic in self.topics.values()
            for feed in topic.feeds
        ]

    @staticmethod
    def unsettled(marks: Sequence[tuple[Feed, int]]) -> list[tuple[Feed, int]]:
        """Those marks that have not been reached."""
        return [
            (feed, sequence)
            for feed, sequence in marks
            if feed.received < sequence and feed in feed.topic.feeds
        ]
