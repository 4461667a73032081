"""What `stats` counts, whenever somebody looks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from world import Member, World

from mq import stats

pytestmark = pytest.mark.usefixtures("small_messages")


def counters(member: Member, topic: str = "t") -> dict[str, Any]:
    """What `stats()` says of a topic."""
    found: dict[str, Any] = stats.of_mesh(member.mesh)["topics"][topic]
    return found


def accounted(member: Member) -> int:
    """All that came on t, or would have: each is counted as one of these."""
    of_topic = counters(member)
    parts = ("received", "dropped", "discarded", "lost")
    return sum(of_topic[part] for part in parts) + len(member.mesh.subscriber.inbox)


@pytest.mark.parametrize("arrive", [True, False])
def test_what_was_replaced_is_counted_though_nobody_reads(arrive: bool) -> None:
    """Here or at its publisher; it is not counted again when others are read."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t", keep=2)
    world.settle()
    for _ in range(50):
        assert a.publish("t", b"x")
        if arrive:
            world.settle()
    world.settle()
    for unread in (2, 1, 0):
        assert counters(b)["dropped"] == 48
        assert counters(b)["received"] == 2 - unread
        assert len(b.mesh.subscriber.inbox) == unread
        b.recv()


@pytest.mark.parametrize("end", ["unsubscribe", "close"])
@pytest.mark.parametrize("read", [0, 1])
def test_what_is_dropped_unread_leaves_no_gap_uncounted(end: str, read: int) -> None:
    """Of a subscription that ends."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t", keep=3)
    world.settle()
    for _ in range(40):
        assert a.publish("t", b"x")
        world.settle()
    for _ in range(read):
        b.recv()
    for _ in range(10):
        assert a.publish("t", b"x")
        world.settle()
    if end == "unsubscribe":
        b.unsubscribe("t")
    else:
        b.mesh.subscriber.discard_all()
    of_topic = counters(b)
    assert of_topic["received"] == read
    assert of_topic["discarded"] == 3
    assert of_topic["dropped"] == 47 - read


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_each_message_is_counted_once_whenever_somebody_looks(keep: int) -> None:
    """Retained ones and those that others replaced, in one session and the next."""
    for seed in range(60):
        chance = random.Random(seed)
        world = World("a", "b", peer_timeout=4.0)
        a, b = world["a"], world["b"]
        due = chance.randrange(2)
        if due:
            assert a.publish("t", b"retained", retain=True)
            assert a.publish("t", b"before the subscription")
        b.subscribe("t", keep)
        world.settle()
        for _ in range(40):
            step = chance.randrange(10)
            if step < 5:
                due += a.publish("t", b"x", retain=chance.random() < 0.3)
            elif step < 7:
                b.recv()
            elif step < 9:
                world.settle()
                assert accounted(b) == due, seed
            elif chance.random() < 0.2:
                world.partition("a", "b")
                due += a.publish("t", b"x")
                world.advance(10.0)
                world.heal()
                world.advance(5.0)
        world.settle()
        b.unsubscribe("t")
        assert accounted(b) == due, seed


@pytest.mark.parametrize("keep", [None, 2])
def test_what_a_call_took_and_put_back_is_counted_once(keep: int | None) -> None:
    """Also where the subscription ends before another call has it."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t", keep)
    world.settle()
    for _ in range(2):
        assert a.publish("t", b"x")
    world.settle()
    subscriber = b.mesh.subscriber
    item = subscriber.take()
    subscriber.inbox.hand_over()
    subscriber.inbox.put_back(item)
    b.unsubscribe("t")
    assert accounted(b) == 2
