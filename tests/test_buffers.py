"""Pooled memory: used again after its last view, never before, and bounded."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mq import buffers, signals, speed
from mq.buffers import REGION_BYTES, Pool, class_bytes, keep
from mq.frames import ALIGNMENT

MIB = 1 << 20


def address(view: memoryview) -> int:
    """Where a buffer lies."""
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


@pytest.mark.parametrize(
    "nbytes", [0, 1, 63, 4096, REGION_BYTES - 1, REGION_BYTES, MIB + 1]
)
def test_a_buffer_is_writable_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    """`take` gives 1-D bytes of exactly that size at a multiple of 64."""
    view = Pool(MIB).take(nbytes)
    assert (view.nbytes, view.format, view.ndim) == (nbytes, "B", 1)
    assert not view.readonly
    assert nbytes == 0 or address(view) % ALIGNMENT == 0
    view[:] = b"\xa5" * nbytes
    assert bytes(view) == b"\xa5" * nbytes


@given(st.integers(REGION_BYTES, 1 << 40))
def test_a_size_class_wastes_an_eighth_at_most(nbytes: int) -> None:
    """Regions hold what they are for, with at most 12.5 % to spare."""
    assert nbytes <= class_bytes(nbytes) <= nbytes * 1.125
    assert class_bytes(class_bytes(nbytes)) == class_bytes(nbytes)


@pytest.mark.parametrize(
    "look",
    [
        lambda view: view[10:20],
        lambda view: memoryview(view)[5:].cast("B"),
        lambda view: np.frombuffer(view, np.float32),
        lambda view: np.frombuffer(view[64:128], np.float32)[2:4].reshape(2, 1),
        lambda view: np.ndarray((4,), np.float32, view[:16]).view(np.int32),
        lambda view: np.asarray(view.obj)[5:],
        lambda view: view.obj[1:][1:],
        lambda view: view.obj.view(),
        lambda view: torch.frombuffer(view, dtype=torch.float32),
        lambda view: torch.frombuffer(view[:64], dtype=torch.int16)[3:],
        lambda view: torch.from_numpy(np.frombuffer(view[64:], np.uint8)).view(
            torch.int8
        ),
    ],
)
def test_any_view_keeps_a_buffer_from_being_used_again(look: object) -> None:
    """A region is idle only after the last view of any kind died, and then once."""
    assert callable(look)
    pool = Pool(8 * MIB)
    view = pool.take(MIB)
    start = address(view)
    kept = look(view)
    del view
    assert pool.stats().in_use == 1
    other = pool.take(MIB)
    assert address(other) != start
    del kept
    assert pool.stats().returned == 1
    again = pool.take(MIB)
    assert address(again) == start
    assert pool.stats().hits == 1
    assert pool.stats().in_use == 2


def test_the_region_that_came_back_last_is_used_first() -> None:
    """Warm memory is preferred: the free list is a stack."""
    pool = Pool(8 * MIB)
    first, second = pool.take(MIB), pool.take(MIB)
    last = address(first)
    del second
    del first
    assert address(pool.take(MIB)) == last


def test_idle_memory_is_bounded_and_the_oldest_goes_first() -> None:
    """What came back over the limit is freed, beginning with what is idle longest."""
    pool = Pool(3 * MIB)
    views = [pool.take(MIB) for _ in range(5)]
    starts = [address(view) for view in views]
    while views:
        del views[0]
    assert pool.stats().idle == 3
    assert pool.stats().idle_bytes == 3 * MIB
    assert pool.stats().returned == 5
    assert [address(pool.take(MIB)), pool.stats().idle] == [starts[-1], 3]
    del_me = pool.take(16 * MIB)
    del del_me
    assert pool.stats().idle_bytes <= 3 * MIB


def test_trim_frees_what_is_idle_for_long_enough() -> None:
    """`trim` looks at how long a region is idle; without an age it frees all."""
    pool = Pool(8 * MIB)
    for view in [pool.take(MIB), pool.take(2 * MIB)]:
        del view
    pool.trim(older_than_seconds=3600)
    assert pool.stats().idle == 2
    pool.trim()
    assert (pool.stats().idle, pool.stats().idle_bytes) == (0, 0)


def test_a_closed_pool_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is idle goes at once, what is in use with its last view; so do engines'."""
    monkeypatch.setattr(buffers, "_pools", weakref.WeakSet())
    gone: list[str] = []

    def watched(what: str, region: Any) -> memoryview:
        weakref.finalize(region, gone.append, what)
        return memoryview(region)

    pool, other = Pool(8 * MIB), Pool(8 * MIB)
    views = [pool.take(MIB) for _ in range(2)]
    for what, ending in zip(("idle", "used"), pool._leases._all.values(), strict=True):
        weakref.finalize(ending.memory, gone.append, what)
    del ending
    engines = [keep(watched("engine's", np.empty(MIB, np.uint8)))]
    views.pop(0)
    pool.close()
    assert gone == ["idle"]
    views.clear()
    assert gone == ["idle", "used"]
    engines.clear()
    assert gone == ["idle", "used"]
    other.close()
    assert gone == ["idle", "used", "engine's"]
    engines = [keep(watched("later", np.empty(MIB, np.uint8)))]
    Pool(0).close()
    engines.clear()
    assert gone[3:] == ["later"]
    assert pool.stats().idle == pool.stats().in_use == 0


def test_a_closed_pool_still_serves_and_does_not_look_after_it() -> None:
    """A `recv` may be decoding just then."""
    pool = Pool(8 * MIB)
    pool.close()
    view = pool.take(MIB)
    view[:] = bytes(MIB)
    assert not pool._leases._all
    with pytest.raises(MemoryError):
        pool.take(1 << 60)
    assert pool.stats().in_use == pool.stats().in_use_bytes == 0


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_a_handler_that_closes_a_pool_waits_until_nobody_is_at_it() -> None:
    """The thread that closes it would wait for the one whose handler waits for that."""
    pool, late = Pool(8 * MIB), []

    def close(*_: object) -> None:
        closer = threading.Thread(target=pool.close)
        closer.start()
        closer.join(0.5)
        late.append(closer.is_alive())

    before = signal.signal(signal.SIGUSR1, close)
    signals.hold()
    try:
        with pool._lock:
            signal.raise_signal(signal.SIGUSR1)
            assert not late
        assert late == [False]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_small_buffers_are_counted_and_not_pooled() -> None:
    """Below 128 KiB the allocator is fast enough."""
    pool = Pool(8 * MIB)
    view = pool.take(REGION_BYTES - 1)
    assert pool.stats() == (0, 0, 0, 0, 0, 0, 0, 1)
    del view


def test_a_view_outlives_its_pool() -> None:
    """Dropping the pool does not touch memory in use."""
    view = Pool(8 * MIB).take(MIB)
    view[:] = b"\x01" * MIB
    assert bytes(view[:4]) == b"\x01" * 4


def test_threads_never_share_a_buffer() -> None:
    """Every buffer has one owner, however many threads take and drop."""
    pool = Pool(64 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            held = [pool.take(MIB // 4 + 4096 * (mark % 2)) for _ in range(3)]
            for view in held:
                view[:8] = mark.to_bytes(8, "little")
            wrong.extend(1 for view in held if view[0] != mark)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    stats = pool.stats()
    assert (stats.in_use, stats.in_use_bytes) == (0, 0)
    assert stats.returned == stats.hits + stats.misses == 4 * 300 * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_forked_child_has_an_empty_pool_that_works(closed: bool) -> None:
    """Fork with the lock held elsewhere: the child takes, and keeps what it had."""
    pool = Pool(8 * MIB)
    held, idle = pool.take(MIB), pool.take(MIB)
    held[:4] = b"held"
    del idle
    if closed:
        pool.close()
    with pool._lock:  # as if another thread were in the middle of take
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # a lock that nobody will release
            status = 1
            try:
                view = pool.take(MIB)
                view[:] = b"\x02" * MIB
                good = bytes(held[:4]) == b"held" and pool.stats().in_use != closed
                del view, held
                status = 0 if good and pool.stats().in_use == 0 else 1
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("again", [False, True], ids=["new", "idle"])
def test_an_exception_in_the_middle_of_a_take_spoils_no_count(again: bool) -> None:
    """As a handler's, between any two bytecodes; a later call raised KeyError."""
    codes = {Pool.take.__code__, buffers._Leases.lease.__code__}
    left = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not pool._lock.locked():  # there handlers wait
            left -= 1
            if left == 0:
                raise InterruptedError
        return trace

    interrupted = 0
    pool = Pool(limit_bytes=1 << 30)
    for number in range(1, 1000):
        pool.trim()
        if again:
            pool.take(REGION_BYTES)
        left = number
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # 3.12 looks for one first
        sys.settrace(trace)
        try:
            pool.take(REGION_BYTES)
        except InterruptedError:
            interrupted += 1
        finally:
            sys.settrace(before)
        counters = pool.stats()
        assert (counters.in_use, counters.in_use_bytes) == (0, 0), number
        held = pool.take(REGION_BYTES)
        assert pool.stats().in_use == 1
        del held
        if left > 0:
            break
    assert left > 0
    assert interrupted > 30


def test_what_cannot_be_mapped_is_a_memory_error_that_leaves_no_trace() -> None:
    """An absurd size raises MemoryError and is not counted as in use."""
    pool = Pool(8 * MIB)
    with pytest.raises(MemoryError, match="message buffer"):
        pool.take(1 << 60)
    assert pool.stats().in_use_bytes == 0


def test_taking_and_dropping_does_not_grow_the_process() -> None:
    """A thousand large buffers in turn use the memory of one."""
    pool = Pool(64 * MIB)
    for _ in range(1000):
        pool.take(16 * MIB)[:: 1 << 20].tolist()
    assert (pool.stats().misses, pool.stats().hits) == (1, 999)


@pytest.mark.parametrize("nbytes", [REGION_BYTES - 1, REGION_BYTES, 4 * REGION_BYTES])
@pytest.mark.parametrize("of", ["the pool", "an engine"])
def test_a_buffer_that_goes_keeps_no_interrupt_from_the_application(
    of: str, nbytes: int
) -> None:
    """One that came while the application called what had the last reference."""
    pool = Pool(1 << 30)
    views = [pool.take(nbytes) if of == "the pool" else keep(_Noisy.area(nbytes))]
    interrupt = ctypes.CDLL(None)["raise"]
    with pytest.raises(KeyboardInterrupt):
        interrupt(int(signal.SIGINT), ctypes.py_object(views.pop()))

    assert pool.stats().in_use == 0
    assert _Noisy.ended == 0
    keep(memoryview(b"next"))
    assert _Noisy.ended == (of == "an engine")
    _Noisy.ended = 0


class _Noisy(np.ndarray[Any, Any]):
    """An engine's memory, at whose end handlers of signals run."""

    ended = 0

    @classmethod
    def area(cls, nbytes: int) -> memoryview:
        area: memoryview = np.ndarray.__new__(cls, (nbytes,), np.uint8).data
        return area

    def __del__(self) -> None:
        type(self).ended += 1
