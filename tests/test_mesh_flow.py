"""Messages: who gets what, in which order, and who waits for whom."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import msgspec
import pytest
from scripted import Parcel, ScriptedConn
from world import INLINE_BYTES, Got, Member, World, subscribed

from mq.errors import CodecError, MessagesLost, MessageTooLarge
from mq.frames import Frames
from mq.mesh import large, wire
from mq.mesh.incoming import Run, Source
from mq.mesh.outgoing import BATCH_MESSAGES
from mq.mesh.subscription import Subscription
from mq.mesh.waiting import _who_lags
from mq.transport import MAX_HEAD_BYTES

LARGE = bytes(range(251)) * 8


pytestmark = pytest.mark.usefixtures("small_messages")


def publish_once(world: World, payload: bytes = b"first") -> None:
    """Publish and receive a message: who publishes gets more of the window."""
    assert world["a"].publish("t", payload)
    world.settle()
    for member in world.members.values():
        member.payloads()
    world.settle()


def sequences(member: Member) -> list[int]:
    items = member.recv_all()
    assert all(isinstance(item, Got) for item in items), items
    return [item.sequence for item in items if isinstance(item, Got)]


def publish_until_full(world: World, name: str, topic: str = "t") -> int:
    """Publish, and let everything arrive, until there is no credit."""
    count = 0
    while world[name].publish(topic, b"%d" % count):
        count += 1
        world.settle()
        assert count < 5000
    return count


def frames_to(world: World, target: Member, kind: int) -> list[Parcel]:
    """A list that fills with the frames of a kind that arrive at a member."""
    seen: list[Parcel] = []

    def watch(conn: ScriptedConn, parcel: Parcel) -> None:
        if conn.link is target.link and parcel[0][0] == kind:
            seen.append(parcel)

    world.net.watcher = watch
    return seen


def test_a_subscription_is_in_force_when_it_is_acknowledged() -> None:
    """All that is published from then on comes, and nothing from before."""
    world = World("a", "b", "c")
    assert world["a"].publish("t", b"before")
    subscription = world["b"].subscribe("t")
    assert len(world["b"].mesh.subscriber.unconfirmed(subscription)) == 2
    world.pump()
    assert not world["b"].mesh.subscriber.unconfirmed(subscription)
    assert world["a"].publish("t", b"after")
    world.settle()
    assert world["b"].payloads() == [b"after"]
    assert world["a"].mesh.publisher.topic("t").stats.nobody == 1


def test_who_waits_for_credit_is_told_what_is_still_on_its_way() -> None:
    """A slow wire is another matter than a subscriber that does not read."""
    world = subscribed("a", "b", depth=3)
    publish_once(world)
    topic = world["a"].mesh.publisher.topic("t")
    count = 0
    while topic.has_credit():
        assert world["a"].publish("t", b"x")
        count += 1
    sessions = [feed.session for feed in topic.feeds]
    said = _who_lags(topic, sessions)
    assert f"'b' has not taken what it has ({count} messages are still" in said
    world.settle()
    assert "'b' has not taken what it has. Let" in _who_lags(topic, sessions)


def test_messages_come_in_order_large_or_small() -> None:
    """FIFO per publisher and topic, whatever the sizes."""
    world = subscribed("a", "b", "c")
    payloads = [bytes([n]) * size for n, size in enumerate((1, 2000, 128, 129, 5, 700))]
    for payload in payloads:
        assert world["a"].publish("t", payload)
    world.settle()
    assert world["b"].payloads() == payloads
    assert world["c"].payloads() == payloads


def test_a_message_of_many_buffers_arrives_as_it_was_laid_out() -> None:
    """Header and buffers of all sizes land at their offsets in the area."""
    world = subscribed("a", "b")
    sizes = (1, 64, 0, 63, 255, 256, 257, 1000, 3, 0)
    buffers = tuple(memoryview(bytes([n + 1]) * s) for n, s in enumerate(sizes))
    whole = Frames(b"h" * 300, buffers, 0, frozenset())
    frames = whole._replace(nbytes=len(whole.pack()))
    a = world["a"]
    topic = a.mesh.publisher.topic("t")
    a.mesh.publisher.publish(topic, frames, world.now, False, world.now)
    world.settle()
    (got,) = world["b"].payloads()
    for start, piece in frames.segments():
        assert got[start : start + len(piece)] == piece


def test_nobody_hears_himself_or_another_topic() -> None:
    """No echo; topics match exactly; bytes nobody wants are not sent."""
    world = World("a", "b")
    for topic in ("a", "ab"):
        world["b"].subscribe(topic)
    world["a"].subscribe("a")
    world.settle()
    seen = frames_to(world, world["b"], wire.DATA)
    assert world["a"].publish("abc", b"1")
    world.settle()
    assert not seen
    assert world["a"].publish("a", b"2")
    world.settle()
    assert not world["a"].recv_all()
    (got,) = world["b"].recv_all()
    assert isinstance(got, Got)
    assert got.topic == "a"


@pytest.mark.parametrize("depth", [1, 2, 5, 40])
def test_unread_messages_never_exceed_depth_and_one_for_each_publisher(
    depth: int,
) -> None:
    """The receiver divides its grants; each publisher may always have one."""
    world = World("b", "p", "q", "r")
    world["b"].subscribe("t", depth=depth)
    world.settle()
    for _ in range(3):
        counts = [publish_until_full(world, name) for name in "pqr"]
        assert all(counts)
        inbox = len(world["b"].mesh.subscriber.inbox)
        assert inbox == sum(counts) <= depth + 3
        assert len(world["b"].payloads()) == inbox
        world.settle()


def test_a_window_of_bytes_bounds_too_and_lets_one_message_of_any_size_pass() -> None:
    """A message larger than the window still goes, alone."""
    world = World("a", "b")
    world["b"].subscribe("t", window_bytes=1000)
    world.settle()
    for _ in range(5):
        assert world["a"].publish("t", LARGE)
        world.settle()
        assert not world["a"].publish("t", b"x")
        assert world["b"].payloads() == [LARGE]
        world.settle()
    count = 0
    while world["a"].publish("t", bytes(90)):
        world.settle()
        count += 1
    assert 5 <= count <= 12


def test_credit_goes_to_those_who_publish() -> None:
    """A publisher that is alone in publishing gets most of the window."""
    world = World("b", "p", "q", "r")
    world["b"].subscribe("t", depth=100)
    world.settle()
    total = 0
    for _ in range(20):
        total = publish_until_full(world, "p")
        world["b"].recv_all()
        world.settle()
    assert total >= 50


def test_grants_outlive_publishers_that_come_and_go() -> None:
    """Unread messages of dead publishers still fill the window of the living."""
    world = World("b", "p")
    world["b"].subscribe("t", depth=10)
    world.settle()
    for _ in range(6):
        publish_until_full(world, "p")
        world.kill("p")
        world.join("p")
        world.settle()
    assert len(world["b"].mesh.subscriber.inbox) <= 10 + 6


def test_publish_is_all_or_nothing() -> None:
    """One subscriber without credit: nobody gets it, and no number is used."""
    world = World("a", "slow", "fast")
    world["slow"].subscribe("t", depth=2)
    world["fast"].subscribe("t")
    world.settle()
    count = publish_until_full(world, "a")
    newest = world["a"].newest("t")
    for _ in range(3):
        assert not world["a"].publish("t", b"no", retain=True)
    world.settle()
    assert world["a"].newest("t") == newest == count - 1
    assert world["a"].mesh.publisher.topic("t").retained is None
    (feed,) = world["a"].mesh.publisher.topic("t").waits_for()
    assert feed.session.name == "slow"
    assert sequences(world["fast"]) == list(range(count))
    assert sequences(world["slow"]) == list(range(count))
    world.settle()
    assert world["a"].publish("t", b"yes")
    world.settle()
    assert world["slow"].payloads() == world["fast"].payloads() == [b"yes"]


def test_a_slow_subscriber_that_unsubscribes_releases_the_publisher() -> None:
    """Nobody waits for who does not want it any more."""
    world = subscribed("a", "b", "c", depth=1)
    world["a"].publish("t", b"1")
    world.settle()
    world["c"].payloads()
    assert not world["a"].publish("t", b"2")
    world["b"].unsubscribe("t")
    world.settle()
    assert world["a"].publish("t", b"2")


def publish_all(world: World, name: str, payload: bytes = b"m") -> int:
    """Publish while there is credit, whatever arrives meanwhile."""
    count = 0
    while world[name].publish("t", payload):
        count += 1
        assert count < 5000
    return count


@pytest.mark.parametrize("size", [1, 1000], ids=["messages", "bytes"])
def test_a_later_publisher_gets_what_an_earlier_one_leaves_unused(size: int) -> None:
    """Nobody reads meanwhile: each has a share, and all together the window."""
    window = 400 if size == 1 else 400_000
    world = World("a", "b")
    b = world["b"]
    b.subscribe("t", depth=400 if size == 1 else 4000, window_bytes=window)
    world.settle()
    assert world["a"].publish("t", bytes(size))
    world.settle()
    world.join("c")
    world.settle()
    assert publish_all(world, "c", bytes(size)) < 30
    world.settle()
    later = publish_all(world, "c", bytes(size))
    assert later > 100
    world.settle()
    earlier = publish_all(world, "a", bytes(size))
    assert earlier > 100
    world.settle()
    got = b.payloads()
    assert 300 < len(got) <= 400 + 2
    assert b.mesh.stats.malformed == 0
    world.settle()
    for name in "ac":
        assert publish_all(world, name, bytes(size)) > 100


def hoarded(unread: int) -> World:
    """`a` has published so much of a window of 400 that is unread; `c` one message."""
    world = World("a", "b")
    world["b"].subscribe("t", depth=400)
    world.settle()
    publish_once(world)
    for _ in range(unread):
        assert world["a"].publish("t", b"unread")
    world.join("c")
    world.settle()
    return world


def asked_back(unread: int = 0) -> tuple[World, Source]:
    """The same, and `b` has asked `a` for credit back, who hears it after `heal`."""
    world = hoarded(unread)
    world.partition("a", "b")
    assert world["c"].publish("t", b"mine")
    world.settle()
    b = world["b"]
    source = b.mesh.subscriber.topics["t"].sources[b.session(world["a"])]
    assert source.asked is not None
    return world, source


def test_what_is_published_while_it_is_asked_back_is_kept() -> None:
    """The question and what uses the credit cross each other on the wire."""
    world, _ = asked_back()
    b = world["b"]
    used = publish_all(world, "a")
    assert used > 300
    world.heal()
    world.settle()
    assert len(b.payloads()) == used + 1
    world.settle()
    assert b.mesh.stats.malformed == 0
    assert publish_all(world, "c") > 100
    world.settle()
    assert publish_all(world, "a") > 100


def read(world: World, count: int) -> None:
    for _ in range(count):
        assert isinstance(world["b"].recv(), Got)
    world.settle()


def test_what_becomes_free_goes_to_who_has_too_little() -> None:
    """As the messages of who has most are read, long before its own next share."""
    world = hoarded(399)
    while publish_all(world, "c"):
        world.settle()
    for _ in range(3):
        read(world, 50)
        assert publish_all(world, "c") >= 40
        world.settle()


def test_what_the_dead_leave_goes_to_who_has_too_little() -> None:
    """Asked or not, at once or as their messages are read."""
    world, _ = asked_back()
    world.kill("a")
    world.advance(30.0)
    assert publish_all(world, "c") > 300

    world = hoarded(399)
    assert world["c"].publish("t", b"mine")
    world.settle()
    world.kill("a")
    world.advance(30.0)
    publish_all(world, "c")
    world.settle()
    read(world, 300)
    assert publish_all(world, "c") > 200


def test_dividing_a_window_looks_at_each_publisher_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where all have too little, as beside one whose messages nobody reads."""
    names = [f"p{number}" for number in range(40)]
    world = hoarded(399)
    for name in names:
        world.join(name)
    world.settle()
    for name in names:
        assert world[name].publish("t", b"first")
    world.settle()
    looked: list[Source] = []
    give = Subscription._give

    def counted(source: Source, *args: Any) -> Any:
        looked.append(source)
        return give(source, *args)

    monkeypatch.setattr(Subscription, "_give", staticmethod(counted))
    subscription = world["b"].mesh.subscriber.topics["t"]
    first = next(iter(subscription.sources.values()))
    subscription.divide(first)
    assert len(looked) == len(set(looked)) <= len(names) + 2


def test_what_is_free_goes_to_who_publishes_though_nobody_reads_on() -> None:
    """Of messages that were read, fewer than is told at once, and of who is gone."""
    world = subscribed("a", "b", depth=40)
    world.join("c")
    world.settle()
    for name in "ac":
        assert world[name].publish("t", b"first")
    world.settle()
    world["b"].payloads()
    world.advance(1.0)
    share = publish_all(world, "a")
    assert share == 20
    world.advance(1.0)
    read(world, 3)
    world.advance(1.0)
    assert publish_all(world, "a") == 3
    world.kill("c")
    world.advance(1.0)
    assert publish_all(world, "a") == 20


def test_a_tick_looks_only_at_what_was_taken_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many other subscriptions there are."""
    world = subscribed("a", "b")
    for number in range(50):
        world["b"].subscribe(f"idle {number}")
    publish_once(world)
    world.advance(1.0)
    looked: list[str] = []
    fill_up = Subscription.fill_up

    def counted(subscription: Subscription) -> list[Source]:
        looked.append(subscription.topic)
        return fill_up(subscription)

    monkeypatch.setattr(Subscription, "fill_up", counted)
    world.advance(1.0)
    assert looked == []
    publish_once(world)
    world.advance(1.0)
    assert looked == ["t"]
    world.join("c")  # who comes has a share, too
    world.advance(1.0)
    assert len(looked) == 1 + len(world["b"].mesh.subscriber.topics)


def test_a_tick_looks_at_no_subscription_that_has_ended() -> None:
    """It was taken from before: nothing is granted of it."""
    world = subscribed("a", "b", depth=11)
    publish_once(world)
    subscription = world["b"].mesh.subscriber.topics["t"]
    world["a"].publish("t", b"more")
    world.settle()
    world["b"].recv_all()
    world["b"].unsubscribe("t")
    world["b"].subscribe("t", keep=1)
    (source,) = subscription.sources.values()
    granted = source.granted_messages
    world.advance(1.0)
    assert source.granted_messages == granted


def test_an_answer_about_credit_holds_nobody_up_who_leaves() -> None:
    """Its peer is gone as well, and need not have had it."""
    world = hoarded(0)
    a, b = world["a"], world["b"]
    assert world["c"].publish("t", b"mine")
    session = a.session(b)
    while not any(frame.kind == wire.RETURNED for frame in session.frames):
        if steps := world.net.steps():
            world.net.deliver(steps[0])
        else:
            world.now += 0.0005
        for member in world.members.values():
            member.poll()
    a.mesh.leave("left")
    a.mesh.disconnect(session, "gone")
    assert not session.alive


def test_nothing_is_granted_while_it_is_asked_back() -> None:
    """The publisher's totals may be going down: what it is told would be too much."""
    world, source = asked_back(300)
    before = source.granted_messages
    assert len(world["b"].payloads()) == 301
    assert source.granted_messages == before
    world.heal()
    world.settle()
    assert source.asked is None
    assert before < source.granted_messages <= source.consumed_messages + 200
    assert publish_all(world, "a") > 100


def test_an_answer_is_taken_once_and_must_fit_the_question() -> None:
    """Told again it changes nothing; there is no more left than was granted."""
    world, source = asked_back()
    session = source.session
    subscriber = world["b"].mesh.subscriber
    asked = source.asked
    assert asked is not None
    before = source.granted_messages
    arrived = source.arrivals[0].messages
    for wrong in (
        {"messages": arrived - 1},
        {"messages": before + 1},
        {"nbytes": source.granted_bytes + 1},
    ):
        answer = msgspec.structs.replace(asked, **wrong)
        with pytest.raises(wire.Malformed, match="left"):
            subscriber.returned(session, [answer])
        assert source.granted_messages == before
    stale = msgspec.structs.replace(asked, serial=asked.serial + 1)
    subscriber.returned(session, [stale])
    assert source.asked is asked
    world.heal()
    world.settle()
    assert source.asked is None
    now = source.granted_messages
    assert now < before
    subscriber.returned(session, [asked])
    assert source.granted_messages == now


def test_keep_last_has_the_newest_and_counts_what_it_dropped() -> None:
    """A stopped subscriber never makes a publisher wait, and finds the newest n."""
    for keep in (1, 3):
        world = subscribed("a", "b", keep=keep)
        for number in range(50):
            assert world["a"].publish("t", b"%d" % number)
            if number % 7 == 0:
                world.settle()
        world.settle()
        assert world["b"].payloads() == [b"%d" % n for n in range(50 - keep, 50)]
        stats = world["b"].mesh.publisher.topic("t").stats
        assert stats.dropped == 50 - keep


@pytest.mark.parametrize("arrives", [False, True])
def test_a_retained_message_that_keep_last_replaces_is_counted(arrives: bool) -> None:
    """Whether it waited here or at its publisher; before a new session and in one."""
    world = World("a", "b", peer_timeout=4.0)
    a, b = world["a"], world["b"]
    assert a.publish("t", b"1", retain=True)
    assert a.publish("t", b"before the subscription")
    b.subscribe("t", keep=1)
    if arrives:
        world.settle()
    else:
        until_acknowledged(world, "b")
    assert a.publish("t", b"2")
    world.settle()
    assert b.payloads() == [b"2"]
    stats = b.mesh.publisher.topic("t").stats
    assert stats.dropped == 1
    world.partition("a", "b")
    world.advance(10.0)
    assert a.publish("t", b"missed")
    assert a.publish("t", b"3", retain=True)
    world.heal()
    if arrives:
        world.advance(5.0)
    else:
        until_acknowledged(world, "b")
    assert a.publish("t", b"4")
    world.settle()
    assert b.payloads() == [b"4"]
    assert stats.dropped == 3
    assert stats.lost == 0


def test_messages_of_a_batch_are_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the link's heads are not: arrays there would not be aligned."""
    receive = ScriptedConn.receive

    def writable(conn: ScriptedConn) -> tuple[Any, int] | None:
        message = receive(conn)
        return message and (memoryview(bytearray(message[0])), message[1])

    monkeypatch.setattr(ScriptedConn, "receive", writable)
    world = subscribed("a", "b")
    for payload in (b"0", b"1"):
        assert world["a"].publish("t", payload)
    world.settle()
    runs = world["b"].mesh.subscriber.inbox.fifo
    areas = [area for run in runs if isinstance(run, Run) for area in run.areas]

    assert len(areas) == 2
    assert all(isinstance(area, memoryview) and area.readonly for area in areas)


@pytest.mark.parametrize("size", [10, 2000])
def test_keep_last_has_at_most_one_message_on_the_wire(size: int) -> None:
    """What waits is replaced; what has begun is always finished."""
    world = subscribed("a", "b", keep=1)
    kind = wire.DATA if size <= INLINE_BYTES else wire.CHUNK
    for number in range(30):
        assert world["a"].publish("t", bytes([number]) * size)
    (conn,) = world.net.between(world["a"].link, world["b"].link)
    under_way = [head for head, _ in conn.flight if head[0] == kind]
    starts = {wire.RUN.unpack_from(h, wire.HEADER_BYTES)[2] for h in under_way}
    if kind == wire.CHUNK:
        starts = {wire.parse_chunk(memoryview(head)).sequence for head in under_way}
    assert starts == {0}
    world.settle()
    (got,) = world["b"].recv_all()
    assert isinstance(got, Got)
    assert got.sequence == 29


def test_later_subscribers_get_the_retained_message_first() -> None:
    """Once, with its own sequence, and nothing that was not retained."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    for payload, retain in ((b"0", False), (LARGE, True), (b"2", False)):
        assert a.publish("t", payload, retain)
    b.subscribe("t")
    world.settle()
    assert a.publish("t", b"3")
    world.settle()
    assert [(g.sequence, g.payload) for g in b.recv_all() if isinstance(g, Got)] == [
        (1, LARGE),
        (3, b"3"),
    ]
    a.mesh.publisher.topic("t").retained = None
    b.unsubscribe("t")
    b.subscribe("t")
    world.settle()
    assert b.payloads() == []


@pytest.mark.parametrize("heard", [False, True])
def test_a_retained_message_outlasts_all_that_is_not(heard: bool) -> None:
    """However many are published after it, to a subscriber or to nobody."""
    world = World("a", "b", "c")
    a, b, c = world["a"], world["b"], world["c"]
    if heard:
        b.subscribe("t")
        world.settle()
    assert a.publish("t", b"kept", retain=True)
    for _ in range(10):
        for _ in range(30):
            assert a.publish("t", b"newer")
        world.settle()
        b.payloads()
    c.subscribe("t")
    world.settle()
    assert c.payloads() == [b"kept"]


def test_a_retained_message_is_not_sent_again_to_who_has_it() -> None:
    """A new session with the same peer neither doubles it nor costs credit."""
    world = World("a", "b", peer_timeout=4.0)
    world["b"].subscribe("t", depth=1)
    world.settle()
    assert world["a"].publish("t", b"kept", retain=True)
    world.settle()
    assert world["b"].payloads() == [b"kept"]
    world.partition("a", "b")
    world.advance(10.0)
    world.heal()
    world.advance(5.0)
    assert world["b"].recv_all() == []
    for _ in range(3):
        assert world["a"].publish("t", b"next")
        world.settle()
        assert world["b"].payloads() == [b"next"]
        world.settle()


def until_acknowledged(world: World, name: str) -> None:
    """Deliver one parcel after the other until a subscription to t has its answer."""
    sources = world[name].mesh.subscriber.topics["t"].sources
    for _ in range(2000):
        if any(source.confirmed for source in sources.values()):
            return
        if steps := world.net.steps():
            world.net.deliver(steps[0])
        else:
            world.now += 0.05
        for member in world.members.values():
            member.poll()
    raise AssertionError("never acknowledged")


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("newer", [False, True])
def test_a_retained_message_cut_off_on_its_way_comes_in_the_next_session(
    keep: int | None, newer: bool
) -> None:
    """It, or the one that took its place; nothing that was never owed is lost."""
    world = World("a", "b", peer_timeout=4.0)
    a, b = world["a"], world["b"]
    assert a.publish("t", LARGE, retain=True)
    assert a.publish("t", b"before the subscription")
    b.subscribe("t", keep)
    for _ in range(2):
        until_acknowledged(world, "b")
        world.partition("a", "b")
        world.advance(10.0)
        assert b.recv_all() == []
        world.heal()
    if newer:
        assert a.publish("t", LARGE[::-1], retain=True)
    world.advance(5.0)
    assert b.payloads() == [LARGE[::-1] if newer else LARGE]
    assert a.publish("t", b"next")
    world.settle()
    assert b.payloads() == [b"next"]
    assert b.mesh.publisher.topic("t").stats.lost == 0


def test_flush_marks_are_reached_when_the_inbox_has_it_all() -> None:
    """For every subscriber, also one that began with an older retained message."""
    world = subscribed("a", "b")
    a = world["a"]
    a.publish("t", b"0", retain=True)
    a.publish("t", b"1")
    world.join("late").subscribe("t")
    world.settle()
    assert not a.mesh.publisher.unsettled(a.mesh.marks())
    a.publish("t", LARGE)
    marks = a.mesh.marks()
    assert a.mesh.publisher.unsettled(marks) == marks
    world.settle()
    assert not a.mesh.publisher.unsettled(marks)
    marks = a.mesh.marks()
    assert len(marks) == 2
    assert not a.mesh.publisher.unsettled(marks)


def test_a_dead_subscriber_does_not_hold_flush_up() -> None:
    """Its marks are settled, and what it lacked is counted."""
    world = subscribed("a", "b")
    world.partition("a", "b")
    world["a"].publish("t", b"1")
    marks = world["a"].mesh.marks()
    world.kill("b")
    world.settle()
    assert not world["a"].mesh.publisher.unsettled(marks)
    assert world["a"].mesh.publisher.topic("t").stats.undelivered == 1


def test_who_gives_a_subscriber_up_says_what_it_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That may be the last that anybody hears of it."""
    world = subscribed("a", "b")
    a, session = world["a"].mesh, world["a"].session(world["b"])
    world.partition("a", "b")
    world["a"].publish("t", b"1")
    world["a"].publish("t", b"2")
    a.forget(session, "silent for 1 s")
    assert "gave up b: silent for 1 s; messages undelivered: 2 on 't'" in caplog.text


def said_of_the_end(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of each record that says that a member is gone."""
    records = [(r.levelname, r.getMessage()) for r in caplog.records]
    return [(level, text) for level, text in records if "is gone" in text]


@pytest.mark.parametrize("lacking", [0, 2])
@pytest.mark.parametrize("returns", [False, True])
def test_the_log_says_what_a_dead_subscriber_lacks(
    caplog: pytest.LogCaptureFixture, lacking: int, returns: bool
) -> None:
    """Whether its end is seen or another life of it tells; a warning, if anything."""
    caplog.set_level(logging.DEBUG, "mq")
    world = subscribed("a", "b")
    world.partition("a", "b")
    for _ in range(lacking):
        world["a"].publish("t", b"x")
    world.kill("b", visible=not returns)
    if returns:
        world.join("b")
    world.settle()
    ((level, text),) = said_of_the_end(caplog)
    assert level == ("WARNING" if lacking else "DEBUG")
    assert text.startswith("b is gone: ")
    assert text.endswith("; messages undelivered: 2 on 't'") == bool(lacking)


def test_who_leaves_lacks_nothing_that_anybody_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It wants no more; who looks for an error finds what it was."""
    caplog.set_level(logging.DEBUG, "mq")
    world = subscribed("a", "b")
    a, b = world["a"], world["b"]
    b.mesh.leave("left")
    a.publish("t", b"x")
    world.settle()
    assert said_of_the_end(caplog) == [
        ("DEBUG", "b is gone: left; messages undelivered: 1 on 't'")
    ]
    assert a.mesh.publisher.topic("t").stats.undelivered == 1


def test_who_dies_while_this_member_leaves_is_left_to_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which says what it could not deliver, whoever lacks it: once is enough."""
    caplog.set_level(logging.DEBUG, "mq")
    world = subscribed("a", "b")
    world.partition("a", "b")
    world["a"].publish("t", b"x")
    world["a"].mesh.leave("closed")
    world.kill("b")
    world.settle()
    ((level, _),) = said_of_the_end(caplog)
    assert level == "DEBUG"


@pytest.mark.parametrize(("keep", "lacking"), [(1, 1), (3, 3), (20, 8)])
def test_what_was_replaced_a_lost_subscriber_does_not_lack(
    caplog: pytest.LogCaptureFixture, keep: int, lacking: int
) -> None:
    """By the counter, the log and what `close` says alike."""
    world = subscribed("a", "b", keep=keep)
    a, session = world["a"].mesh, world["a"].session(world["b"])
    for _ in range(5):
        world["a"].publish("t", b"received")
    world.settle()
    world.partition("a", "b")
    for _ in range(8):
        world["a"].publish("t", b"lacking")
    ((feed, mark),) = a.publisher.unsettled(a.marks())
    assert feed.lacks(mark) == lacking
    assert feed.lacks(mark - 3) == max(0, lacking - 3)
    a.forget(session, "silent for 1 s")
    assert a.publisher.topic("t").stats.undelivered == lacking
    assert f"undelivered: {lacking} on 't'" in caplog.text


def test_of_many_topics_that_a_subscriber_lacks_some_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And of the rest, how many messages on how many."""
    world = subscribed("a", "b")
    a, b = world["a"], world["b"]
    topics = [f"topic {number}" for number in range(15)]
    for topic in topics:
        b.subscribe(topic)
    world.settle()
    session = a.session(b)
    world.partition("a", "b")
    for topic in topics:
        a.publish(topic, b"1")
        a.publish(topic, b"2")
    a.mesh.forget(session, "silent for 1 s")
    assert "2 on 'topic 9', 10 on 5 other topics" in caplog.text
    assert "'topic 10'" not in caplog.text


def test_a_large_message_delays_no_other_topic() -> None:
    """Chunks and small messages of another topic take turns."""
    world = subscribed("a", "b")
    world["b"].subscribe("u")
    world.settle()
    world["a"].link.capacity = 2
    assert world["a"].publish("t", LARGE * 4)
    for number in range(5):
        assert world["a"].publish("u", b"%d" % number)
    chunks = frames_to(world, world["b"], wire.CHUNK)
    while not world["b"].mesh.subscriber.inbox.fifo:
        (conn,) = world.net.between(world["a"].link, world["b"].link)
        world.net.deliver(conn)
        for member in world.members.values():
            member.poll()
    assert len(chunks) <= 4
    world.settle()
    topics = [item.topic for item in world["b"].recv_all() if isinstance(item, Got)]
    assert topics == ["u"] * 5 + ["t"]


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_small_messages_beside_large_ones_are_never_left_behind(capacity: int) -> None:
    """Whatever room the link has: what only joins a batch leaves with one.

    `recv` may return before it has sent what there is room for by then.
    """
    for seed in range(100):
        chance = random.Random(seed)
        world = subscribed("a", "b")
        a, b = world["a"], world["b"]
        b.subscribe("u")
        a.subscribe("r")
        world.settle()
        b.publish("r", b"for recv")
        world.settle()
        a.link.capacity = capacity
        small = large = 0
        for _ in range(40):
            step = chance.randrange(7)
            if step == 0:
                small += a.publish("u", b"%d" % small)
            elif step == 1 and large < 2:
                large += a.publish("t", LARGE)
            elif step == 2 and (flying := world.net.steps()):
                world.net.deliver(chance.choice(flying))
            elif step == 3:
                b.poll()
            elif step == 4:
                world.now += 0.0004
            else:
                a.mesh.poll(until_message=True)
        world.settle()
        got = [item for item in b.recv_all() if isinstance(item, Got)]
        assert [i.payload for i in got if i.topic == "u"] == [
            b"%d" % number for number in range(small)
        ]
        assert len(got) == small + large


def test_small_messages_are_batched_while_an_answer_is_out() -> None:
    """One frame at once, the others together, at the latest after a millisecond."""
    world = subscribed("a", "b")
    publish_once(world)
    batches = frames_to(world, world["b"], wire.DATA)
    for number in range(100):
        assert world["a"].publish("t", b"%d" % number)
    world.pump()
    assert len(batches) == 1
    world.advance(0.0011)
    assert len(batches) == 2
    assert len(world["b"].payloads()) == 100


@pytest.mark.parametrize("goes_on", [True, False], ids=["more", "no more"])
def test_credit_is_answered_along_with_what_it_lets_out(goes_on: bool) -> None:
    """Its sender waits for no answer: one goes alone only where nothing else does."""
    world = subscribed("a", "b")
    publish_once(world)
    a, b = world["a"], world["b"]
    publish_until_full(world, "a")
    before = b.session(a).number
    answers = frames_to(world, b, wire.RECEIVED)
    assert b.recv_all()
    world.pump()
    a.mesh.poll([], flush=True)  # by a call that waits for credit
    world.pump()
    credit = b.session(a).number
    assert a.session(b).received == credit > before
    assert not answers
    if goes_on:
        batches = frames_to(world, b, wire.DATA)
        assert a.publish("t", b"y")
        world.pump()
        answers = batches
    else:
        world.advance(0.021)
    (answer,) = answers
    assert wire.HEADER.unpack_from(answer[0])[-1] == credit


def test_a_full_batch_does_not_wait() -> None:
    """A batch leaves when it is full, whatever is unanswered."""
    world = subscribed("a", "b", depth=4 * BATCH_MESSAGES)
    publish_once(world)
    batches = frames_to(world, world["b"], wire.DATA)
    for _ in range(BATCH_MESSAGES + 1):
        assert world["a"].publish("t", b"x")
    world.net.deliver_all()
    assert len(batches) == 2


def test_a_batch_fits_into_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of all sizes on several topics, and no frame that a link refuses."""
    monkeypatch.setattr("mq.mesh.publisher.INLINE_BYTES", large.INLINE_BYTES)
    world = subscribed("a", "b", depth=10_000)
    b = world["b"]
    topics = ["t", *"uvw"]
    for topic in topics[1:]:
        b.subscribe(topic, keep=50 if topic == "w" else None, depth=10_000)
    world.settle()
    batches = frames_to(world, b, wire.DATA)
    sizes = random.Random(3)
    sent: list[bytes] = []
    got: list[bytes] = []
    for _ in range(40):
        for number in range(sizes.choice((3, 300))):
            nbytes = sizes.choice((0, 200, 500, 30_000, 65_000, large.INLINE_BYTES))
            sent.append(bytes([number % 251]) * sizes.randint(0, nbytes))
            assert world["a"].publish(sizes.choice(topics[:3]), sent[-1])
        world["a"].publish("w", sent[-1])
        sent.append(sent[-1])
        world["a"].poll()
        if sizes.random() < 0.5:
            world.settle()
            got += b.payloads()
            world.settle()
    world.settle()
    assert sorted([*got, *b.payloads()]) == sorted(sent)
    longest = max(len(head) for head, _ in batches)
    assert 0.9 * large.INLINE_BYTES < longest <= MAX_HEAD_BYTES


def test_a_small_message_waits_for_no_answer_to_one_that_takes_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is behind that on the wire, and nowhere else."""
    monkeypatch.setattr("mq.mesh.publisher.INLINE_BYTES", large.INLINE_BYTES)
    world = subscribed("a", "b", topics=["t", "u"])
    publish_once(world)
    batches = frames_to(world, world["b"], wire.DATA)
    payloads = [bytes(large.SMALL_BYTES + 1), b"small"]
    for topic, payload in zip("tu", payloads, strict=True):
        assert world["a"].publish(topic, payload)
    world.net.deliver_all()
    assert len(batches) == 2
    world.settle()
    assert world["b"].payloads() == payloads


def test_unsubscribing_ends_the_old_stream_for_good() -> None:
    """A new subscription to the same topic never sees what was under way."""
    world = subscribed("a", "b")
    for number in range(20):
        assert world["a"].publish("t", b"old %d" % number)
        assert world["a"].publish("t", b"old" * 100)
    world.net.deliver(world.net.between(world["a"].link, world["b"].link)[0])
    world["b"].poll()
    world["b"].unsubscribe("t")
    assert world["b"].recv() is None
    world["b"].subscribe("t")
    world.settle()
    assert world["b"].recv() is None
    assert world["a"].publish("t", b"new")
    world.settle()
    assert world["b"].payloads() == [b"new"]


def test_a_subscription_that_ended_with_a_batch_held_is_sent_nothing_more() -> None:
    """Nor is what is published later looked for where the log was trimmed."""
    world = subscribed("a", "b", "c")
    publish_once(world)
    for _ in range(3):
        assert world["a"].publish("t", b"held")
    world["b"].unsubscribe("t")
    world.net.deliver_all()
    world["a"].poll()
    batches = frames_to(world, world["b"], wire.DATA)
    for number in range(5):
        assert world["a"].publish("t", b"%d" % number)
        world.advance(0.01)
    assert not batches
    assert len(world["c"].payloads()) == 8


def test_a_transfer_survives_a_break_at_any_point() -> None:
    """Whichever frames are lost at the break, everything arrives once."""
    for delivered in range(14):
        for lose in range(3):
            for pieces in (1, 3):
                world = subscribed("a", "b")
                world["b"].link.pieces = pieces
                assert world["a"].publish("t", LARGE)
                assert world["a"].publish("t", b"small")
                for _ in range(delivered):
                    for conn in world.net.steps():
                        world.net.deliver(conn)
                    world["b"].poll()
                world.cut("a", "b", lose, lose)
                world.settle()
                assert world["b"].payloads() == [LARGE, b"small"]
                assert world["a"].session(world["b"]).stats.connections == 2


def test_a_stalled_subscriber_is_told_once_how_much_it_missed() -> None:
    """After the reset: one notice, with the exact number, then the queue goes on."""
    world = World("a", "b", "c", peer_timeout=4.0)
    for name in "bc":
        world[name].subscribe("t", depth=5)
        world[name].subscribe("u")
    world.settle()
    for topic in "tu":
        assert world["a"].publish(topic, b"seen")
    world.settle()
    world.stall("b")
    for _ in range(3):
        assert world["a"].publish("t", b"lost")
    world.advance(6.0)
    for _ in range(4):
        assert world["a"].publish("u", b"lost")
    world.unstall("b")
    world.advance(5.0)
    assert len(world["c"].payloads()) == 9
    world.settle()
    assert world["a"].publish("t", b"after")
    world.settle()
    items = world["b"].recv_all()
    assert [i.payload for i in items if isinstance(i, Got)][:2] == [b"seen"] * 2
    (notice,) = [i for i in items if isinstance(i, MessagesLost)]
    assert notice.sender == "a"
    received = sum(1 for i in items if isinstance(i, Got))
    assert notice.count == 10 - received
    assert isinstance(items[-1], Got)
    assert items[-1].payload == b"after"
    assert world["c"].payloads() == [b"after"]


def test_what_a_subscriber_would_refuse_is_not_published() -> None:
    """MessageTooLarge and CodecError name the members, and nobody gets it."""
    world = World("a", "b")
    world.join("tiny", max_message_bytes=500)
    for name in ("b", "tiny"):
        world[name].subscribe("t")
    world.settle()
    with pytest.raises(MessageTooLarge, match="tiny"):
        world["a"].publish("t", LARGE)
    publisher = world["a"].mesh.publisher
    frames = Frames(b"x", (), 1, frozenset({"some.Type"}))
    with pytest.raises(CodecError, match=r"some\.Type"):
        publisher.check(publisher.topic("t"), frames)
    world.settle()
    assert world["a"].newest("t") == -1
    assert not world["b"].recv_all()


@pytest.mark.parametrize("size", [100, 2000, 1 << 40])
def test_a_sender_that_announces_too_much_is_cut_off(size: int) -> None:
    """Before memory is taken, and without harm to other peers."""
    world = World("a")
    world.join("tiny", max_message_bytes=99)
    tiny, a = world["tiny"], world["a"]
    tiny.subscribe("t")
    world.settle()
    session = a.session(tiny)
    session.peer = msgspec.structs.replace(session.peer, max_message_bytes=1 << 50)

    def announce(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        head, body = parcel
        if head[0] != wire.CHUNK:
            return parcel
        chunk = list(wire.CHUNK_HEAD.unpack_from(head, wire.HEADER_BYTES))
        chunk[4] = size
        start = wire.HEADER_BYTES + wire.CHUNK_HEAD.size
        packed = wire.CHUNK_HEAD.pack(*chunk)
        return head[: wire.HEADER_BYTES] + packed + head[start:], body

    if size > 2000:
        world.net.tamper = announce
    assert a.publish("t", bytes(min(size, 2000)))
    world.advance(0.5)
    assert tiny.mesh.stats.malformed >= 1
    assert tiny.taken == []
    assert all(isinstance(item, MessagesLost) for item in tiny.recv_all())


def test_a_sender_without_credit_is_cut_off() -> None:
    """Whoever ignores the window cannot fill this member's memory."""
    world = subscribed("a", "b", depth=2)
    (feed,) = world["a"].mesh.publisher.topic("t").feeds
    feed.credit_messages = 1000
    feed.topic.refresh()
    for _ in range(100):
        assert world["a"].publish("t", b"x")
    world.advance(0.5)
    assert world["b"].mesh.stats.malformed >= 1
    assert len(world["b"].mesh.subscriber.inbox) <= 2


def test_two_members_that_are_full_of_each_other_still_hear_each_other() -> None:
    """Control frames pass whatever waits: credit comes as soon as one reads."""
    world = World("a", "b")
    for name in "ab":
        world[name].subscribe("t", depth=2)
    world.settle()
    for name in "ab":
        publish_until_full(world, name)
    world["a"].recv_all()
    world.settle()
    assert world["b"].publish("t", b"go on")


def test_publishing_costs_no_more_with_many_topics() -> None:
    """A thousand idle topics do not slow a busy one down."""

    def seconds(topics: int) -> float:
        world = World("a", "b")
        for number in range(topics):
            world["b"].subscribe(f"idle {number}")
        world["b"].subscribe("t")
        world.settle()
        begin = time.perf_counter()
        for _ in range(300):
            world["a"].publish("t", b"x")
        return time.perf_counter() - begin

    few = min(seconds(1) for _ in range(3))
    many = min(seconds(1000) for _ in range(3))
    assert many < 10 * few
