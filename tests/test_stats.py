"""What `stats` counts, whenever somebody looks."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from world import Member, World, subscribed

import mq
from mq import stats
from mq.testing.waiting import wait_until

pytestmark = pytest.mark.usefixtures("small_messages")


def counters(member: Member, topic: str = "t") -> dict[str, Any]:
    """What `stats()` says of a topic."""
    found: dict[str, Any] = stats.of_mesh(member.mesh, {})["topics"][topic]
    return found


def listening(keep: int | None) -> tuple[World, Member, Member]:
    """Two members, of which the second is subscribed to t."""
    world = subscribed("a", "b", keep=keep)
    return world, world["a"], world["b"]


def accounted(member: Member) -> int:
    """All that came on t, or would have: each is counted as one of these."""
    of_topic = counters(member)
    parts = ("received", "dropped", "discarded", "lost")
    return sum(of_topic[part] for part in parts) + len(member.mesh.subscriber.inbox)


@pytest.mark.parametrize("arrive", [True, False])
def test_what_was_replaced_is_counted_though_nobody_reads(arrive: bool) -> None:
    """Here or at its publisher; it is not counted again when others are read."""
    world, a, b = listening(2)
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
    world, a, b = listening(3)
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
    world, a, b = listening(keep)
    for _ in range(2):
        assert a.publish("t", b"x")
    world.settle()
    subscriber = b.mesh.subscriber
    item = subscriber.take()
    subscriber.inbox.hand_over()
    subscriber.inbox.put_back(item)
    b.unsubscribe("t")
    assert accounted(b) == 2


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[mq.MQ, mq.MQ]]:
    """Two members; b has room for one message on t, which is there and unread."""
    group = f"stats-{os.getpid()}"
    with mq.connect("inproc", group=group, name="a") as a:
        with mq.connect("inproc", group=group, name="b") as b:
            b.subscribe("t", depth=1)
            a.publish("t", "first")
            a.flush(timeout=30)
            yield a, b


def blocked(queue: mq.MQ) -> float:
    """Seconds for which calls of `publish` on t have waited."""
    found: float = queue.stats()["topics"]["t"]["blocked_seconds"]
    return found


def grows(queue: mq.MQ) -> None:
    """The time for which calls wait on t is seen to grow."""
    for _ in range(3):
        before = blocked(queue)
        wait_until(lambda seen=before: blocked(queue) > seen, "time to pass")


def stands(queue: mq.MQ) -> bool:
    """Whether it does no more; no two looks come at one time of the clock."""
    return blocked(queue) == blocked(queue)


def test_a_publish_that_waits_now_shows_whom_it_waits_for(
    pair: tuple[mq.MQ, mq.MQ],
) -> None:
    """Long before its wait has ended; then it counts no more."""
    a, b = pair
    calls = [
        threading.Thread(target=a.publish, args=("t", number), daemon=True)
        for number in range(2)
    ]
    for call in calls:
        call.start()
    grows(a)
    of_topic = a.stats()["topics"]["t"]
    assert of_topic["published"] == 1
    assert of_topic["credit"] == {"b": 0}
    assert of_topic["queued"] == {"b": 0}
    for _ in range(3):
        b.recv(timeout=30)
    for call in calls:
        call.join(30)
        assert not call.is_alive()
    assert stands(a)


def test_a_publish_that_gave_up_counts_no_more(pair: tuple[mq.MQ, mq.MQ]) -> None:
    """Neither one that blocked nor a task."""
    a, _ = pair

    async def body() -> None:
        call = asyncio.create_task(a.apublish("t", "second"))
        await asyncio.to_thread(grows, a)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(body())
    assert stands(a)
    before = blocked(a)
    with pytest.raises(mq.PublishTimeout):
        a.publish("t", "third", timeout=0.05)
    assert stands(a)
    assert blocked(a) > before


def test_a_publish_that_waits_for_memory_shows_who_holds_it() -> None:
    """It is no want of credit."""
    options: dict[str, Any] = {"group": f"stats-{os.getpid()}", "shm_bytes": 4 << 20}
    with (
        mq.connect("shm", name="a", **options) as a,
        mq.connect("shm", name="b", **options) as b,
    ):
        b.subscribe("t", zero_copy=True)
        content = np.zeros((3 << 20) - 256, np.uint8)
        a.publish("t", content)
        held = [b.recv(timeout=30).payload]
        call = threading.Thread(target=a.publish, args=("t", content), daemon=True)
        call.start()
        grows(a)
        assert a.stats()["topics"]["t"]["credit"]["b"] > 0
        assert a.stats()["peers"]["b"]["lent_bytes"] >= len(content)
        held.clear()
        call.join(30)
        assert not call.is_alive()
        assert stands(a)


@pytest.mark.parametrize(("keep", "lacking"), [(None, 8), (3, 3), (20, 8)])
def test_what_a_subscriber_is_still_to_have_is_queued_for_it(
    keep: int | None, lacking: int
) -> None:
    """Whether it is in a frame, and how much of that the wire has taken, or not."""
    world, a, b = listening(keep)
    for capacity in (0, 1, 1000):
        a.link.capacity = capacity
        world.partition("a", "b")
        for _ in range(8):
            assert a.publish("t", b"x")
        world.settle()
        assert counters(a)["queued"] == {"b": lacking}
        world.heal()
        a.link.capacity = 1000
        world.cut("a", "b")
        world.settle()
        assert counters(a)["queued"] == {"b": 0}
        b.recv_all()
        world.settle()


def test_credit_is_what_publish_may_still_send_a_subscriber() -> None:
    """None where it is bytes that are used up; nobody waits for who keeps the last."""
    world = World("a", "few", "small", "newest")
    a = world["a"]
    world["few"].subscribe("t", depth=3)
    world["small"].subscribe("t", window_bytes=1000)
    world["newest"].subscribe("t", keep=1)
    world.settle()
    assert counters(a)["credit"].keys() == {"few", "small"}
    while (left := counters(a)["credit"])["few"]:
        assert a.publish("t", b"x")
        assert counters(a)["credit"] == {name: n - 1 for name, n in left.items()}
    assert not a.publish("t", b"x")
    world["few"].unsubscribe("t")
    world.settle()
    assert a.publish("t", bytes(2000))
    assert counters(a)["credit"] == {"small": 0}
    assert not a.publish("t", b"x")


@pytest.mark.parametrize(("keep", "lacking"), [(None, 8), (3, 3)])
def test_what_close_could_not_deliver_is_counted_as_undelivered(
    keep: int | None, lacking: int
) -> None:
    """And waits for nobody any more, wherever it was."""
    for capacity in (0, 1, 1000):
        world = World("a", "b", "c")
        a, b, c = world["a"], world["b"], world["c"]
        for member in (b, c):
            member.subscribe("t", keep)
        world.settle()
        world.partition("a", "b")
        a.link.capacity = capacity
        for _ in range(8):
            assert a.publish("t", b"x")
        a.link.capacity = 1000
        world.cut("a", "c")
        world.settle()
        assert counters(a)["queued"] == {"b": lacking, "c": 0}
        a.mesh.close()
        assert counters(a)["undelivered"] == lacking
        assert counters(a)["queued"] == {}
