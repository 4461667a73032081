"""Order, No echo, Exact topics, Subscribe is synchronous, Nobody listening, Reuse."""

from __future__ import annotations

from typing import Any

import numpy as np

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP, wait_until

MIB = 1 << 20


@case("Order")
def order_is_fifo_per_publisher_and_topic(group: Group) -> None:
    """Two publishers, two topics each: every stream arrives complete and in order."""
    first, second, reader = group.members("first", "second", "reader")
    for topic in ("x", "y"):
        reader.subscribe(topic)
    running = [
        member.begin(programs.publish_range, topic, 0, 150)
        for member in (first, second)
        for topic in ("x", "y")
    ]
    got = reader.run(programs.receive, 600)
    for future in running:
        future.result()
    for sender in ("first", "second"):
        for topic in ("x", "y"):
            stream = [m for m in got if (m.sender, m.topic) == (sender, topic)]
            assert [m.sequence for m in stream] == list(range(150))
            assert [m.digest for m in stream] == list(range(150))


@case("Order")
def small_messages_do_not_overtake_large_ones(group: Group) -> None:
    """Messages of one chunk, of many and of none keep their order on one topic."""
    writer, reader = group.members("writer", "reader")
    reader.subscribe("t")
    sizes = [3 * MIB, 10, 0, 200_000, MIB, 1, 60_000, 5 * MIB, 64, 90_000, 64]
    running = writer.begin(programs.publish_patterns, "t", sizes)
    got = reader.run(programs.receive, len(sizes))
    assert [m.digest for m in got] == running.result()
    assert [m.sequence for m in got] == list(range(len(sizes)))


def _small(number: int) -> Any:
    """What joins batches, and is decoded along with others."""
    import torch

    kinds = (
        {"n": number, "nested": [number, {"raw": b"x"}]},
        torch.full((3,), number),
        {"a": torch.full((2,), number), "n": number},
        np.full(2, number),
        (number, [0.5]),
    )
    return kinds[number % len(kinds)]


def _publish_and_reuse(queue: mq.MQ, count: int) -> None:
    for number in range(count):
        payload = _small(number)
        queue.publish("t", payload, timeout=STEP)
        _overwrite(payload)


def _overwrite(payload: Any) -> None:
    """Everything in it that can be written to."""
    for value in payload.values() if isinstance(payload, dict) else [payload]:
        if hasattr(value, "shape"):
            value[:] = -1


def _receive_and_overwrite(queue: mq.MQ, count: int) -> None:
    for number in range(count):
        message = queue.recv(timeout=STEP)
        assert message.sequence == number
        assert repr(message.payload) == repr(_small(number))  # types and dtypes, too
        _overwrite(message.payload)


@case("Order")
def burst_of_small_messages_of_all_kinds_keeps_order_and_content(group: Group) -> None:
    """Plain, tensors, arrays and tuples, in memory that both sides then write to."""
    writer, reader = group.members("writer", "reader")
    reader.subscribe("t")
    running = writer.begin(_publish_and_reuse, 400)
    reader.run(_receive_and_overwrite, 400)
    running.result()


@case("No echo")
def member_does_not_receive_what_it_published(group: Group) -> None:
    """A publisher that is subscribed to its own topic hears only the others."""
    a, b = group.members("a", "b")
    for member in (a, b):
        member.subscribe("t")
    a.publish("t", "from a")
    b.publish("t", "from b")
    assert b.recv().payload == "from a"
    assert a.recv().payload == "from b"
    a.call("flush", timeout=STEP)
    for member in (a, b):
        assert member.run(programs.nothing_waits)
    assert a.call("subscribers", "t") == ["b"]


@case("Exact topics")
def a_topic_of_a_subclass_of_str_is_that_topic(group: Group) -> None:
    """NumPy's strings are such: others join, and hear it as any."""
    a, b = group.members("a", "b")
    b.subscribe(np.str_("t"))
    a.publish(np.str_("t"), 0)
    late = group.member("late")
    late.publish("t", 0)
    assert a.call("subscribers", np.str_("t")) == ["b"]
    for _ in range(2):
        assert type(b.recv().topic) is str
    b.call("unsubscribe", np.str_("t"))
    late.subscribe("t")
    a.publish("t", "end")
    assert late.recv().payload == "end"


@case("Exact topics")
def topic_matches_exactly(group: Group) -> None:
    """Neither prefixes nor other spellings of a topic match it."""
    a, b = group.members("a", "b")
    longest = "é" * 127 + "x"
    for topic in ("a", longest):
        b.subscribe(topic)
    for topic in ("ab", "A", "a ", " a", "a/b", "á", "é" * 127 + "y"):
        a.publish(topic, "wrong")
    a.publish("a", "right")
    a.publish(longest, "longest")
    assert [b.recv()[:2] for _ in range(2)] == [("a", "right"), (longest, "longest")]
    assert b.run(programs.nothing_waits)


@case("Exact topics")
def unsubscribed_topics_are_not_sent(group: Group) -> None:
    """Bytes that a member did not subscribe to do not travel to it."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("small")
    c.subscribe("large")
    before = a.run(programs.peer_stats, "b")["sent_bytes"]
    a.publish("large", programs.pattern(0, 4 * MIB))
    a.publish("small", 1)
    assert b.recv().payload == 1
    assert c.recv().nbytes >= 4 * MIB
    sent = a.run(programs.peer_stats, "b")["sent_bytes"] - before
    assert sent < MIB, f"{sent} bytes were sent to a member that wanted a few"


@case("Exact topics")
def malformed_topics_are_refused(group: Group) -> None:
    """A topic has 1 to 255 bytes without control characters and is not ours."""
    a = group.member("a")
    for topic in ("", "x" * 256, "é" * 128, "a\nb", "a\0", "\x7f", "mq.private"):
        for method in ("subscribe", "publish"):
            with expect(ValueError):
                a.call(method, topic, *([1] if method == "publish" else []))
    with expect(TypeError):
        a.call("subscribe", b"bytes")


@case("Subscribe is synchronous")
def message_published_after_subscribe_returned_arrives(group: Group) -> None:
    """No slow joiner: what anyone publishes after `subscribe` returned is delivered."""
    a, b, c = group.members("a", "b", "c")
    for number in range(15):
        topic = f"t{number}"
        c.subscribe(topic)
        a.publish(topic, "a")
        b.publish(topic, "b")
        assert {c.recv().payload, c.recv().payload} == {"a", "b"}


@case("Subscribe is synchronous")
def nothing_arrives_after_unsubscribe_returned(group: Group) -> None:
    """Neither what waited in the inbox, as it is read, nor what is published then."""
    a, b = group.members("a", "b")
    for topic in ("gone", "kept"):
        b.subscribe(topic)
    a.run(programs.publish_range, "gone", 0, 50)
    a.call("flush", timeout=STEP)
    b.run(programs.receive, 4)  # from then on some are decoded ahead
    b.call("unsubscribe", "gone")
    a.run(programs.publish_range, "gone", 50, 100)
    a.publish("kept", "end")
    message = b.recv()
    assert (message.topic, message.payload) == ("kept", "end")
    assert b.run(programs.nothing_waits)
    b.call("unsubscribe", "gone")  # idempotent


def _subscribe_and_unsubscribe(group: Group) -> None:
    """Where no member can be stopped alone, so that all acknowledge at once."""
    a, b = group.members("a", "b")
    a.subscribe("t")
    a.call("unsubscribe", "t")
    wait_until(lambda: b.call("subscribers", "t") == [], "b to hear of it")


@case(
    "edge: subscribe", needs="separate_processes", otherwise=_subscribe_and_unsubscribe
)
def a_subscribe_that_waits_ends_with_its_subscription(group: Group) -> None:
    """Another thread unsubscribes while a stopped member has yet to acknowledge."""
    a, b = group.members("a", "b", peer_timeout=3 * STEP)
    b.stop()
    subscribing = a.start("subscribe", "t", timeout=None)

    def has_ended() -> bool:
        a.call("unsubscribe", "t")  # again, as it may have come before the other
        return subscribing.done(0.05)

    wait_until(has_ended, "subscribe to end")
    subscribing.result()
    b.cont()


@case("Nobody listening")
def publishing_to_nobody_returns_and_is_counted(group: Group) -> None:
    """Alone in the group, or without a subscriber among the others."""
    a = group.member("a")
    a.publish("t", 1, timeout=0)
    group.member("b")
    a.publish("t", 2, timeout=0)
    a.call("flush", timeout=STEP)
    assert a.run(programs.topic_stats, "t")["nobody"] == 2


def _publish_and_overwrite(queue: mq.MQ, sizes: list[int]) -> None:
    import torch

    for number, nbytes in enumerate(sizes):
        array = np.full(nbytes, number, np.uint8)
        tensor = torch.full((nbytes,), number, dtype=torch.uint8)
        inside = bytearray(array.tobytes())
        queue.publish("t", [array, tensor, inside], timeout=STEP)
        array[:] = 255
        tensor.fill_(255)
        inside[:] = b"\xff" * nbytes


def _sums(queue: mq.MQ, count: int) -> list[list[int]]:
    found = []
    for _ in range(count):
        parts = queue.recv(timeout=STEP).payload
        arrays = [np.asarray(part) for part in parts[:2]]
        arrays.append(np.frombuffer(parts[2], np.uint8))
        found.append([int(array.sum(dtype=np.int64)) for array in arrays])
    return found


@case("Reuse")
def caller_may_overwrite_what_it_published(group: Group) -> None:
    """Whatever the size, and while the subscriber has not taken the message yet."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    sizes = [16, 100_000, 3 * MIB, 64, 9 * MIB]
    a.run(_publish_and_overwrite, sizes)
    expected = [[number * n] * 3 for number, n in enumerate(sizes)]
    assert b.run(_sums, len(sizes)) == expected
