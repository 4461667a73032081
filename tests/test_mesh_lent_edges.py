"""References to a publisher's memory that are too large, or that come twice."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest
from scripted import Parcel, ScriptedConn
from world import World

from mq.borrowing import is_borrowed
from mq.lending import BLOCK_BYTES
from mq.mesh import wire
from mq.mesh.backlog import Backlog
from mq.mesh.frame import Frame
from mq.mesh.inbox import Item
from mq.mesh.incoming import Run, Source

LIMIT = 4 * BLOCK_BYTES
LARGE = bytes(range(250)) * 16


@pytest.fixture
def world(small_messages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A publisher `a`, and for others that join memory that both ends read."""
    monkeypatch.setattr("mq.mesh.publisher.cores", lambda: 8)
    world = World("a", lends=dict.fromkeys("ab", LIMIT))
    yield world
    world.close()


def test_a_message_above_the_limit_is_not_copied_from_its_publisher(
    world: World,
) -> None:
    """Whoever ignores max_message_bytes has the receiver take no memory for it."""
    b = world.join("b", max_message_bytes=len(LARGE) - 1)
    b.subscribe("t")
    world.settle()
    session = world["a"].session(b)
    session.peer = msgspec.structs.replace(session.peer, max_message_bytes=1 << 50)
    assert world["a"].publish("t", LARGE)
    world.advance(0.5)
    assert b.mesh.stats.malformed >= 1
    assert b.taken == []


def _references(world: World) -> list[Parcel]:
    """LENT frames that will reach `b`."""
    found: list[Parcel] = []

    def see(conn: ScriptedConn, parcel: Parcel) -> None:
        if conn.link is world["b"].link and parcel[0][0] == wire.LENT:
            found.append(parcel)

    world.net.watcher = see
    return found


def test_a_reference_that_comes_again_does_not_release_what_is_viewed(
    world: World,
) -> None:
    """Its memory would be written to under the view."""
    a, b = world["a"], world.join("b")
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    references = _references(world)
    assert a.publish("t", LARGE)
    world.settle()
    assert b.payloads() == [LARGE]
    b.session(a).received -= 1  # as if an interrupt had come right before this
    (conn,) = world.net.between(a.link, b.link)
    conn.flight.append(references[0])
    world.settle()
    assert b.payloads() == []
    assert a.session(b).lent_bytes() == len(LARGE)
    b.views.clear()
    world.settle()
    assert a.session(b).lent_bytes() == 0


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_view_that_nobody_ever_had_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """An interrupt came before its message was in the inbox; it comes again."""
    a, b = world["a"], world.join("b")
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    arrived = Source.arrived
    never_had: list[object] = []

    def interrupted(source: Source, fifo: deque[Item], run: Run) -> None:
        if interrupts:
            never_had.append(run.areas[0])
            raise interrupts.pop()
        arrived(source, fifo, run)

    interrupts = [KeyboardInterrupt()]
    monkeypatch.setattr(Source, "arrived", interrupted)
    assert a.publish("t", LARGE)
    world.net.deliver_all()
    with pytest.raises(KeyboardInterrupt):
        b.poll()
    gc.collect()  # the traceback had it, too
    if dies == "before":
        b.link.abrupt = True  # so that what it says of that comes with the message
        never_had.clear()
        b.mesh.pump(world.clock())
    b.mesh.recover()
    world.advance(1.0)
    assert b.payloads() == [LARGE]
    never_had.clear()
    world.advance(1.0)
    assert a.session(b).lent_bytes() == len(LARGE)
    b.views.clear()
    world.settle()
    assert a.session(b).lent_bytes() == 0


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_message_of_which_a_part_has_left_is_not_lent(
    world: World, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on in chunks where the session resumes over a link that lends."""
    world.net.shares = False
    a, b = world["a"], world.join("b")
    b.subscribe("t")
    world.settle()
    a.link.capacity = 1
    messages = [bytes([number]) * 3000 for number in range(4)]
    for message in messages:
        assert a.publish("t", message)
    for _ in range(steps):
        for conn in world.net.steps()[:1]:
            world.net.deliver(conn)
        b.poll()
        a.poll()
    world.cut("a", "b")
    world.net.shares = True
    append = Backlog._append

    def bounded(backlog: Backlog, frame: Frame) -> None:
        assert frame.number < 200  # else it would go on for ever
        append(backlog, frame)

    monkeypatch.setattr(Backlog, "_append", bounded)
    a.link.capacity = 1000
    world.advance(3.0)
    assert b.payloads() == messages
    assert b.mesh.stats.malformed == 0


@pytest.mark.parametrize("keep", [None, 1], ids=["all", "last"])
@pytest.mark.parametrize("viewing", [False, True], ids=["copied", "viewed"])
@pytest.mark.parametrize("steps", range(1, 16))
def test_what_was_lent_is_sent_where_the_next_link_lends_nothing(
    world: World, steps: int, viewing: bool, keep: int | None
) -> None:
    """However much had come before, and if that breaks, too, on any further link."""
    a, b, net = world["a"], world.join("b"), world.net
    b.subscribe("t", keep, zero_copy=viewing)
    world.settle()
    b.viewing = viewing
    sent = [b"small", *(bytes([n]) * (3000 + n) for n in range(3)), b"the last"]
    for message in sent:
        assert a.publish("t", message)
    a.subscribe("u")  # to be carried out once, behind them
    for _ in range(steps // 2):
        for conn in net.steps()[:1]:
            net.deliver(conn)
        b.poll()
        a.poll()
    got = b.payloads()
    chunks = 0

    def see(conn: ScriptedConn, parcel: Parcel) -> None:
        nonlocal chunks
        if parcel[0][0] != wire.CHUNK:
            return
        chunks += 1
        if chunks == steps:
            net.shares = steps % 2 > 0
            world.cut("a", "b", lose_one=99)

    net.watcher = see
    net.shares = False
    world.cut("a", "b", lose_one=99)
    world.advance(3.0)
    got += b.payloads()
    assert b.publish("u", b"back")
    world.settle()

    assert a.payloads() == [b"back"]
    assert got == sent if keep is None else got[-1] == sent[-1]
    assert a.mesh.stats.malformed == b.mesh.stats.malformed == 0
    assert all(bytes(view) == content for view, content in b.views)
    held = sum(len(view) for view, _ in b.views if is_borrowed(view))
    assert a.session(b).lent_bytes() == held
    b.views.clear()
    world.settle()
    assert a.session(b).lent_bytes() == 0
    assert a.link.lender is not None
    assert a.link.lender.stats().in_use_bytes == 0


def test_what_is_viewed_is_not_released_where_the_next_link_lends_nothing(
    world: World,
) -> None:
    """It came before an interrupt, of which its sender knows nothing, and comes again.

    Its memory would be written to under the view.
    """
    a, b = world["a"], world.join("b")
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    assert a.publish("t", LARGE)
    world.net.deliver_all()
    b.poll()
    assert b.payloads() == [LARGE]
    b.session(a).received -= 1
    world.net.shares = False
    world.cut("b", "a", lose_one=99)
    world.advance(1.0)
    assert b.payloads() == []
    assert a.session(b).lent_bytes() == len(LARGE)
    assert not a.session(b).frames
    b.views.clear()
    world.settle()
    assert a.session(b).lent_bytes() == 0


@pytest.mark.parametrize("more", range(4))
def test_nothing_is_read_twice_where_frames_get_other_numbers(
    world: World, more: int
) -> None:
    """A broken connection may still hold some, when its other end has the next one."""
    a, b, net = world["a"], world.join("b"), world.net
    a.subscribe("t")
    world.settle()
    assert b.session(a).dialler
    (old,) = (c for c in net.conns if c.link is b.link and not c.closed)
    sent = [bytes([n]) * (3000 + n) for n in range(2)]
    for message in sent:
        assert b.publish("t", message)
    for _ in range(more):
        b.subscribe("u")
        b.unsubscribe("u")
    b.subscribe("u")
    b.poll()
    net.shares = False
    net.cut(old, hold=(False, True))

    def go_on() -> bool:
        """Whether something has moved, but on the old connection."""
        for conn in net.steps():
            if conn is not old:
                net.deliver(conn)
                a.poll()
                b.poll()
                return True
        return False

    net.deliver(old.other)
    b.poll()
    while not b.session(a).conn:
        if not go_on():
            world.now += 0.01
            b.poll()
    while old.flight:
        net.deliver(old)
    a.poll()
    world.settle()
    assert a.payloads() == sent
    assert a.publish("u", b"back")
    world.settle()
    assert b.payloads() == [b"back"]
    assert a.mesh.stats.malformed == b.mesh.stats.malformed == 0
    assert b.session(a).lent_bytes() == 0
