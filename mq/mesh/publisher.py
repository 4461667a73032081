"""What this member publishes, and to whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mq.errors import CodecError
from mq.log import Log
from mq.mesh import wire
from mq.mesh.atomic import append_each
from mq.mesh.cutting import Cutting
from mq.mesh.feed import Feed
from mq.mesh.large import INLINE_BYTES, Large, Take
from mq.mesh.outgoing import Outgoing, Topic
from mq.mesh.poller import cores
from mq.mesh.session import Session
from mq.mesh.wire import Begun, Malformed, Subscribe, Subscribed
from mq.message import MAX_SUBSCRIPTIONS, MAX_TOPIC_BYTES
from mq.safe_types import PICKLE
from mq.speed import send_alone

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.segments import Block

logger = Log(__name__)

_REGISTER = "Call mq.add_safe_types there, too."
_REGISTER_OR_PICKLE = (
    "Call mq.add_safe_types here and there for what travels as a pickle, or connect "
    "there with allow_pickle=True, too."
)
_send_alone = send_alone or Session.send_alone
_TRIM_EVERY = 64
"""Messages after which the log is trimmed even if nothing leaves."""


class Publisher:
    """Topics of this member and the feeds of their subscribers.

    Attributes:
        topics: All that some peer is subscribed to, and those in `used`.
        used: Those that this member has named itself; others go with their last feed.
    """

    def __init__(self, take: Take, cutting: Cutting) -> None:
        self.topics: dict[str, Topic] = {}
        self.used: dict[str, Topic] = {}
        self._take = take
        self._cutting = cutting
        self._to_fill: tuple[Block, Frames] | None = None

    def topic(self, name: str) -> Topic:
        """The topic of this name, made when first asked for."""
        topic = self.used.get(name)
        if topic is None:
            topic = self.used[name] = self._listed(name)
        return topic

    def _listed(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = Topic(name)
        return topic

    def check(self, topic: Topic, frames: Frames) -> None:
        """Refuse what some subscriber would refuse.

        Raises:
            MessageTooLarge, CodecError: Naming the members.
        """
        topic.check_size(frames.nbytes)
        if not frames.needs:
            return
        for feed in topic.feeds:
            missing = frames.needs - feed.session.accepts
            if missing:
                names = ", ".join(sorted(missing))
                remedies = [_REGISTER] if missing - {PICKLE} else []
                remedies += [_REGISTER_OR_PICKLE] if PICKLE in missing else []
                raise CodecError(
                    f"{feed.session.name!r}, subscribed to {topic.name!r}, does not "
                    f"accept {names}; nobody got the message. {' '.join(remedies)}"
                )

    def publish(
        self,
        topic: Topic,
        frames: Frames,
        published_at: float,
        retain: bool,
        now: float,
        urgent: bool = False,
        block: Block | None = None,
    ) -> Outgoing:
        """Commit a message and send what can be sent of it.

        The caller has seen that there is credit, and calls `own` in the end.

        Args:
            published_at: Unix time.
            now: The mesh's time.
            urgent: Send at once instead of joining a batch.
            block: All of the message in memory that some subscribers read in place. If
                it has a counter, they are told of it before it is written.
        """
        data: bytes | Large
        if block is not None:
            data = Large(frames.nbytes, [], block, self._cutting.chunk_bytes)
        elif frames.nbytes <= INLINE_BYTES and not frames.areas:
            data = frames.pack()
        else:
            data = topic.cut(frames, self._cutting, self._take, retain)
        if self._to_fill is not None:  # as two interrupts have kept it from being so
            self.fill()
        if block is not None:
            self._to_fill = (block, frames)
        message = topic.commit(published_at, data, retain)
        for feed in topic.feeds:
            session = feed.session
            if not _send_alone(session, feed, message, now):
                session.offer(feed)
                session.pump(now, urgent)
        if not topic.feeds:
            topic.stats.nobody += 1
            topic.trim()
        elif (
            message.takes_turns
            or len(topic.view[2]) == 1
            or not len(topic.view[2]) % _TRIM_EVERY
        ):
            topic.trim()
        if self._to_fill is not None:
            self.fill()
        return message

    def fill(self) -> None:
        """Write the message that was announced, if that is still to be done."""
        # With the mesh's lock: none but who follows it is to find it half there.
        if self._to_fill is not None:
            block, frames = self._to_fill
            block.fill(frames.segments())
            self._to_fill = None

    @staticmethod
    def free_received(
        topic: Topic, message: Outgoing, sessions: Iterable[Session]
    ) -> None:
        """Let go of the chunks of a large message that every subscriber has."""
        assert isinstance(message.data, Large)
        if message.data.owned:  # for later subscribers, too, as it is retained
            return
        message.data.free_before(min(s.first_needed(topic, message) for s in sessions))

    def own(
        self,
        topic: Topic,
        message: Outgoing,
        sessions: Sequence[Session],
        most_bytes: int | None = None,
    ) -> bool:
        """Copy what of a large message is still needed, or so many bytes of it.

        Returns:
            Whether that was all, so that the caller's memory is free.
        """
        large = message.data
        if not isinstance(large, Large) or large.owned:
            return True
        needed = set().union(*(s.chunks_needed(topic, message) for s in sessions))
        if not large.own(self._take, needed, most_bytes):
            return False
        for session in sessions:
            session.let_go()
        return True

    def close_gates(self) -> None:
        """Have the next message on every topic looked at."""
        for topic in list(self.topics.values()):
            topic.gate.close()

    def fill_pieces(self, frames: Frames) -> None:
        """Copy what is on devices, which `publish` would do else."""
        for area in frames.areas:
            area.pieces(self._cutting.piece_bytes)

    def carried(self, topic: Topic) -> set[str] | None:
        """Devices whose tensors some subscriber gets from there; None: there is none.

        For those who do not get them so they are copied into host memory once.
        """
        found = [feed.session.devices or {} for feed in topic.feeds]
        return set().union(*found) if found else None

    # -- what peers ask for ----------

    def subscribe(self, session: Session, requests: Sequence[Subscribe]) -> None:
        """A peer subscribes; it is told where its stream begins.

        The answer and the feeds come into being in one step, so that a message
        published next is either before the answer or in the stream.
        """
        feeds: dict[int, Feed] = {}
        answers: list[Begun] = []
        for request in self._new(session, requests):
            topic = self._listed(request.topic)
            feed = Feed(session, topic, request)
            if feed.late is not None and not self._stage(feed.late.data, feed):
                feed = Feed(session, topic, request)
            feeds[request.subscription] = feed
            retained = -1 if feed.late is None else feed.late.sequence
            answer = request.subscription, feed.joined, retained
            late = feed.withheld
            answers.append(Subscribed(*answer, late) if late else Begun(*answer))
        if not answers:
            return
        frame = session.control_frame(wire.SUBSCRIBED, answers)
        append_each(
            (session.frames, *(feed.topic.feeds for feed in feeds.values())),
            (frame, *feeds.values()),
        )
        session.number = frame.number
        session.count_answer(frame)
        for feed in feeds.values():
            self._adopt(feed)

    def _stage(self, data: bytes | Large, feed: Feed) -> bool:
        """See that a peer can be sent what is retained, which is dropped else."""
        try:
            if isinstance(data, Large) and data.must_be_staged(feed.session.devices):
                data.stage(self._take)
        except CodecError as error:
            feed.topic.retained = None
            said = "the retained message on %r is dropped: %s"
            logger.warning(said, feed.topic.name, str(error))
            return False
        return True

    def _new(self, session: Session, requests: Sequence[Subscribe]) -> list[Subscribe]:
        """Those not sent again. Raises: Malformed, if one of them cannot be met."""
        found = [r for r in requests if r.subscription not in session.feeds]
        if len(session.feeds) + len(found) > MAX_SUBSCRIPTIONS:
            raise Malformed("too many subscriptions")
        ids, names = {r.subscription for r in found}, {r.topic for r in found}
        if len(ids) < len(found) or len(names) < len(found):
            raise Malformed("the same subscription twice")
        for name in names:
            if not 0 < len(name.encode()) <= MAX_TOPIC_BYTES:
                raise Malformed(f"a subscription to a topic of {len(name)} characters")
            # Each change of a topic takes as long as it has subscriptions.
            topic = self.topics.get(name)
            if topic and any(feed.session is session for feed in topic.feeds):
                raise Malformed(f"two subscriptions to {name!r}")
        return found

    @staticmethod
    def _adopt(feed: Feed) -> None:
        feed.session.feeds[feed.subscription] = feed
        feed.topic.refresh()
        if feed.head() is not None:
            feed.session.offer(feed)

    def unsubscribe(self, session: Session, subscription: int) -> None:
        """A peer unsubscribes; publishers no longer wait for it."""
        feed = session.feeds.get(subscription)
        if feed is not None:
            self._drop(feed)
            del session.feeds[subscription]

    @staticmethod
    def credit(session: Session, grants: Sequence[wire.Credit]) -> None:
        """A peer has taken messages; totals only grow, so a repetition is harmless."""
        found = [(f, g) for g in grants if (f := session.feeds.get(g.subscription))]
        for feed, grant in found:
            feed.credit_messages = max(feed.credit_messages, grant.messages)
            feed.credit_bytes = max(feed.credit_bytes, grant.nbytes)
        for topic in {feed.topic for feed, _ in found}:
            topic.refresh()

    @staticmethod
    def reclaim(session: Session, requests: Sequence[wire.Reclaim]) -> None:
        """A peer asks for credit back that others need; it gets what is not used."""
        found = [(f, r) for r in requests if (f := session.feeds.get(r.subscription))]
        answers = [
            wire.Reclaim(r.subscription, r.serial, *f.give_back(r.messages, r.nbytes))
            for f, r in found
        ]
        for topic in {feed.topic for feed, _ in found}:
            topic.refresh()
        if answers:
            session.control(wire.RETURNED, answers)

    @staticmethod
    def is_read_in_place(topic: Topic) -> bool:
        """Whether some subscriber reads large messages in this process's memory."""
        return any(feed.session.lends for feed in topic.feeds)

    @staticmethod
    def is_followed(topic: Topic) -> bool:
        """Whether all subscribers copy messages while they are being written.

        Each needs a processor for that, or the writer would wait for them.
        """
        return 0 < len(topic.feeds) < cores() and all(
            feed.follows and feed.session.lends and feed.late is None
            for feed in topic.feeds
        )

    @staticmethod
    def borrowers(topic: Topic) -> list[Session]:
        """Subscribers to a topic that keep all and hold memory of this process by it.

        Nobody else makes its publisher wait: neither those who keep the last, nor those
        who hold messages of other topics.
        """
        sessions = {feed.session for feed in topic.feeds}
        return [session for session in sessions if session.is_borrower(topic)]

    def release(self, session: Session, releases: Sequence[wire.Release]) -> None:
        """A peer has no view of these messages' memory any more."""
        for release in releases:
            session.lent.pop((release.subscription, release.sequence), None)

    def remove(self, session: Session) -> None:
        """The peer is gone."""
        for feed in session.feeds.values():
            feed.topic.stats.undelivered += feed.lacks(feed.mark())
            self._drop(feed)
        session.feeds.clear()

    def _drop(self, feed: Feed) -> None:
        feed.end()  # first, so that nothing looks for its messages after an interrupt
        feed.session.busy.pop(feed, None)
        if feed in feed.topic.feeds:
            feed.topic.feeds.remove(feed)
            feed.topic.refresh()
        feed.topic.trim()
        self._unlist(feed.topic)

    def _unlist(self, topic: Topic) -> None:
        """Forget a topic that nobody has to do with any more."""
        if not topic.feeds and topic.name not in self.used:
            self.topics.pop(topic.name, None)

    def repair(self, sessions: Sequence[Session]) -> None:
        """Derive again what an exception may have left undone."""
        alive = set(sessions)
        for topic in list(self.topics.values()):
            for feed in list(topic.feeds):
                if feed.session in alive:
                    self._adopt(feed)
                else:
                    self._drop(feed)
            self._unlist(topic)
            topic.refresh()
            topic.total()  # it may still refer to messages that have left the log
            self._own_all(logged[1] for logged in topic.view[2])
        for session in sessions:
            session.let_go()
            self._own_all(frame.large for frame in session.frames)
            for feed in session.feeds.values():
                if feed.progress is not None:
                    self._own_all([feed.progress[0].data])

    def _own_all(self, found: Iterable[bytes | Large | None]) -> None:
        for large in found:
            if isinstance(large, Large):
                with contextlib.suppress(MemoryError):  # `publish` waits, then
                    large.own(self._take, range(len(large.chunks)))

    # -- questions ----------

    def subscribers(self, name: str) -> list[str]:
        """Names of the peers subscribed to a topic."""
        topic = self.topics.get(name)
        return [] if topic is None else sorted(f.session.name for f in topic.feeds)

    @staticmethod
    def unsettled(marks: Sequence[tuple[Feed, int]]) -> list[tuple[Feed, int]]:
        """Those marks that have not been reached."""
        return [
            (feed, sequence)
            for feed, sequence in marks
            if feed.received < sequence and feed in feed.topic.feeds
        ]
