"""A small message alone: compiled, it leaves, arrives and is taken as in Python."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Parcel, ScriptedConn
from world import Member, World, subscribed

from mq import speed
from mq.mesh import inbox as inbox_module
from mq.mesh import publisher as publisher_module
from mq.mesh import wire
from mq.mesh.session import Session

pytestmark = pytest.mark.skipif(not speed.COMPILED, reason="nothing is compiled")

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 1), st.integers(0, 200)),
        st.tuples(st.sampled_from(["settle", "recv"]), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("advance"), st.just(0), st.integers(1, 2000)),
        st.tuples(st.just("cut"), st.just(0), st.integers(0, 3)),
        st.tuples(st.just("unsubscribe"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("full"), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)
FIELDS = (
    *("received", "unanswered", "answer_at", "number", "sent", "blocked", "last_sent"),
    *("batches_unanswered", "batch_at", "under_way", "last_heard", "sending"),
)


def counted(function: Callable[..., Any], done: Counter[str], name: str) -> Any:
    """A function that counts how often it did anything."""

    def call(*args: Any) -> Any:
        result = function(*args)
        done[name] += bool(result)
        return result

    return call


def state(member: Member) -> list[Any]:
    """All that a message in a frame of its own changes, but for what is random."""
    mesh = member.mesh
    found: list[Any] = []
    for session in mesh.sessions.values():
        found += [getattr(session, field) for field in FIELDS]
        found += [asdict(session.stats), len(session.frames)]
        for frame in session.frames:
            completes = [(f.topic.name, n) for f, n in frame.completes or ()]
            fields = (frame.kind, frame.number, frame.flags, frame.sent_before)
            found += [*fields, frame.chunk, frame.part, frame.large, completes]
            found += [frame.parts] if frame.kind == wire.DATA else []
        for feed in session.feeds.values():
            found += [feed.next, feed.received, feed.on_wire]
    for topic in mesh.publisher.topics.values():
        base, total, log = topic.view
        found += [topic.name, base, total, list(log), asdict(topic.stats)]
    subscriber = mesh.subscriber
    for subscription in subscriber.topics.values():
        found.append(asdict(subscription.stats))
        for source in subscription.sources.values():
            found += [source.consumed_messages, source.consumed_bytes, source.taken]
            found += [list(source.arrivals), source.unread(), source.active]
    return [*found, len(subscriber.inbox), subscriber.inbox.counted is None]


def history(steps: list[tuple[str, int, int]], done: Counter[str] | None) -> list[Any]:
    """What two members sent, got and knew, compiled where it is counted."""
    random.seed(1)  # when to dial again
    with pytest.MonkeyPatch.context() as patch:
        world = World("a", "b")
        if done is None:
            patch.setattr(publisher_module, "_send_alone", Session.send_alone)
            patch.setattr(inbox_module, "take_alone", lambda inbox: None)
        else:
            sends, takes = speed.send_alone, speed.take_alone
            patch.setattr(publisher_module, "_send_alone", counted(sends, done, "s"))
            patch.setattr(inbox_module, "take_alone", counted(takes, done, "t"))
        for member in world.members.values():
            reader, arrives = member.mesh.reader, member.mesh.subscriber.arrive_alone
            now = (lambda *_: False) if done is None else counted(arrives, done, "a")
            patch.setattr(reader, "_arrive_alone", now)
            member.subscribe("t", depth=20)
        world.settle()
        seen: list[Any] = []

        def watch(conn: ScriptedConn, parcel: Parcel) -> None:
            if parcel[0][0] < wire.DATA:  # the random ones of a handshake
                return
            kind, flags, _, number, received = wire.HEADER.unpack_from(parcel[0])
            content = parcel[0] if kind == wire.DATA else b""
            seen.append((conn.link.address, kind, flags, number, received, content))

        world.net.watcher = watch
        for what, index, value in steps:
            seen.append(what)
            play(world, world["ab"[index]], what, value, seen)
            seen += map(state, world.members.values())
        return seen


def play(world: World, member: Member, what: str, value: int, seen: list[Any]) -> None:
    if what == "publish":
        seen.append(member.publish("t", b"%d" % value * (value % 7)))
    elif what == "recv":
        item = member.recv()
        # Not whose: that is random.
        seen.append(item and (item.topic, item.sender, item.sequence, item.payload))
    elif what == "settle":
        world.settle()
    elif what == "advance":
        world.advance(value / 1000)
    elif what == "cut":
        world.cut("a", "b", lose_one=value % 2, lose_other=value // 2)
    elif what == "full":
        member.link.capacity = 0 if member.link.capacity else 1000
        for conn in member.link.conns:
            conn.report_writable()
    elif "t" in member.mesh.subscriber.topics:
        member.unsubscribe("t")


@settings(max_examples=200)
@given(STEPS)
def test_compiled_it_changes_what_it_changes_in_python(
    steps: list[tuple[str, int, int]],
) -> None:
    """Whatever else is under way, lost, unread or refused meanwhile."""
    assert history(steps, Counter()) == history(steps, None)


def test_compiled_code_carries_messages_that_are_alone() -> None:
    """All three steps; but for the first of a publisher, who gets a share then."""
    done: Counter[str] = Counter()
    history([("publish", 0, 13), ("settle", 0, 0), ("recv", 1, 0)] * 5, done)
    assert done == {"s": 5, "a": 4, "t": 5}


def test_what_is_alone_leaves_nothing_behind() -> None:
    """No object is referred to more often than before."""
    world = subscribed("a", "b")

    def carry(count: int) -> int:
        for number in range(count):
            assert world["a"].publish("t", b"%d" % (number % 10))
            world.settle()
            assert len(world["b"].recv_all()) == 1
        gc.collect()
        return sys.getallocatedblocks()

    carry(200)
    before = carry(10)
    assert carry(500) - before < 250


@pytest.mark.parametrize("attribute", ["received", "frames", "stats", "unanswered"])
def test_a_session_that_cannot_be_asked_is_an_error(attribute: str) -> None:
    """And nothing has arrived: the next frame finds all as it was."""
    world = subscribed("a", "b")
    receiver, seen = world["b"], []
    assert world["a"].publish("t", b"0")
    world.settle()
    assert receiver.payloads() == [b"0"]

    def watch(conn: ScriptedConn, parcel: Parcel) -> None:
        if parcel[0][0] == wire.DATA:
            seen.append(parcel[0])

    world.net.watcher = watch
    assert world["a"].publish("t", b"1")
    world.net.deliver_all()
    session = receiver.session(world["a"])
    value = getattr(session, attribute)
    delattr(session, attribute)
    with pytest.raises(AttributeError):
        receiver.mesh.subscriber.arrive_alone(session, seen[0], 0.0)
    setattr(session, attribute, value)
    assert not receiver.mesh.subscriber.inbox.fifo
    assert receiver.mesh.subscriber.arrive_alone(session, seen[0], 0.0)
    assert not receiver.mesh.subscriber.arrive_alone(session, seen[0], 0.0)
    assert receiver.payloads() == [b"1"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (speed.arrive_alone, ()),
        (speed.arrive_alone, ([], 10, None, None, b"", 0.0)),
        (speed.send_alone, (None, None, None, 0.0)),
        (speed.send_alone, ()),
        (speed.know_frames, (None,)),
        (speed.know_arrivals, (int, int, int)),
    ],
)
def test_other_arguments_are_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """As no caller gives them, an error is enough."""
    with pytest.raises(TypeError):
        function(*arguments)
