"""Messages in their publisher's memory, on a scripted link."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
from world import Got, Member, World

from mq.borrowing import Mapping
from mq.errors import MessagesLost
from mq.lending import BLOCK_BYTES
from mq.mesh import wire
from mq.mesh.subscription import Subscription
from mq.segments import Block

LIMIT = 4 * BLOCK_BYTES
PIECE_BYTES = 1000
LARGE = bytes(range(250)) * 16


@pytest.fixture
def world(small_messages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A publisher `a` and a subscriber `b` that read each other's memory."""
    monkeypatch.setattr("mq.mesh.publisher.cores", lambda: 8)
    monkeypatch.setattr("mq.mesh.copying.PIECE_BYTES", PIECE_BYTES)
    world = World("a", "b", lends=dict.fromkeys("abc", LIMIT))
    yield world
    world.close()


def deliver(world: World) -> None:
    """Let what was sent arrive, without giving anybody time to copy it all."""
    world["a"].mesh.pump(world.clock(), flush=True)
    world.net.deliver_all()
    for _ in range(3):
        world["b"].mesh.poll(until_message=True)


def announce(a: Member, b: Member, subscription: Subscription, skew: int = 0) -> None:
    """Say to `b` that a message of 4,000 bytes is being written, which it is not."""
    session = a.session(b)
    assert a.link.lender is not None
    block = a.link.lender.take(4000, counted=True)
    assert block is not None
    assert session.conn is not None
    session.conn.lend(block.segment)
    head = wire.HEADER.pack(
        wire.LENT, wire.FLAG_FILLING, 0, session.number + 1, session.received
    )
    place = (block.segment.id, 0, 0.0, block.offset + skew, 4000)
    session.conn.try_send(head + wire.LENT_HEAD.pack(subscription.id, *place))


def in_use(member: Member) -> int:
    """Bytes of blocks that are not free."""
    assert member.link.lender is not None
    return member.link.lender.stats().in_use_bytes


def test_only_a_reference_travels(world: World) -> None:
    """A large message is one frame without a body, and released once it was copied."""
    world["b"].subscribe("t")
    world.settle()
    session = world["a"].session(world["b"])
    before = session.stats.sent_bytes

    world["a"].publish("t", LARGE)
    lent = session.lent_bytes()
    world.settle()

    assert lent == len(LARGE)
    assert session.stats.sent_bytes - before < 200
    assert world["b"].payloads() == [LARGE]
    assert session.lent_bytes() == 0
    assert in_use(world["a"]) == 0


def test_a_message_being_copied_delays_no_other_topic(world: World) -> None:
    """It delays those behind it on its own topic, for their order."""
    a, b = world["a"], world["b"]
    b.subscribe("large")
    b.subscribe("other")
    world.settle()
    a.publish("large", LARGE)
    a.publish("large", b"behind it")
    a.publish("other", b"beside it")

    deliver(world)
    first = b.payloads()
    world.settle()

    assert first == [b"beside it"]
    assert b.payloads() == [LARGE, b"behind it"]


def test_what_is_dropped_while_it_is_copied_is_released(world: World) -> None:
    """`unsubscribe` does not wait for the copy, nor hand it out."""
    b = world["b"]
    b.subscribe("t")
    world.settle()
    world["a"].publish("t", LARGE)
    deliver(world)

    b.unsubscribe("t")
    world.settle()

    assert b.payloads() == []
    assert in_use(world["a"]) == 0


def test_what_keep_last_keeps_is_released_when_unsubscribed(world: World) -> None:
    """At once, not when the garbage collector comes by."""
    a, b = world["a"], world["b"]
    b.subscribe("kept", keep=2)
    world.settle()
    gc.disable()
    try:
        assert a.publish("kept", bytes(1000))
        world.settle()
        assert a.session(b).lent
        b.unsubscribe("kept")
        world.settle()
        assert not a.session(b).lent
        assert in_use(a) == 0
    finally:
        gc.enable()


def test_a_view_keeps_its_block_and_nothing_else(world: World) -> None:
    """With `zero_copy` the memory is released when the view dies."""
    a, b = world["a"], world["b"]
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    a.publish("t", LARGE)
    world.settle()
    b.payloads()
    world.settle()
    held = in_use(a)

    b.views.clear()
    world.settle()

    assert held == BLOCK_BYTES
    assert in_use(a) == 0


def test_a_subscriber_that_only_views_holds_the_publisher_up(world: World) -> None:
    """When its views fill the memory there is no more, until it drops one."""
    a, b = world["a"], world["b"]
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    while a.publish("t", LARGE):
        world.settle()
        b.payloads()
    published = a.newest("t") + 1

    b.views.pop(0)
    world.settle()

    assert published == LIMIT // BLOCK_BYTES
    assert a.publish("t", LARGE)


def test_keep_last_never_holds_a_publisher_up(world: World) -> None:
    """What does not fit into the memory goes through the connection."""
    a, b = world["a"], world["b"]
    b.subscribe("t", keep=1, zero_copy=True)
    world.settle()
    b.viewing = True
    for number in range(2 * LIMIT // BLOCK_BYTES):
        assert a.publish("t", LARGE + bytes([number]))
        world.settle()
        b.recv()

    assert b.views[-1][1] == LARGE + bytes([number])
    assert all(bytes(view) == content for view, content in b.views)


def test_memory_that_a_stalled_peer_may_read_is_never_used_again(world: World) -> None:
    """It was given up without proof of its death, and then goes on reading."""
    a, b = world["a"], world["b"]
    b.subscribe("t", zero_copy=True)
    world.settle()
    b.viewing = True
    a.publish("t", LARGE)
    world.settle()
    b.payloads()
    (segment,) = {block.segment for block in a.session(b).lent.values()}

    world.stall("b")
    world.partition("a", "b")
    world.advance(60.0)

    assert a.link.lender is not None
    assert segment.id not in a.link.lender.segments
    for _ in range(10):
        a.publish("t", bytes(4000), retain=True)
    assert all(bytes(view) == content for view, content in b.views)


def test_memory_of_a_dead_peer_is_given_back(world: World) -> None:
    """A child of it may still read that memory, so that it is not used again."""
    a, b = world["a"], world["b"]
    b.subscribe("t", zero_copy=True)
    world.settle()
    a.publish("t", LARGE)
    world.settle()

    world.kill("b")
    world.settle()

    assert a.link.lender is not None
    assert a.link.lender.stats().mapped_bytes == 0


@pytest.mark.parametrize("what", ["unknown segment", "beyond it", "cut off"])
def test_a_reference_to_no_memory_is_refused(world: World, what: str) -> None:
    """The connection breaks, and the session is resumed."""
    a, b = world["a"], world["b"]
    subscription = b.subscribe("t")
    world.settle()
    session = a.session(b)
    segment = 0
    if what == "beyond it":
        assert a.link.lender is not None
        block = a.link.lender.take(4000)
        assert block is not None
        assert session.conn is not None
        session.conn.lend(block.segment)
        segment = block.segment.id
    head = wire.HEADER.pack(wire.LENT, 0, 0, session.number + 1, session.received)
    body = wire.LENT_HEAD.pack(subscription.id, segment, 0, 0.0, LIMIT - 10, 4000)
    assert session.conn is not None
    session.conn.try_send(head + body[: -1 if what == "cut off" else None])

    world.settle()
    a.publish("t", LARGE)
    world.settle()

    assert b.mesh.stats.malformed == 1
    assert b.payloads() == [LARGE]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Block, bytes]]]:
    """Blocks of which only a part was written, and what belongs there."""
    held: list[tuple[Block, bytes]] = []

    def fill(block: Block, pieces: list[tuple[int, memoryview]]) -> None:
        if block.counter is None:
            return
        content = bytearray(len(block.area))
        for start, piece in pieces:
            content[start : start + len(piece)] = piece
        part = PIECE_BYTES + 1
        block.area[:part] = content[:part]
        block.counter[:] = part.to_bytes(8, sys.byteorder)
        held.append((block, bytes(content)))

    monkeypatch.setattr(Block, "fill", fill)
    yield held
    held.clear()  # their memory must be free when the test has ended


def half_written(world: World) -> tuple[Member, Member]:
    """`a`, which has written a part of `LARGE`, and `b`, which follows it."""
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    a.publish("t", LARGE)
    world.settle()
    return a, b


def finish(slow: list[tuple[Block, bytes]]) -> None:
    """The publisher goes on writing, to the end."""
    for block, content in slow:
        assert block.counter is not None
        block.area[:] = content
        block.counter[:] = len(content).to_bytes(8, sys.byteorder)
    slow.clear()


def test_a_message_is_handed_out_once_it_is_written(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """Until then what is behind it on its topic waits, and nothing else does."""
    a, b = world["a"], world["b"]
    b.subscribe("t")
    b.subscribe("other")
    world.settle()
    a.publish("t", LARGE)
    a.publish("t", b"behind it")
    a.publish("other", b"beside it")
    world.settle()
    before = b.payloads()
    assert slow

    finish(slow)
    world.advance(0.1)

    assert before == [b"beside it"]
    assert b.payloads() == [LARGE, b"behind it"]
    world.settle()
    assert in_use(a) == 0


def test_who_waits_for_a_writer_does_not_spin(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """It looks again and again, each time after a longer pause."""
    _, b = half_written(world)
    pauses = []
    for _ in range(8):
        pauses.append(b.mesh.next_deadline() - world.clock())
        world.now += pauses[-1]
        b.poll()

    assert pauses == sorted(pauses)
    assert 0.005 < pauses[-1] < 0.02
    finish(slow)


def test_what_a_dead_publisher_did_not_write_never_arrived(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """Nor what is behind it: what is handed out is a prefix without a gap."""
    a, b = world["a"], world["b"]
    b.subscribe("t")
    b.subscribe("other")
    world.settle()
    a.publish("t", b"before it")
    a.publish("t", LARGE)
    a.publish("t", b"behind it")
    a.publish("other", b"beside it")
    world.settle()

    world.kill("a")
    world.settle()

    assert sorted(b.payloads()) == [b"before it", b"beside it"]
    assert not b.mesh.subscriber.copies.waiting
    assert not b.mesh.subscriber.inbox.fifo


def test_what_a_publisher_wrote_before_its_death_arrives(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """The memory is there as long as somebody reads it."""
    _, b = half_written(world)
    finish(slow)

    world.kill("a")
    world.advance(0.1)

    assert b.payloads() == [LARGE]


def test_what_a_stalled_publisher_did_not_write_is_reported(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """It was given up in the middle of a message, and comes back."""
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    a.publish("t", b"before it")
    a.publish("t", LARGE)
    a.publish("t", b"behind it")
    world.settle()

    world.stall("a")
    world.advance(60.0)
    world.unstall("a")
    finish(slow)
    world.advance(60.0)
    a.publish("t", b"new")
    world.advance(1.0)

    first, notice, last = b.recv_all()
    assert isinstance(first, Got)
    assert isinstance(last, Got)
    assert (first.payload, last.payload) == (b"before it", b"new")
    assert isinstance(notice, MessagesLost)
    assert notice.count == 2


def test_what_is_dropped_while_it_is_written_is_released(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """`unsubscribe` does not wait for the publisher."""
    a, b = half_written(world)

    b.unsubscribe("t")
    world.advance(0.1)
    slow.clear()

    assert b.payloads() == []
    assert in_use(a) == 0


@pytest.mark.parametrize("options", [{"keep": 1}, {"zero_copy": True}], ids=str)
def test_who_does_not_copy_is_told_of_what_is_written(
    world: World, slow: list[tuple[Block, bytes]], options: dict[str, int]
) -> None:
    """And then nobody on that topic is told before."""
    a, b = world["a"], world["b"]
    world.join("c").subscribe("t")
    b.subscribe("t", **options)
    world.settle()
    a.publish("t", LARGE)
    world.settle()

    assert not slow
    assert b.payloads() == world["c"].payloads() == [LARGE]


def test_two_interrupts_leave_no_message_unwritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the mesh puts right what the first one left."""
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    fill = Block.fill
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(block: Block, pieces: list[tuple[int, memoryview]]) -> None:
        if interrupts:
            raise interrupts.pop()
        fill(block, pieces)

    monkeypatch.setattr(Block, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.publish("t", LARGE)
    with pytest.raises(KeyboardInterrupt):
        a.mesh.recover()
    a.publish("t", LARGE[::-1])
    a.mesh.recover()
    world.settle()

    assert b.payloads() == [LARGE, LARGE[::-1]]
    assert in_use(a) == 0


def test_a_message_that_is_not_there_is_for_who_follows(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """Another subscriber refuses it, so that nobody reads what is not there."""
    a, b = world["a"], world["b"]
    subscription = b.subscribe("t", zero_copy=True)
    world.settle()
    announce(a, b, subscription)
    world.settle()

    assert b.mesh.stats.malformed == 1


def test_who_cannot_map_gets_what_is_written(
    world: World,
    slow: list[tuple[Block, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It copies at once, so it waits a little, and then for another connection."""
    monkeypatch.setattr("mq.mesh.copying.UNMAPPED_SECONDS", 0.01)
    in_place = Mapping.borrow

    def copied(
        mapping: Mapping, offset: int, nbytes: int, take: Callable[[int], memoryview]
    ) -> memoryview:
        area = take(nbytes)
        area[:] = in_place(mapping, offset, nbytes, take)
        return area

    monkeypatch.setattr(Mapping, "borrow", copied)
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    a.publish("t", LARGE)
    deliver(world)
    before = b.payloads(), b.mesh.stats.malformed

    finish(slow)
    world.advance(1.0)

    assert before == ([], 1)
    assert b.payloads() == [LARGE]
    assert in_use(a) == 0


def test_a_publisher_that_stopped_delays_no_other(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """What another one has written is copied without a pause."""
    a, b, c = world["a"], world["b"], world.join("c")
    b.subscribe("t")
    world.settle()
    a.publish("t", LARGE)
    world.advance(1.0)
    stopped = slow.pop()
    c.publish("t", LARGE[::-1])
    finish(slow)
    c.mesh.pump(world.clock(), flush=True)
    world.net.deliver_all()
    for _ in range(12):
        b.poll()

    assert b.payloads() == [LARGE[::-1]]
    slow.append(stopped)
    finish(slow)
    world.advance(0.1)
    assert b.payloads() == [LARGE]


def test_what_has_been_written_is_found_at_once(
    world: World, slow: list[tuple[Block, bytes]]
) -> None:
    """By who asks for a message, however long the pause between two looks is."""
    _, b = half_written(world)
    world.advance(1.0)

    finish(slow)
    for _ in range(len(LARGE) // PIECE_BYTES + 1):
        b.mesh.poll(until_message=True)

    assert b.payloads() == [LARGE]


def test_a_counter_that_no_processor_writes_at_once_is_refused(world: World) -> None:
    """The connection breaks, and not the member."""
    a, b = world["a"], world["b"]
    subscription = b.subscribe("t")
    world.settle()
    announce(a, b, subscription, skew=1)
    world.settle()
    a.publish("t", LARGE)
    world.settle()

    assert b.mesh.stats.malformed == 1
    assert b.payloads() == [LARGE]
