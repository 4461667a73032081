"""Memory that is lent: what the owner has, what a peer sees of it, and their ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import logging
import mmap
import os
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from refusals import no_descriptor
from shared_memory import SlowSystem, segment_of

from mq import borrowing, signals, speed
from mq.borrowing import Key, Mapping, Returns, Unmapped, arm, is_borrowed, settle
from mq.buffers import Pool
from mq.lending import BLOCK_BYTES, Lender
from mq.mappings import HUGE_BYTES, address, map_descriptor, reserve
from mq.mesh.poller import Poller
from mq.segments import Block, Segment

LIMIT = 8 * BLOCK_BYTES
FILES = ("mq/lending.py", "mq/segments.py")


_others: Final[set[int]] = set()


@pytest.fixture(autouse=True)
def _what_is_there() -> None:
    """What earlier tests of this process have left is not looked at."""
    _others.clear()
    _others.update(memfds())


def memfds() -> list[int]:
    """Descriptors of memory that this process has got since the test began."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:mq"):
                found.append(int(fd))
    return sorted({*found} - _others)


def fill(lender: Lender, nbytes: int = BLOCK_BYTES) -> list[Block]:
    """All blocks that there are."""
    return list(iter(lambda: lender.take(nbytes), None))


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed is not built here")
def test_a_handler_of_a_signal_does_not_come_into_the_middle_of_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may publish, too, and would wait for itself."""
    lender = Lender(LIMIT)
    locked: list[bool] = []

    def find(*size: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return Lender._find(lender, *size)

    def handle(number: int, frame: FrameType | None) -> None:
        locked.append(lender._lock.locked())

    assert lender.take(BLOCK_BYTES) is not None
    monkeypatch.setattr(lender, "_find", find)
    before = signal.signal(signal.SIGTERM, handle)
    signals.hold()
    try:
        block = lender.take(BLOCK_BYTES)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert block is not None
    assert locked == [False]


@pytest.mark.parametrize("call", ["stats", "trim", "retire", "take", "grow"])
def test_nothing_waits_for_memory_that_another_thread_takes(
    slow: SlowSystem, call: str
) -> None:
    """It may take seconds. The keeper trims, and has to show that this member lives."""
    lender = Lender(LIMIT)
    held = lender.take(BLOCK_BYTES)
    assert held is not None
    assert lender.take(2 * BLOCK_BYTES) is not None  # idle again
    calls = {
        "stats": lender.stats,
        "trim": lender.trim,
        "retire": lambda: lender.retire(held.segment),
        "take": lambda: lender.take(2 * BLOCK_BYTES).area,  # type: ignore[union-attr]
        "grow": lambda: lender.take(BLOCK_BYTES).area,  # type: ignore[union-attr]
    }
    got = slow.take(lender, 3 * BLOCK_BYTES)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(calls[call]()), daemon=True)
    thread.start()
    if call == "grow":
        assert slow.asked.acquire(timeout=60.0)
        slow.go_on()
    thread.join(10.0)
    assert len(done) == 1
    slow.go_on()
    assert got[0] is not None


def test_memory_counts_while_it_is_taken(slow: SlowSystem) -> None:
    """However many threads do so at once, the limit is kept."""
    lender = Lender(LIMIT)
    got = [slow.take(lender, 3 * BLOCK_BYTES) for _ in range(2)]
    assert lender.take(3 * BLOCK_BYTES) is None
    assert lender.full
    stats = lender.stats()
    assert (stats.mapped_bytes, stats.in_use_bytes) == (6 * BLOCK_BYTES, 0)
    assert stats.segments == 2
    small = fill(lender)
    assert len(small) == 2
    slow.go_on()
    assert lender.stats().mapped_bytes == lender.stats().in_use_bytes == LIMIT
    assert None not in (got[0][0], got[1][0])


@pytest.mark.parametrize(
    "error", [lambda: OSError(errno.ENOSPC, "No space"), KeyboardInterrupt]
)
def test_memory_that_does_not_come_counts_no_more(
    slow: SlowSystem, error: Callable[[], BaseException]
) -> None:
    """Who found none because of it is told."""
    lender = Lender(LIMIT)
    told: list[bool] = []
    lender.freed = lambda: told.append(lender._lock.locked())
    slow.error = error
    got = slow.take(lender, 6 * BLOCK_BYTES)
    assert lender.take(6 * BLOCK_BYTES) is None
    assert not told
    slow.go_on()
    assert told == [False]
    assert got in ([], [None])
    assert lender.stats().mapped_bytes == 0
    assert len(fill(lender)) == 8
    assert told == [False]


def test_who_is_refused_again_tells_nobody(slow: SlowSystem) -> None:
    """Two that wait would else wake each other, and try in vain, for ever."""
    lender = Lender(LIMIT)
    told: list[bool] = []
    lender.freed = lambda: told.append(True)
    lender.refusal = "the last time, too"
    slow.error = lambda: OSError(errno.ENOSPC, "No space")
    slow.take(lender, 6 * BLOCK_BYTES)
    assert lender.take(6 * BLOCK_BYTES) is None
    slow.go_on()
    assert not told


def test_memory_that_comes_after_the_end_is_given_back(slow: SlowSystem) -> None:
    """It is nobody's."""
    lender = Lender(LIMIT)
    got = slow.take(lender, BLOCK_BYTES)
    lender.close()
    slow.go_on()
    assert got == [None]
    assert not memfds()
    assert lender.stats().mapped_bytes == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_memory_is_taken_has_nothing_of_it(
    slow: SlowSystem,
) -> None:
    """By another thread than the one that takes it."""
    lender = Lender(LIMIT)
    got = slow.take(lender, BLOCK_BYTES)
    pid = os.fork()
    if pid == 0:
        clean = not memfds() and lender.stats().mapped_bytes == 0
        os._exit(0 if clean else 1)
    assert os.waitpid(pid, 0)[1] == 0
    slow.go_on()
    assert got[0] is not None


@contextmanager
def handler_within_taking(
    monkeypatch: pytest.MonkeyPatch, handle: Callable[[], object]
) -> Iterator[None]:
    """Have a signal's handler run once while the main thread takes memory."""

    def interrupted(fd: int, memory: memoryview) -> None:
        patched.undo()
        signal.raise_signal(signal.SIGUSR1)
        reserve(fd, memory)

    before = signal.signal(signal.SIGUSR1, lambda *args: handle())
    try:
        with monkeypatch.context() as patched:
            patched.setattr("mq.segments.reserve", interrupted)
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_may_take_memory_while_its_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It publishes, or asks for the counters."""
    lender = Lender(LIMIT)
    blocks: list[Block | None] = []
    mapped: list[int] = []

    def handle() -> None:
        blocks.append(lender.take(BLOCK_BYTES))
        blocks.append(lender.take(6 * BLOCK_BYTES))
        mapped.append(lender.stats().mapped_bytes)

    with handler_within_taking(monkeypatch, handle):
        blocks.append(lender.take(3 * BLOCK_BYTES))
    assert [block is not None for block in blocks] == [True, False, True]
    assert mapped == [4 * BLOCK_BYTES]
    assert lender.stats().in_use_bytes == 4 * BLOCK_BYTES


def test_a_handler_may_fork_while_its_thread_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes then is the parent's alone, who is not disturbed."""
    lender = Lender(LIMIT)
    ends: list[int | None] = []

    def handle() -> None:
        child = os.fork()
        ends.append(os.waitpid(child, 0)[1] if child else None)

    with handler_within_taking(monkeypatch, handle):
        block = lender.take(BLOCK_BYTES)
    if ends == [None]:
        clean = block is None and not memfds() and not lender.segments
        os._exit(0 if clean else 1)
    assert ends == [0]
    assert block is not None


def test_a_handler_of_the_log_may_take_memory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told of memory that the system refuses; it may publish."""
    lender = Lender(LIMIT)
    told: list[bool] = []

    def refuse(segment: Segment) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def warn(*message: object) -> None:
        told.append(lender._lock.locked())

    monkeypatch.setattr(Segment, "open", refuse)
    monkeypatch.setattr(lender, "_warn", warn)
    assert lender.take(BLOCK_BYTES) is None
    assert told == [False]


def test_a_block_returns_when_the_last_view_of_it_dies() -> None:
    """Memory is used again and never exceeds the limit."""
    lender = Lender(LIMIT)
    blocks = fill(lender)
    assert len(blocks) == 8
    assert lender.stats().mapped_bytes == lender.stats().in_use_bytes == LIMIT
    view = np.frombuffer(blocks[3].area, np.uint8)[100:200]
    segments = set(lender.segments)
    blocks.clear()
    assert len(fill(lender)) == 7
    del view
    assert len(fill(lender)) == 8
    assert set(lender.segments) == segments


def test_sizes_take_turns_in_the_same_memory() -> None:
    """Unused segments make room for blocks of another size; those in use do not."""
    lender = Lender(LIMIT)
    del fill(lender)[:]
    whole = lender.take(LIMIT)
    assert whole is not None
    assert lender.take(BLOCK_BYTES) is None
    del whole
    assert lender.take(BLOCK_BYTES + 1) is not None
    assert lender.stats().mapped_bytes <= LIMIT


def test_nothing_is_given_up_in_vain() -> None:
    """A block that finds no room even then leaves unused segments as they are."""
    lender = Lender(LIMIT)
    blocks = fill(lender)
    del blocks[4:]
    dropped = lender.dropped
    assert lender.take(5 * BLOCK_BYTES) is None
    assert lender.dropped == dropped


def test_a_view_that_is_kept_pins_little() -> None:
    """A segment has a small part of the memory, so that one view cannot hold it all."""
    limit = 256 << 20
    lender = Lender(limit)
    kept = lender.take(BLOCK_BYTES)
    assert kept is not None
    assert lender.stats().mapped_bytes <= limit // 16
    assert lender.take(limit - limit // 16) is not None


def test_what_is_larger_than_all_of_it_never_fits() -> None:
    """Nor does anything where there is none, or after the end."""
    assert not Lender(LIMIT).fits(LIMIT + 1)
    assert not Lender(100_000).fits(99_000)  # it has not as many whole pages
    assert Lender(0).take(BLOCK_BYTES) is None
    lender = Lender(LIMIT)
    lender.close()
    assert not lender.fits(1)
    assert lender.take(BLOCK_BYTES) is None
    assert not lender.segments


def test_a_retired_segment_is_never_used_again() -> None:
    """Its blocks count as long as they are in use, and are gone afterwards."""
    lender = Lender(LIMIT)
    blocks = fill(lender)
    for block in blocks:
        lender.retire(block.segment)
    assert lender.take(BLOCK_BYTES) is None
    assert lender.stats().mapped_bytes == LIMIT
    old = {block.segment.id for block in blocks}
    del block
    blocks.clear()
    assert lender.stats().mapped_bytes == 0
    assert old.isdisjoint(block.segment.id for block in fill(lender))


def test_idle_segments_are_given_back() -> None:
    """With their descriptor; those with a block in use stay."""
    lender = Lender(LIMIT)
    kept = lender.take(3 * BLOCK_BYTES)
    assert kept is not None
    idle = lender.take(BLOCK_BYTES)
    assert idle is not None
    segment = weakref.ref(idle.segment)
    del idle
    lender.trim()
    assert list(lender.segments.values()) == [kept.segment]
    assert segment() is None


def test_after_the_end_memory_goes_with_its_last_view() -> None:
    """Nothing that the closed lender has keeps a segment."""
    lender = Lender(LIMIT)
    block = lender.take(BLOCK_BYTES)
    assert block is not None
    view, segment = block.area, weakref.ref(block.segment)
    lender.close()
    view[:3] = b"abc"
    assert bytes(block.area[:3]) == b"abc"
    del block
    assert segment() is None
    del view


def test_descriptors_are_one_a_segment_and_none_a_mapping() -> None:
    """So `ulimit -n` is no limit to the number of segments of all peers."""
    segment = segment_of(LIMIT, LIMIT)
    mapping = Mapping(segment.fd, LIMIT)
    assert memfds() == [segment.fd]
    segment.map[5:8] = b"new"
    del segment
    gc.collect()
    assert bytes(mapping.borrow(5, 3, bytearray)) == b"new"  # type: ignore[arg-type]


@pytest.mark.parametrize("refused", ["memfd_create", "posix_fallocate"])
def test_what_the_system_refuses_is_like_no_memory(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, with the remedy, and tried again the next time."""
    lender = Lender(LIMIT)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, refused, no_descriptor)
        assert lender.take(BLOCK_BYTES) is None
        assert lender.take(BLOCK_BYTES) is None
    (record,) = caplog.records
    assert "Too many open files" in record.getMessage()
    assert "shm_bytes" in record.getMessage()
    assert lender.take(BLOCK_BYTES) is not None


def test_unused_segments_make_room_where_the_system_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their descriptors and memory serve the size that is needed now."""
    lender = Lender(1 << 30)
    for nbytes in (100_000, 200_000, 300_000):
        assert lender.take(nbytes) is not None
    create = os.memfd_create

    def create_few(name: str, flags: int) -> int:
        if len(lender.segments) > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", create_few)
    assert lender.take(400_000) is not None


def test_there_are_never_more_segments_than_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The application needs some, too."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    lender = Lender(1 << 30)
    blocks = [lender.take(100_000 * n) for n in range(1, 25)]
    assert sum(block is not None for block in blocks) == 16 == len(lender.segments)
    blocks.clear()
    assert lender.take(5_000_000) is not None
    assert len(lender.segments) == 16


@contextmanager
def interrupt_at(number: int, *files: str) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the n-th bytecode run in some files."""
    count = [0]

    def call(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_name
        if not frame.f_code.co_filename.endswith(files) or name in ("__del__", "close"):
            return None  # what is raised in a finalizer is lost, there as everywhere
        frame.f_trace_opcodes = True
        return opcode

    def opcode(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            count[0] += 1
            if count[0] == number:
                raise KeyboardInterrupt
        return opcode

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one first
    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(before)


def _use(lender: Lender) -> None:
    """Grow, take, give back, retire, trim."""
    blocks = [lender.take(BLOCK_BYTES), lender.take(BLOCK_BYTES)]
    assert blocks[0] is not None
    lender.retire(blocks[0].segment)
    blocks.clear()
    block = lender.take(2 * BLOCK_BYTES)
    del block
    block = lender.take(BLOCK_BYTES)
    del block
    lender.trim()
    lender.take(BLOCK_BYTES)


def test_an_interrupt_anywhere_loses_no_block() -> None:
    """Between any two bytecodes: afterwards all the memory can be taken, once."""
    with interrupt_at(0, *FILES) as count:
        _use(Lender(LIMIT))
    assert count[0] > 300
    for number in range(1, count[0] + 1):
        lender = Lender(LIMIT)
        try:
            with interrupt_at(number, *FILES):
                _use(lender)
        except KeyboardInterrupt:
            # The tracer interrupts where no signal can: between the end of a block and
            # the release of its lock.
            lender._lock = threading.Lock()
        blocks = fill(lender)
        places = {(block.segment.id, block.offset) for block in blocks}
        assert len(places) == len(blocks) == 8, f"after bytecode {number}"
        blocks.clear()
        assert lender.stats().in_use_bytes == 0, f"after bytecode {number}"
    del lender
    gc.collect()
    for fd in memfds():  # made, and interrupted before anybody could know of it
        assert not os.fstat(fd).st_size
        os.close(fd)


def test_blocks_die_in_any_thread() -> None:
    """Many threads take and drop; nothing is handed out twice or lost."""
    lender = Lender(LIMIT)
    wrong: list[str] = []

    def work(mark: int) -> None:
        for _ in range(500):
            block = lender.take(BLOCK_BYTES)
            if block is not None:
                block.area[:8] = bytes([mark]) * 8
                if bytes(block.area[:8]) != bytes([mark]) * 8:
                    wrong.append("a block has two owners")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(fill(lender)) == 8


# -- the other side ----------


def borrowed(
    returns: Returns, segment: Segment, key: object = "message"
) -> tuple[Mapping, memoryview]:
    """A view of the first page of a segment."""
    mapping = Mapping(segment.fd, segment.nbytes)
    area = mapping.borrow(0, mmap.PAGESIZE, Pool(0).take)
    arm(area, returns, Key(key, 0, object()))
    return mapping, area


def test_what_a_reader_writes_stays_with_it_until_it_is_forgotten() -> None:
    """Neither the owner nor another reader sees it, nor a later message there."""
    segment = segment_of(LIMIT, LIMIT)
    segment.map[:5] = b"first"
    ours, area = borrowed(Returns(), segment)
    theirs, other = borrowed(Returns(), segment)
    area[:5] = b"wrote"
    assert (segment.map[:5], bytes(other[:5])) == (b"first", b"first")
    ours.forget_writes(0, mmap.PAGESIZE)
    segment.map[:5] = b"later"
    assert bytes(area[:5]) == bytes(other[:5]) == b"later"
    assert theirs.nbytes == LIMIT


def test_writes_are_forgotten_where_the_kernel_cannot_tell_which_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 6.7, and where /proc is missing, all of the view is."""
    segment = segment_of(LIMIT, LIMIT)
    mapping, area = borrowed(Returns(), segment)
    area[:] = b"x" * len(area)

    def missing(*args: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    mapping.forget_writes(0, len(area))
    assert bytes(area) == bytes(len(area))


def test_the_death_of_a_view_is_noted_once_whoever_drops_it() -> None:
    """In another thread, or by the collector of cycles."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    held: list[Any] = [borrowed(returns, segment)[1][10:20]]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(returns.queue) == 1
    cycle: list[Any] = [borrowed(returns, segment)[1]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert len(returns.queue) == 2


def test_the_death_of_a_view_is_noted_though_an_interrupt_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it dies; with nothing compiled, the interrupt itself may be lost."""
    monkeypatch.setattr(sys, "unraisablehook", lambda event: None)
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    held = [borrowed(returns, segment)[1]]
    with contextlib.suppress(KeyboardInterrupt):
        ctypes.CDLL(None)["raise"](int(signal.SIGINT), ctypes.py_object(held.pop()))
    assert [ending.nbytes for ending in returns.ended()] == [mmap.PAGESIZE]


def test_a_view_wakes_the_mesh_only_where_somebody_waits() -> None:
    """And what it is woken for is noted by then; not once nobody is to be told."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    poller = Poller()
    try:
        for fd, noted in ((-1, 1), (poller.wake_fd, 2)):
            returns.bell.fd = fd
            held = [borrowed(returns, segment)[1]]
            held.clear()
            assert len(returns.queue) == noted
            assert is_readable(poller.wake_fd) == (fd >= 0)
        returns.close()
        assert returns.bell.fd == -1
    finally:
        poller.close()


def is_readable(fd: int) -> bool:
    """Whether something was written there."""
    return bool(select.select([fd], [], [], 0)[0])


def test_after_the_end_a_view_keeps_its_memory_and_nothing_keeps_it_afterwards() -> (
    None
):
    """A queue that was closed is told of no view any more."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    mapping, area = borrowed(returns, segment)
    gone = weakref.ref(mapping)
    del mapping
    returns.close()
    assert len(bytes(area)) == mmap.PAGESIZE
    del area
    assert gone() is None
    assert not returns.queue


def test_memory_that_cannot_be_mapped_is_copied() -> None:
    """With the checks of what can; the descriptor goes with it."""
    segment = segment_of(LIMIT, LIMIT)
    segment.map[100:105] = b"hello"
    fd = os.dup(segment.fd)
    unmapped = Unmapped(fd, LIMIT)
    area = unmapped.borrow(100, 5, Pool(0).take)
    assert bytes(area) == b"hello"
    assert not is_borrowed(area)
    for offset, nbytes in ((LIMIT, 1), (LIMIT - 1, 2), (0, LIMIT + 1), (0, 0)):
        with pytest.raises(ValueError, match="of a segment of"):
            unmapped.borrow(offset, nbytes, Pool(0).take)
    del unmapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_copying_subscriber_gets_memory_of_its_own() -> None:
    """And the publisher's is free as soon as nobody else has a view."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    _, area = borrowed(returns, segment)
    own, in_place = settle(area, Pool(0), zero_copy=False)
    assert (in_place, is_borrowed(own)) == (False, False)
    assert not returns.shown()
    same, in_place = settle(area, Pool(0), zero_copy=True)
    assert in_place
    assert same is area
    assert len(returns.shown()) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_view_lives_as_long_as_a_forked_child_may_read_it() -> None:
    """It is given back when the child has ended, although the parent dropped it."""
    segment = segment_of(LIMIT, LIMIT)
    segment.map[:5] = b"first"
    returns = Returns()
    held = [borrowed(returns, segment)[1]]
    settle(held[0], Pool(0), zero_copy=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has dropped its view
        os._exit(0 if bytes(held[0][:5]) == b"first" else 1)
    os.close(reader)
    held.clear()
    returns.look_for_children()
    assert not returns.queue, "given back while a child may read it"
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    returns.look_for_children()
    assert len(returns.queue) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_views_are_kept_where_nobody_can_tell_when_a_child_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There was no descriptor for that: they are until the queue is closed."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    held = [borrowed(returns, segment)[1]]
    settle(held[0], Pool(0), zero_copy=True)
    monkeypatch.setattr(os, "pipe", no_descriptor)
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    held.clear()
    returns.look_for_children()
    assert not returns.queue, "given back while a child may read it"
    assert len(returns.shown()) == 1
    returns.close()
    assert not returns.shown()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_views_but_those_that_the_application_has() -> None:
    """Neither what has died, not told of yet, nor what is kept for other children."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
    for keep in (False, True):
        mapping, area = borrowed(returns, segment)
        mappings.add(mapping)
        settle(area, Pool(0), zero_copy=True)
        if keep:
            returns.keep_for_child(None, returns.shown())
        del mapping, area
    child = os.fork()
    if child == 0:
        os._exit(len(mappings))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(mappings) == 2
    returns.close()
    assert not mappings


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_of_a_child_that_has_views_open_no_descriptors() -> None:
    """They hold the end that it inherited itself."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    held = [borrowed(returns, segment)[1]]
    settle(held[0], Pool(0), zero_copy=True)
    child = os.fork()
    if child == 0:
        before = len(os.listdir("/proc/self/fd"))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(len(os.listdir("/proc/self/fd")) - before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    returns.close()


def test_each_thread_that_forks_closes_its_own_ends() -> None:
    """Not those of a child that another one is about to start."""
    segment = segment_of(LIMIT, LIMIT)
    returns = Returns()
    held = [borrowed(returns, segment)[1]]
    settle(held[0], Pool(0), zero_copy=True)
    borrowing._before_fork()
    other = threading.Thread(target=borrowing._after_fork_in_parent)
    other.start()
    other.join()
    held.clear()
    returns.look_for_children()
    assert not returns.queue
    borrowing._after_fork_in_parent()
    returns.look_for_children()
    assert len(returns.queue) == 1


@pytest.mark.parametrize("private", [False, True])
def test_large_memory_begins_at_a_huge_page(private: bool) -> None:
    """Otherwise it could not consist of them; small memory may begin anywhere."""
    with tempfile.TemporaryFile() as file:
        file.truncate(5 * HUGE_BYTES)
        for nbytes in (HUGE_BYTES, 3 * HUGE_BYTES + 4096):
            memory = map_descriptor(file.fileno(), nbytes, private=private)
            assert len(memory) == nbytes
            assert address(memory) % HUGE_BYTES == 0
        small = map_descriptor(file.fileno(), 4096, private=private)
        assert len(small) == 4096


def test_segments_consist_of_huge_pages() -> None:
    """Where the kernel lets us have any: the sender's copies are a quarter faster."""
    segment = segment_of(3 * HUGE_BYTES, HUGE_BYTES)
    first = f"{address(segment.map):x}-"
    with open("/proc/self/smaps") as file:
        text = file.read()
    ours = text[text.index(first) :]
    huge = int(re.findall(r"ShmemPmdMapped: +(\d+) kB", ours)[0])
    if not huge and not _kernel_collapses():
        pytest.skip("this kernel has no MADV_COLLAPSE, or no huge page is free")
    assert huge == 3 * HUGE_BYTES // 1024


def _kernel_collapses() -> bool:
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return release >= (6, 1)


def test_memory_that_is_not_there_is_an_error_and_not_a_signal() -> None:
    """Wherever it is noticed: here one may not have more than the first huge page."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        memory = map_descriptor(fd, 4 * HUGE_BYTES, private=False)
        with pytest.raises(PermissionError):
            reserve(fd, memory)
    finally:
        os.close(fd)
