"""A session frame by frame: in order, each once, and only where there is credit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import Parcel, ScriptedConn, numbered
from world import World, subscribed

from mq.errors import MessagesLost
from mq.mesh import backlog, wire
from mq.mesh.frame import Frame
from mq.mesh.large import Chunk, Large
from mq.mesh.outgoing import Topic
from mq.mesh.session import Session
from mq.mesh.subscriber import SUBSCRIPTIONS_PER_FRAME
from mq.transport import Event

LARGE = bytes(range(251)) * 8


pytestmark = pytest.mark.usefixtures("small_messages")


def active(**options: Any) -> World:
    """A world in which `b` is subscribed to t, and has had a message of `a`."""
    world = subscribed("a", "b", **options)
    assert world["a"].publish("t", b"active")
    world.settle()
    assert world["b"].payloads() == [b"active"]
    world.settle()
    return world


def test_what_goes_alone_does_not_overtake_a_frame_that_waits() -> None:
    """Frames travel in the order of their numbers, whoever sends the last of them."""
    world = active()
    a, b = world["a"], world["b"]
    a.session(b).control(wire.ACCEPTS, [])
    seen: list[int] = []

    def see(conn: ScriptedConn, parcel: Parcel) -> None:
        if conn.link is b.link and numbered(parcel):
            seen.append(numbered(parcel))

    world.net.watcher = see
    assert a.publish("t", b"x")
    world.settle()
    assert b.payloads() == [b"x"]
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert b.mesh.stats.malformed == 0


def _renumbered(by: int) -> Callable[[Parcel], Parcel]:
    def renumber(parcel: Parcel) -> Parcel:
        kind, flags, zero, number, received = wire.HEADER.unpack_from(parcel[0])
        head = wire.HEADER.pack(kind, flags, zero, number + by, received)
        return head + parcel[0][wire.HEADER_BYTES :], parcel[1]

    return renumber


def tamper_once(world: World, change: Callable[[Parcel], Parcel]) -> None:
    """Change the next message on its way from `a` to `b`."""
    left = [change]

    def tamper(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        if left and conn.link is world["a"].link and parcel[0][0] == wire.DATA:
            return left.pop()(parcel)
        return parcel

    world.net.tamper = tamper


def test_a_gap_in_the_numbers_breaks_the_connection_and_loses_nothing() -> None:
    """A link that loses a message is not believed: the session is resumed."""
    world = active()
    tamper_once(world, _renumbered(1))
    assert world["a"].publish("t", b"x")
    world.advance(1.0)
    assert world["b"].payloads() == [b"x"]
    assert world["b"].mesh.stats.malformed == 1
    assert world["b"].session(world["a"]).stats.connections == 2


@pytest.mark.parametrize("payload", [b"x", LARGE])
def test_a_frame_that_comes_twice_counts_once(payload: bytes) -> None:
    """Also the newest one, and with the body that belongs to it."""
    world = active()
    a, b = world["a"], world["b"]
    (conn,) = world.net.between(a.link, b.link)
    assert a.publish("t", payload)
    again = len(conn.flight)
    conn.flight = type(conn.flight)(p for p in conn.flight for _ in range(2))
    assert again
    world.settle()
    assert b.payloads() == [payload]
    assert b.session(a).stats.duplicate_frames == again
    assert b.mesh.stats.malformed == 0


def test_both_ends_count_the_same_bytes() -> None:
    """Answers too, which alone say that a frame has come."""
    world = active()
    a, b = world["a"], world["b"]
    for payload in (b"x", LARGE):
        assert a.publish("t", payload)
        world.advance(1.0)
    ours, theirs = a.session(b).stats, b.session(a).stats
    assert theirs.sent_frames == ours.received_frames
    assert theirs.sent_bytes == ours.received_bytes
    assert ours.sent_bytes == theirs.received_bytes


def test_a_request_to_subscribe_is_carried_out_once() -> None:
    """Its frame comes again where an interrupt left it half handled."""
    world = active()
    a, b = world["a"], world["b"]
    session = a.session(b)
    (feed,) = a.mesh.publisher.topic("t").feeds
    request = wire.Subscribe(feed.subscription, "t", None, 1, 1)
    number = session.number
    a.mesh.publisher.subscribe(session, [request])
    assert list(a.mesh.publisher.topic("t").feeds) == [feed]
    assert session.feeds == {feed.subscription: feed}
    assert session.number == number


def test_a_peer_is_introduced_by_the_last_of_its_subscriptions() -> None:
    """However many frames they take: `connect` returns when all are known."""
    count = 2 * SUBSCRIPTIONS_PER_FRAME + 1
    world = World("a")
    for number in range(count):
        world["a"].subscribe(f"t{number}")
    b = world.join("b")
    known: list[int] = []
    while not known:
        for conn in world.net.steps()[:1]:
            world.net.deliver(conn)
        for member in world.members.values():
            member.poll()
        session = b.mesh.sessions.get(world["a"].incarnation)
        if session is not None and session.introduced:
            known.append(len(session.feeds))
    assert known == [count]


@pytest.mark.parametrize(
    "options", [{"depth": 1}, {"depth": 1000, "window_bytes": 100}], ids=str
)
def test_a_retained_message_counts_against_the_credit(options: dict[str, int]) -> None:
    """What follows it waits until there is room again, and nothing is refused."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    assert a.publish("t", bytes(100), retain=True)
    b.subscribe("t", **options)
    world.settle()
    assert not a.publish("t", b"x")
    world.settle()
    assert b.payloads() == [bytes(100)]
    world.settle()
    assert a.publish("t", b"x")
    world.settle()
    assert b.payloads() == [b"x"]
    assert b.mesh.stats.malformed == 0


def test_a_small_message_to_keep_the_last_of_does_not_leave_while_one_is_out() -> None:
    """Also where all that was sent before has been answered but that one."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t", keep=1)
    world.settle()
    (conn,) = world.net.between(a.link, b.link)
    (feed,) = a.mesh.publisher.topic("t").feeds
    assert a.publish("t", b"0")
    assert feed.on_wire
    assert feed.head() is None
    assert [wire.HEADER.unpack_from(head)[1] for head, _ in conn.flight] == [
        wire.FLAG_ANSWER
    ]


def test_who_subscribes_anew_is_not_told_what_the_old_subscription_lost() -> None:
    """Of a publisher that was given up meanwhile and comes back."""
    world = World("a", "b", peer_timeout=4.0)
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    assert a.publish("t", b"0")
    world.settle()
    assert b.payloads() == [b"0"]
    world.partition("a", "b")
    world.advance(6.0)
    assert not b.mesh.sessions
    assert a.publish("t", b"1")
    b.unsubscribe("t")
    b.subscribe("t")
    world.heal()
    world.advance(5.0)
    assert a.publish("t", b"2")
    world.settle()
    assert b.payloads() == [b"2"]


def test_a_large_message_without_credit_takes_no_memory() -> None:
    """It is cut off at its first chunk, and not when all of it is there."""
    world = active(depth=2)
    a, b = world["a"], world["b"]
    (feed,) = a.mesh.publisher.topic("t").feeds
    feed.credit_messages = 1000
    feed.topic.refresh()
    for _ in range(4):
        assert a.publish("t", LARGE)
    world.advance(0.5)
    assert b.mesh.stats.malformed >= 1
    assert b.taken == [len(LARGE)] * 2


Part = tuple[int, bytes, bytes]
"""Offset of a chunk, its first part and its body."""


def _send_chunks(
    world: World, sequence: int, total: int, *chunks: Part, last: int | None = -1
) -> None:
    """Have `a` send chunks as no member does.

    Args:
        last: The index of the one that is said to be the last; None: there is none.
    """
    a, b = world["a"], world["b"]
    session = a.session(b)
    (subscription,) = session.feeds
    for index, (offset, part, body) in enumerate(chunks):
        head = wire.CHUNK_HEAD.pack(
            subscription, len(part), sequence, 1.0, total, offset
        )
        is_last = last is not None and index == last % len(chunks)
        flags = wire.FLAG_LAST if is_last else 0
        number = session.number + 1
        large = Large(total, [Chunk(offset, part, memoryview(body))]) if body else None
        frame = Frame(wire.CHUNK, number, [head, part], flags, large=large)
        session._append(frame)
    world.settle()


@pytest.mark.parametrize(
    ("total", "chunks"),
    [
        (163, [(0, b"x" * 100, b"")]),
        (263, [(0, b"x" * 100, b""), (163, b"", b"x" * 100)]),
        (164, [(0, b"x", b"x" * 100)]),
    ],
    ids=["behind the last", "between two", "before a body"],
)
def test_what_was_not_sent_of_a_message_is_zero(total: int, chunks: list[Part]) -> None:
    """It may be said to be no pad; what the memory held before is nobody's."""
    world = active()
    expected = bytearray(total)
    for offset, part, body in chunks:
        expected[offset : offset + len(part)] = part
        start = -(-(offset + len(part)) // 64) * 64 if part else offset
        if body:
            expected[start : start + len(body)] = body
    _send_chunks(world, 1, total, *chunks)

    assert world["b"].payloads() == [bytes(expected)]
    assert not world["b"].mesh.stats.malformed


@pytest.mark.parametrize("offset", [0, 1, 50, 99, 164])
def test_a_chunk_that_does_not_follow_breaks_the_connection(offset: int) -> None:
    """Taken for one that came again, it would be missing without a word."""
    world = active()
    _send_chunks(world, 1, 300, (0, b"x" * 100, b""), (offset, b"y" * 101, b""))

    assert world["b"].mesh.stats.malformed
    assert not world["b"].payloads()


def test_a_chunk_that_comes_again_is_the_same() -> None:
    """Its sender, or who takes it, was interrupted in the middle of it."""
    world = active()
    first = (0, b"x", b"y" * 100)
    _send_chunks(world, 1, 264, first, first, (164, b"", b"z" * 100))

    (payload,) = world["b"].payloads()
    assert payload == b"x" + bytes(63) + b"y" * 100 + b"z" * 100
    assert not world["b"].mesh.stats.malformed


@pytest.mark.parametrize("after", ["chunk", "batch", "lent"])
def test_a_message_that_is_given_up_breaks_the_connection(after: str) -> None:
    """Of who keeps all, with the next on its topic: it would be lost without a word."""
    world = active(lends={"a": 1 << 20, "b": 1 << 20} if after == "lent" else None)
    a, b = world["a"], world["b"]
    _send_chunks(world, 1, 300, (0, b"x" * 100, b""), last=None)
    assert not b.mesh.stats.malformed
    a.mesh.publisher.topic("t").commit(1.0, b"", retain=False)
    (feed,) = a.session(b).feeds.values()
    feed.framed(1)
    assert a.publish("t", b"small" if after == "batch" else LARGE)
    world.settle()
    world.close()

    assert b.mesh.stats.malformed
    (notice,) = b.recv_all()
    assert isinstance(notice, MessagesLost)
    assert notice.count == 2


def test_a_message_that_is_given_up_is_dropped_by_who_keeps_the_last() -> None:
    """Its publisher may have been interrupted, and has a newer one; it is counted."""
    world = active(keep=1)
    b = world["b"]
    _send_chunks(world, 1, 300, (0, b"x" * 100, b""), last=None)
    _send_chunks(world, 2, 100, (0, b"y" * 100, b""))

    assert b.payloads() == [b"y" * 100]
    assert b.mesh.subscriber.topics["t"].stats.dropped == 1
    assert not b.mesh.stats.malformed


def _ask(world: World, *topics: str, first: int = 1000) -> None:
    """Have a's peer subscribe as no member does: its mesh knows nothing of it."""
    requests = [
        wire.Subscribe(first + n, topic, None, 1, 1) for n, topic in enumerate(topics)
    ]
    world["b"].session(world["a"]).control(wire.SUBSCRIBE, requests)
    world.settle()


@pytest.mark.parametrize(
    "topics", [["x", "x"], ["t"], [""], ["x" * 256], ["x", "y" * 256]], ids=len
)
def test_what_no_member_subscribes_to_breaks_the_connection(topics: list[str]) -> None:
    """A topic with thousands of subscriptions would hold everybody up."""
    world = active()
    mesh = world["a"].mesh
    before = set(mesh.publisher.topics)
    _ask(world, *topics)

    assert mesh.stats.malformed
    assert set(mesh.publisher.topics) == before


def test_topics_that_only_peers_have_named_go_with_them() -> None:
    """Else a peer could have any number of them kept."""
    world = active()
    mesh = world["a"].mesh
    before = set(mesh.publisher.topics)
    for number in range(3):
        _ask(world, "x", "y", first=1000 + 2 * number)
        assert set(mesh.publisher.topics) == {*before, "x", "y"}
        for of in range(2):
            told = 1000 + 2 * number + of
            world["b"].session(world["a"]).control(wire.UNSUBSCRIBE, told)
        world.settle()
        assert set(mesh.publisher.topics) == before
    _ask(world, "x", first=2000)
    assert world["a"].publish("x", b"named here, too")
    world["b"].session(world["a"]).control(wire.UNSUBSCRIBE, 2000)
    world.settle()

    assert set(mesh.publisher.topics) == {*before, "x"}
    assert not mesh.stats.malformed


def test_who_takes_no_answers_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept until they are received, and a peer asks as often as it likes."""
    monkeypatch.setattr(backlog, "MOST_ANSWER_BYTES", 20_000)
    world = active()
    a, b = world["a"], world["b"]
    ours, theirs = a.session(b), b.session(a)
    (subscription,) = ours.feeds
    ask = [wire.Reclaim(subscription, 0, 1000, 1 << 20)]
    for _ in range(500):
        theirs.control(wire.RECLAIM, ask)
        world.settle()
    assert not ours.answer_bytes
    assert not a.mesh.stats.malformed
    monkeypatch.setattr(b.mesh.reader, "read", lambda *args: None)
    for _ in range(500):
        theirs.control(wire.RECLAIM, ask)
        theirs.pump(world.now, flush=True)
        world.net.deliver_all()
        a.poll()

    assert a.mesh.stats.malformed
    assert ours.answer_bytes < 21_000


@pytest.mark.parametrize("kind", [wire.CREDIT, wire.RECLAIM])
def test_a_long_list_holds_nobody_else_up(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic's limits are derived once per frame, and then others have their turn."""
    world = active()
    a, b = world["a"], world["b"]
    ours, theirs = a.session(b), b.session(a)
    (feed,) = ours.feeds.values()
    granted = feed.credit_messages
    derived: list[Topic] = []
    refresh = Topic.refresh

    def count(topic: Topic) -> None:
        derived.append(topic)
        refresh(topic)

    monkeypatch.setattr(Topic, "refresh", count)
    entry = (feed.subscription, *([7] if kind == wire.RECLAIM else []))
    for messages in (granted + 1, granted + 2, granted + 3):
        theirs.control(kind, [(*entry, messages, 1 << 20)] * 1000)
    theirs.pump(world.now, flush=True)
    world.net.deliver_all()
    assert ours.conn is not None
    before = ours.stats.received_frames
    reader = a.mesh.reader
    reader.stopped_early = False
    reader.read(ours, ours.conn)

    assert ours.stats.received_frames == before + 1
    assert reader.stopped_early
    assert derived == [feed.topic]
    world.settle()
    assert ours.stats.received_frames >= before + 3
    assert derived == [feed.topic] * 3
    assert feed.credit_messages == granted + (3 if kind == wire.CREDIT else 0)
    assert not a.mesh.stats.malformed


def test_peers_hear_of_who_reads_for_long_from_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them may send less than a turn, and all of them together much."""
    world = World(*"abcdefghijkl", peer_timeout=2.0)
    a = world["a"]
    a.subscribe("t")
    world.settle()
    for name in "bcdefghijkl":
        assert world[name].publish("t", b"x")
        world[name].poll()
    world.net.deliver_all()
    read = a.mesh.reader.read
    unheard: list[float] = []

    def read_slowly(session: Session, *args: Any) -> None:
        world.now += 0.2
        unheard.extend(world.now - s.last_sent for s in a.mesh.sessions.values())
        read(session, *args)

    monkeypatch.setattr(a.mesh.reader, "read", read_slowly)
    a.poll()
    assert len(unheard) >= 11 * 11
    assert max(unheard) < 1.0
    assert len(a.mesh.sessions) == 11


def test_links_are_looked_at_after_the_last_that_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A send may take up an engine's news, which then nobody is woken for."""
    world = World("a", "b", peer_timeout=2.0)
    a, b = world["a"], world["b"]
    a.subscribe("t")
    world.settle()
    assert b.publish("t", b"x")
    b.mesh.pump(world.now, flush=True)
    world.net.deliver_all()
    order: list[str] = []
    poll, pump, handle = a.link.poll, a.mesh.pump, a.mesh._handle

    def poll_told() -> Iterator[Event]:
        order.append("look")
        return poll()

    def pump_told(*arguments: Any) -> bool:
        sent = pump(*arguments)
        order.extend(["send"] * sent)
        return sent

    def handle_slowly(event: Event) -> None:
        handle(event)
        world.now += 0.6

    monkeypatch.setattr(a.link, "poll", poll_told)
    monkeypatch.setattr(a.mesh, "pump", pump_told)
    monkeypatch.setattr(a.mesh, "_handle", handle_slowly)
    a.poll()
    assert "send" in order
    assert order[-1] == "look"


def test_peers_are_looked_at_though_each_poll_finds_a_message() -> None:
    """Whoever receives without end gives the silent up as others do."""
    world = World("a", "b", "c", peer_timeout=2.0)
    a, b = world["a"], world["b"]
    a.subscribe("t")
    world.settle()
    world.stall("c")
    begun = world.now
    while len(a.peers()) > 1:
        assert world.now < begun + 4.0
        assert b.publish("t", b"x")
        b.mesh.pump(world.now, flush=True)
        b.poll()
        world.net.deliver_all()
        a.mesh.poll(until_message=True)
        assert a.payloads()
        world.now += 0.005
    assert a.peers() == ["b"]


@pytest.mark.parametrize("late", ["a", "b"])
def test_types_that_are_accepted_since_the_greeting_are_told(late: str) -> None:
    """Those of the greeting are of before, of either side."""
    asked = 0

    def accepts() -> frozenset[str]:
        nonlocal asked
        asked += 1
        return frozenset() if asked == 1 else frozenset({"test:Late"})

    world = World()
    world.join("a", **({"accepts": accepts} if late == "a" else {}))
    world.join("b", **({"accepts": accepts} if late == "b" else {}))
    world.settle()
    other = world["b" if late == "a" else "a"]
    assert other.session(world[late]).accepts == {"test:Late"}
