"""Keep all, Windows, and two members that publish to each other."""

from __future__ import annotations

import threading

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.member import Member
from mq.testing.waiting import PEER_TIMEOUT, STEP, wait_until

MIB = 1 << 20


@case("Keep all")
def keep_all_loses_nothing_under_backpressure(group: Group) -> None:
    """A publisher that is far faster than its subscriber waits for it."""
    a, b = group.members("a", "b")
    count = 1200  # of which a depth of 4 would not survive a leak of credit
    b.subscribe("t", depth=4)
    running = a.begin(programs.publish_range, "t", 0, count)
    assert not running.done(0.2), "a publisher did not wait for a full subscriber"
    got = b.run(programs.receive, count)
    running.result()
    assert [(m.sequence, m.digest) for m in got] == [(n, n) for n in range(count)]
    assert b.run(programs.nothing_waits)
    assert a.run(programs.topic_stats, "t")["blocked_seconds"] > 0.1


@case("Keep all")
def publish_timeout_means_nobody_got_it(group: Group) -> None:
    """One full subscriber of two: no copy, no sequence number, nothing retained."""
    a, quick, slow = group.members("a", "quick", "slow")
    a.publish("t", "retained", retain=True)
    quick.subscribe("t")
    slow.subscribe("t", depth=4)
    filled = a.run(programs.fill, "t")
    for timeout in (0, 0.1):
        with expect(mq.PublishTimeout, "'t'", "slow") as caught:
            a.publish("t", "refused", retain=True, timeout=timeout)
        assert caught[0].members == ("slow",)
    a.call("flush", timeout=STEP)
    late = group.member("late")
    late.subscribe("t")
    assert late.recv().payload == "retained"
    for member in (quick, slow):
        member.run(programs.receive, filled + 1)
    a.publish("t", "accepted")
    for member in (quick, slow):
        message = member.recv()
        assert (message.payload, message.sequence) == ("accepted", filled + 1)


@case("Keep all")
def waiting_publish_holds_no_reservation(group: Group) -> None:
    """While it waits nobody got the message, and everything else goes on."""
    a, quick, slow = group.members("a", "quick", "slow")
    for topic in ("shared", "other"):
        quick.subscribe(topic, depth=4)
    slow.subscribe("shared", depth=2)
    filled = a.run(programs.fill, "shared")
    quick.run(programs.receive, filled)
    waiting = a.start("publish", "shared", "last", timeout=STEP)
    assert not waiting.done(0.1)
    for number in range(5):
        a.publish("other", number)
        assert quick.recv()[:2] == ("other", number)
    slow.run(programs.receive, filled)
    waiting.result()
    for member in (quick, slow):
        assert member.recv()[:2] == ("shared", "last")


@case("Keep all")
def waiting_publish_shows_whom_it_waits_for(group: Group) -> None:
    """In `stats()`, while it waits: the one that has taken nothing of two."""
    a, quick, slow = group.members("a", "quick", "slow")
    quick.subscribe("t")
    slow.subscribe("t", depth=2)
    filled = a.run(programs.fill, "t")
    before = a.run(programs.topic_stats, "t")["blocked_seconds"]
    waiting = a.start("publish", "t", "last", timeout=STEP)
    wait_until(
        lambda: a.run(programs.topic_stats, "t")["blocked_seconds"] > before,
        "the time that publish waits to be counted",
    )
    counters = a.run(programs.topic_stats, "t")
    assert counters["credit"]["slow"] == 0 < counters["credit"]["quick"]
    assert counters["queued"] == {"quick": 0, "slow": 0}
    slow.run(programs.receive, filled)
    waiting.result()


@case("Keep all")
def unsubscribing_releases_a_waiting_publisher(group: Group) -> None:
    """A subscriber that unsubscribes is no longer waited for; others lose nothing."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t", depth=2)
    c.subscribe("t")
    filled = a.run(programs.fill, "t")
    waiting = a.start("publish", "t", "after", timeout=None)
    assert not waiting.done(0.1)
    b.call("unsubscribe", "t")
    waiting.result()
    assert [m.sequence for m in c.run(programs.receive, filled + 1)] == list(
        range(filled + 1)
    )
    assert b.run(programs.nothing_waits)


@case("edge: unsubscribe")
def new_subscription_never_sees_the_old_stream(group: Group) -> None:
    """Unsubscribe and subscribe again with messages under way: a fresh start."""
    a, b = group.members("a", "b")
    for turn in range(10):
        b.subscribe("t", depth=5)
        a.run(programs.fill, "t")
        b.call("unsubscribe", "t")
        b.subscribe("t", depth=5)
        a.publish("t", f"turn {turn}")
        assert b.recv().payload == f"turn {turn}"
        b.call("unsubscribe", "t")
    for _ in range(2):
        b.subscribe("t", history=mq.keep_last(1))
        a.publish("t", "old")
        b.call("unsubscribe", "t")
        wait_until(lambda: not a.call("subscribers", "t"), "a to hear of it")
        a.publish("t", "to nobody")
    assert a.run(programs.topic_stats, "t")["nobody"] == 2
    assert b.run(programs.nothing_waits)


@case("edge: Windows")
def full_topic_delays_no_other_topic(group: Group) -> None:
    """Topics share no credit: one that nobody reads leaves the next at full speed."""
    a, b = group.members("a", "b")
    b.subscribe("full", depth=3)
    a.run(programs.fill, "full")
    waiting = a.start("publish", "full", "waits", timeout=STEP)
    b.subscribe("free")
    running = a.begin(programs.publish_range, "free", 0, 100)
    running.result()
    assert not waiting.done()
    got = b.run(programs.receive_until, "waits")
    assert [m.digest for m in got if m.topic == "free"] == list(range(100))
    waiting.result()


@case("edge: Windows")
def every_publisher_has_one_message_of_any_size_in_flight(group: Group) -> None:
    """With the smallest windows and messages larger than they are."""
    writers = group.members("w0", "w1", "w2")
    reader = group.member("reader")
    reader.subscribe("t", depth=1, window_bytes=1)
    sizes = [2 * MIB, 100, 3 * MIB]
    running = [w.begin(programs.publish_patterns, "t", sizes) for w in writers]
    got = reader.run(programs.receive, len(sizes) * len(writers))
    for writer, future in zip(writers, running, strict=True):
        mine = [m.digest for m in got if m.sender == writer.name]
        assert mine == future.result()


@case("edge: Windows")
def depth_and_window_bytes_bound_what_waits_at_a_subscriber(group: Group) -> None:
    """Over all publishers: each may exceed its share by one message, no more."""
    a, b, reader = group.members("a", "b", "reader")
    reader.subscribe("count", depth=10)
    reader.subscribe("size", window_bytes=8 * MIB)
    counted = sum(w.run(programs.fill, "count") for w in (a, b))
    assert 2 <= counted <= 10 + 2, f"{counted} messages wait where depth is 10"
    sized = sum(w.run(programs.fill, "size", nbytes=MIB) for w in (a, b))
    assert 2 <= sized <= 8 + 2, f"{sized} MiB wait where window_bytes is 8 MiB"
    reader.run(programs.receive, counted + sized)


@case("edge: Windows")
def a_window_that_was_read_is_whole_again(group: Group) -> None:
    """A publisher may fill it each time before anything of that is read."""
    a, b = group.members("a", "b")
    b.subscribe("count", depth=11)
    b.subscribe("size", window_bytes=11 * MIB)
    for turn in range(3):
        a.run(programs.publish_range, "count", 11 * turn, 11 * (turn + 1))
        a.run(programs.publish_patterns, "size", [MIB] * 9)
        b.run(programs.receive, 20)


@case("edge: Windows")
def idle_publisher_leaves_its_part_of_the_window_to_others(group: Group) -> None:
    """Who comes later has its share of it too, though nobody receives meanwhile."""
    reader, early = group.members("reader", "early")
    reader.subscribe("t", depth=100)
    early.run(programs.publish_range, "t", 0, 1)
    early.call("flush", timeout=STEP)
    late = group.member("late")
    for writer, count in ((late, 40), (early, 20)):
        writer.run(programs.publish_range, "t", 0, count)
    got = reader.run(programs.receive, 61)
    mine = [m.digest for m in got if m.sender == "late"]
    assert mine == list(range(40))


def _exchange(queue: mq.MQ, send: str, count: int) -> list[int]:
    """Publish in one thread while receiving in another."""
    numbers: list[int] = []

    def read() -> None:
        numbers.extend(queue.recv(timeout=STEP).payload for _ in range(count))

    reader = threading.Thread(target=read, name="mq-test-read")
    reader.start()
    for number in range(count):
        queue.publish(send, number, timeout=STEP)
    reader.join(STEP)
    return numbers


@case("edge: Two members that publish to each other")
def two_members_with_full_windows_finish(group: Group) -> None:
    """Both publish far more than the windows hold, and both read meanwhile."""
    a, b = group.members("a", "b")
    a.subscribe("to a", depth=4)
    b.subscribe("to b", depth=4)
    running = [
        a.begin(_exchange, "to b", 200),
        b.begin(_exchange, "to a", 200),
    ]
    for future in running:
        assert future.result() == list(range(200))


def _answer_each(queue: mq.MQ, topic: str, count: int) -> None:
    for _ in range(count):
        message = queue.recv(timeout=STEP)
        queue.publish(topic, message.payload, timeout=STEP)


@case("edge: Two members that publish to each other")
def publishing_inside_a_recv_loop_is_fine(group: Group) -> None:
    """A member that answers every message, with windows of one message."""
    a, b = group.members("a", "b")
    a.subscribe("answer", depth=1)
    b.subscribe("question", depth=1)
    answering = b.begin(_answer_each, "answer", 100)
    assert a.run(_exchange, "question", 100) == list(range(100))
    answering.result()


def _both_full(a: Member, b: Member) -> None:
    a.subscribe("to a", depth=2)
    b.subscribe("to b", depth=2)
    a.run(programs.fill, "to b")
    b.run(programs.fill, "to a")


@case("edge: Two members that publish to each other")
def publish_timeout_tells_that_the_other_waits_for_us(group: Group) -> None:
    """Two members that wait for each other: the error says so.

    Neither takes the other for dead, though they have nothing to say for so long.
    """
    a, b = group.members("a", "b", peer_timeout=2 * PEER_TIMEOUT)
    _both_full(a, b)
    other = b.start("publish", "to a", "stuck", timeout=STEP)
    with expect(mq.PublishTimeout, "'to b'", "'b'", "waiting") as caught:
        a.publish("to b", "stuck", timeout=6)  # it is told of after 5 s
    assert caught[0].members == ("b",)
    a.run(programs.receive_until, "stuck")
    other.result()
