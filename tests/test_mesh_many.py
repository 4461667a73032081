"""Members with very many topics: what happens to all of them takes time for each once.

That is counted in bytecodes of the mesh, for some topics and for twice as many.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from interrupter import Interrupter
from world import Member, World, subscribed

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
        found.append(bytecodes(lambda a=a, b=b: action(a, b)))
        topics = b.mesh.subscriber.topics.values()
        discarded = sum(topic.stats.discarded for topic in topics)
        assert len(b.payloads()) + discarded == count * (keep or UNREAD)
        assert bool(discarded) == (action is discard)
    assert found[2] < 2.5 * found[1]
