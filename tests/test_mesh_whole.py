"""Messages that travel as one body, which stays in the memory in which it arrives."""

from __future__ import annotations

import numpy as np
import pytest
from world import WHOLE_BYTES, Member, World, subscribed

from mq.codec import Codec
from mq.mesh import wire
from mq.mesh.cutting import whole
from mq.transport import Conn

LARGE = bytes(range(250)) * 6
TOO_LARGE = LARGE * 2
assert len(LARGE) <= WHOLE_BYTES < len(TOO_LARGE)


pytestmark = pytest.mark.usefixtures("small_messages")


def pair(wholes: str = "ab", **options: object) -> tuple[World, Member, Member]:
    """A publisher `a`, and `b` that is subscribed to two topics."""
    world = subscribed("a", "b", topics="tu", wholes=wholes, **options)
    return world, world["a"], world["b"]


def chunks_under_way(world: World) -> list[wire.Chunk]:
    """Heads of what was sent by `a` and did not arrive."""
    (conn,) = world.net.between(world["a"].link, world["b"].link)
    heads = [memoryview(head) for head, _ in conn.flight if head[0] == wire.CHUNK]
    return list(map(wire.parse_chunk, heads))


def test_a_message_is_one_body_and_stays_where_it_arrives() -> None:
    """The sender copies it once, and the receiver takes no memory."""
    world, a, b = pair()
    assert a.publish("t", LARGE)
    (chunk,) = chunks_under_way(world)
    world.settle()

    assert (chunk.offset, bytes(chunk.part), chunk.total) == (0, b"", len(LARGE))
    assert b.payloads() == [LARGE]
    assert a.taken == [len(LARGE)]
    assert b.taken == []


@pytest.mark.parametrize(
    ("wholes", "message"),
    [("ab", TOO_LARGE), ("a", LARGE)],
    ids=["a larger one is cut", "a body that cannot be kept"],
)
def test_what_cannot_stay_is_copied_by_the_receiver(
    wholes: str, message: bytes
) -> None:
    """What the sender's links can do says nothing of the receiver's."""
    world, a, b = pair(wholes)
    assert a.publish("t", message)
    world.settle()

    assert b.payloads() == [message]
    assert b.taken == [len(message)]


def test_a_message_is_cut_where_a_large_body_would_do_harm() -> None:
    """To one of its subscribers: all get the same chunks."""
    world, a, b = pair()
    c = world.join("c")
    c.subscribe("t")
    world.settle()
    session = a.session(c)
    session.whole_bytes = 0  # as over a slow wire
    assert a.publish("t", LARGE)
    chunks = chunks_under_way(world)
    assert a.publish("u", LARGE)
    (whole_one,) = chunks_under_way(world)[len(chunks) :]
    world.settle()

    assert len(chunks) > 1
    assert whole_one.offset == 0
    assert b.payloads() == [LARGE, LARGE]
    assert c.payloads() == [LARGE]


def test_what_nobody_gets_is_not_copied() -> None:
    """A message without a subscriber takes no memory."""
    world, a, _ = pair()
    assert a.publish("nobody's", LARGE)
    world.settle()

    assert a.taken == []


@pytest.mark.parametrize("lead", [8, 64])
def test_what_precedes_a_body_is_no_part_of_the_message(lead: int) -> None:
    """The engine has the body at an address of its own, where that aligns the rest."""
    world, a, b = pair(leads=(lead,))
    seen: list[bytes] = []
    world.net.watcher = lambda conn, parcel: seen.append(bytes(parcel[1]))
    assert a.publish("t", LARGE)
    (chunk,) = chunks_under_way(world)
    world.settle()

    assert (chunk.offset, bytes(chunk.part), chunk.total) == (0, b"", len(LARGE))
    assert bytes(lead) + LARGE in seen
    assert b.payloads() == [LARGE]
    assert b.taken == []


@pytest.mark.parametrize("skew", [1, 8, 16, 24, 48])
@pytest.mark.parametrize("lead", [0, 8])
def test_a_body_at_an_odd_address_is_copied(lead: int, skew: int) -> None:
    """By its receiver: the engine's memory may be anywhere."""
    world, a, b = pair(leads=(lead,))
    b.link.skew = skew
    assert a.publish("t", LARGE)
    world.settle()

    assert b.payloads() == [LARGE]
    assert b.taken == ([len(LARGE)] if skew % 16 else [])


@pytest.mark.parametrize("leads", [(8, 0), (0, 8)])
def test_a_body_goes_over_a_connection_with_another_lead(
    leads: tuple[int, int],
) -> None:
    """As where a session goes on over another wire; without a lead it is copied."""
    world, a, b = pair(leads=leads)
    assert a.publish("t", LARGE)
    world.cut("a", "b", lose_one=1)
    world.advance(5.0)
    taken = list(b.taken)
    assert a.publish("t", LARGE[::-1])
    world.settle()

    assert taken == ([] if leads == (8, 0) else [len(LARGE)])
    assert b.payloads() == [LARGE, LARGE[::-1]]
    assert b.taken == taken


@pytest.mark.parametrize("leads", [(0,), (8,), (8, 0)])
@pytest.mark.parametrize("lost", range(4))
def test_a_body_that_was_lost_is_sent_again(lost: int, leads: tuple[int, ...]) -> None:
    """Each message once and in order, whatever a break has swallowed."""
    world, a, b = pair(leads=leads)
    messages = [LARGE, b"small", LARGE[::-1]]
    for message in messages:
        assert a.publish("t", message)
    world.cut("a", "b", lose_one=lost)
    world.advance(5.0)

    assert b.payloads() == messages


def test_a_body_that_comes_twice_is_dropped() -> None:
    """By the number of its frame, before it is looked at."""
    world, a, b = pair()
    (conn,) = world.net.between(a.link, b.link)
    assert a.publish("t", LARGE)
    conn.flight.append(conn.flight[-1])
    world.settle()

    assert b.payloads() == [LARGE]
    assert b.session(a).stats.duplicate_frames == 1


def test_a_body_that_nobody_wants_any_more_is_dropped() -> None:
    """It was under way when the subscription ended."""
    world, a, b = pair()
    assert a.publish("t", LARGE)
    b.unsubscribe("t")
    assert a.publish("u", LARGE)
    world.settle()

    assert b.payloads() == [LARGE]


def test_a_body_beyond_the_limit_breaks_the_connection() -> None:
    """As a chunk of such a message does."""
    world, a, b = pair(max_message_bytes=2000)
    session = a.session(b)
    (subscription,) = (f for f, feed in session.feeds.items() if feed.topic.name == "t")
    head = wire.HEADER.pack(wire.CHUNK, 2, 0, session.number + 1, session.received)
    head += wire.CHUNK_HEAD.pack(subscription, 0, 0, 0.0, 3000, 0)
    assert isinstance(session.conn, Conn)
    session.conn.try_send(head, memoryview(bytes(3000)))
    world.settle()
    assert a.publish("t", LARGE)
    world.settle()

    assert b.mesh.stats.malformed == 1
    assert b.payloads() == [LARGE]


def test_not_more_is_under_way_than_the_peer_answers() -> None:
    """The rest waits, and small messages of other topics pass it."""
    world, a, b = pair()
    for number in range(5):
        assert a.publish("t", LARGE[number:])
    under_way = len(chunks_under_way(world))
    assert a.publish("u", b"small")
    a.mesh.pump(world.clock(), flush=True)
    world.net.deliver_all()
    b.mesh.poll()
    first = b.payloads()
    world.settle()

    assert under_way == 2
    assert first == [LARGE, LARGE[1:], b"small"]
    assert b.payloads() == [LARGE[number:] for number in range(2, 5)]


@pytest.mark.parametrize("lead", [0, 8, 64])
def test_a_whole_message_is_what_its_parts_are_together(lead: int) -> None:
    """Its pads and what precedes it are zero, whatever the memory held before."""
    payload = [np.arange(n, dtype=np.uint8) for n in (3, 0, 64, 100)], "text"
    frames = Codec().encode(payload)
    large = whole(frames, lambda nbytes: memoryview(bytearray(b"\xaa" * nbytes)), lead)
    (chunk,) = large.chunks

    assert chunk is not None
    assert chunk.lead == lead
    assert chunk.view == bytes(lead) + frames.pack()
    assert len(large) == frames.nbytes
    assert large.owned


def test_a_retained_message_is_cut() -> None:
    """It may go to a later subscriber, to whom a large body would do harm."""
    world, a, b = pair()
    assert a.publish("t", LARGE, retain=True)
    under_way = chunks_under_way(world)
    world.settle()

    assert len(under_way) > 1
    assert b.payloads() == [LARGE]
