"""Members with very many topics: what happens to all of them takes time for each once.

That is counted in bytecodes of the mesh, for some topics and for twice as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
from interrupter import Interrupter
from world import Member, World, subscribed

import mq
from mq.mesh.feed import Feed

FEW = 60
UNREAD = 3
"""Messages on each topic."""
Action = Callable[[Member, Member], object]


def bytecodes(action: Callable[[], object]) -> int:
    """How many of the mesh a call takes."""
    counter = Interrupter(None, opcodes=True)
    with counter.armed():
        action()
    return sum(map(len, counter.visited.values()))


def backlog(count: int, keep: int | None = None) -> World:
    """`b` has read nothing of what `a` has published on so many topics."""
    topics = [f"t{number}" for number in range(count)]
    world = subscribed("a", "b", topics=topics, keep=keep)
    for number in range(UNREAD):
        for topic in topics:
            assert world["a"].publish(topic, b"%d" % number)
        world.settle()
    return world


def lose(a: Member, b: Member) -> None:
    b.mesh.forget(b.session(a), "it was killed", proven=True)


def recover(a: Member, b: Member) -> None:
    b.mesh.recover()


def discard(a: Member, b: Member) -> None:
    b.mesh.subscriber.discard_all()


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("action", [lose, recover, discard])
def test_twice_as_many_topics_take_twice_as_long(
    action: Action, keep: int | None
) -> None:
    """With a backlog of each: what is not discarded can still be read."""
    found = []
    for count in (FEW, FEW, 2 * FEW):  # Python 3.13 sees all bytecodes the second time
        world = backlog(count, keep)
        a, b = world["a"], world["b"]
        found.append(bytecodes(partial(action, a, b)))
        topics = b.mesh.subscriber.topics.values()
        discarded = sum(topic.stats.discarded for topic in topics)
        assert len(b.payloads()) + discarded == count * (keep or UNREAD)
        assert bool(discarded) == (action is discard)
    assert found[2] < 2.5 * found[1]


def test_many_topics_wait_for_a_stalled_peer_in_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor once it goes on: then what waits is sent batch by batch."""
    compared = 0

    def equal(feed: Feed, other: object) -> bool:
        nonlocal compared
        compared += 1
        return feed is other

    monkeypatch.setattr(Feed, "__eq__", equal)
    for module in ("backlog", "session"):
        monkeypatch.setattr(f"mq.mesh.{module}.BATCH_MESSAGES", 4)
    found = []
    for count in (FEW, FEW, 2 * FEW):
        topics = [f"t{number}" for number in range(count)]
        world = subscribed("a", "b", topics=topics)
        compared = 0
        steps = bytecodes(partial(stall_and_go_on, world, topics))
        found.append((steps, compared))
        assert len(world["b"].payloads()) == count
    assert found[2][0] < 2.5 * found[1][0]
    assert found[2][1] <= 2.5 * found[1][1]


def stall_and_go_on(world: World, topics: list[str]) -> None:
    a, b = world["a"], world["b"]
    a.link.capacity = 1  # the second waits in the way of all others
    for topic in topics[:2]:
        assert a.publish(topic, b"x")
        a.mesh.pump(world.now, flush=True)
    for topic in topics[2:]:
        assert a.publish(topic, b"x")
    assert len(a.session(b).busy) == len(topics) - 2
    a.link.capacity = 1000
    world.settle()


def test_flush_does_not_look_at_topics_without_subscribers() -> None:
    """However many this member has ever used."""
    found = []
    for count in (0, 0, FEW):
        world = subscribed("a", "b")
        a = world["a"]
        for number in range(count):
            assert a.publish(f"once {number}", b"x")
        found.append(bytecodes(a.mesh.marks))
        assert [feed.topic.name for feed, _ in a.mesh.marks()] == ["t"]
    assert found[2] == found[1]


def test_of_many_topics_an_error_names_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says of the rest how much is lacking on how many."""
    group = f"many-{os.getpid()}"
    with (
        mq.connect("inproc", group=group, name="a") as a,
        mq.connect("inproc", group=group, name="b") as b,
        mq.connect("inproc", group=group, name="c") as c,
    ):
        for number in range(15):
            b.subscribe(f"topic {number}")
        c.subscribe("topic 14")
        with monkeypatch.context() as patch:
            patch.setattr(a._mesh.publisher, "unsettled", list)
            with pytest.raises(mq.FlushTimeout) as caught:
                a.flush(timeout=0)
    said = str(caught.value)
    assert "'b' lacks 1 on 'topic 0', 1 on 'topic 1', " in said
    assert "'topic 9', 5 on 5 other topics; 'c' lacks 1 on 'topic 14'" in said
    assert "'topic 10'" not in said


def test_of_many_topics_with_losses_some_are_named() -> None:
    """The attribute has them all."""
    topics = [f"topic {number}" for number in range(15)]
    few, many = (mq.MessagesLost("a", topics[:count], 40) for count in (10, 15))
    assert "on 'topic 0', 'topic 1', " in str(few)
    assert "'topic 9' were lost" in str(few)
    assert "'topic 9' and 5 other topics were lost" in str(many)
    assert many.topics == tuple(topics)
