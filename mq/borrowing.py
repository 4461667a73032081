"""Memory of a peer on the same host, read in place: the other side of `mq.lending`.

A peer's segment is mapped privately: what is written to a view stays in this process,
and is thrown away before the memory is given back, so the next message is not seen
through it. A view's death is noted in a queue by its finalizer, which takes no locks;
the mesh then tells the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from mq.buffers import Pool, copy

# linux/fs.h: struct pm_scan_arg and its ioctl, Linux 6.7.
_SCAN_ARG: Final = struct.Struct("<12Q")
_PAGEMAP_SCAN: Final = 3 << 30 | _SCAN_ARG.size << 16 | ord("f") << 8 | 16
_PAGE_IS_FILE, _PAGE_IS_PRESENT, _PAGE_IS_SWAPPED = 4, 8, 16
_MOST_RANGES: Final = 64


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
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError("the descriptor of a segment is no memfd") from error
        # Without this seal its owner could end this process with a SIGBUS.
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError("a segment of shared memory is not sealed")
        if not 0 < nbytes <= os.fstat(fd).st_size:
            raise ValueError(f"a segment of shared memory has no {nbytes} bytes")
        self.nbytes = nbytes
        self._map = mmap.mmap(
            fd,
            nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        whole = np.frombuffer(self._map, np.uint8)
        self._address: int = whole.__array_interface__["data"][0]

    def borrow(self, offset: int, nbytes: int) -> memoryview:
        """A view of a part of it, writable for this process alone.

        Raises:
            ValueError: It is beyond the segment.
        """
        if not (nbytes > 0 <= offset and offset + nbytes <= self.nbytes):
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} of a segment of {self.nbytes}"
            )
        lease = np.ndarray.__new__(_Borrowed, (nbytes,), np.uint8, self._map, offset)
        lease._place = (self, offset, nbytes)
        return memoryview(lease)

    def forget_writes(self, offset: int, nbytes: int) -> None:
        """Make this process see the peer's memory again where it wrote to a view."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = min(stop, -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        for first, last in _written(self._address + start, self._address + stop):
            first -= self._address
            self._map.madvise(mmap.MADV_DONTNEED, first, last - self._address - first)


def _written(start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges of pages, by address, that are this process's own copies.

    Where the kernel cannot tell, or there are many: all of it.
    """
    found = (ctypes.c_uint64 * (3 * _MOST_RANGES))()
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


class Returned(NamedTuple):
    """A view that has died."""

    key: Key
    mapping: Mapping
    offset: int
    nbytes: int


class Returns:
    """Where finalizers note the views that have died.

    Attributes:
        hurry: Whether some peer waits for memory, so that `wake` is called at once.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.queue: deque[Returned] = deque()
        self.hurry = False
        self.wake = wake


class _Borrowed(np.ndarray[Any, Any]):
    """A view of a peer's memory; every view of it refers to it."""

    _place: tuple[Mapping, int, int] | None = None
    _key: Key | None = None
    _returns: Returns

    def __del__(self) -> None:
        if self._key is not None and self._place is not None:
            self._returns.queue.append(Returned(self._key, *self._place))
            if self._returns.hurry:
                with contextlib.suppress(Exception):
                    self._returns.wake()


def arm(area: memoryview, returns: Returns, key: Key) -> None:
    """Have the death of the last view of a borrowed area noted."""
    lease = area.obj
    assert isinstance(lease, _Borrowed)
    lease._returns = returns
    lease._key = key


def settle(area: memoryview, pool: Pool, zero_copy: bool) -> tuple[memoryview, bool]:
    """Where to decode a message: where it is, or in a copy of the receiver's own.

    Returns:
        The area, and whether it is the publisher's memory.
    """
    nbytes = len(area)
    borrowed = type(area.obj) is _Borrowed
    if borrowed and zero_copy:
        return area, True
    if borrowed or (area.readonly and nbytes > 3 and area[3]):
        # It has buffers and lies in a batch, or it belongs to the publisher.
        own = pool.take(nbytes)
        copy(area, own)
        return own, False
    return area, False
