"""Threads, asyncio, Interrupt and Errors: how calls run, end and fail."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.member import Member
from mq.testing.waiting import STEP, wait_until


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


def _full_pair(backend: str, options: dict[str, Any]) -> tuple[mq.MQ, mq.MQ, int]:
    writer = mq.connect(backend, name="writer", **options)
    reader = mq.connect(backend, name="reader", **options)
    reader.subscribe("t", depth=1)
    return writer, reader, programs.fill(writer, "t")


def _publish_a_loan(writer: mq.MQ) -> None:
    with writer.loan("t", (4,), "u1") as array:
        array[:] = 1


def _waits(writer: mq.MQ, reader: mq.MQ, call: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "recv": writer.recv,
        "publish": lambda: writer.publish("t", "interrupted"),
        "loan": lambda: _publish_a_loan(writer),
        "wait_for_members": lambda: writer.wait_for_members(9, timeout=None),
        "wait_for_subscribers": lambda: writer.wait_for_subscribers(
            "t", 9, timeout=None
        ),
    }
    calls[call]()


def _interrupted(worker: Any, call: str) -> float:
    """The time, by the clock of all processes, when a waiting call was interrupted."""
    writer, reader, _ = worker.queue
    try:
        _waits(writer, reader, call)
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError(f"{call} ended by itself")


def _make_full_pair(worker: Any, backend: str, options: dict[str, Any]) -> None:
    worker.queue = _full_pair(backend, options)


def _main_thread_waits(worker: Any) -> bool:
    """Whether the worker's main thread waits inside the library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return not names.isdisjoint(("_waits", "_waits_in_close")) and _sleeps()


def _sleeps() -> bool:
    with open("/proc/self/stat") as file:  # of the main thread
        return file.read().rpartition(")")[2].split()[0] == "S"


def _check_after_interrupts(worker: Any) -> None:
    writer, reader, filled = worker.queue
    worker.queue = None
    programs.receive(reader, filled)
    writer.publish("t", "next", timeout=STEP)
    (message,) = programs.receive(reader, 1)
    assert (message.digest, message.sequence) == ("next", filled)
    reader.close()
    writer.close()


def _interrupt(host: Member, call: Callable[..., float], *args: object) -> float:
    """Interrupt a call once it waits; the seconds until it has ended."""
    waiting = host.ask(call, *args)
    asks = host.ask(_main_thread_waits, worker_main=False)
    while not asks.result():
        asks = host.ask(_main_thread_waits, worker_main=False)
    sent = time.monotonic()
    host.interrupt()
    return float(waiting.result()) - sent


@case("Interrupt")
def interrupt_ends_every_waiting_call(group: Group) -> None:
    """Within half a second, and an interrupted `publish` did nothing."""
    host = group.process("host")
    host.ask(_make_full_pair, group.backend, group.options()).result()
    calls = ("recv", "publish", "loan", "wait_for_members", "wait_for_subscribers")
    taken = [_interrupt(host, _interrupted, call) for call in calls]
    assert max(taken) < 0.5, dict(zip(calls, taken, strict=True))
    host.ask(_check_after_interrupts).result()


def _waits_in_close(queue: mq.MQ) -> None:
    queue.close(linger=STEP)


def _interrupted_in_close(worker: Any) -> float:
    """The time, by the clock of all processes, when `close` was interrupted."""
    try:
        _waits_in_close(worker.queue)
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("close ended by itself")


def _close_beside_a_full_peer(group: Group) -> None:
    """Where members are threads, none can hang; what it has not read keeps nobody."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=1)
    a.run(programs.fill, "t")
    a.call("close", linger=0.0)


@case("Interrupt", needs="separate_processes", otherwise=_close_beside_a_full_peer)
def interrupt_ends_close_though_a_peer_hangs(group: Group) -> None:
    """Within half a second, and nothing of the queue is left."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    b.stop()
    a.publish("t", "never read")
    assert _interrupt(a, _interrupted_in_close) < 0.5


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
    a.run(programs.fill, "t")
    with expect(mq.PublishTimeout) as caught:
        a.publish("t", 1, timeout=0.05)
    assert sorted(caught[0].members) == ["b", "c"]
    wait_until(lambda: a.run(programs.topic_stats, "t")["published"] > 0, "counters")
