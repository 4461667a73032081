"""What the asyncio twins of the waiting calls say and count."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import mq
from mq import lines
from mq.mesh import waiting
from mq.mesh.lead import _KEEPER
from mq.testing.waiting import wait_until

Pair = tuple[mq.MQ, mq.MQ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two members; the second has room for one message on t, which is there."""
    with mq.connect("inproc", group=f"asyncio-{os.getpid()}", name="a") as a:
        with mq.connect("inproc", group=f"asyncio-{os.getpid()}", name="b") as b:
            b.subscribe("t", depth=1)
            a.publish("t", "first")
            yield a, b


def test_apublish_says_how_long_it_waited_and_for_whom(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `publish` does: in its error, in the log, and in `stats`."""
    a, b = pair
    monkeypatch.setattr(waiting, "COMPLAIN_SECONDS", 0.05)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(mq.PublishTimeout) as caught:
        asyncio.run(a.apublish("t", "second", timeout=0.2))
    waited = time.monotonic() - begin
    assert caught.value.members == ("b",)
    said = float(str(caught.value).split("within ")[1].split(" s,")[0])
    counted = a.stats()["topics"]["t"]["blocked_seconds"]
    assert 0.199 < said <= counted + 0.001 <= waited + 0.002
    assert caplog.text.count("publish on 't' has waited 0 s: no credit: 'b' has") == 1
    assert b.recv(timeout=10).payload == "first"
    asyncio.run(a.apublish("t", "third", timeout=10))
    assert b.recv(timeout=10).payload == "third"


def test_a_member_hears_that_apublish_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it does no more, also when it was cancelled."""
    a, b = pair
    monkeypatch.setattr(waiting, "COMPLAIN_SECONDS", 0.0)
    a.subscribe("u", depth=1)
    b.publish("u", "first")

    async def body() -> None:
        call = asyncio.create_task(a.apublish("t", "second"))
        while not a._driver.waits._waited_for:
            await asyncio.sleep(0)
        with pytest.raises(mq.PublishTimeout, match="is itself waiting in publish"):
            b.publish("u", "second", timeout=0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(body())
    with pytest.raises(mq.PublishTimeout) as caught:
        b.publish("u", "third", timeout=0.1)
    assert "is itself waiting" not in str(caught.value)
    assert a.stats()["topics"]["t"]["blocked_seconds"] > 0.1


def test_aflush_says_how_long_it_waited(pair: Pair) -> None:
    """As `flush` does."""
    a, _ = pair
    unsettled = a._mesh.publisher.unsettled
    a._mesh.publisher.unsettled = list  # type: ignore[assignment,method-assign]
    with pytest.raises(mq.FlushTimeout, match=r"within 0\.05 s"):
        asyncio.run(a.aflush(timeout=0.05))
    a._mesh.publisher.unsettled = unsettled  # type: ignore[method-assign]
    asyncio.run(a.aflush(timeout=10))


def test_close_ends_what_waits_though_nothing_comes() -> None:
    """At once, as it does for the calls that block."""

    async def run(queue: mq.MQ) -> None:
        task = asyncio.create_task(queue.arecv())
        while not queue._lead._listeners:
            await asyncio.sleep(0)
        await asyncio.to_thread(queue.close, 0)
        with pytest.raises(mq.Closed):
            await asyncio.wait_for(task, 10)

    with mq.connect("inproc", group="alone") as queue:
        asyncio.run(run(queue))


def test_messages_that_never_end_leave_the_loop_to_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that need not wait would keep it, and could not be cancelled."""
    a, b = pair
    a.subscribe("own")
    for call, given in ((b.arecv, ()), (a.apublish, ("own", 1)), (b.aflush, ())):
        if call == b.arecv:
            # As if the next message were always there.
            monkeypatch.setattr(b, "recv", lambda timeout=None: None)

        async def run_on(call: Any = call, given: Any = given) -> None:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                await call(*given)

        async def body(run_on: Any = run_on) -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(run_on(), 0.05)

        asyncio.run(body())


def test_many_tasks_that_need_not_wait_share_one_turn_of_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each taking as long as one would keep the loop from others for ever longer."""
    _, b = pair
    tasks, calls = 20, [0]

    def recv(timeout: float | None = None) -> None:
        calls[0] += 1

    monkeypatch.setattr(b, "recv", recv)
    clock = itertools.count(time.monotonic(), lines.LOOP_SECONDS / 4)
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(lines, "time", fake)

    async def run_on() -> None:
        while True:
            await b.arecv()

    async def body() -> None:
        running = [asyncio.create_task(run_on()) for _ in range(tasks)]
        await asyncio.sleep(0)
        for _ in range(10):
            before = calls[0]
            await asyncio.sleep(0)
            assert calls[0] - before < 2 * tasks
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(body())


def test_the_end_of_a_block_needs_no_thread_of_asyncios() -> None:
    """The calls that it is to end may have taken them all."""

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            asyncio.get_running_loop().set_default_executor(executor)
            async with mq.connect("inproc", group="busy") as queue:
                reading = asyncio.create_task(asyncio.to_thread(queue.recv, 10))
                while queue._lead._leader in (None, _KEEPER):
                    await asyncio.sleep(0)
            with pytest.raises(mq.Closed):
                await reading

    asyncio.run(run())


def test_a_cancelled_end_of_a_block_cuts_no_other_close_short(pair: Pair) -> None:
    """It waits for one in another thread, which delivers as it was told."""
    a, b = pair
    closing = threading.Thread(target=a.close, args=(None,))

    async def run() -> None:
        async with a:
            closing.start()
            wait_until(a._close_lock.locked, "the other close")
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with b._lead.lock, pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    closing.join()
    assert min(a._driver._leave_by) > time.monotonic()


def test_a_block_closes_the_queue_without_a_loop_of_asyncios() -> None:
    """Another library runs it, which the calls for asyncio refuse."""
    queue = mq.connect("inproc", group="other-loop")

    async def run() -> None:
        async with queue:
            pass

    with pytest.raises(StopIteration):
        run().send(None)
    with pytest.raises(mq.Closed):
        queue.recv(0)


def test_who_listens_is_told_of_what_an_interrupted_recv_put_back(pair: Pair) -> None:
    """Nothing else would wake an `arecv`."""
    _, b = pair
    taken: list[Any] = [None]
    assert b._driver.taking.take(taken, 0)
    b._lead.stop()  # nobody polls, which may find something else to tell of
    told: list[bool] = []
    b._lead._listeners.add(lambda: bool(told.append(True)))
    b._driver.taking.stranded.append(taken)
    b._driver.taking.put_back()
    assert told
    assert b.recv(0).payload == "first"


@pytest.mark.parametrize("call", ["listen", "unlisten"])
def test_an_interrupt_as_arecv_begins_or_ends_leaves_nothing_behind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A handler that raises runs when the lock is released; the message is not lost."""
    a, b = pair
    real = getattr(b._lead, call)

    def interrupted(listener: Any) -> None:
        real(listener)
        raise KeyboardInterrupt

    monkeypatch.setattr(b._lead, call, interrupted)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(b.arecv(10))
    monkeypatch.undo()
    assert b.recv(0).payload == "first"
    a.publish("t", "second", timeout=10)  # a change, of which nobody is told
    assert b.recv(10).payload == "second"
    assert not b._lead._listeners


def test_a_loop_that_is_busy_is_told_once(pair: Pair) -> None:
    """However much changes meanwhile; and one that is closed is forgotten."""
    a, b = pair
    assert b.recv(0).payload == "first"
    told: list[Any] = []
    loop = asyncio.new_event_loop()
    soon = loop.call_soon_threadsafe

    def noted(*call: Any, **context: Any) -> Any:
        told.append(call)
        return soon(*call, **context)

    loop.call_soon_threadsafe = noted  # type: ignore[method-assign]
    waiting = loop.create_task(b.arecv())
    while not b._lead._listeners:
        loop.run_until_complete(asyncio.sleep(0))
    told.clear()
    for number in range(10):
        a.publish("t", number, timeout=10)
        assert b.recv(10).payload == number
    assert len(told) <= 1
    loop.run_until_complete(asyncio.sleep(0))
    assert not waiting.done()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    a.publish("t", "last", timeout=10)
    assert b.recv(10).payload == "last"
    assert not b._lead._listeners


def test_another_library_than_asyncio_is_told_what_to_do() -> None:
    """As trio, under which no loop of asyncio's runs in the thread."""
    with mq.connect("inproc", group=f"trio-{os.getpid()}") as queue:
        waiting = queue.arecv(timeout=10)

        def run() -> None:
            while True:  # the first turn may but let others run
                waiting.send(None)

        with pytest.raises(RuntimeError, match=r"under trio have trio\.to_thread"):
            run()
