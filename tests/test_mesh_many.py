"""Members with very many topics: what happens to all of them takes time for each once.

That is counted in bytecodes of the mesh, for some topics and for twice as many.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from interrupter import Interrupter
from world import Got, Member, World, subscribed

import mq
from mq.mesh.feed import Feed
from mq.mesh.incoming import Run

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


@pytest.mark.parametrize("keep", [None, 2])
def test_topics_that_end_one_after_another_are_looked_for_once(
    keep: int | None,
) -> None:
    """What is left can be read in order, as what comes by new subscriptions."""
    found = []
    for count in (FEW, FEW, 2 * FEW):
        world = backlog(count, keep)
        a, b = world["a"], world["b"]
        topics = dict(b.mesh.subscriber.topics)
        ending = [t for number, t in enumerate(topics) if number % 5 > 1]

        def end(b: Member = b, ending: list[str] = ending) -> None:
            for topic in ending:
                b.mesh.subscriber.unsubscribe(topic, [])

        found.append(bytecodes(end))
        each = keep or UNREAD
        for topic, subscription in topics.items():
            assert subscription.stats.discarded == each * (topic in ending)
        assert len(b.mesh.subscriber.inbox) == each * (count - len(ending))
        assert len(b.mesh.subscriber.inbox.fifo) <= 2 * len(b.mesh.subscriber.inbox)
        for topic in ending:
            b.subscribe(topic, keep)
        world.settle()
        for topic in topics:
            assert a.publish(topic, b"new")
        world.settle()
        got = [item for item in b.recv_all() if isinstance(item, Got)]
        for topic in topics:
            payloads = [item.payload for item in got if item.topic == topic]
            old = [b"%d" % number for number in range(UNREAD)][-each:]
            kept = [] if topic in ending else old
            assert payloads == [*kept, b"new"][-(keep or 9) :]
        assert {topics[t].stats.dropped for t in ending} == {UNREAD - each}
        assert not b.mesh.subscriber.inbox.fifo
    assert found[2] < 2.5 * found[1]


def test_what_ends_unread_holds_no_memory() -> None:
    """Though others wait in the same queue, and more than it."""
    world = backlog(FEW)
    b = world["b"]
    held = [
        weakref.ref(area)
        for item in b.mesh.subscriber.inbox.fifo
        if isinstance(item, Run) and item.source.subscription.topic == "t5"
        for area in item.areas
        if isinstance(area, memoryview)
    ]
    assert len(held) == UNREAD
    b.unsubscribe("t5")
    assert [area() for area in held] == [None] * UNREAD
    assert len(b.payloads()) == UNREAD * (FEW - 1)


def test_what_is_taken_between_two_that_end_holds_no_memory() -> None:
    """Nor does the inbox grow by what ends again and again beside others."""
    world = backlog(FEW)
    a, b = world["a"], world["b"]
    inbox = b.mesh.subscriber.inbox
    b.unsubscribe("t5")
    run = inbox.fifo[0]
    assert isinstance(run, Run)
    area = run.areas[0]
    assert isinstance(area, memoryview)
    taken = weakref.ref(area)
    del run, area
    assert isinstance(b.recv(), Got)
    assert taken() is None
    for _ in range(3 * FEW):
        b.subscribe("t5")
        world.settle()
        for _ in range(UNREAD):
            assert a.publish("t5", b"x")
            world.settle()
        b.unsubscribe("t5")
    assert len(inbox.fifo) <= 2 * len(inbox)
    assert len(b.payloads()) == UNREAD * (FEW - 1) - 1


def unsubscribe(member: Member, topic: str, interrupter: Interrupter) -> None:
    """As the driver does."""
    try:
        with interrupter.armed():
            member.unsubscribe(topic)
    except KeyboardInterrupt:
        member.mesh.recover()


@pytest.mark.parametrize("keep", [None, 2])
def test_an_interrupt_as_topics_end_loses_nothing_of_others(keep: int | None) -> None:
    """At any line; and of those that end nothing comes."""

    def end(interrupter: Interrupter) -> None:
        world = backlog(5, keep)
        b = world["b"]
        ending = ["t0", "t1", "t3"]
        for topic in ending:
            while topic in b.mesh.subscriber.topics:
                unsubscribe(b, topic, interrupter)
        world.settle()
        got = [item for item in b.recv_all() if isinstance(item, Got)]
        assert [item.topic for item in got] == ["t2", "t4"] * (keep or UNREAD)
        assert not b.mesh.subscriber.inbox.fifo
        assert list(b.mesh.subscriber._by_id) == [
            s.id for s in b.mesh.subscriber.topics.values()
        ]

    looked = Interrupter(None)
    end(looked)
    points = [point for place in looked.visited.values() for point in place]
    assert len(points) > 100
    for at in points:
        end(Interrupter(at))


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
