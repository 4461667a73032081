"""NNG's asynchronous operations, told to a poller.

An operation of NNG ends in one of its threads, by a callback. Here that is libc's
`fflush`, of a pipe's stream that holds one byte: no Python runs in that thread, and the
pipe tells the poller.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from typing import Any

from pynng import ffi, lib

from mq import forks
from transports._nng_pair import check

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fdopen.restype = ctypes.c_void_p
for _function in (_libc.fflush, _libc.fclose):
    _function.argtypes = [ctypes.c_void_p]
_libc.fputc.argtypes = [ctypes.c_int, ctypes.c_void_p]
_flush = ffi.cast(
    "void (*)(void *)", ctypes.cast(_libc.fflush, ctypes.c_void_p).value or 0
)


class Operation:
    """One of NNG's asynchronous operations, repeated; `fd` is readable when it ended.

    Attributes:
        running: Whether it was begun and not yet taken note of.
    """

    def __init__(self) -> None:
        self.fd = self._writer = -1
        self._file = None
        forks.register(self)
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC)
        self._file = _libc.fdopen(self._writer, b"w")
        self._aio = ffi.new("nng_aio **")
        self._iov = ffi.new("nng_iov *")
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self.running = False
        check(lib.nng_aio_alloc(self._aio, _flush, ffi.cast("void *", self._file)))

    def begin(
        self, start: Callable[[Any], object], pointer: Any = None, nbytes: int = 0
    ) -> None:
        """Start it, over this memory."""
        if pointer is not None:
            self._iov.iov_buf, self._iov.iov_len = pointer, nbytes
            check(lib.nng_aio_set_iov(self._aio[0], 1, self._iov))
        _libc.fputc(120, self._file)
        self.running = True
        start(self._aio[0])

    def has_ended(self) -> bool:
        """Whether it was begun and has ended; `fd` stays readable until `finish`."""
        if not self.running or not self._poller.poll(0):
            return False
        lib.nng_aio_wait(self._aio[0])  # for the callback, which has flushed already
        return True

    def wait(self) -> None:
        """Wait for its end, which somebody has caused."""
        lib.nng_aio_wait(self._aio[0])

    def finish(self) -> int:
        """Take note that it has ended; NNG's error code."""
        os.read(self.fd, 1)
        self.running = False
        return self.code()

    def code(self) -> int:
        """NNG's error code of what has ended."""
        return int(lib.nng_aio_result(self._aio[0]))

    def count(self) -> int:
        """How many bytes it has moved."""
        return int(lib.nng_aio_count(self._aio[0]))

    def output(self) -> Any:
        """The stream that it has made."""
        return ffi.cast("nng_stream *", lib.nng_aio_get_output(self._aio[0], 0))

    def close(self) -> None:
        """End it and free everything; idempotent."""
        if self._file:
            lib.nng_aio_stop(self._aio[0])
            lib.nng_aio_free(self._aio[0])
            # It holds nothing any more, so a child that is forked now may exit with it.
            file, self._file = self._file, None
            _libc.fclose(file)
            fd, self.fd = self.fd, -1
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child, whose exit flushes what is the parent's to flush."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self._file:
            self._file = None
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._writer, inheritable=False)
            os.close(null)
