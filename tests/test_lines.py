"""Whom a change wakes, of many tasks that wait for one queue."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mq
from mq import lines
from mq.testing.waiting import wait_until

MANY = 30
Pair = tuple[mq.MQ, mq.MQ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two members, of which the second hears the first."""
    with mq.connect("inproc", group=f"lines-{os.getpid()}", name="a") as a:
        with mq.connect("inproc", group=f"lines-{os.getpid()}", name="b") as b:
            b.subscribe("t")
            yield a, b


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, call: str) -> Counter[str]:
    """How often a method is called from now on."""
    real, calls = getattr(owner, call), Counter[str]()

    def call_it(*args: Any, **kwargs: Any) -> Any:
        calls[call] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, call, call_it)
    return calls


async def until(reached: Callable[[], object]) -> None:
    """Turns of the loop, at most ten seconds of them."""
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


def begin(calls: Iterator[Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(call) for call in calls]


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


def sleepers(queue: mq.MQ) -> int:
    """How many calls of the running loop have found that they must wait."""
    own = queue._lines.get(asyncio.get_running_loop())
    return sum(len(line.places) for line in own._lines.values()) if own else 0


def bring(a: mq.MQ, b: mq.MQ, payload: str) -> None:
    """Have a message arrive at `b`, whose keeper may have stopped."""
    a.publish("t", payload)
    a._driver.run(lambda: None)  # sends it
    with b._lead.lock:
        b._lead.poll()


def test_a_message_wakes_one_of_many_tasks_in_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they came, and the others do not even look."""
    a, b = pair
    looks = counted(monkeypatch, b, "recv")

    async def body() -> None:
        got: list[tuple[int, Any]] = []

        async def take(number: int) -> None:
            got.append((number, (await b.arecv()).payload))

        tasks = begin(take(number) for number in range(MANY))
        await until(lambda: sleepers(b) == MANY)
        looks.clear()
        for number in range(MANY // 2):
            a.publish("t", number)
            await until(lambda number=number: len(got) > number)
        for number in range(MANY // 2, MANY):
            a.publish("t", number)
        await until(lambda: len(got) == MANY)
        assert sorted(got) == [(number, number) for number in range(MANY)]
        assert got[: MANY // 2] == sorted(got)[: MANY // 2]
        await end(tasks)

    asyncio.run(body())
    assert looks["recv"] <= 3 * MANY


def test_who_is_cancelled_when_called_calls_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would, until the next change; who was called has taken nothing."""
    a, b = pair
    real = lines.Place.call

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(4))
        left = list(tasks)

        def call(place: lines.Place) -> bool:
            is_called = real(place)
            if is_called and len(left) > 1:
                left.pop(0).cancel()
            return is_called

        await until(lambda: sleepers(b) == 4)
        b._lead.stop()  # nobody polls: nothing changes but by what is done here
        monkeypatch.setattr(lines.Place, "call", call)
        bring(a, b, "first")
        assert (await asyncio.wait_for(tasks[-1], 10)).payload == "first"
        assert all(task.cancelled() for task in tasks[:-1])

    asyncio.run(body())


def test_who_is_called_in_vain_keeps_its_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is faster, without having waited, does not send it to the end of the line."""
    a, b = pair
    real = lines.Place.call

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(3))
        await until(lambda: sleepers(b) == 3)
        stolen: list[Any] = []

        def call(place: lines.Place) -> bool:
            if not stolen:
                steal = asyncio.get_running_loop().call_soon
                steal(lambda: stolen.append(b.recv(0).payload))
            return real(place)

        monkeypatch.setattr(lines.Place, "call", call)
        a.publish("t", "stolen")
        await until(lambda: stolen)
        assert stolen == ["stolen"]
        for number in range(3):
            a.publish("t", number)
            await until(tasks[number].done)
            assert tasks[number].result().payload == number

    asyncio.run(body())


def test_an_exception_of_a_handler_as_lines_are_looked_at_leaves_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it came into the middle of is done again."""
    a, b = pair
    real, interrupts = lines._Line.call, [ZeroDivisionError()]

    def interrupted(*args: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        real(*args)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        task = asyncio.ensure_future(b.arecv())
        await until(lambda: sleepers(b))
        b._lead.stop()
        monkeypatch.setattr(lines._Line, "call", interrupted)
        bring(a, b, "first")
        assert (await asyncio.wait_for(task, 10)).payload == "first"
        assert not interrupts

    asyncio.run(body())


def test_a_task_that_never_comes_when_called_keeps_nobody_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises may have come as the loop was to go on with it."""
    a, b = pair
    real = lines.Place.call

    async def body() -> None:
        loop = asyncio.get_running_loop()
        tasks = begin(b.arecv() for _ in range(2))
        await until(lambda: sleepers(b) == 2)
        b._lead.stop()
        lost: list[Callable[[], object]] = []

        def call(place: lines.Place) -> bool:
            if not lost:
                woken: Any = place.woken
                go_on = woken._callbacks[0][0]
                woken.remove_done_callback(go_on)
                lost.append(lambda: loop.call_soon(go_on, woken))
            return real(place)

        monkeypatch.setattr(lines.Place, "call", call)
        bring(a, b, "first")
        try:
            assert (await asyncio.wait_for(tasks[1], 10)).payload == "first"
        finally:
            lost[0]()
            await end(tasks)

    asyncio.run(body())


def test_a_place_that_was_never_left_keeps_nobody_back(pair: Pair) -> None:
    """Handlers may raise as a call leaves, each time that it tries to."""
    a, b = pair

    async def body() -> None:
        place = b._place()
        place.__enter__()
        place._lines.stand(place, b._inbox, b._inbox.has_items)
        task = asyncio.ensure_future(b.arecv())
        await until(lambda: sleepers(b) == 2)
        bring(a, b, "first")
        assert (await asyncio.wait_for(task, 10)).payload == "first"
        assert not sleepers(b)
        assert not b._lines
        # Who was taken for one, and still runs, waits as it did.
        waiting = asyncio.ensure_future(place.wait(b._inbox, b._inbox.has_items, None))
        await until(lambda: sleepers(b))
        bring(a, b, "second")
        assert await asyncio.wait_for(waiting, 10)
        place.__exit__(None)

    asyncio.run(body())


def test_a_loop_that_never_comes_to_what_it_was_told_is_told_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises may have had it drop that."""
    a, b = pair

    async def body() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(b.arecv())
        await until(lambda: sleepers(b))
        b._lead.stop()
        await asyncio.sleep(0)
        real, dropped = loop.call_soon_threadsafe, list[bool]()

        def soon(*args: Any) -> Any:
            if dropped:
                return real(*args)
            return dropped.append(True)

        monkeypatch.setattr(loop, "call_soon_threadsafe", soon)
        bring(a, b, "first")
        assert dropped
        assert (await asyncio.wait_for(task, 10)).payload == "first"

    asyncio.run(body())


def test_who_takes_one_of_many_messages_calls_the_next(pair: Pair) -> None:
    """They may have come in one change; an error of one of them is its caller's."""
    a, b = pair

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(MANY))
        await until(lambda: sleepers(b) == MANY)
        b._lead.stop()
        for number in range(MANY):
            a.publish("t", number)
        a._driver.run(lambda: None)  # sends it
        b._decode_run = lambda *args: []  # none is decoded ahead
        b._decode_ahead = lambda *args: []  # type: ignore[method-assign,assignment]
        decode, numbers = b._decode, iter(range(MANY))

        def fail_now_and_then(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) % 3 == 1:
                raise mq.CodecError("bad")
            return decode(*args, **kwargs)

        b._decode = fail_now_and_then  # type: ignore[method-assign]
        with b._lead.lock:
            b._lead.poll()
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        results = await asyncio.wait_for(gathered, 10)
        for number, result in enumerate(results):
            if number % 3 == 1:
                assert isinstance(result, mq.CodecError)
            else:
                assert result.payload == number

    asyncio.run(body())


def test_a_burst_calls_as_many_of_a_long_line_as_it_has_messages(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that leaves calls one: two would be four, and all of them looked through."""
    a, b = pair
    calls = counted(monkeypatch, lines.Place, "call")

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(10 * MANY))
        await until(lambda: sleepers(b) == 10 * MANY)
        b._lead.stop()
        for number in range(5 * MANY):
            a.publish("t", number)
        a._driver.run(lambda: None)  # sends it
        with b._lead.lock:
            b._lead.poll()
        await until(lambda: sum(map(asyncio.Task.done, tasks)) >= 5 * MANY)
        got = [task.result().payload for task in tasks[: 5 * MANY]]
        assert got == list(range(5 * MANY))
        await end(tasks)

    asyncio.run(body())
    assert calls["call"] <= 6 * MANY


@pytest.mark.parametrize("is_late", [False, True])
def test_who_is_called_is_not_overtaken_before_it_has_looked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Neither is who was called by its deadline, and may find something yet."""
    _, b = pair

    async def body() -> None:
        timeout = 0.2 if is_late else None
        tasks = begin(b.arecv(timeout if n == 0 else None) for n in range(3))
        await until(lambda: sleepers(b) == 3)
        (known,) = b._lines.values()
        (line,) = known._lines.values()
        first, second, _ = line.places
        monkeypatch.setattr(line, "moves", lambda: True)
        if is_late:
            await until(lambda: first.woken.done())
        else:
            line.call()
        line.call()
        assert second.woken is not None
        assert not second.woken.done()
        await end(tasks)

    asyncio.run(body())


def test_who_is_cancelled_is_passed_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task may never come to leave, where a handler raises in the loop."""
    _, b = pair

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(3))
        await until(lambda: sleepers(b) == 3)
        (known,) = b._lines.values()
        (line,) = known._lines.values()
        _, second, third = line.places
        monkeypatch.setattr(line, "moves", lambda: True)
        tasks[0].cancel()
        line.call()
        assert second.woken.done()
        assert list(line.places) == [second, third]
        await end(tasks)

    asyncio.run(body())


def test_credit_wakes_one_of_who_publish_on_its_topic(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that one the next, as far as the credit goes; other topics sleep on."""
    a, b = pair
    for topic in range(MANY):
        b.subscribe(f"t{topic}", depth=1)
        a.publish(f"t{topic}", "first")
    looks = counted(monkeypatch, a, "_publish")

    async def body() -> None:
        tasks = begin(a.apublish(f"t{n}", "more") for n in range(MANY) for _ in "abc")
        await until(lambda: sleepers(a) == 3 * MANY)
        looks.clear()
        for more in range(MANY):
            assert b.recv(10).topic == f"t{more}"
            await until(lambda more=more: sum(map(asyncio.Task.done, tasks)) > more)
            assert tasks[3 * more].done()
        for _ in range(3 * MANY):
            await until(lambda: b._inbox.has_items())
            b.recv(10)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(body())
    assert looks["_publish"] <= 3 * 3 * MANY


def test_aflush_wakes_when_all_of_its_own_has_arrived(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every change before."""
    a, b = pair
    held: list[Any] = [1]
    monkeypatch.setattr(a._mesh.publisher, "unsettled", lambda marks: list(held))
    looks = counted(monkeypatch, a._driver, "wait_until")

    async def body() -> None:
        tasks = begin(a.aflush() for _ in range(MANY))
        await until(lambda: sleepers(a) == MANY)
        assert looks.pop("wait_until") == MANY
        for _ in range(10):
            seen = a._mesh.changed
            a.publish("t", 1)
            b.recv(10)
            await until(lambda seen=seen: a._mesh.changed > seen)
            for _ in range(3):
                await asyncio.sleep(0)
        assert not looks
        held.clear()
        a.publish("t", 1)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(body())
    assert looks["wait_until"] == MANY


def test_close_wakes_all(pair: Pair) -> None:
    """Whatever they wait for."""
    a, b = pair
    b.subscribe("full", depth=1)
    a.publish("full", 1)

    async def body() -> None:
        calls = [a.arecv] * MANY + [lambda: a.apublish("full", 2)] * MANY
        tasks = begin(call() for call in calls)
        await until(lambda: sleepers(a) == 2 * MANY)
        await asyncio.to_thread(a.close, 0)
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        for result in await asyncio.wait_for(gathered, 10):
            assert isinstance(result, mq.Closed)

    asyncio.run(body())


def test_a_task_that_is_dropped_leaves_its_line(pair: Pair) -> None:
    """Its place may be freed in any thread, and while that has the queue's lock."""
    a, b = pair

    async def body() -> None:
        tasks = begin(b.arecv() for _ in range(2))
        await until(lambda: sleepers(b) == 2)
        call = b.arecv()
        call.send(None)  # it waits, in no task
        with b._lead.lock:
            call.close()
        await until(lambda: sleepers(b) == 2)
        for number in range(2):
            a.publish("t", number)
        got = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [message.payload for message in got] == [0, 1]
        await until(lambda: not b._lead._listeners)

    asyncio.run(body())


def test_tasks_that_need_not_wait_have_equal_parts_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one queue's messages go by thousands where another's go by ones."""
    now = [time.monotonic()]

    def monotonic() -> float:
        now[0] += lines.LOOP_SECONDS / 100
        return now[0]

    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=monotonic))
    turns = Counter[int]()

    async def run_on(number: int) -> None:
        while True:
            await lines.let_others_run()
            turns[number] += 1

    async def body() -> None:
        tasks = begin(run_on(number) for number in range(4))
        for _ in range(10):
            await asyncio.sleep(0)
        begin_at = now[0]
        turns.clear()
        for _ in range(10):
            await asyncio.sleep(0)
        assert now[0] - begin_at < 10 * 1.1 * lines.LOOP_SECONDS
        await end(tasks)

    asyncio.run(body())
    assert len(turns) == 4
    assert min(turns.values()) > 100
    assert max(turns.values()) <= 1.1 * min(turns.values())


class Readers:
    """Tasks of one loop that take messages, and are cancelled and time out by chance.

    Attributes:
        got: What they took, of all loops.
    """

    def __init__(self, queue: mq.MQ, seed: int, got: list[Any]) -> None:
        self._queue = queue
        self._random = random.Random(seed)
        self.got = got

    async def _read(self) -> None:
        while True:
            try:
                timeout = self._random.choice((None, None, 0, 0.001))
                message = await self._queue.arecv(timeout)
            except mq.RecvTimeout:
                await asyncio.sleep(0)
                continue
            except mq.Closed:
                return
            self.got.append(message.payload)
            if self._random.random() < 0.3:
                await asyncio.sleep(0)

    async def _read_one(self) -> None:
        self.got.append((await self._queue.arecv()).payload)

    async def run(self, count: int) -> None:
        """Disturb them until all has been published, then see that nothing is left."""
        tasks = begin(self._read_one() for _ in range(MANY))
        while self._random.random() > 0.002 and len(self.got) < count:
            number = self._random.randrange(len(tasks))
            if self._random.random() < 0.5:
                tasks[number].cancel()
            if tasks[number].done():
                make = self._random.choice((self._read, self._read_one))
                tasks[number] = asyncio.ensure_future(make())
            await asyncio.sleep(self._random.choice((0, 0, 0, 0.0001)))
        # From here on each must be woken by its message: nobody looks by itself.
        await end([task for task in tasks if self._random.random() < 0.5])
        tasks += begin(self._read_all() for _ in range(2))
        deadline = time.monotonic() + 20
        while len(self.got) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        await end(tasks)

    async def _read_all(self) -> None:
        async for message in self._queue:
            self.got.append(message.payload)


@pytest.mark.parametrize("backend", ["inproc", "shm"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_left_whoever_is_cancelled(backend: str, seed: int) -> None:
    """Of tasks of two loops and a thread that blocks; each message goes to one."""
    count, got = 3000, list[Any]()
    group = f"lines-{os.getpid()}"
    with (
        mq.connect(backend, group=group, name="a") as a,
        mq.connect(backend, group=group, name="b") as b,
    ):
        b.subscribe("t", depth=16)
        failed: list[BaseException] = []

        def run_loop(number: int) -> None:
            try:
                asyncio.run(Readers(b, 2 * seed + number, got).run(count))
            except BaseException as error:
                failed.append(error)

        def block() -> None:
            while len(got) < count // 2:
                with contextlib.suppress(mq.RecvTimeout):
                    got.append(b.recv(0.001).payload)

        async def publish() -> None:
            numbers = iter(range(count))

            async def work() -> None:
                for number in numbers:
                    await a.apublish("t", number, timeout=20)

            await asyncio.gather(*(work() for _ in range(MANY)))

        threads = [threading.Thread(target=block)]
        threads += [threading.Thread(target=run_loop, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        asyncio.run(publish())
        for thread in threads:
            thread.join(30)
        assert not failed
        assert sorted(got) == list(range(count))
        assert not b._lead._listeners
        assert not a._lead._listeners


def test_a_loop_in_which_nobody_waits_any_more_is_not_held(pair: Pair) -> None:
    """Whether it was closed, nobody may ever tell."""
    _, b = pair

    async def body() -> None:
        task = asyncio.ensure_future(b.arecv())
        await until(lambda: sleepers(b))
        await end([task])

    asyncio.run(body())
    assert not b._lines


def test_tasks_that_wait_in_a_loop_that_is_closed_are_let_go_of(pair: Pair) -> None:
    """With their payloads, once something changes."""
    a, b = pair
    b.subscribe("full", depth=1)
    a.publish("full", "one")
    array = np.zeros(100_000)
    freed = weakref.ref(array)
    tasks = [a.apublish("full", array)]
    del array

    async def body() -> None:
        asyncio.ensure_future(tasks.pop())  # noqa: RUF006
        await until(lambda: sleepers(a))

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task "was destroyed"
    loop.run_until_complete(body())
    loop.close()
    del loop

    def is_free() -> bool:
        a.publish("t", "something")
        gc.collect()
        return freed() is None

    wait_until(is_free, "what nobody waits with any more to be freed")
    assert not a._lines


def test_a_task_that_is_freed_under_the_lock_ends_its_wait(pair: Pair) -> None:
    """By a collection that begins there: whom it waited for is told all the same."""
    a, b = pair
    b.subscribe("full", depth=1)
    a.publish("full", "one")
    driver = a._driver
    frames = a._codec.encode("two", "full")
    turns = driver.waits.turns("full", None)
    wait = turns.__enter__()
    assert not driver.publishing.publish("full", frames, False, False, 0, wait)
    (session,) = driver.mesh.sessions.values()
    with driver.lead.lock:
        driver.waits._tell_waiting([session], wait.told)
        with contextlib.suppress(GeneratorExit):
            turns.__exit__(GeneratorExit, GeneratorExit(), None)

    wait_until(
        lambda: not driver.look(lambda: driver.waits._waited_for[session]),
        "the keeper to say that nobody waits",
    )
    assert a.stats()["topics"]["full"]["blocked_seconds"] > 0
