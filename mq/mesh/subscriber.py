"""What this member is subscribed to, and what has arrived."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mq.borrowing import Returns
from mq.errors import MessagesLost, MessageTooLarge
from mq.mesh import wire
from mq.mesh.atomic import append_each
from mq.mesh.copying import Borrow, Copies
from mq.mesh.ended import NOTHING_CAME, Ended
from mq.mesh.inbox import Inbox
from mq.mesh.incoming import Arrivals, Run, Source, uncounted
from mq.mesh.large import Take
from mq.mesh.subscription import Subscription
from mq.mesh.wire import Chunk, Malformed, Subscribed
from mq.speed import arrive_alone
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.devices import Piece
    from mq.mesh.session import Session

SUBSCRIPTIONS_PER_FRAME: Final = 200
"""Keeps a SUBSCRIBE frame below 64 KiB with the longest topics."""
MAX_REMEMBERED: Final = 1024
"""Publishers that were given up without proof and whose streams are remembered."""


class Subscriber:
    """Subscriptions of this member, by topic and by id, and its inbox.

    Attributes:
        owed: Sessions for which `take` queued credit, until the caller sends it.
        returns: Views of publishers' memory that have died, until `give_back`.
        copies: Messages that are being copied from there.
        arrive_alone: See `mq.speed`: here for a session, a frame of its, and the time.
    """

    def __init__(self, take: Take, max_message_bytes: int, returns: Returns) -> None:
        self.returns = returns
        self.copies = Copies(take)
        self.topics: dict[str, Subscription] = {}
        self.inbox = Inbox()
        self._by_id: dict[int, Subscription] = {}
        self._next_id = 1
        self._take = take
        self._limit = max_message_bytes
        known = self._by_id, self._limit, self.inbox
        self.arrive_alone = functools.partial(arrive_alone, *known)
        self._remembered: dict[str, dict[str, Ended]] = {}
        self.owed: list[Session] = []

    def subscribe(
        self,
        topic: str,
        keep: int | None,
        depth: int,
        window_bytes: int,
        zero_copy: bool,
        device: str | None,
        stats: TopicStats,
        sessions: Sequence[Session],
    ) -> Subscription:
        """Begin a subscription and tell every peer."""
        subscription = Subscription(
            self._next_id, topic, keep, depth, window_bytes, zero_copy, device, stats
        )
        self._next_id += 1
        self._by_id[subscription.id] = subscription
        self.topics[topic] = subscription
        for session in sessions:
            self._tell(subscription, session)
        return subscription

    @staticmethod
    def _tell(subscription: Subscription, session: Session) -> None:
        session.control(wire.SUBSCRIBE, [subscription.add_source(session)])
        subscription.sources[session].told = True

    def unsubscribe(self, topic: str, sessions: Sequence[Session]) -> None:
        """End a subscription; what has arrived of it is dropped."""
        subscription = self.topics.pop(topic, None)
        if subscription is not None:
            self._end(subscription, sessions)

    def _end(self, subscription: Subscription, sessions: Sequence[Session]) -> None:
        self.inbox.end(subscription)
        subscription.end()
        for session in sessions:
            session.control(wire.UNSUBSCRIBE, subscription.id)
        for remembered in self._remembered.values():
            remembered.pop(subscription.topic, None)
        del self._by_id[subscription.id]

    def discard_all(self) -> None:
        """Drop and count all messages of the inbox."""
        self.inbox.drop(self.topics.values())

    def introduce(self, session: Session) -> None:
        """Tell a new session's peer all subscriptions, in its first frames."""
        self.inbox.touched.update(dict.fromkeys(self.topics.values()))  # other shares
        ended = self._remembered.get(session.peer.incarnation, {})
        requests = [
            s.add_source(session, ended.get(s.topic, NOTHING_CAME).newest)
            for s in self.topics.values()
        ]
        session.introduce(
            requests[start : start + SUBSCRIPTIONS_PER_FRAME]
            for start in range(0, max(1, len(requests)), SUBSCRIPTIONS_PER_FRAME)
        )
        for subscription in self.topics.values():
            subscription.sources[session].told = True

    def remove(self, session: Session, *, may_return: bool) -> None:
        """The peer is gone; its messages in the inbox stay, as far as they are there.

        Args:
            may_return: It may only have been stalled: remember where its streams
                ended, so that a later session can tell what was lost in between.
        """
        self.inbox.cut(session)
        ended: dict[str, Ended] = {}
        for subscription in self.topics.values():
            source = subscription.sources.get(session)
            if source is not None and source.confirmed:
                ended[subscription.topic] = Ended.of(source)
        incarnation = session.peer.incarnation
        if may_return:
            self._remembered.setdefault(incarnation, {}).update(ended)
            while len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        else:
            self._remembered.pop(incarnation, None)
        for subscription in self.topics.values():
            source = subscription.sources.get(session)
            if source is not None:
                if subscription.keep is None and source.unread()[0]:
                    subscription.orphans.append(source)
                subscription.drop_source(session)
                self._divide(subscription, None)

    def repair(self, sessions: Sequence[Session]) -> None:
        """Derive again what an exception may have left undone."""
        alive = set(sessions)
        unread = self.inbox.runs()
        for subscription in list(self._by_id.values()):
            if self.topics.get(subscription.topic) is not subscription:
                self._end(subscription, sessions)
                continue
            for session in subscription.sources.keys() - alive:
                subscription.drop_source(session)
            for session in sessions:
                source = subscription.sources.get(session)
                if source is None or not source.told:
                    self._tell(subscription, session)
                elif subscription.keep is None:
                    source.count_again(*uncounted(unread.get(source, ())))
                    # What was granted or asked may not have been sent.
                    if source.asked is None:
                        session.control(wire.CREDIT, [source.credit()])
                    else:
                        session.control(wire.RECLAIM, [source.asked])
            if subscription.keep is None:
                for source in list(subscription.sources.values()):
                    self.grant(source)

    def unconfirmed(self, subscription: Subscription) -> list[Session]:
        """Peers that have not acknowledged a subscription, and still will."""
        if self.topics.get(subscription.topic) is not subscription:
            return []  # another thread has ended it: no answer counts any more
        return [s for s, source in subscription.sources.items() if not source.confirmed]

    # -- what peers send ----------

    def subscribed(self, session: Session, answers: Sequence[Subscribed]) -> None:
        """A publisher acknowledged; report what was lost since its last session."""
        remembered = self._remembered.get(session.peer.incarnation, {})
        begun: dict[Source, Arrivals] = {}
        notices: list[MessagesLost | MessageTooLarge] = []
        refused: list[Source] = []
        lost: dict[str, int] = {}
        reason = ""  # of all alike: they ended together
        for answer in answers:
            known = self._by_id.get(answer.subscription)
            source = None if known is None else known.sources.get(session)
            if source is None or source.confirmed or source in begun:
                continue
            topic = source.subscription.topic
            newest, owed, why, starved = remembered.get(topic, NOTHING_CAME)
            first = max(answer.next_sequence, owed + 1)
            begun[source] = source.begin(first, answer.retained, newest)
            if answer.withheld:
                refused.append(source)
                large = (session.name, topic, answer.withheld, self._limit)
                notices.append(MessageTooLarge.retained(*large))
            if topic not in remembered:
                continue
            told = answer.retained > owed or bool(answer.withheld)
            count = max(0, answer.next_sequence - 1 - owed - told)
            if source.subscription.keep is not None:
                source.subscription.stats.dropped += count
                count = 0
            if count + starved > 0:
                lost[topic], reason = count + starved, why
        queues: tuple[deque[Any], ...] = tuple(source.arrivals for source in begun)
        items: tuple[object, ...] = tuple(begun.values())
        if lost:
            count = sum(lost.values())
            notices.append(MessagesLost(session.name, sorted(lost), count, reason))
        queues += (self.inbox.fifo,) * len(notices)
        append_each(queues, (*items, *notices))
        for source in begun:
            topic = source.subscription.topic
            remembered.pop(topic, None)
            source.subscription.stats.lost += lost.get(topic, 0) + (source in refused)

    def returned(self, session: Session, answers: Sequence[wire.Reclaim]) -> None:
        """A publisher gave credit back; others get it."""
        for answer in answers:
            subscription = self._by_id.get(answer.subscription)
            source = subscription and subscription.sources.get(session)
            if source and subscription and subscription.returned(source, answer):
                self.grant(source)

    def data(self, session: Session, head: bytes | memoryview) -> None:
        """A batch of small messages."""
        # Its messages are at any address: who reads arrays in place copies them.
        view = memoryview(head).toreadonly()
        for subscription, first, times, areas in wire.runs(view, wire.HEADER_BYTES):
            source = self._source(session, subscription)
            largest = max(map(len, areas))
            if largest > self._limit:
                raise Malformed(f"a message of {largest} bytes is over the limit")
            if source is not None:
                source.arrived(self.inbox.fifo, Run(source, first, times, areas))
                self._activate(source)

    def _activate(self, source: Source) -> None:
        """A publisher that begins to publish gets the share of those that do."""
        if not source.active:
            source.active = True
            if source.subscription.keep is None:
                self.grant(source)

    def _source(self, session: Session, subscription: int) -> Source | None:
        known = self._by_id.get(subscription)
        if known is None:
            if subscription >= self._next_id:
                raise Malformed(f"subscription {subscription} never existed")
            return None
        source = known.sources.get(session)
        if source is None or not source.arrivals:
            raise Malformed(f"message for unconfirmed subscription {subscription}")
        return source

    def place(
        self,
        session: Session,
        chunk: Chunk,
        nbytes: int,
        sizes: tuple[int, ...] = (),
        body: memoryview | None = None,
    ) -> memoryview | None:
        """Where the body of a chunk goes; None if nobody wants the chunk.

        Args:
            sizes: Of the message's areas on devices.
            body: All of the message, to be kept where it is.
        """
        source = self._source(session, chunk.subscription)
        if source is None:
            return None
        return source.place(chunk, nbytes, self._limit, self._take, sizes, body)

    def land(self, session: Session, place: wire.Piece, piece: Piece) -> None:
        """A tensor has arrived, for which there was a place."""
        source = self._source(session, place.chunk.subscription)
        if source is not None:
            source.land(place, piece)

    def placed(self, session: Session, chunk: Chunk, nbytes: int, last: bool) -> None:
        """The body of a chunk is in its place."""
        source = self._source(session, chunk.subscription)
        if source is not None:
            source.placed(chunk, nbytes, last, self.inbox.fifo)
            if last:
                self._activate(source)

    def lent(
        self, session: Session, lent: wire.Lent, filling: bool, borrow: Borrow
    ) -> None:
        """A message lies in its publisher's memory.

        Args:
            filling: It may still be on its way there.
        """
        source = self._source(session, lent.subscription)
        in_place = False
        if source is not None:
            fifo = self.inbox.fifo
            in_place = source.borrow(
                lent,
                filling,
                self._limit,
                fifo,
                borrow,
                self._take,
                self.returns,
                self.copies,
            )
            self._activate(source)
        if not in_place:
            session.check_answers()
            release = wire.Release(lent.subscription, lent.sequence)
            session.control(wire.RELEASE, [release])

    def give_back(self) -> None:
        """Tell publishers of views of their memory that have died.

        Repeated after an interrupt it may tell them again, which is harmless.
        """
        returned = self.returns.ended()
        releases: dict[Session, list[wire.Release]] = {}
        for ending in returned:
            key = ending.key
            source: Source = key.source
            if source.has_returned(key) and source.session.alive:
                subscription = source.subscription
                if subscription.zero_copy:
                    ending.mapping.forget_writes(ending.offset, ending.nbytes)
                release = wire.Release(subscription.id, key.sequence)
                releases.setdefault(source.session, []).append(release)
        for session, found in releases.items():
            for start in range(0, len(found), wire.MOST_ENTRIES):
                part = found[start : start + wire.MOST_ENTRIES]
                session.control(wire.RELEASE, part)
        for ending in returned:
            key = ending.key
            if key.source.has_returned(key):
                del key.source.lent[key.sequence]
        self.returns.forget(returned)

    # -- what recv takes ----------

    def take(self) -> Any:
        """What `Inbox.take` returns; grants credit where it is due.

        An exception takes nothing.
        """
        inbox = self.inbox
        if not inbox.fifo:
            return None
        try:
            item = inbox.take()
            source = inbox.counted
            if source is not None:
                inbox.counted = None
                if (
                    source.consumed_messages >= source.grant_at_messages
                    or source.consumed_bytes >= source.grant_at_bytes
                ) and source.subscription.keep is None:
                    self.grant(source)
            return item
        except BaseException:
            inbox.undo_take()
            raise

    def grant(self, source: Source) -> None:
        """Tell the publisher, if it is still there, and others of more credit."""
        subscription = source.subscription
        there = subscription.sources.get(source.session) is source
        self._divide(subscription, source if there else None)

    def tick(self) -> None:
        """Called now and then: what nothing else would see to."""
        self.returns.look_for_children()
        # The others have what they may have since they were last looked at.
        for subscription in self.inbox.touched:
            known = self.topics.get(subscription.topic)
            if known is subscription and known.keep is None:
                self._tell_credit(known.fill_up())
        self.inbox.touched.clear()

    def _tell_credit(self, given: Sequence[Source]) -> None:
        for source in given:
            source.session.control(wire.CREDIT, [source.credit()])
            self.owed.append(source.session)

    def _divide(self, subscription: Subscription, source: Source | None) -> None:
        self.inbox.touched[subscription] = None
        given, asked = subscription.divide(source)
        self._tell_credit(given)
        for other in asked:
            other.session.control(wire.RECLAIM, [other.asked])
            self.owed.append(other.session)
