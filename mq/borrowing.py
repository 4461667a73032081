"""Memory of a peer on the same host, read in place: the other side of `mq.lending`.

A peer's segment is mapped privately: what is written to a view stays in this process,
and is thrown away before the memory is given back, so the next message is not seen
through it. A view's death is noted in a queue by a weak reference, whose callback is
one call into C that no signal can interrupt; the mesh then tells the owner.

A view that was handed out before a fork is there in the child, too, and nothing can
tell when it dies there. So it counts as alive until the child has ended or become
another program: until nobody has the other end of a pipe that the child got.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import struct
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from mq import speed
from mq.buffers import Pool, copy
from mq.log import Log
from mq.mappings import address, discard, map_descriptor

logger = Log(__name__)

Take = Callable[[int], memoryview]

# linux/fs.h: struct pm_scan_arg and its ioctl, Linux 6.7.
_SCAN_ARG: Final = struct.Struct("<12Q")
_PAGEMAP_SCAN: Final = 3 << 30 | _SCAN_ARG.size << 16 | ord("f") << 8 | 16
_PAGE_IS_FILE, _PAGE_IS_PRESENT, _PAGE_IS_SWAPPED = 4, 8, 16
_MOST_RANGES: Final = 64
_Ranges: Final = ctypes.c_uint64 * (3 * _MOST_RANGES)
"""Named once: else each use makes the type anew, which takes longer than the scan."""


class Mapping:
    """A peer's segment in this process's memory.

    Args:
        fd: Its descriptor; it may be closed afterwards.
        nbytes: Its size as the peer says.

    Raises:
        ValueError: It is no memory that stays as it is.
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        _check(fd, nbytes)
        self.nbytes = nbytes
        self._map = map_descriptor(fd, nbytes, private=True)
        self._address = address(self._map)

    def borrow(self, offset: int, nbytes: int, take: Take) -> memoryview:
        """A view of a part of it, writable for this process alone.

        Raises:
            ValueError: It is beyond the segment.
        """
        _check_part(offset, nbytes, self.nbytes)
        lease = np.ndarray.__new__(_Borrowed, (nbytes,), np.uint8, self._map, offset)
        lease.place = (self, offset)
        area: memoryview = lease.data
        return area

    def forget_writes(self, offset: int, nbytes: int) -> None:
        """Make this process see the peer's memory again where it wrote to a view."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = min(stop, -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        for first, last in _written(self._address + start, self._address + stop):
            discard(first, last)


class Unmapped:
    """A peer's segment where there is no room to map it: its messages are copied.

    Args:
        fd: Its descriptor, which has been checked and belongs to this object.
        nbytes: Its size.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes

    def borrow(self, offset: int, nbytes: int, take: Take) -> memoryview:
        """A copy of a part of it in memory from `take`.

        Raises:
            ValueError: It is beyond the segment.
            MemoryError: There is no memory for the copy.
        """
        _check_part(offset, nbytes, self.nbytes)
        area = take(nbytes)
        done = 0
        while done < nbytes:
            done += os.preadv(self._fd, [area[done:]], offset + done)
        return area

    def __del__(self) -> None:
        os.close(self._fd)


def _check(fd: int, nbytes: int) -> None:
    """Raises: ValueError, if it is no memory of this size that stays as it is."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("the descriptor of a segment is no memfd") from error
    # Without this seal its owner could end this process with a SIGBUS.
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("a segment of shared memory is not sealed")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise ValueError("a segment of shared memory cannot be read")
    # Nor has the system a page of that size for every reader, or room beside the map.
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise ValueError("a segment of shared memory is of huge pages alone")
    if not 0 < nbytes <= os.fstat(fd).st_size:
        raise ValueError(f"a segment of shared memory has no {nbytes} bytes")


def _check_part(offset: int, nbytes: int, whole: int) -> None:
    if not (nbytes > 0 <= offset and offset + nbytes <= whole):
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a segment of {whole}")


def _written(start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges of pages, by address, that are this process's own copies.

    Where the kernel cannot tell, or there are many: all of it.
    """
    found = _Ranges()
    arguments = bytearray(
        _SCAN_ARG.pack(
            _SCAN_ARG.size,
            0,
            start,
            stop,
            0,
            ctypes.addressof(found),
            _MOST_RANGES,
            0,
            _PAGE_IS_FILE,  # inverted: pages of no file,
            _PAGE_IS_FILE,
            _PAGE_IS_PRESENT | _PAGE_IS_SWAPPED,  # of those that exist
            _PAGE_IS_PRESENT | _PAGE_IS_SWAPPED,
        )
    )
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            ranges = fcntl.ioctl(fd, _PAGEMAP_SCAN, arguments)
        finally:
            os.close(fd)
    except OSError:
        return [(start, stop)]
    if ranges >= _MOST_RANGES:
        return [(start, stop)]
    return [(found[3 * n], found[3 * n + 1]) for n in range(ranges)]


class Key(NamedTuple):
    """Whose message a view is of: the mesh's source, the sequence, and a token.

    The token tells views of one message apart, of which one was never handed out.
    """

    source: Any
    sequence: int
    token: object


class _Borrowed(np.ndarray[Any, Any]):
    """A view of a peer's memory; every view of it refers to it."""

    place: tuple[Mapping, int]
    ending: Ending


class Ending(weakref.ref[_Borrowed]):
    """The end of a view of a peer's memory: what is to be known of it then.

    Attributes:
        key: Whose message it is of.
        mapping, offset, nbytes: Where it is.
        shown: Whether the application has it.
        alarm: Rings the bell of who waits for the memory, once this is noted.
    """

    __slots__ = ("alarm", "key", "mapping", "nbytes", "offset", "shown")
    key: Key
    mapping: Mapping
    offset: int
    nbytes: int
    shown: bool
    alarm: weakref.ref[_Borrowed]


class Returns:
    """Where the views that have died are noted.

    Attributes:
        queue: They, until the mesh has told their owners.
        endings: Of all views of which the owners were not told.
        bell: Rung then; its `fd` wakes the mesh while some peer waits for memory.
    """

    def __init__(self) -> None:
        self.queue: deque[Ending] = deque()
        self.endings: dict[int, Ending] = {}
        self.bell = speed.Bell()
        self._forks: deque[tuple[int, list[_Borrowed]]] = deque()
        self._kept: dict[int, _Borrowed] = {}
        _all_returns.add(self)

    def ended(self) -> list[Ending]:
        """The views that have died, until `forget`."""
        queue, known = self.queue, self.endings
        # More die at any time, even now. One that is not known was being armed when
        # an interrupt came, and nobody ever had the view.
        return [
            queue[n] for n in range(len(queue)) if known.get(id(queue[n])) is queue[n]
        ]

    def forget(self, endings: Iterable[Ending]) -> None:
        """The owners were told of these."""
        for ending in endings:
            self.endings.pop(id(ending), None)
        while self.queue and id(self.queue[0]) not in self.endings:
            self.queue.popleft()

    def close(self) -> None:
        """Nobody is to be told any more."""
        self.abandon()

    # -- forks ----------

    def shown(self) -> list[_Borrowed]:
        """The views that the application has."""
        endings = list(self.endings.values())
        found = [ending() for ending in endings if ending.shown]
        return [lease for lease in found if lease is not None]

    def keep_for_child(self, pipe: int | None, leases: list[_Borrowed]) -> None:
        """Keep views alive until the pipe has no other end; None: until `close`."""
        if pipe is None:
            self._kept.update((id(lease), lease) for lease in leases)
        else:
            self._forks.append((pipe, leases))

    def look_for_children(self) -> None:
        """Let go of what is kept for children that have ended."""
        for _ in range(len(self._forks)):
            pipe, leases = self._forks.popleft()
            poller = select.poll()
            poller.register(pipe, select.POLLIN)
            if poller.poll(0):
                os.close(pipe)
            else:
                self._forks.append((pipe, leases))

    def abandon(self) -> None:
        """In a forked child: its parent keeps what there is to keep."""
        self.bell.fd = -1
        self.endings.clear()
        self._kept.clear()
        self.queue.clear()
        while self._forks:
            os.close(self._forks.popleft()[0])


_all_returns: weakref.WeakSet[Returns] = weakref.WeakSet()
_child_ends: dict[int, list[int]] = {}
"""By the thread that forks, as several may at once."""


def _before_fork() -> None:
    childs_ends = _child_ends.setdefault(threading.get_ident(), [])
    for returns in list(_all_returns):
        if leases := returns.shown():
            try:
                ours, childs = os.pipe()
            except OSError as error:
                logger.warning(
                    "a forked child may read %d messages of peers in place, which are "
                    "kept for as long as this queue is open: %s",
                    len(leases),
                    str(error),  # a log that keeps it must not keep its traceback
                )
                returns.keep_for_child(None, leases)
            else:
                childs_ends.append(childs)
                returns.keep_for_child(ours, leases)


def _after_fork_in_parent() -> None:
    for fd in _child_ends.pop(threading.get_ident(), ()):
        os.close(fd)


def _after_fork_in_child() -> None:
    for returns in list(_all_returns):
        returns.abandon()
    _child_ends.clear()  # and they stay open: that they are is what they are for


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def is_borrowed(area: memoryview) -> bool:
    """Whether it is a peer's memory, and not this process's own."""
    return isinstance(area.obj, _Borrowed)


def arm(area: memoryview, returns: Returns, key: Key) -> None:
    """Have the death of the last view of a borrowed area noted."""
    lease = area.obj
    assert isinstance(lease, _Borrowed)
    # The newest reference is called first: then what the bell is rung for is noted.
    alarm: weakref.ref[_Borrowed] = weakref.ref(lease, returns.bell)
    ending = Ending(lease, returns.queue.append)
    ending.key, ending.alarm, ending.shown = key, alarm, False
    ending.mapping, ending.offset = lease.place
    ending.nbytes = len(area)
    returns.endings[id(ending)] = lease.ending = ending


def settle(area: memoryview, pool: Pool, zero_copy: bool) -> tuple[memoryview, bool]:
    """Where to decode a message: where it is, or in a copy of the receiver's own.

    Returns:
        The area, and whether it is the publisher's memory.
    """
    lease = area.obj
    if not isinstance(lease, _Borrowed):
        return area, False
    if zero_copy:
        lease.ending.shown = True
        return area, True
    own = pool.take(len(area))
    copy(area, own)
    return own, False


def let_go(area: object, error: BaseException) -> None:
    """Have an error keep no peer's memory, nor those that it comes of.

    The frames that they were raised in refer to the message, and to what was being made
    of it. Where that is the receiver's own it is left for a debugger to see. What the
    application was handling when it called is none of them: its frames may go on.
    """
    if not (isinstance(area, memoryview) and is_borrowed(area)):
        return
    callers, frame = set(), sys._getframe(1).f_back
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()  # an error may be its own cause
    while errors:
        found = errors.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        trace = found.__traceback__  # it begins where the error was caught
        if trace is None or trace.tb_frame not in callers:
            traceback.clear_frames(trace)
            errors += [found.__cause__, found.__context__]
