"""What the application has let go of, or never had, keeps no memory in use."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from world import Member, World

import mq
from mq import buffers
from mq.buffers import REGION_BYTES, Pool
from mq.testing import STEP, wait_until

MIB = 1 << 20

Pair = tuple[mq.MQ, mq.MQ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A publisher with shared memory for one message, and who reads it in place."""
    group = f"letting-go-{os.getpid()}"
    with (
        mq.connect("shm", group=group, name="a", shm_bytes=MIB) as a,
        mq.connect("shm", group=group, name="b") as b,
    ):
        b.subscribe("t", zero_copy=True)
        yield a, b


def array_of(number: int, nbytes: int = MIB - 4096) -> np.ndarray[tuple[int], Any]:
    return np.full(nbytes, number, np.uint8)


def test_a_loop_over_the_queue_keeps_no_message(pair: Pair) -> None:
    """Neither in its body nor while it waits: its publisher might wait for that."""
    a, b = pair
    messages = iter(b)
    for number in range(3):
        a.publish("t", array_of(number), timeout=STEP)
        message = next(messages)
        view = weakref.ref(message.payload)
        assert message.payload[-1] == number
        del message
        assert view() is None


def test_an_asynchronous_loop_over_the_queue_keeps_none_either(pair: Pair) -> None:
    """It is a generator as well."""
    a, b = pair

    async def loop() -> None:
        messages = aiter(b)
        for number in range(3):
            await a.apublish("t", array_of(number), timeout=STEP)
            message = await anext(messages)
            view = weakref.ref(message.payload)
            assert message.payload[-1] == number
            del message
            assert view() is None

    asyncio.run(loop())


# -- errors that the application keeps ----------


@dataclass
class Refusing:
    """Can be sent; and what it is made of travels with it."""

    array: Any
    refuses: bool = False

    def __post_init__(self) -> None:
        if self.refuses:
            try:
                look_up(self.array)
            except LookupError:
                raise ValueError("it is refused")  # noqa: B904


def look_up(array: Any) -> None:
    raise LookupError(f"none of {len(array)}")


mq.add_safe_types(Refusing)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_an_error_that_is_kept_keeps_no_message(pair: Pair) -> None:
    """Nor do those that it came of, which still tell where they were raised."""
    a, b = pair
    errors = []
    for number in range(3):
        payload = Refusing(array_of(number))
        payload.refuses = True
        a.publish("t", payload, timeout=STEP)
        with pytest.raises(mq.CodecError, match="it is refused") as caught:
            b.recv(timeout=STEP)
        errors.append(caught.value)
    assert all("in look_up" in text_of(error) for error in errors)


def test_what_the_application_was_handling_is_left_alone(pair: Pair) -> None:
    """Its frames may be those of a generator that goes on."""
    a, b = pair

    def rows() -> Iterator[ValueError]:
        for number in range(3):
            try:
                raise ValueError(number)
            except ValueError as error:  # noqa: PERF203
                yield error

    seen = []
    for row in rows():
        payload = Refusing(array_of(1))
        payload.refuses = True
        a.publish("t", payload, timeout=STEP)
        try:
            raise row
        except ValueError:
            with pytest.raises(mq.CodecError, match="it is refused"):
                b.recv(timeout=STEP)
        seen.append(row.args[0])
    assert seen == [0, 1, 2]


def test_nor_does_one_that_found_no_memory_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the message is given up, or has been received after all."""
    a, b = pair
    b.unsubscribe("t")
    b.subscribe("t", history=mq.keep_last(1))
    errors = []
    take = b._pool.take

    def take_third(nbytes: int) -> memoryview:
        if len(errors) < 3:
            raise MemoryError
        return take(nbytes)

    monkeypatch.setattr(b._pool, "take", take_third)
    for tries in (2, 1):
        a.publish("t", array_of(tries), timeout=STEP)
        for _ in range(tries):
            with pytest.raises(MemoryError) as caught:
                b.recv(timeout=STEP)
            errors.append(caught.value)
        if tries == 1:
            assert (b.recv(timeout=STEP).payload == 1).all()
        wait_until(lambda: not lent(a), "b to let go of it")
    assert all("in take_third" in text_of(error) for error in errors)


# -- forked children ----------

forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@contextlib.contextmanager
def forked(act: Callable[[], object]) -> Iterator[None]:
    """A child, which acts when the block ends, without an error."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(writer)
            os.read(reader, 1)
            act()
            status = 0
        finally:
            os._exit(status)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        status = os.waitpid(child, 0)[1]
    assert status == 0


@forks
def test_a_child_that_leaves_a_loan_writes_nothing_for_its_parent(pair: Pair) -> None:
    """Whose memory has long been used for another message, perhaps."""
    a, b = pair
    loan = a.loan("t", (MIB - 4096,), np.uint8, timeout=STEP)
    loan.__enter__()

    def leave() -> None:
        with pytest.raises(mq.ForkedProcess):
            loan.__exit__(None, None, None)

    with forked(leave):
        loan.__exit__(None, None, None)
        b.recv(timeout=STEP)
        a.publish("t", array_of(7), timeout=STEP)
        view = b.recv(timeout=STEP).payload
    assert (view == 7).all()


@forks
def test_a_child_forked_within_publish_copies_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal may fork, and return in both."""
    a, b = pair
    copies: list[memoryview] = []
    children: list[int] = []

    def fork_and_copy(piece: memoryview, target: memoryview, whole: int) -> None:
        copies.append(target)
        buffers.copy(piece, target, whole)
        if len(piece) >= MIB // 8 and not children:
            copies.clear()
            children.append(os.fork())

    monkeypatch.setattr("mq.mesh.publishing.copy", fork_and_copy)
    payload = [array_of(number, MIB // 4) for number in (1, 2)]
    try:
        a.publish("t", payload, timeout=STEP)
    except mq.ForkedProcess:
        os._exit(len(copies))
    finally:
        if children == [0]:
            os._exit(-1)
    assert copies
    assert os.waitpid(children[0], 0)[1] == 0
    assert [int(view[-1]) for view in b.recv(timeout=STEP).payload] == [1, 2]


def mapped() -> list[str]:
    """The memory of messages that this process has mapped."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:mq" in line]


def lent(queue: mq.MQ) -> int:
    """Of how many messages peers have its memory."""
    return sum(len(session.lent) for session in queue._mesh.sessions.values())


def is_busy(*queues: mq.MQ) -> bool:
    """Whether a thread that a forked child lacks may have some of their memory."""
    return any(queue._lead.lock.locked() for queue in queues)


@forks
def test_a_child_keeps_only_the_messages_that_the_application_has() -> None:
    """Its parent's limit is one of what is there, however long the child lives."""
    group = f"letting-go-{os.getpid()}"
    gc.collect()  # what other tests have left in cycles
    others = mapped()
    with (
        mq.connect("shm", group=group, name="a", shm_bytes=32 * MIB) as a,
        mq.connect("shm", group=group, name="b") as b,
    ):
        b.subscribe("viewed", zero_copy=True)
        b.subscribe("copied")
        a.subscribe("never published")
        b.subscribe("newest", history=mq.keep_last(2), zero_copy=True)
        a.publish("retained", array_of(0), retain=True)
        for topic in ("viewed", "copied", "newest", "viewed"):
            a.publish(topic, array_of(1), timeout=STEP)
        a.flush(STEP)
        wait_until(lambda: lent(a) == 3 and not is_busy(a, b), "b to have its copy")
        held = [b.recv(timeout=STEP).payload]
        gc.disable()

        def let_go() -> None:
            assert (held[0] == 1).all()
            assert len(mapped()) == len(others) + 1
            held.clear()
            assert mapped() == others

        try:
            with forked(let_go):
                b.subscribe("retained")
                rest = [b.recv(timeout=STEP) for _ in range(4)]
                found = {message.topic: int(message.payload[-1]) for message in rest}
        finally:
            gc.enable()
        assert found == {"viewed": 1, "copied": 1, "newest": 1, "retained": 0}
        assert a.stats()["topics"]["viewed"]["undelivered"] == 0


# -- messages that never come to their end ----------


@pytest.mark.parametrize("end", ["unsubscribe", "kill", "close"])
def test_half_a_message_is_let_go_of_at_once(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """And not when the garbage collector comes by, or all before it is read."""
    pool = Pool(0)
    monkeypatch.setattr(
        Member, "_take", lambda self, n: (pool if self.name == "b" else Pool(0)).take(n)
    )
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    (conn,) = world.net.between(a.link, b.link)
    assert a.publish("t", b"unread")
    assert a.publish("t", bytes(REGION_BYTES))
    while not pool.stats().in_use:
        world.net.deliver(conn)
        b.mesh.poll()
    gc.disable()
    try:
        if end == "unsubscribe":
            b.unsubscribe("t")
        elif end == "kill":
            world.partition("a", "b")  # what it has sent does not arrive
            world.kill("a")
            world.advance(1.0)
            assert not b.mesh.sessions
        else:
            b.mesh.close()
        assert not pool.stats().in_use
    finally:
        gc.enable()
