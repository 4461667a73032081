"""Threads, asyncio and Errors: how calls run, end and fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP

_HANDLING_SECONDS: Final = 10e-6


def _in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(0)` to `work(count - 1)` return, each called in a thread."""
    results: dict[int, Any] = {}

    def body(number: int) -> None:
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [
        threading.Thread(target=body, args=(n,), name=f"mq-test-{n}")
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STEP)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    assert len(results) == count, "a thread did not end"
    return [results[number] for number in range(count)]


def _receive_in_threads(queue: mq.MQ, threads: int) -> list[list[int]]:
    def work(number: int) -> list[int]:
        mine: list[int] = []
        while (payload := queue.recv(timeout=STEP).payload) != "end":
            mine.append(payload)
        return mine

    return _in_threads(threads, work)


def _publish_in_threads(queue: mq.MQ, threads: int, count: int) -> None:
    def work(number: int) -> None:
        for k in range(count):
            queue.publish("t", number * count + k, timeout=STEP)

    _in_threads(threads, work)


@case("Threads")
def each_message_goes_to_exactly_one_recv(group: Group) -> None:
    """Four threads publish, four receive: nothing lost, doubled or out of order."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=16)
    reading = b.begin(_receive_in_threads, 4)
    a.run(_publish_in_threads, 4, 100)
    for _ in range(4):
        a.publish("t", "end")
    shares = reading.result()
    assert sorted(n for share in shares for n in share) == list(range(400))
    for share in shares:
        for thread in range(4):
            mine = [n for n in share if n // 100 == thread]
            assert mine == sorted(mine)


def _use_everything(queue: mq.MQ, rounds: int) -> list[int]:
    def work(number: int) -> int:
        topic = f"private {number}"
        for k in range(rounds):
            queue.subscribe(topic)
            queue.publish("t", [number, k], timeout=STEP)
            queue.flush(timeout=STEP)
            queue.stats()
            queue.members()
            queue.unsubscribe(topic)
        return rounds

    return _in_threads(4, work)


@case("Threads")
def every_method_may_be_called_from_any_thread(group: Group) -> None:
    """Four threads subscribe, publish, flush and ask at the same time."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    using = a.begin(_use_everything, 8)
    got = b.run(programs.receive, 32)
    assert using.result() == [8] * 4
    assert [m.sequence for m in got] == list(range(32))
    for thread in range(4):
        assert [m.digest[1] for m in got if m.digest[0] == thread] == list(range(8))


def _ask_beside_bulk(queue: mq.MQ, rounds: int) -> list[int]:
    asked = threading.Event()

    def work(number: int) -> int:
        bulk = 0
        while number and not asked.is_set():
            queue.publish("bulk", bytes(8 << 20), timeout=STEP)
            bulk += 1
        try:
            for k in range(0 if number else rounds):
                queue.publish("ask", {"question": k}, timeout=STEP)
                assert queue.recv(timeout=STEP).payload == {"question": k}
        finally:
            asked.set()
        return bulk

    return _in_threads(2, work)


def _answer(queue: mq.MQ) -> int:
    bulk = 0
    while (payload := queue.recv(timeout=STEP).payload) != "end":
        if isinstance(payload, dict):
            queue.publish("answer", payload, timeout=STEP)
        else:
            bulk += 1
    return bulk


@case("Threads")
def small_messages_pass_beside_large_ones_of_another_thread(group: Group) -> None:
    """Each question is answered while another thread publishes in bulk."""
    a, b = group.members("a", "b")
    a.subscribe("answer")
    for topic in ("ask", "bulk"):
        b.subscribe(topic)
    answering = b.begin(_answer)
    _, bulk = a.run(_ask_beside_bulk, 60)
    a.publish("bulk", "end")
    assert answering.result() == bulk


async def _async_reader(queue: mq.MQ) -> list[Any]:
    got: list[Any] = []
    for k in range(20):  # cancelled again and again, and no message is lost
        waiting = asyncio.ensure_future(queue.arecv())
        await asyncio.sleep(0)  # the one turn in which the call begins to wait
        if k % 2:
            waiting.cancel()
        try:
            got.append((await waiting).payload)
        except asyncio.CancelledError:
            continue
    async for message in queue:
        if message.payload == "end":
            return got
        got.append(message.payload)
    raise AssertionError("the queue closed by itself")


def _read_async(queue: mq.MQ) -> list[Any]:
    return asyncio.run(_async_reader(queue))


def _publish_async(queue: mq.MQ, count: int) -> None:
    async def body() -> None:
        for number in range(count):
            await queue.apublish("t", number, timeout=STEP)
        await queue.apublish("t", "end", timeout=STEP)
        await queue.aflush(timeout=STEP)

    asyncio.run(body())


@case("edge: Threads and asyncio")
def cancelled_arecv_loses_nothing(group: Group) -> None:
    """Asynchronous publisher and reader, whose calls are cancelled on the way."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=4)
    reading = b.begin(_read_async)
    a.begin(_publish_async, 60).result()
    assert reading.result() == list(range(60))


def _handle() -> int:
    """Take a while, or else a fast processor has all before another task is due."""
    turns, done_at = 0, time.perf_counter() + _HANDLING_SECONDS
    while time.perf_counter() < done_at:
        turns += 1
    return turns


def _read_beside_another_task(queue: mq.MQ) -> list[int]:
    """What was read, by its sequence, when the other task had its first turn."""

    async def body() -> list[int]:
        got: list[int] = []

        async def read() -> None:
            while True:
                got.append((await queue.arecv()).sequence)
                _handle()

        reading = asyncio.ensure_future(read())
        while not got:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return got

    return asyncio.run(body())


@case("edge: Threads and asyncio")
def arecv_leaves_the_loop_to_others_though_messages_wait(group: Group) -> None:
    """Else nothing could end a task that reads an endless stream; none is lost."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(programs.publish_range, "t", 0, 4000)
    a.call("flush", timeout=STEP)
    got = b.run(_read_beside_another_task)
    assert len(got) < 4000
    got += [m.sequence for m in b.run(programs.receive, 4000 - len(got))]
    assert got == list(range(4000))


def _cancel_publish(queue: mq.MQ) -> None:
    async def body() -> None:
        try:
            await asyncio.wait_for(queue.apublish("t", "cancelled"), 0.1)
        except asyncio.TimeoutError:
            return
        raise AssertionError("it did not wait for a full subscriber")

    asyncio.run(body())


@case("edge: Threads and asyncio")
def apublish_cancelled_before_its_commit_did_nothing(group: Group) -> None:
    """Nobody got the message, and the next one takes its sequence number."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=3)
    filled = a.run(programs.fill, "t")
    a.run(_cancel_publish)
    b.run(programs.receive, filled)
    a.publish("t", "next")
    message = b.recv()
    assert (message.payload, message.sequence) == ("next", filled)


@case("Errors")
def errors_say_what_where_and_which_builtin_they_are(group: Group) -> None:
    """Ours, and the builtin that a caller would expect; with backend, topic, peer."""
    a, b = group.members("a", "b")
    with expect(mq.RecvTimeout, group.backend):
        a.recv(timeout=0)
    with expect(TimeoutError, "0.05"):
        a.recv(timeout=0.05)
    b.subscribe("t", depth=1)
    a.run(programs.fill, "t")
    with expect(TimeoutError, "'t'", "b", group.backend):
        a.publish("t", 1, timeout=0)
    with expect(ValueError, "2"):
        a.publish("t", 1, timeout=-2)


def _connect_only(worker: object, backend: str, options: dict[str, Any]) -> None:
    mq.connect(backend, **options).close()


@case("Errors")
def misspelt_options_and_backends_are_refused_with_the_nearest(group: Group) -> None:
    """An option that nobody knows, a transport that nobody knows, no group."""
    host = group.process("host")
    options = group.options(name="x")
    with expect(TypeError, "peer_timeot", "peer_timeout"):
        wrong = {**options, "peer_timeot": 3}
        host.ask(_connect_only, group.backend, wrong).result()
    with expect(LookupError, group.backend):
        host.ask(_connect_only, group.backend + "x", options).result()
    with expect(Exception, "group", "MQ_GROUP"):
        wrong = {**options, "group": None}
        host.ask(_connect_only, group.backend, wrong).result()


@case("Errors")
def error_of_a_full_inbox_names_every_subscriber_waited_for(group: Group) -> None:
    """`PublishTimeout.members` holds all of them, and none that has room."""
    a, b, c, d = group.members("a", "b", "c", "d")
    for member, depth in ((b, 1), (c, 1), (d, 100)):
        member.subscribe("t", depth=depth)
    filled = a.run(programs.fill, "t")
    with expect(mq.PublishTimeout) as caught:
        a.publish("t", 1, timeout=0.05)
    assert sorted(caught[0].members) == ["b", "c"]
    assert a.run(programs.topic_stats, "t")["published"] == filled
    assert [m.digest for m in d.run(programs.receive, filled)] == list(range(filled))
    assert d.run(programs.nothing_waits)
