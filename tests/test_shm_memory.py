"""Zero-copy over `shm` between processes: views, full memory, loans, and their ends."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mq
from mq import registry, speed
from mq.testing import STEP, Group, Member, wait_until

MIB = 1 << 20
KIB = 1 << 10


@contextlib.contextmanager
def group_of(backend: str = "shm", **options: Any) -> Iterator[Group]:
    """Members, closed and checked for leaks at the end."""
    group = Group(backend, registry.capabilities(backend), options)
    try:
        yield group
        group.close()
    finally:
        group.end()


@pytest.fixture
def group() -> Iterator[Group]:
    with group_of() as made:
        yield made


@pytest.fixture
def small() -> Iterator[Group]:
    """Members with memory for four messages of a megabyte."""
    with group_of(shm_bytes=4 * MIB) as made:
        yield made


# -- what members do: functions that run there ----------

HELD: list[Any] = []
"""Payloads that a member keeps between calls."""


def replace_constant(module: str, name: str, value: float) -> None:
    """Change a constant of this process, which must be there and in use."""
    holder = importlib.import_module(module)
    assert isinstance(getattr(holder, name), float), (module, name)
    setattr(holder, name, value)


def publish(
    queue: mq.MQ, numbers: list[int], nbytes: int = MIB, **options: Any
) -> None:
    """Arrays of bytes that all are their number."""
    options = {"timeout": STEP, **options}
    topic = options.pop("topic", "t")
    for number in numbers:
        # Header and all fit into a block of `nbytes`.
        queue.publish(topic, np.full(nbytes - 256, number, np.uint8), **options)


def publish_tensors(queue: mq.MQ, numbers: list[int], nbytes: int = MIB) -> None:
    import torch

    for number in numbers:
        queue.publish("t", torch.full((nbytes,), number, dtype=torch.uint8))


def hold(queue: mq.MQ, count: int = 1) -> list[int]:
    """Receive and keep; the values of what is held."""
    HELD.extend(queue.recv(timeout=STEP).payload for _ in range(count))
    return look(queue)


def look(queue: mq.MQ) -> list[int]:
    """The values of what is held; -1 where one is not the same all over."""
    return [int(v[0]) if bool((v == v[0]).all()) else -1 for v in HELD]


def drop(queue: mq.MQ, count: int = 1) -> None:
    """Let go of what has been held for longest."""
    del HELD[:count]


def receive(queue: mq.MQ, count: int) -> list[int]:
    """Values of messages that are not kept."""
    found = []
    for _ in range(count):
        payload = queue.recv(timeout=STEP).payload
        same = bool((payload == payload[0]).all())
        found.append(int(payload[0]) if same else -1)
    return found


def shared(queue: mq.MQ) -> dict[str, int]:
    (counters,) = queue.stats()["shared"]
    return dict(counters)


def lent(queue: mq.MQ, peer: str) -> int:
    return int(queue.stats()["peers"][peer]["lent_bytes"])


def in_use(member: Member) -> int:
    return int(member.run(shared)["in_use_bytes"])


def until_unused(member: Member) -> None:
    """All memory of a member came back."""
    wait_until(lambda: not in_use(member), f"memory of {member.name} to come back")


# -- views ----------


def _try_to_write(queue: mq.MQ) -> list[str]:
    payload = queue.recv(timeout=STEP).payload
    arrays = (payload["a"], payload["nested"][0], payload["a"][10:].view(np.int8))
    return [_write(array) for array in arrays]


def _write(array: Any) -> str:
    try:
        array[0] = 1
    except ValueError as error:
        return str(error)
    return "written"


def _publish_nested(queue: mq.MQ) -> None:
    arrays = {"a": np.zeros(MIB, np.uint8), "nested": [np.zeros(100_000)]}
    queue.publish("t", arrays, timeout=STEP)


def test_arrays_of_a_view_are_read_only(group: Group) -> None:
    """Wherever they are in the payload, and whatever is made of them."""
    a, b = group.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(_publish_nested)
    said = b.run(_try_to_write)
    assert all("read-only" in text for text in said)


def _write_and_drop(queue: mq.MQ, rounds: int) -> list[int]:
    """Write to each tensor; what it held before."""
    seen = []
    for _ in range(rounds):
        tensor = queue.recv(timeout=STEP).payload
        seen.append(int(tensor[0]) if bool((tensor == tensor[0]).all()) else -1)
        tensor[::3] = 99
        tensor[-1] = 98
        assert int(tensor[3]) == 99
    return seen


def test_writes_to_a_tensor_reach_nobody(small: Group) -> None:
    """Neither other subscribers nor later messages in the same memory."""
    a, b, c = small.members("a", "b", "c")
    for member in (b, c):
        member.subscribe("t", zero_copy=True, depth=2)
    numbers = list(range(1, 21))
    publishing = a.begin(publish_tensors, numbers, MIB - 4096)
    writing = b.begin(_write_and_drop, len(numbers))
    assert c.run(receive, len(numbers)) == numbers
    assert writing.result() == numbers
    publishing.result()
    until_unused(a)
    assert a.run(shared)["mapped_bytes"] <= 4 * MIB  # it was the same memory


def test_views_outlive_their_publisher_and_their_queue(group: Group) -> None:
    """SIGKILL or close of the publisher, unsubscribe and close of the receiver."""
    a, k, b = group.members("a", "k", "b")
    b.subscribe("t", zero_copy=True)
    k.run(publish, [1])
    assert b.run(hold) == [1]
    a.run(publish, [2, 3])
    assert b.run(hold, 2) == [1, 2, 3]
    k.kill()
    assert b.run(look) == [1, 2, 3]
    again = group.unconnected("k")
    group.connecting(again).result()
    again.run(publish, [4, 5, 6])
    assert b.run(hold, 3) == [1, 2, 3, 4, 5, 6]
    a.close()
    again.call("unsubscribe", "nothing")
    b.call("unsubscribe", "t")
    again.run(publish, list(range(50, 90)))
    assert b.run(look) == [1, 2, 3, 4, 5, 6]
    b.call("close")
    again.run(publish, list(range(90, 120)))
    assert b.run(look) == [1, 2, 3, 4, 5, 6]
    assert len(b.run(_mapped)) > 0
    b.run(drop, 6)
    assert b.run(_mapped) == []


def _mapped(queue: mq.MQ) -> list[str]:
    """Other processes' memory that this one has mapped."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:mq" in line]


# -- full memory ----------


def _publish_and_catch(queue: mq.MQ, numbers: list[int], timeout: float) -> str:
    try:
        publish(queue, numbers, timeout=timeout)
    except mq.PublishTimeout as error:
        return f"{error} {list(error.members)}"
    return ""


def _start_listening(queue: mq.MQ) -> None:
    handler = logging.Handler()
    said = HELD
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mq.mesh").addHandler(handler)


def _complain_soon(queue: mq.MQ) -> None:
    replace_constant("mq.mesh.waiting", "COMPLAIN_SECONDS", 0.2)
    _start_listening(queue)


def _said(queue: mq.MQ) -> list[str]:
    return list(HELD)


def test_a_hoarder_meets_backpressure_that_says_who_holds_how_much(
    small: Group,
) -> None:
    """In PublishTimeout, in the log, in `stats`; it goes on when a view is dropped."""
    a, b = small.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(publish, [0, 1, 2, 3])
    assert b.run(hold, 4) == [0, 1, 2, 3]
    text = a.run(_publish_and_catch, [4], 0.1)
    for word in (
        "'b' holds 41",
        "shared memory",
        "zero_copy",
        "shm_bytes",
        "nobody got",
        "['b']",
    ):
        assert word in text, text
    counters = a.run(shared)
    assert counters["in_use_bytes"] == counters["limit_bytes"] == 4 * MIB
    assert counters["waits"] == 1
    assert a.run(lent, "b") > 3 * MIB
    a.run(_complain_soon)
    waiting = a.begin(publish, [4])
    wait_until(lambda: a.run(_said), "the log to say who is waited for")
    (record,) = a.run(_said)
    assert "'b' holds" in record
    assert "publish on 't' has waited" in record
    assert not waiting.done(0.05)
    b.run(drop)
    waiting.result()
    assert b.run(hold) == [1, 2, 3, 4]
    b.run(drop, 4)
    until_unused(a)


def _tick_slowly(worker: Any) -> None:
    """Make what is only seen at a tick take for ever."""
    replace_constant("mq.mesh.liveness", "MAX_TICK", 60.0)


@pytest.fixture
def hoarded() -> Iterator[tuple[Member, Member]]:
    """A publisher without memory: the other holds its two views; neither ticks."""
    with group_of(shm_bytes=2 * MIB, peer_timeout=None) as group:
        a, b = group.unconnected("a"), group.unconnected("b")
        for member in (a, b):
            member.ask(_tick_slowly).result()
            group.connecting(member).result()
        b.subscribe("t", zero_copy=True)
        a.run(publish, [0, 1])
        assert b.run(hold, 2) == [0, 1]
        yield a, b


def test_a_waiting_publisher_goes_on_at_once_when_a_view_is_dropped(
    hoarded: tuple[Member, Member],
) -> None:
    """In any thread of the receiver, without any call to the queue: no tick helps."""
    a, b = hoarded
    for number in (2, 3, 4):
        waiting = a.begin(publish, [number])
        assert not waiting.done(0.2)
        b.run(drop)
        waiting.result(timeout=5.0)
        assert b.run(hold) == [number - 1, number]


def test_several_waiting_publishers_all_go_on(hoarded: tuple[Member, Member]) -> None:
    """One that goes on leaves the others' wish to be told in force."""
    a, b = hoarded
    waiting = [a.begin(publish, [number]) for number in (2, 3)]
    assert not any(future.done(0.2) for future in waiting)
    b.run(drop)
    wait_until(lambda: any(f.done() for f in waiting), "the first to go on")
    assert sum(future.done(0.1) for future in waiting) == 1
    b.run(drop)
    for future in waiting:
        future.result(timeout=5.0)


def test_who_keeps_the_last_makes_nobody_wait(small: Group) -> None:
    """Whatever views it hoards: messages then travel through the socket."""
    a, b = small.members("a", "b")
    b.subscribe("t", zero_copy=True, history=mq.keep_last(1))
    for number in range(8):
        a.run(publish, [number], timeout=5.0)
        assert b.run(hold) == list(range(number + 1))
    a.run(publish, list(range(8, 30)), timeout=5.0)
    assert b.run(look) == list(range(8))


def test_a_hoarder_of_one_topic_delays_no_other_topic(small: Group) -> None:
    """The memory is full, so the other topic's messages go through the socket."""
    a, b, c = small.members("a", "b", "c")
    b.subscribe("t", zero_copy=True)
    for member in (b, c):
        member.subscribe("u", zero_copy=True)
    a.run(publish, [0, 1, 2, 3])
    b.run(hold, 4)
    assert a.run(_publish_and_catch, [4], 0.1)
    a.run(publish, list(range(10, 20)), topic="u", timeout=5.0)
    assert c.run(receive, 10) == list(range(10, 20))
    assert b.run(receive, 10) == list(range(10, 20))
    assert b.run(look) == [0, 1, 2, 3]


@pytest.mark.parametrize("shm_bytes", [0, 100_000, MIB])
def test_what_does_not_fit_travels_through_the_socket(shm_bytes: int) -> None:
    """Also where there is no shared memory at all; loans too."""
    with group_of(shm_bytes=shm_bytes) as group:
        a, b = group.members("a", "b")
        b.subscribe("t", zero_copy=True, depth=2)
        numbers = list(range(8))
        publishing = a.begin(publish, numbers, 3 * MIB)
        assert b.run(receive, 8) == numbers
        publishing.result()
        assert a.run(shared)["in_use_bytes"] == 0
        a.run(_loan_bytes, 3 * MIB, 7)
        assert b.run(receive, 1) == [7]


# -- who shares a message ----------


def test_one_write_serves_subscribers_who_copy_and_who_do_not(group: Group) -> None:
    """The message is in memory once while all of them have it."""
    a, b, c, d = group.members("a", "b", "c", "d")
    b.subscribe("t", zero_copy=True)
    c.subscribe("t")
    d.subscribe("t", zero_copy=True, history=mq.keep_last(2))
    a.run(publish, [7])
    for member in (b, c, d):
        assert member.run(hold) == [7]
    assert MIB <= in_use(a) < 2 * MIB
    for member in (b, d):
        assert a.run(lent, member.name) > 0
    wait_until(lambda: a.run(lent, "c") == 0, "the copying one to give it back")
    for member in (b, c, d):
        member.run(drop)
    until_unused(a)


def test_a_later_subscriber_reads_the_retained_message_in_place(group: Group) -> None:
    """It stays in shared memory until another one replaces it."""
    a = group.member("a")
    a.run(publish, [1, 2], retain=True)
    assert MIB <= in_use(a) < 2 * MIB
    for name in ("b", "c"):
        late = group.member(name)
        late.subscribe("t", zero_copy=True)
        assert late.run(hold) == [2]
        assert a.run(lent, name) > 0
    a.run(publish, [3], retain=True)
    a.run(_clear)
    for name in ("b", "c"):
        member = next(m for m in group._members if m.name == name)
        assert member.run(hold) == [2, 3]
        member.run(drop, 2)
    until_unused(a)


def _clear(queue: mq.MQ) -> None:
    queue.publish("t", mq.CLEAR, retain=True)


def test_what_nobody_will_read_is_given_back(small: Group) -> None:
    """Unread messages at `unsubscribe`, replaced ones of keep-last, dead readers'."""
    a, b, c = small.members("a", "b", "c")
    b.subscribe("t", zero_copy=True)
    a.run(publish, [0, 1, 2, 3])
    assert a.run(_publish_and_catch, [4], 0.05)
    b.call("unsubscribe", "t")
    until_unused(a)
    b.subscribe("t", history=mq.keep_last(2))
    a.run(publish, list(range(30)))
    a.call("flush", timeout=STEP)
    wait_until(lambda: in_use(a) <= 3 * MIB, "replaced messages to come back")
    assert b.run(receive, 2) == [28, 29]
    until_unused(a)
    c.subscribe("t", zero_copy=True)
    a.run(publish, [0, 1, 2, 3])
    c.run(hold, 4)
    waiting = a.begin(publish, [4])
    assert not waiting.done(0.1)
    c.kill()
    waiting.result()
    a.call("flush", timeout=STEP)
    b.run(receive, 2)
    until_unused(a)


def test_a_subscriber_given_up_while_stalled_sees_its_view_unchanged() -> None:
    """Its memory is never used again, although the publisher goes on to publish."""
    with group_of(shm_bytes=4 * MIB, peer_timeout=3.0) as group:
        a, b, c = group.members("a", "b", "c")
        b.subscribe("t", zero_copy=True)
        c.subscribe("u", zero_copy=True)
        a.run(publish, [0, 1, 2])
        assert b.run(hold, 3) == [0, 1, 2]
        b.stop()
        wait_until(lambda: a.call("subscribers", "t") == [], "b to be given up")
        for _ in range(5):
            a.run(publish, [50, 51, 52], topic="u")
            assert c.run(receive, 3) == [50, 51, 52]
        b.cont()
        assert b.run(look) == [0, 1, 2]
        a.call("wait_for_subscribers", "t", 1, timeout=STEP)
        a.run(publish, [60, 61, 62], topic="u")
        assert b.run(look) == [0, 1, 2]
        b.run(drop, 3)
        a.run(publish, [9])
        assert b.run(_hold_despite_losses) == [9]


def _hold_despite_losses(queue: mq.MQ) -> list[int]:
    with contextlib.suppress(mq.MessagesLost):  # which is told once
        hold(queue)
    return look(queue) or hold(queue)


def _be_quick_to_give_back(worker: Any) -> None:
    replace_constant("mq.join", "IDLE_MEMORY_SECONDS", 0.2)
    replace_constant("mq.join", "MOST_UPKEEP_SECONDS", 0.5)


def test_segments_that_nobody_uses_are_given_back_on_both_sides() -> None:
    """The owner closes them and the reader unmaps them."""
    with group_of() as group:
        a, b = group.unconnected("a"), group.unconnected("b")
        for member in (a, b):
            member.ask(_be_quick_to_give_back).result()
            group.connecting(member).result()
        b.subscribe("t", zero_copy=True)
        a.run(publish, [1, 2])
        a.run(publish, [3], 5 * MIB)
        assert b.run(hold, 3) == [1, 2, 3]
        assert len(b.run(_mapped)) == a.run(shared)["segments"] == 2
        b.run(drop, 2)
        assert b.run(look) == [3]
        wait_until(lambda: a.run(shared)["segments"] == 1, "one to be given back")
        wait_until(lambda: len(b.run(_mapped)) == 1, "one to be unmapped")
        assert b.run(look) == [3]
        b.run(drop)
        wait_until(lambda: a.run(shared)["mapped_bytes"] == 0, "all to be given back")
        wait_until(lambda: b.run(_mapped) == [], "all to be unmapped")
        assert not any("memfd" in fd for fd in a.fds() + b.fds())


# -- loans ----------


def _loan_bytes(queue: mq.MQ, nbytes: int, value: int) -> None:
    with queue.loan("t", (nbytes,), np.uint8, timeout=STEP) as array:
        array[:] = value


def _loan_and_raise(queue: mq.MQ) -> None:
    with (
        contextlib.suppress(ZeroDivisionError),
        queue.loan("t", (MIB,), np.uint8, timeout=STEP) as array,
    ):
        array[:] = 1
        raise ZeroDivisionError


def test_a_loan_is_published_from_where_it_was_filled(group: Group) -> None:
    """One block for the loan and the message; none after a block that raised."""
    a, b = group.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(_loan_and_raise)
    until_unused(a)
    a.run(_loan_bytes, MIB, 5)
    assert b.run(hold) == [5]
    assert MIB <= in_use(a) < 2 * MIB
    b.run(drop)
    until_unused(a)
    a.run(_loan_and_raise)
    a.run(_loan_bytes, 100, 6)  # too small to be lent
    assert b.run(hold) == [6]
    assert a.run(shared)["in_use_bytes"] == 0


def _loan_timeout(queue: mq.MQ) -> str:
    try:
        with queue.loan("t", (MIB - 2048,), np.uint8, timeout=0.1):
            return "there was memory"
    except mq.PublishTimeout as error:
        return f"{error} {list(error.members)}"


def test_a_loan_waits_for_memory_as_long_as_it_may(small: Group) -> None:
    """PublishTimeout says who holds it; it is there again when they let go."""
    a, b = small.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(publish, [0, 1, 2, 3])
    b.run(hold, 4)
    text = a.run(_loan_timeout)
    assert "'b' holds" in text
    assert "['b']" in text
    waiting = a.begin(_loan_bytes, MIB - 2048, 9)
    assert not waiting.done(0.1)
    b.run(drop)
    waiting.result()
    assert b.run(hold) == [1, 2, 3, 9]


def _loan_dtypes(queue: mq.MQ) -> int:
    import torch

    from mq.tensors import _BY_DTYPE

    kinds: list[Any] = [*_BY_DTYPE]
    kinds += [
        np.dtype(code) for code in "? b h i l q B H I L Q e f d g F D S3 U2".split()
    ]
    kinds += [np.dtype("<M8[s]"), np.dtype(">i4"), np.dtype([("a", "i4"), ("b", "f8")])]
    for kind in kinds:
        shape = (70_000 // kind.itemsize + 1, 2)
        with queue.loan("t", shape, kind, timeout=STEP) as loaned:
            if isinstance(loaned, torch.Tensor):
                loaned.view(torch.uint8).fill_(1)
            else:
                loaned.view(np.uint8)[:] = 1
        del loaned
    return len(kinds)


def _receive_dtypes(queue: mq.MQ, count: int) -> tuple[set[str], list[str]]:
    import torch

    kinds, wrong = set(), []
    for _ in range(count):
        payload = queue.recv(timeout=STEP).payload
        kinds.add(f"{type(payload).__name__} {payload.dtype}")
        if isinstance(payload, torch.Tensor):
            right = bool((payload.view(torch.uint8) == 1).all())
        else:
            right = bool((np.frombuffer(payload.tobytes(), np.uint8) == 1).all())
        if not right:
            wrong.append(str(payload.dtype))
    return kinds, wrong


def test_every_dtype_can_be_loaned(group: Group) -> None:
    """Those of torch and of NumPy; what was filled is what arrives."""
    a, b = group.members("a", "b")
    b.subscribe("t", zero_copy=True)
    count = a.run(_loan_dtypes)
    assert count > 30
    kinds, wrong = b.run(_receive_dtypes, count)
    assert not wrong
    assert len(kinds) > 30
    until_unused(a)


# -- forks and ends ----------


def _fork_and_read(queue: mq.MQ) -> int:
    """A worker, as of a DataLoader, reads a view after its parent has dropped it."""
    import warnings

    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(int(HELD[0].sum()) % 251)
    os.close(reader)
    HELD.clear()
    HELD.append(writer)
    return child


def _let_child_read(queue: mq.MQ, child: int) -> int:
    os.close(HELD.pop())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_worker_may_read_a_view(small: Group) -> None:
    """Its memory is not used for later messages before the worker has ended."""
    a, b = small.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(publish, [3])
    b.run(hold)
    child = b.run(_fork_and_read)
    publishing = a.begin(publish, list(range(10, 22)))
    assert b.run(receive, 12) == list(range(10, 22))
    publishing.result()
    assert b.run(_let_child_read, child) == (MIB - 256) * 3 % 251
    until_unused(a)


def _publish_in_child(queue: mq.MQ) -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            publish(queue, [1], timeout=None)
        except mq.ForkedProcess:
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + STEP
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return 1
        threading.Event().wait(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 0


def test_a_large_publish_in_a_forked_child_is_refused(group: Group) -> None:
    """At once, also where the parent would have had to wait for credit."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=1)
    a.run(publish, [1])
    assert a.run(_publish_in_child)
    assert b.run(receive, 1) == [1]
    a.run(publish, [2])
    assert b.run(receive, 1) == [2]


def _loan_through_close(queue: mq.MQ) -> str:
    try:
        with queue.loan("t", (MIB,), np.uint8, timeout=STEP) as array:
            queue.close()
            array[:] = 1
            HELD.append(array)
    except mq.Closed as error:
        return str(error)
    return "published"


def _publish_while_closing(queue: mq.MQ) -> str:
    payload = np.zeros(MIB, np.uint8)
    try:
        while True:
            queue.publish("t", payload, timeout=STEP)
    except mq.Closed:
        return "closed"


def _own_segments(queue: mq.MQ) -> list[str]:
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith("/memfd:mq")] + _mapped(queue)


def test_close_leaves_no_segment_whatever_runs_beside_it(group: Group) -> None:
    """A loan that is still being filled, and a publish in another thread."""
    a, b, c = group.members("a", "b", "c")
    c.subscribe("t", history=mq.keep_last(1))
    assert "is closed" in a.run(_loan_through_close)
    assert len(a.run(_own_segments)) == 1  # the loan that is still referred to
    a.run(drop)
    assert a.run(_own_segments) == []
    publishing = b.begin(_publish_while_closing)
    c.recv()
    b.start("close", linger=0.5).result()
    assert publishing.result() == "closed"
    assert b.run(_own_segments) == []


# -- messages that are followed ----------


def _stop_in_the_middle(queue: mq.MQ, go_on: str) -> None:
    """What is written behind its announcement stops half-way until a file is there."""
    whole = speed.fill

    def half(
        pieces: list[tuple[int, memoryview]], target: memoryview, counter: memoryview
    ) -> None:
        middle = len(target) // 2
        for start, piece in pieces:
            stop = min(middle, start + len(piece))
            target[start:stop] = piece[: stop - start]
        counter[:] = middle.to_bytes(8, sys.byteorder)
        while not os.path.exists(go_on):
            time.sleep(0.01)  # nothing else in this process can tell
        counter[:] = bytes(8)
        whole(pieces, target, counter)

    speed.fill = half  # type: ignore[misc]


def _receive_in_vain(queue: mq.MQ) -> bool:
    try:
        queue.recv(timeout=0.3)
    except TimeoutError:
        return True
    return False


@pytest.fixture
def halved(group: Group, tmp_path: Path) -> tuple[Member, Member, Path]:
    """A publisher in the middle of a message, its subscriber, and what ends that."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("nobody follows on one processor")
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(publish, [1])
    assert b.run(receive, 1) == [1]
    go_on = tmp_path / "go_on"
    a.run(_stop_in_the_middle, str(go_on))
    a.begin(publish, [2, 3])
    assert b.run(_receive_in_vain)
    return a, b, go_on


def test_a_publisher_stopped_in_the_middle_of_a_message_goes_on(
    halved: tuple[Member, Member, Path],
) -> None:
    """Stopped for less than `peer_timeout`, it writes the rest, and it arrives."""
    a, b, go_on = halved
    a.stop()
    assert b.run(_receive_in_vain)
    go_on.touch()
    a.cont()
    assert b.run(receive, 2) == [2, 3]
    until_unused(a)


def test_a_publisher_killed_in_the_middle_of_a_message(
    halved: tuple[Member, Member, Path], group: Group
) -> None:
    """That message never arrived, nobody hangs, and others are heard."""
    a, b, _ = halved
    a.kill()
    c = group.member("c")
    c.call("wait_for_subscribers", "t", 1, timeout=STEP)
    c.run(publish, [7])
    assert b.run(receive, 1) == [7]
    assert b.run(_receive_in_vain)


def _ask(queue: mq.MQ, rounds: int, nbytes: int) -> int:
    """Publish and wait for the answer; how much memory that took."""
    for number in range(rounds):
        publish(queue, [number], nbytes)
        assert queue.recv(timeout=STEP).payload == number
    return shared(queue)["mapped_bytes"]


def _wait_for_memory(queue: mq.MQ) -> None:
    replace_constant("mq.mesh.memory", "NEW_BYTES_PER_SECOND", 1e6)


def _answer(queue: mq.MQ, rounds: int) -> None:
    for _ in range(rounds):
        number = int(queue.recv(timeout=STEP).payload[0])
        queue.publish("answers", number, timeout=STEP)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_memory_on_its_way_back_is_waited_for(group: Group, zero_copy: bool) -> None:
    """New memory takes longer: who waits for each answer needs one block."""
    a, b = group.members("a", "b")
    a.subscribe("answers")
    b.subscribe("t", zero_copy=zero_copy)
    a.run(_wait_for_memory)
    answering = b.begin(_answer, 20)
    assert a.run(_ask, 20, 8 * MIB) < 16 * MIB
    answering.result()


def test_memory_that_nobody_gives_back_is_not_waited_for(group: Group) -> None:
    """At least not for longer than new memory takes."""
    a, b = group.members("a", "b")
    b.subscribe("t", zero_copy=True)
    a.run(publish, [0, 1, 2], 8 * MIB)
    assert b.run(hold, 3) == [0, 1, 2]
