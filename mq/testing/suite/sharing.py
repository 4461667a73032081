"""Zero copy and loans: nobody sees another's writes, no view changes."""

from __future__ import annotations

from typing import Any

import numpy as np

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP

MIB = 1 << 20
_held: list[Any] = []


def _publish_filled(queue: mq.MQ, first: int, stop: int, nbytes: int) -> None:
    memory = np.empty(nbytes, np.uint8)
    for number in range(first, stop):
        memory[:] = number
        queue.publish("t", memory, timeout=STEP)


def _hold(queue: mq.MQ, count: int) -> list[int]:
    """Receive and keep; what every kept one holds."""
    _held.extend(queue.recv(timeout=STEP).payload for _ in range(count))
    return _look(queue)


def _look(queue: mq.MQ) -> list[int]:
    return [int(a[0]) if bool((a == a[0]).all()) else -1 for a in _held]


def _drop(queue: mq.MQ) -> None:
    _held.clear()


def _receive_filled(queue: mq.MQ, count: int) -> list[int]:
    found = []
    for _ in range(count):
        array = queue.recv(timeout=STEP).payload
        found.append(int(array[0]) if bool((array == array[0]).all()) else -1)
    return found


def _hold_views(queue: mq.MQ, count: int) -> list[int]:
    held = [queue.recv(timeout=STEP).payload for _ in range(count)]
    for array in held:
        if array.flags.writeable:  # then it is a private copy
            array += 0
        else:
            try:
                array[0] = 1
            except ValueError:
                continue
            raise AssertionError("a read-only view could be written to")
    return [int(array.sum(dtype=np.int64)) for array in held]


@case("edge: Zero copy")
def zero_copy_views_keep_their_content_while_they_live(group: Group) -> None:
    """Arrays are read-only views or private; credit returns while they are held."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t", zero_copy=True, depth=2)
    c.subscribe("t", depth=2)
    publishing = a.begin(_publish_filled, 0, 8, 300_000)
    readers = [m.begin(_hold_views, 8) for m in (b, c)]
    for reader in readers:
        assert reader.result() == [number * 300_000 for number in range(8)]
    publishing.result()


def _loan(queue: mq.MQ) -> None:
    import torch

    with queue.loan("t", (300, 500), np.float32, timeout=STEP) as array:
        array[:] = 2
    with queue.loan("t", (0,), np.int64, timeout=STEP):
        pass
    try:
        with queue.loan("t", (10,), torch.float32, timeout=STEP) as tensor:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with queue.loan("t", (2, 3), torch.bfloat16, retain=True, timeout=STEP) as tensor:
        tensor.fill_(1.5)


def _receive_loans(queue: mq.MQ) -> list[Any]:
    import torch

    array = queue.recv(timeout=STEP).payload
    empty = queue.recv(timeout=STEP).payload
    tensor = queue.recv(timeout=STEP).payload
    assert np.asarray(array).dtype == np.float32, type(array)
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    total = float(np.asarray(array).sum())
    return [tuple(array.shape), total, tuple(empty.shape), float(tensor.sum())]


@case("edge: loan")
def loan_is_published_when_its_block_ends(group: Group) -> None:
    """Arrays and tensors by dtype; an exception in the block publishes nothing."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    receiving = b.begin(_receive_loans)
    a.run(_loan)
    assert receiving.result() == [(300, 500), 300_000.0, (0,), 9.0]
    late = group.member("late")
    late.subscribe("t")
    assert late.recv().sequence == 2


@case("edge: Zero copy")
def zero_copy_views_keep_their_content_under_pressure(group: Group) -> None:
    """Some are kept while many more messages come, to their holder and to another."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t", zero_copy=True, depth=4)
    c.subscribe("t", zero_copy=True, depth=4)
    for first in (0, 50):
        publishing = a.begin(_publish_filled, first, first + 50, 600_000)
        reading = c.begin(_receive_filled, 50)
        kept = b.run(_hold, 5)
        assert kept[-5:] == list(range(first, first + 5))
        assert b.run(_receive_filled, 45) == list(range(first + 5, first + 50))
        assert reading.result() == list(range(first, first + 50))
        publishing.result()
        assert b.run(_look) == kept
    a.call("close")
    assert b.run(_look) == [*range(5), *range(50, 55)]
    b.run(_drop)


def _publish_tensors(queue: mq.MQ, count: int) -> None:
    import torch

    for number in range(count):
        queue.publish("t", torch.full((500_000,), number, dtype=torch.uint8))


def _write_to_all(queue: mq.MQ, count: int) -> list[int]:
    """Spoil every tensor; what each held before, -1 if it was not whole."""
    found = []
    for _ in range(count):
        tensor = queue.recv(timeout=STEP).payload
        found.append(int(tensor[0]) if bool((tensor == tensor[0]).all()) else -1)
        tensor.fill_(255)
        assert int(tensor.min()) == 255
    return found


@case("edge: Zero copy")
def writes_to_a_zero_copy_tensor_reach_nobody(group: Group) -> None:
    """Two subscribers spoil all that they get: each gets every message as it was."""
    a, b, c = group.members("a", "b", "c")
    for member in (b, c):
        member.subscribe("t", zero_copy=True, depth=3)
    publishing = a.begin(_publish_tensors, 40)
    spoiling = [member.begin(_write_to_all, 40) for member in (b, c)]
    for future in spoiling:
        assert future.result() == list(range(40))
    publishing.result()


def _loan_tensors(queue: mq.MQ, count: int) -> None:
    import torch

    for number in range(count):
        with queue.loan("t", (5, 1 << 20), torch.float32, timeout=STEP) as tensor:
            tensor.fill_(number)


def _receive_tensors(queue: mq.MQ, count: int) -> list[tuple[tuple[int, ...], float]]:
    found = []
    for _ in range(count):
        tensor = queue.recv(timeout=STEP).payload
        assert bool((tensor == tensor[0, 0]).all())
        found.append((tuple(tensor.shape), float(tensor[-1, -1])))
    return found


@case("edge: loan")
def large_tensor_is_loaned_again_and_again(group: Group) -> None:
    """20 MiB each, to a subscriber that reads in place and to one that does not."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t", zero_copy=True)
    c.subscribe("t", depth=2)
    loaning = a.begin(_loan_tensors, 8)
    expected = [((5, 1 << 20), float(number)) for number in range(8)]
    reading = [member.begin(_receive_tensors, 8) for member in (b, c)]
    for future in reading:
        assert future.result() == expected
    loaning.result()


def _hoarding_costs_nobody(group: Group) -> None:
    """Where payloads are private copies: the publisher never waits for them."""
    a, b = group.members("a", "b")
    b.subscribe("t", zero_copy=True, depth=4)
    publishing = a.begin(_publish_filled, 0, 40, 300_000)
    assert b.run(_hold, 40) == list(range(40))
    publishing.result()
    b.run(_drop)


@case("edge: Zero copy", needs="zero_copy", otherwise=_hoarding_costs_nobody)
def hoarder_of_views_meets_backpressure(group: Group) -> None:
    """Full memory: `PublishTimeout` names who holds it; a dropped view ends the wait.

    A transport that declares `zero_copy` has the option `shm_bytes`, its limit.
    """
    a, b = group.members("a", "b", shm_bytes=4 * MIB)
    b.subscribe("t", zero_copy=True)
    a.run(_publish_filled, 0, 4, 900_000)
    assert b.run(_hold, 4) == [0, 1, 2, 3]
    with expect(mq.PublishTimeout, "'b'", "shared memory", "shm_bytes"):
        a.publish("t", programs.pattern(0, 900_000), timeout=0.1)
    assert b.run(programs.nothing_waits)
    (shared,) = a.call("stats")["shared"]
    assert shared["waits"] == 1
    assert shared["in_use_bytes"] > 3 * MIB
    assert a.run(programs.peer_stats, "b")["lent_bytes"] > 3 * MIB
    waiting = a.begin(_publish_filled, 4, 8, 900_000)
    assert not waiting.done(0.1)
    assert b.run(_look) == [0, 1, 2, 3]
    b.run(_drop)
    waiting.result()
    assert b.run(_hold, 4) == [4, 5, 6, 7]
    b.run(_drop)
