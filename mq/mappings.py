"""Memory of a descriptor that stays mapped when the descriptor is closed.

`mmap.mmap` keeps a descriptor of its own for each mapping, which counts against
``ulimit -n``; only from Python 3.13 on can it be told not to. So it maps memory without
a file here, in whose place the file is then put: at a multiple of the size of huge
pages, without which there are none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

import numpy as np

_FIXED: Final = 0x10  # MAP_FIXED, the same on all of Linux's architectures in use
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0)
_FAILED: Final = ctypes.c_void_p(-1).value

HUGE_BYTES: Final = 2 << 20
"""Size of a huge page; where they are larger there are none of ours."""
_COLLAPSE: Final = 25  # MADV_COLLAPSE of Linux 6.1, which Python has no name for yet

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def map_descriptor(fd: int, nbytes: int, *, private: bool) -> memoryview:
    """Map the first bytes of what a descriptor refers to, readable and writable.

    Args:
        private: Whether what is written stays in this process.

    Returns:
        Format 'B'; the memory is unmapped when the last view of it dies.

    Raises:
        OSError: It cannot be mapped.
    """
    mode = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    spare = HUGE_BYTES if nbytes >= HUGE_BYTES else 0
    memory = memoryview(mmap.mmap(-1, nbytes + spare, flags=flags))
    if spare:
        first = -address(memory) % HUGE_BYTES
        memory = memory[first : first + nbytes]
    start = address(memory)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _mmap(start, nbytes, protection, mode | _FIXED | _NO_RESERVE, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memory


def reserve(fd: int, memory: memoryview) -> None:
    """Take the memory of an empty memfd from the system, in huge pages if it can be.

    They halve the time of the first copy into it, and take a quarter off each later
    one. The system has none for memfds by itself, unless its administrator says so.

    Args:
        memory: All of it, from `map_descriptor`.

    Raises:
        OSError: There is not enough.
    """
    whole = len(memory) // HUGE_BYTES * HUGE_BYTES
    for start in range(0, whole, HUGE_BYTES):
        # One page of each, for what is quite empty is not made huge.
        os.posix_fallocate(fd, start, mmap.PAGESIZE)
    if whole:
        _madvise(address(memory), whole, _COLLAPSE)
    # What that has not got, perhaps all; where there is no memory this fails, in place
    # of a SIGBUS later.
    os.posix_fallocate(fd, 0, len(memory))


def discard(start: int, stop: int) -> None:
    """Give this process's own copies of pages back, from one address to another.

    Raises:
        OSError: They are not mapped.
    """
    if _madvise(start, stop - start, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def address(memory: memoryview) -> int:
    """Where it begins in this process."""
    start: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return start
