"""Frames of the session protocol: what is packed is parsed, all else is Malformed."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from mq.log import printable
from mq.mesh import wire
from mq.mesh.setbacks import TRIES
from mq.mesh.wire import Credit, Malformed, Subscribe, Subscribed

SETTINGS = settings(deadline=None, max_examples=300)
CONTROL = (
    wire.SUBSCRIBE,
    wire.SUBSCRIBED,
    wire.UNSUBSCRIBE,
    wire.CREDIT,
    wire.BYE,
    wire.ACCEPTS,
    wire.WAITING,
    wire.FENCED,
)
numbers = st.integers(0, 2**63 - 1)
ids = st.integers(0, 2**32 - 1)


@SETTINGS
@given(
    subscription=ids,
    topic=st.text(max_size=100),
    keep=st.none() | st.integers(1, 2**31 - 1),
    messages=numbers,
    nbytes=numbers,
    seen=st.integers(-1, 2**63 - 1),
)
def test_control_frames_survive_their_encoding(
    subscription: int,
    topic: str,
    keep: int | None,
    messages: int,
    nbytes: int,
    seen: int,
) -> None:
    """What one side says is what the other one hears."""
    for kind, value in (
        (
            wire.SUBSCRIBE,
            [Subscribe(subscription, topic, keep, messages, nbytes, seen)],
        ),
        (wire.SUBSCRIBED, [Subscribed(subscription, messages, seen)]),
        (wire.CREDIT, [Credit(subscription, messages, nbytes)]),
        (wire.UNSUBSCRIBE, subscription),
        (wire.BYE, topic),
        (wire.ACCEPTS, [topic]),
        (wire.WAITING, True),
    ):
        told = printable(value) if kind == wire.BYE else value
        assert wire.decode(kind, memoryview(wire.encode(value))) == told


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (wire.SUBSCRIBE, [[-1, "t", None, 1, 1]]),
        (wire.SUBSCRIBE, [[1 << 32, "t", None, 1, 1]]),
        (wire.SUBSCRIBE, [[1, "t", 0, 1, 1]]),
        (wire.SUBSCRIBE, [[1, "t", 1 << 63, 1, 1]]),
        (wire.SUBSCRIBE, [[1, "t", None, -1, 1]]),
        (wire.SUBSCRIBE, [[1, 2, None, 1, 1]]),
        (wire.SUBSCRIBED, [[1, -1, -1]]),
        (wire.SUBSCRIBED, [[1, 1, -2]]),
        (wire.SUBSCRIBE, [[1, "t", 1 << 31, 1, 1]]),
        (wire.SUBSCRIBE, [[1, "t", None, 1, 1, 1 << 63]]),
        (wire.CREDIT, [[1, 1]]),
        (wire.CREDIT, [[1, 1 << 63, 1]]),
        (wire.RECLAIM, [[1, 1 << 63, 1, 1]]),
        (wire.UNSUBSCRIBE, 1 << 32),
        (wire.WAITING, 1),
    ],
)
def test_values_out_of_range_are_malformed(kind: int, value: object) -> None:
    """Nothing that would fail later is let in."""
    with pytest.raises(Malformed):
        wire.decode(kind, memoryview(wire.encode(value)))


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (wire.SUBSCRIBE, [1, "t", None, 1, 1]),
        (wire.SUBSCRIBED, [1, 1, 1]),
        (wire.CREDIT, [1, 1, 1]),
        (wire.RELEASE, [1, 1]),
        (wire.RECLAIM, [1, 1, 1, 1]),
        (wire.RETURNED, [1, 1, 1, 1]),
    ],
)
def test_a_list_of_more_entries_than_a_member_sends_is_malformed(
    kind: int, entry: list[object]
) -> None:
    """All of them are carried out before other peers have their turn."""
    most = wire.encode([entry] * wire.MOST_ENTRIES)
    assert len(wire.decode(kind, memoryview(most))) == wire.MOST_ENTRIES
    with pytest.raises(Malformed):
        wire.decode(kind, memoryview(wire.encode([entry] * (wire.MOST_ENTRIES + 1))))


@SETTINGS
@given(kind=st.sampled_from(CONTROL), raw=st.binary(max_size=200))
def test_random_control_frames_are_malformed_at_worst(kind: int, raw: bytes) -> None:
    """Nothing but Malformed is raised."""
    try:
        wire.decode(kind, memoryview(raw))
    except Malformed:
        pass


def test_deep_nesting_is_malformed() -> None:
    """A frame cannot exhaust the stack."""
    with pytest.raises(Malformed):
        wire.decode(wire.ACCEPTS, memoryview(b"\x91" * 100_000))


runs = st.tuples(
    ids,
    st.integers(0, 2**62),
    st.lists(st.tuples(st.floats(), st.binary(max_size=50)), min_size=1),
)


@SETTINGS
@given(sent=st.lists(runs))
def test_runs_survive_a_batch(
    sent: list[tuple[int, int, list[tuple[float, bytes]]]],
) -> None:
    """A batch is cut where it was joined."""
    frame = b"head"
    for subscription, first, messages in sent:
        times, areas = zip(*messages, strict=True)
        frame += b"".join(wire.pack_run(subscription, first, times, areas))
    got = list(wire.runs(memoryview(frame), 4))
    for run, (subscription, first, messages) in zip(got, sent, strict=True):
        assert run[:2] == (subscription, first)
        assert [area for _, area in messages] == run[3]
        for one, (other, _) in zip(run[2], messages, strict=True):
            assert one == other or (math.isnan(one) and math.isnan(other))


@SETTINGS
@given(
    raw=st.binary(max_size=300),
    head=st.tuples(ids, st.integers(0, 40), st.integers(0, 300)),
)
def test_random_batches_and_chunks_are_malformed_at_worst(
    raw: bytes, head: tuple[int, int, int]
) -> None:
    """Nothing is read beyond the frame, and nothing but Malformed is raised."""
    subscription, count, size = head
    for batch in (raw, wire.RUN.pack(subscription, count, 0) + raw):
        with suppress(Malformed):
            found = [area for run in wire.runs(memoryview(batch), 0) for area in run[3]]
            assert sum(map(len, found)) <= len(batch)
    start = bytes(wire.HEADER_BYTES)
    with suppress(Malformed):
        assert len(wire.parse_chunk(memoryview(start + raw)).part) <= len(raw)
    announced = start + wire.CHUNK_HEAD.pack(subscription, size, 0, 0.0, 9, 0)
    if len(raw) == size:
        assert wire.parse_chunk(memoryview(announced + raw)).part == raw
    else:
        with pytest.raises(Malformed):
            wire.parse_chunk(memoryview(announced + raw))


@SETTINGS
@given(
    kind=st.sampled_from((*CONTROL, wire.DATA, wire.CHUNK, wire.RECEIVED, 0, 99)),
    flags=st.integers(0, 3),
    number=st.integers(0, 40),
    received=st.integers(0, 40),
    content=st.binary(max_size=80),
    body=st.binary(max_size=10),
)
def test_an_authenticated_peer_that_sends_nonsense_harms_nobody_else(
    kind: int, flags: int, number: int, received: int, content: bytes, body: bytes
) -> None:
    """The session may end and begin anew; the member and its other peers go on."""
    world = World("a", "b", "c")
    for name in "bc":
        world[name].subscribe("t")
    world.settle()
    head = wire.HEADER.pack(kind, flags, 0, number, received) + content
    for _ in range(TRIES):
        for conn in world.net.between(world["b"].link, world["a"].link):
            conn.flight.append((head, body))
        world.pump()
    world.advance(1.0)
    a = world["a"]
    if not a.mesh.replaced:
        assert "c" in a.peers()
        assert a.session(world["c"]).stats.connections == 1
        assert a.publish("t", b"x")
        world.settle()
        assert world["c"].payloads() == [b"x"]
