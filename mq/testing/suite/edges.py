"""Batching, Scale, and what `inproc` and its like declare not to have."""

from __future__ import annotations

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.waiting import STEP


@case("edge: Batching")
def what_was_published_leaves_without_a_further_call(group: Group) -> None:
    """One message, or a burst of small ones: the last arrives as well as the first."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    for size in (1, 2, 700):
        a.run(programs.publish_range, "t", 0, size)
        got = b.run(programs.receive, size)
        assert [m.digest for m in got] == list(range(size))


def _round_trips(queue: mq.MQ, count: int) -> int:
    for number in range(count):
        queue.publish("question", number, urgent=True, timeout=STEP)
        assert queue.recv(timeout=STEP).payload == number
    return count


def _answer(queue: mq.MQ, count: int) -> None:
    for _ in range(count):
        queue.publish("answer", queue.recv(timeout=STEP).payload, urgent=True)


@case("edge: Batching")
def urgent_messages_keep_their_order_among_the_others(group: Group) -> None:
    """They do not wait for a batch, nor do they overtake what came before."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    for number in range(100):
        a.publish("t", number, urgent=number % 10 == 9)
    got = b.run(programs.receive, 100)
    assert [m.digest for m in got] == list(range(100))
    a.subscribe("answer")
    b.subscribe("question")
    answering = b.begin(_answer, 100)
    assert a.run(_round_trips, 100) == 100
    answering.result()


def _names_of_threads(worker: object) -> list[str]:
    import threading

    return [t.name for t in threading.enumerate() if not t.name.startswith("mq-test")]


def _many_queues(worker: object, backend: str, options: dict[str, object]) -> list[int]:
    """Threads of the library with one queue, and for each queue with six of them."""
    before = len(_names_of_threads(worker))
    queues: list[mq.MQ] = []
    found = []
    for number in range(6):
        queues.append(mq.connect(backend, name=f"m{number}", **options))  # type: ignore[arg-type]
        if number in {0, 5}:
            mine = len(_names_of_threads(worker)) - before
            found.append(mine)
    for queue in queues:
        queue.close()
    found.append(len(_names_of_threads(worker)) - before)
    return found


@case("edge: Scale")
def number_of_threads_does_not_grow_with_the_members(group: Group) -> None:
    """One keeper for each queue, whatever the number of its peers, none after it."""
    host = group.process("host")
    options = group.options()
    alone, six, none = host.ask(_many_queues, group.backend, options).result()
    assert alone <= 2, f"one queue has {alone} threads"
    assert six <= 6 * alone, f"six queues with five peers each have {six} threads"
    assert none == 0, f"{none} threads are left after close"


def _members_share_a_process(group: Group) -> None:
    """Members are threads: one process, one memory, and yet private payloads."""
    a, b = group.members("a", "b")
    assert a.pid == b.pid
    b.subscribe("t")
    a.publish("t", {"list": [1]})
    message = b.recv()
    assert (message.payload, message.sender) == ({"list": [1]}, "a")


@case("edge: inproc", needs="separate_processes", otherwise=_members_share_a_process)
def members_are_processes_of_their_own(group: Group) -> None:
    """What the transport declares: its members do not share a process."""
    a, b = group.members("a", "b")
    assert a.pid != b.pid
    b.subscribe("t")
    a.publish("t", {"list": [1]})
    message = b.recv()
    assert (message.payload, message.sender) == ({"list": [1]}, "a")
