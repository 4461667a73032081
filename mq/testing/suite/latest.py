"""Keep last n and Retain: for those who want the newest, not everything."""

from __future__ import annotations

import time

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP

MIB = 1 << 20


@case("Keep last n")
def keep_last_never_makes_a_publisher_wait(group: Group) -> None:
    """A subscriber that never reads: `publish` needs no time, the newest n remain."""
    a, b = group.members("a", "b")
    b.subscribe("t", history=mq.keep_last(3))
    for number in range(300):
        a.publish("t", number, timeout=0)
    a.call("flush", timeout=STEP)
    assert b.run(programs.topic_stats, "t")["dropped"] == 297
    got = b.run(programs.receive, 3)
    assert [(m.sequence, m.digest) for m in got] == [(n, n) for n in (297, 298, 299)]
    assert b.run(programs.nothing_waits)
    assert b.run(programs.topic_stats, "t")["dropped"] == 297


@case("Keep last n")
def keep_all_and_keep_last_subscribers_get_along(group: Group) -> None:
    """One publisher, one topic: all for the one, the newest for the other."""
    a, everything, newest = group.members("a", "everything", "newest")
    everything.subscribe("t")
    newest.subscribe("t", history=mq.keep_last(1))
    a.run(programs.publish_range, "t", 0, 200)
    a.call("flush", timeout=STEP)
    assert newest.recv().payload == 199
    got = everything.run(programs.receive, 200)
    assert [m.digest for m in got] == list(range(200))


@case("edge: Keep-last")
def keep_last_is_per_publisher_and_topic(group: Group) -> None:
    """The newest of each publisher and of each topic, in order, gaps counted."""
    writers = group.members("w0", "w1")
    reader = group.member("reader")
    for topic in ("x", "y"):
        reader.subscribe(topic, history=mq.keep_last(2))
    for writer in writers:
        for topic in ("x", "y"):
            writer.run(programs.publish_range, topic, 0, 50)
        writer.call("flush", timeout=STEP)
    got = reader.run(programs.receive, 8)
    for writer in writers:
        for topic in ("x", "y"):
            stream = [m for m in got if (m.sender, m.topic) == (writer.name, topic)]
            assert [m.sequence for m in stream] == [48, 49]
    assert reader.run(programs.topic_stats, "x")["dropped"] == 96


@case("edge: Keep-last")
def keep_last_counts_the_lives_of_a_publisher_as_one(group: Group) -> None:
    """Of one that was started again under its name the newest n are kept, in all."""
    reader = group.member("reader")
    for topic, keep in (("x", 1), ("y", 3)):
        reader.subscribe(topic, history=mq.keep_last(keep))
    for life in range(4):
        writer = group.member("learner")
        for topic in ("x", "y"):
            for number in range(2):
                writer.publish(topic, (life, number))
        writer.call("close")
    assert reader.run(programs.waiting_in_inbox) == 4
    got = [reader.recv() for _ in range(4)]
    newest = {"x": [(3, 1)], "y": [(2, 1), (3, 0), (3, 1)]}
    for topic, payloads in newest.items():
        assert [m.payload for m in got if m.topic == topic] == payloads
        dropped = reader.run(programs.topic_stats, topic)["dropped"]
        assert dropped == 8 - len(payloads)
    assert reader.run(programs.nothing_waits)


@case("edge: Keep-last")
def fast_publisher_does_not_starve_a_keep_last_subscriber(group: Group) -> None:
    """A message under way is finished although newer ones wait already."""
    a, b = group.members("a", "b")
    b.subscribe("t", history=mq.keep_last(1))
    sizes = [2 * MIB + n for n in range(40)]
    running = a.begin(programs.publish_patterns, "t", sizes)
    got = b.run(programs.receive, 1)
    sent = running.result()
    while got[-1].sequence < len(sizes) - 1:
        got += b.run(programs.receive, 1)
    assert all(m.digest == sent[m.sequence] for m in got)
    numbers = [m.sequence for m in got]
    assert numbers == sorted(set(numbers))
    dropped = b.run(programs.topic_stats, "t")["dropped"]
    assert dropped == len(sizes) - len(got)


def _keep_last_and_flush_return(group: Group) -> None:
    """Where nobody can be stopped alone: a subscriber that never reads."""
    a, b = group.members("a", "b")
    b.subscribe("t", history=mq.keep_last(1))
    a.run(programs.publish_range, "t", 0, 100)
    a.call("flush", timeout=STEP)
    assert b.recv().payload == 99


@case(
    "edge: Keep-last",
    needs="separate_processes",
    otherwise=_keep_last_and_flush_return,
)
def stopped_keep_last_subscriber_delays_flush_never_publish(group: Group) -> None:
    """It cannot say what it has received, yet `publish` does not wait for it."""
    a, b = group.members("a", "b")
    b.subscribe("t", history=mq.keep_last(1))
    b.stop()
    for number in range(40):
        a.publish("t", [number, programs.pattern(number, 100_000)], timeout=0)
    with expect(mq.FlushTimeout, "b"):
        a.call("flush", timeout=0.2)
    b.cont()
    a.call("flush", timeout=STEP)
    while (message := b.recv()).payload[0] < 39:
        pass
    assert message.payload == [39, programs.pattern(39, 100_000)]


@case("Retain")
def late_subscriber_gets_the_last_retained_message(group: Group) -> None:
    """With its original sequence and time, before anything newer, however much."""
    a = group.member("a")
    started = time.time()
    a.publish("t", "old", retain=True)
    a.publish("t", "kept", retain=True)
    published = time.time()
    a.run(programs.publish_range, "t", 2, 50)
    b, c = group.members("b", "c")
    b.subscribe("t")
    a.publish("t", "newer")
    first, second = b.recv(), b.recv()
    assert (first.payload, first.sequence, first.sender) == ("kept", 1, "a")
    assert started <= first.published_at <= published
    assert (second.payload, second.sequence) == ("newer", 50)
    a.run(programs.publish_range, "t", 51, 100)
    assert [m.digest for m in b.run(programs.receive, 49)] == list(range(51, 100))
    c.subscribe("t", history=mq.keep_last(1))
    assert c.recv().payload == "kept", "an unretained message replaced the retained one"
    assert b.run(programs.nothing_waits)


@case("Retain")
def every_publisher_of_a_topic_retains_its_own(group: Group) -> None:
    """A new subscriber gets the last retained message of each, of any size."""
    a, b = group.members("a", "b")
    a.publish("t", programs.pattern(1, 3 * MIB), retain=True)
    b.publish("t", programs.pattern(2, 10), retain=True)
    c = group.member("c")
    c.subscribe("t")
    got = {m.sender: m.digest for m in c.run(programs.receive, 2)}
    assert got == {
        "a": programs.digest(programs.pattern(1, 3 * MIB)),
        "b": programs.digest(programs.pattern(2, 10)),
    }


@case("edge: Retain")
def retained_message_is_sent_once_for_each_subscription(group: Group) -> None:
    """Again after unsubscribing, not again for a repeated `subscribe`."""
    a, b = group.members("a", "b")
    a.publish("t", "kept", retain=True)
    for _ in range(3):
        b.subscribe("t")
        b.subscribe("t")
        assert b.recv().payload == "kept"
        a.publish("t", "end")
        assert b.recv().payload == "end"
        b.call("unsubscribe", "t")


@case("edge: Retain")
def retained_message_that_is_too_large_is_refused_once(group: Group) -> None:
    """By who subscribes with a lower `max_message_bytes`; all else is delivered."""
    a = group.member("a")
    b = group.member("b", max_message_bytes=MIB)
    c = group.member("c")
    b.subscribe("other")
    a.publish("t", programs.pattern(1, 3 * MIB), retain=True)
    for count, history in enumerate((mq.KEEP_ALL, mq.keep_last(1)), 1):
        b.subscribe("t", history=history)
        with expect(mq.MessageTooLarge, "'a' on 't'", f"max_message_bytes is {MIB}"):
            b.recv()
        a.publish("other", "small")
        a.publish("t", "newer")
        assert {b.recv().payload, b.recv().payload} == {"small", "newer"}
        assert b.run(programs.topic_stats, "t")["lost"] == count
        b.call("unsubscribe", "t")
    b.subscribe("t")
    b.call("unsubscribe", "t")
    a.publish("other", "end")
    assert b.recv().payload == "end", "what was refused is told after unsubscribing"
    c.subscribe("t")
    (message,) = c.run(programs.receive, 1)
    assert message.digest == programs.digest(programs.pattern(1, 3 * MIB))


def _clear(queue: mq.MQ, topic: str) -> None:
    queue.publish(topic, mq.CLEAR, retain=True)


@case("edge: Retain")
def clear_drops_the_retained_message(group: Group) -> None:
    """`publish(topic, CLEAR, retain=True)` sends nothing and leaves nothing."""
    a, b = group.members("a", "b")
    a.publish("t", "kept", retain=True)
    b.subscribe("t")
    assert b.recv().payload == "kept"
    a.run(_clear, "t")
    c = group.member("c")
    c.subscribe("t")
    a.publish("t", "end")
    for member in (b, c):
        assert member.recv().payload == "end"


@case("edge: Retain")
def retained_message_ends_with_its_publisher(group: Group) -> None:
    """Who subscribes after the publisher has left gets nothing of it."""
    a, b, c = group.members("a", "b", "c")
    for member in (a, b):
        member.publish("t", member.name, retain=True)
    a.call("close")
    c.subscribe("t")
    b.publish("t", "end")
    assert [c.recv().payload for _ in range(2)] == ["b", "end"]
