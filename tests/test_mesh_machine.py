"""Four members or more, two topics, mixed histories, and everything that goes wrong."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scripted import Parcel, ScriptedConn, numbered
from world import INLINE_BYTES, Got, Member, World

from mq.errors import MessagesLost
from mq.lending import BLOCK_BYTES
from mq.mesh.incoming import Source
from mq.mesh.session import Session
from mq.mesh.subscription import Subscription
from mq.mesh.wire import Subscribed

NAMES = ("a", "b", "c", "d", "e")
TOPICS = ("t", "u")
PEER_TIMEOUT = 4.0
PIECE_BYTES = 500
FIRST_BYTES, LEAST_BYTES = 400, 150  # of a message over a new, or a slow, connection
TURN_BYTES = 700  # a few chunks: most large messages take several turns
HISTORIES = (
    (None, 1, 1 << 20),
    (None, 3, 1 << 20),
    (None, 40, 1 << 20),
    (None, 1000, 700),
    (1, 1, 1),
    (3, 1, 1),
)
"""keep, depth and window_bytes of a subscription."""

names = st.sampled_from(NAMES)
topics = st.sampled_from(TOPICS)
sizes = st.sampled_from((20, INLINE_BYTES, INLINE_BYTES + 1, 300, 1000, 3000))
few = st.integers(0, 3)


class Reading:
    """What one subscription has received, by incarnation of the publisher."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.last: dict[str, int] = {}
        self.first: dict[str, int] = {}


class MeshMachine(RuleBasedStateMachine):
    """The rules of the contract's clauses, checked after every step and at the end."""

    def __init__(self) -> None:
        super().__init__()
        lends = {"a": 1 << 20, "b": 3 * BLOCK_BYTES, "d": BLOCK_BYTES}
        carries = {"a": 2, "b": 1, "c": 2, "e": 2}
        self.world = World(
            peer_timeout=PEER_TIMEOUT,
            lends=lends,
            carries=carries,
            wholes="bce",
            leads=(8, 0),
        )
        self.published: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self.readings: dict[tuple[str, str], Reading] = {}
        self.gaps: dict[tuple[str, str], int] = defaultdict(int)
        self.lost: dict[tuple[str, str], int] = defaultdict(int)
        self.inexact: set[tuple[str, str]] = set()
        self.delivered: dict[tuple[str, str], list[Parcel]] = defaultdict(list)
        self.serial = 0
        self.world.net.watcher = self._remember

    @initialize(
        count=st.integers(4, 5),
        histories=st.lists(st.sampled_from(HISTORIES), min_size=6, max_size=6),
    )
    def begin(self, count: int, histories: list[tuple[int | None, int, int]]) -> None:
        for name in NAMES[:count]:
            self._join(name)
        self.world.settle()
        for number, history in enumerate(histories):
            self.subscribe(NAMES[number % 3], TOPICS[number // 3], history)
        self.world.settle()

    # -- help ----------

    def _running(self, name: str) -> Member | None:
        member = self.world.members.get(name)
        return None if member is None or member.stalled else member

    def _remember(self, conn: ScriptedConn, parcel: Parcel) -> None:
        for member in self.world.members.values():
            session = member.mesh.conns.get(conn)
            if session is not None and numbered(parcel):
                kept = self.delivered[member.incarnation, session.id]
                kept.append(parcel)
                del kept[:-20]

    def _observe(self) -> None:
        """Note where each confirmed stream begins: from there on nothing is missing."""
        for reading in self.readings.values():
            for session, source in reading.subscription.sources.items():
                incarnation = session.peer.incarnation
                if source.confirmed and incarnation not in reading.first:
                    assert source.first <= self._count(incarnation, reading)
                    reading.first[incarnation] = source.first

    def _count(self, incarnation: str, reading: Reading) -> int:
        return len(self.published[incarnation, reading.subscription.topic])

    def _take(self, member: Member) -> bool:
        item = member.recv()
        if item is None:
            return False
        self._observe()
        if isinstance(item, MessagesLost):
            assert item.count > 0
            self.lost[member.incarnation, item.sender] += item.count
            if not all((member.name, topic) in self.readings for topic in item.topics):
                self.inexact.add((member.incarnation, item.sender))
        else:
            self._check(member, item)
        return True

    def _check(self, member: Member, got: Got) -> None:
        reading = self.readings[member.name, got.topic]
        assert got.payload == self.published[got.incarnation, got.topic][got.sequence]
        assert got.incarnation != member.incarnation, "an echo"
        last = reading.last.get(got.incarnation, -1)
        assert got.sequence > last, "doubled or out of order"
        reading.last[got.incarnation] = got.sequence
        if reading.subscription.keep is None:
            expected = max(last + 1, reading.first[got.incarnation])
            missing = max(0, got.sequence - expected)
            self.gaps[member.incarnation, got.sender] += missing
            assert missing == 0 or self.lost[member.incarnation, got.sender] > 0

    def _join(self, name: str) -> None:
        """Start a member, and note each confirmation in the moment it arrives."""
        subscriber = self.world.join(name).mesh.subscriber
        confirm = subscriber.subscribed

        def subscribed(session: Session, answers: Sequence[Subscribed]) -> None:
            confirm(session, answers)
            self._observe()

        subscriber.subscribed = subscribed  # type: ignore[method-assign]

    def _gone(self, name: str) -> None:
        """A member is no more; what it published last may be missing unseen."""
        members = self.world.members.values()
        self.inexact.update((member.incarnation, name) for member in members)
        for topic in TOPICS:
            self.readings.pop((name, topic), None)

    # -- what applications do ----------

    @rule(name=names, topic=topics, size=sizes, retain=st.booleans(), count=few)
    def publish(
        self, name: str, topic: str, size: int, retain: bool, count: int
    ) -> None:
        member = self._running(name)
        if member is None:
            return
        for _ in range(count):
            self.serial += 1
            text = f"{member.incarnation} {topic} {self.serial} ".encode()
            payload = (text * (size // len(text) + 1))[:size]
            committed = self.published[member.incarnation, topic]
            if member.publish(topic, payload, retain):
                committed.append(payload)
            assert member.newest(topic) == len(committed) - 1

    @rule(
        name=names,
        topic=topics,
        host=st.sampled_from((64, 192, 640)),
        areas=st.sampled_from(((256,), (1024,), (512, 256))),
        retain=st.booleans(),
    )
    def publish_from_devices(
        self, name: str, topic: str, host: int, areas: tuple[int, ...], retain: bool
    ) -> None:
        member = self._running(name)
        if member is None or len(areas) > len(member.link.devices):
            return
        self.serial += 1
        text = f"{member.incarnation} {topic} {self.serial} ".encode()
        payload = (text * 200)[: host + sum(areas)]
        committed = self.published[member.incarnation, topic]
        if member.publish(topic, payload, retain, areas):
            committed.append(payload)
        assert member.newest(topic) == len(committed) - 1

    @rule(name=names, topic=topics)
    def clear(self, name: str, topic: str) -> None:
        member = self._running(name)
        if member is not None:
            member.mesh.publisher.topic(topic).retained = None

    @rule(name=names, count=st.sampled_from((1, 2, 100)))
    def recv(self, name: str, count: int) -> None:
        member = self._running(name)
        if member is not None:
            while count and self._take(member):
                count -= 1
            member.poll()

    @rule(name=names, viewing=st.booleans())
    def keep_views(self, name: str, viewing: bool) -> None:
        member = self._running(name)
        if member is not None:
            member.viewing = viewing
            member.views.clear()
            member.poll()

    @rule(name=names, topic=topics, history=st.sampled_from(HISTORIES))
    def subscribe(
        self, name: str, topic: str, history: tuple[int | None, int, int]
    ) -> None:
        member = self._running(name)
        if member is not None and (name, topic) not in self.readings:
            subscription = member.subscribe(topic, *history, zero_copy=topic == "u")
            self.readings[name, topic] = Reading(subscription)

    @rule(name=names, topic=topics)
    def unsubscribe(self, name: str, topic: str) -> None:
        member = self._running(name)
        reading = self.readings.get((name, topic))
        if member is None or reading is None:
            return
        # What is lost now can no longer be seen as a gap, but may be reported.
        self.inexact.update((member.incarnation, other) for other in NAMES)
        member.unsubscribe(topic)
        del self.readings[name, topic]

    # -- what networks and schedulers do ----------

    @rule(choice=st.integers(0, 1000), count=st.integers(1, 8))
    def deliver_some(self, choice: int, count: int) -> None:
        for _ in range(count):
            steps = self.world.net.steps()
            if not steps:
                return
            conn = steps[choice % len(steps)]
            self.world.net.deliver(conn)
            assert conn.other is not None
            for member in self.world.running():
                if member.link is conn.other.link:
                    member.poll()

    @rule()
    def deliver_all(self) -> None:
        self.world.pump()

    @rule(seconds=st.sampled_from((0.002, 0.1, 1.0, PEER_TIMEOUT * 1.5)))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(
        one=names,
        other=names,
        lose=st.tuples(few, few),
        hold=st.tuples(st.booleans(), st.booleans()),
        shares=st.booleans(),
    )
    def cut(
        self,
        one: str,
        other: str,
        lose: tuple[int, int],
        hold: tuple[bool, bool],
        shares: bool,
    ) -> None:
        members = self.world.members
        self.world.net.shares = shares
        if one in members and other in members:
            net = self.world.net
            for conn in net.between(members[one].link, members[other].link):
                net.cut(conn, lose, hold)

    @rule()
    def report_what_was_held_back(self) -> None:
        for conn in self.world.net.hold_back():
            conn.lost_held = False

    @rule(name=names, choice=st.integers(0, 1000))
    def repeat_a_frame(self, name: str, choice: int) -> None:
        member = self.world.members.get(name)
        if member is None:
            return
        for conn, session in member.mesh.conns.items():
            assert isinstance(conn, ScriptedConn)
            kept = [
                parcel
                for parcel in self.delivered[member.incarnation, session.id]
                if numbered(parcel) <= session.received
            ]
            if kept and not conn.broken:
                conn.arrived.append(kept[choice % len(kept)])

    @rule(name=names)
    def stall(self, name: str) -> None:
        if name in self.world.members:
            self.world.stall(name)

    @rule(name=names)
    def unstall(self, name: str) -> None:
        if name in self.world.members:
            self.world.unstall(name)

    @precondition(lambda self: len(self.world.members) > 3)
    @rule(name=names, visible=st.booleans())
    def kill(self, name: str, visible: bool) -> None:
        if name in self.world.members:
            self.world.kill(name, visible=visible)
            self._gone(name)

    @rule(name=names)
    def join(self, name: str) -> None:
        if name not in self.world.members:
            self._join(name)

    @rule(one=names, other=names)
    def dial(self, one: str, other: str) -> None:
        """The rendezvous shows a record again; both may dial at once."""
        member = self._running(one)
        if member is not None and other in self.world.members and one != other:
            member.dial(self.world[other])

    @precondition(lambda self: len(self.world.members) > 3)
    @rule(name=names)
    def leave(self, name: str) -> None:
        if self._running(name) is not None:
            self.world.leave(name)
            self._gone(name)

    @rule(one=names, other=names)
    def partition(self, one: str, other: str) -> None:
        if one in self.world.members and other in self.world.members and one != other:
            self.world.partition(one, other)

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(
        name=names,
        capacity=st.sampled_from((1, 3, 1000)),
        pieces=st.integers(1, 3),
        abrupt=st.booleans(),
    )
    def change_link(
        self, name: str, capacity: int, pieces: int, abrupt: bool = False
    ) -> None:
        if name in self.world.members:
            link = self.world[name].link
            link.capacity, link.pieces, link.abrupt = capacity, pieces, abrupt
            for conn in list(link.conns):
                conn.report_writable()

    # -- what must hold ----------

    @invariant()
    def credit_is_bounded(self) -> None:
        self._observe()
        for reading in self.readings.values():
            subscription = reading.subscription
            if subscription.keep is not None:
                continue
            sources: list[Source] = list(subscription.sources.values())
            held, _ = subscription.held()
            extra = len(self.published) + len(sources) + len(subscription.orphans)
            assert held <= subscription.depth + extra
            for source in sources:
                # Else the last message that there is credit for would bring no more.
                # Who was asked for credit gets none until it has answered.
                left = source.granted_messages - source.consumed_messages
                assert left > 0 or source.asked is not None
                assert source.grant_at_messages <= source.granted_messages
                assert source.grant_at_bytes <= source.granted_bytes

    @invariant()
    def views_never_change(self) -> None:
        for member in self.world.members.values():
            for view, content in member.views:
                assert bytes(view) == content

    @invariant()
    def one_session_per_connection(self) -> None:
        for member in self.world.members.values():
            for conn, session in member.mesh.conns.items():
                assert session.conn is conn
                assert member.mesh.sessions[session.peer.incarnation] is session

    def teardown(self) -> None:
        """Everything heals: then nobody waits, nothing is missing, nothing is left."""
        world = self.world
        world.heal()
        for name in world.members:
            world.unstall(name)
            self.change_link(name, 1000, 1)
        self.report_what_was_held_back()
        for member in world.members.values():
            self.keep_views(member.name, False)
        for _ in range(8):
            world.advance(2 * PEER_TIMEOUT)
            for member in world.members.values():
                while self._take(member):
                    pass
        self._check_mesh_is_full()
        self._check_retained_arrived()
        for member in world.members.values():
            for topic in TOPICS:
                self._publish_at_last(member, topic)
        self._check_nothing_is_missing()
        self.world.advance(PEER_TIMEOUT / 2)  # what is only told by ticks is answered
        self._check_nothing_is_left()

    def _publish_at_last(self, member: Member, topic: str) -> None:
        committed = len(self.published[member.incarnation, topic])
        self.publish(member.name, topic, 300, False, 1)
        assert len(self.published[member.incarnation, topic]) > committed, "stuck"
        self._take_all()

    def _take_all(self) -> None:
        self.world.settle()
        for member in self.world.members.values():
            while self._take(member):
                pass
        self.world.settle()

    def _check_mesh_is_full(self) -> None:
        for member in self.world.members.values():
            others = sorted(n for n in self.world.members if n != member.name)
            assert member.peers() == others

    def _check_retained_arrived(self) -> None:
        for (name, topic), reading in self.readings.items():
            for other in self.world.members.values():
                retained = other.mesh.publisher.topic(topic).retained
                if other.name != name and retained is not None:
                    assert reading.last.get(other.incarnation, -1) >= retained.sequence

    def _check_nothing_is_missing(self) -> None:
        for (name, topic), reading in self.readings.items():
            me = self.world[name]
            for other in self.world.members.values():
                if other is not me:
                    newest = other.newest(topic)
                    assert reading.last.get(other.incarnation) == newest
        for key in {*self.gaps, *self.lost}:
            exact = key not in self.inexact
            assert self.gaps[key] <= self.lost[key]
            assert not exact or self.gaps[key] == self.lost[key], key

    def _check_nothing_is_left(self) -> None:
        alive = {m.incarnation for m in self.world.members.values()}
        for member in self.world.members.values():
            mesh = member.mesh
            greeters = mesh.dialling.greeters
            # Who was killed, and not seen to be, is still looked for.
            assert alive.isdisjoint(d.incarnation for d in mesh.dialling.dials)
            assert {g.dial for g in greeters.values()} <= set(mesh.dialling.dials)
            assert set(member.link.conns) == {*mesh.conns, *greeters}
            assert len(mesh.conns) == len(self.world.members) - 1
            assert mesh.stats.malformed == 0
            watches = [session.watch for session in mesh.sessions.values()]
            assert member.fds == {w.fileno() for w in watches if w is not None}
            for session in mesh.sessions.values():
                assert not session.frames
                assert not session.lent
                for feed in session.feeds.values():
                    assert not feed.queued()
                    assert feed.progress is None
                    assert feed in feed.topic.feeds
            for topic in mesh.publisher.topics.values():
                topic.retained = None
                assert all(feed.session.alive for feed in topic.feeds)
            if member.link.lender is not None:
                assert member.link.lender.stats().in_use_bytes == 0


settings.register_profile(
    "ci",
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "campaign",
    max_examples=int(os.environ.get("MQ_MACHINE_EXAMPLES", "2000")),
    stateful_step_count=80,
    deadline=None,
    derandomize=False,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_any_interleaving_of_faults_keeps_the_contract(
    small_messages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss, no double, no gap unreported, no stuck credit, nothing left behind."""
    monkeypatch.setattr("mq.mesh.publisher.cores", lambda: 8)
    monkeypatch.setattr("mq.mesh.copying.PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr("mq.mesh.session.BYTES_PER_TURN", TURN_BYTES)
    monkeypatch.setattr("mq.mesh.config.Config.is_near", lambda *_: False)
    monkeypatch.setattr("mq.mesh.pace.FIRST_BYTES", FIRST_BYTES)
    monkeypatch.setattr("mq.mesh.pace.LEAST_BYTES", LEAST_BYTES)
    monkeypatch.setattr("mq.mesh.reader.BYTES_PER_TURN", TURN_BYTES)
    profile = "campaign" if "MQ_MACHINE_EXAMPLES" in os.environ else "ci"
    run_state_machine_as_test(MeshMachine, settings=settings.get_profile(profile))
