"""Memory of a descriptor that stays mapped when the descriptor is closed.

`mmap.mmap` keeps a descriptor of its own for each mapping, which counts against
``ulimit -n``; only from Python 3.13 on can it be told not to. So it maps memory without
a file here, in whose place the file is then put.
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

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def map_descriptor(fd: int, nbytes: int, *, private: bool) -> mmap.mmap:
    """Map the first bytes of what a descriptor refers to, readable and writable.

    Args:
        private: Whether what is written stays in this process.

    Raises:
        OSError: It cannot be mapped.
    """
    mode = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, nbytes, flags=flags)
    start = address(memory)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _mmap(start, nbytes, protection, mode | _FIXED | _NO_RESERVE, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memory


def address(memory: mmap.mmap | memoryview) -> int:
    """Where it begins in this process."""
    start: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return start
