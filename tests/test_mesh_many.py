"""Members with very many topics: what happens to all of them takes time for each once.

That is counted in bytecodes of the mesh, for some topics and for twice as many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from interrupter import Interrupter
from world import Member, World, subscribed

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
