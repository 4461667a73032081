"""What libraries keep for a whole process: a log level, libuv's pipe, CUDA, memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Iterator
from typing import Final

import torch

from mq.errors import ForkedProcess, TransportUnavailable, first_line

_ERRORS: Final = 2  # of FLAGS_caffe2_log_level
_FATAL: Final = 3
_WORTH_BYTES: Final = 64 << 20


class LogLevel:
    """Keeps TensorPipe from writing a warning to stderr for every peer that leaves."""

    def __init__(self) -> None:
        self._before: int | None = None

    @functools.cached_property
    def _flag(self) -> ctypes.c_int | None:
        if "TORCH_CPP_LOG_LEVEL" in os.environ:  # the user has decided
            return None
        with contextlib.suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(library("libc10.so"), "FLAGS_caffe2_log_level")
        return None

    def raise_to_errors(self) -> None:
        """Write errors only, until `restore`."""
        if self._flag is not None and self._before is None:
            self._before = self._flag.value
            self._flag.value = max(self._before, _ERRORS)

    def restore(self) -> None:
        """Write again what was written before."""
        if self._flag is not None and self._before is not None:
            self._flag.value = self._before
            self._before = None

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Write nothing but what ends the process."""
        flag = self._flag
        if flag is None:
            yield
            return
        before = flag.value
        flag.value = max(before, _FATAL)
        try:
            yield
        finally:
            flag.value = before


class Heap:
    """What glibc keeps of the tensors in which TensorPipe receives.

    They come and go in many sizes and threads, so that ever more of its memory lies
    between others and is not used again: 25 MiB more a minute were measured. The kernel
    takes back the pages of what is free, which costs a page fault each when it is used
    again.

    Attributes:
        received: Bytes since it was given back.
    """

    def __init__(self) -> None:
        self.received = 0
        self._trimmed_at = time.monotonic()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone

    def trim(self, every_seconds: float) -> None:
        """Give it back, if that is due and worth while."""
        now = time.monotonic()
        if self.received >= _WORTH_BYTES and now >= self._trimmed_at + every_seconds:
            self.received = 0
            self._trimmed_at = now
            if self._trim is not None:
                self._trim(0)


def library(name: str) -> ctypes.CDLL:
    """A shared library of torch's, which is loaded already."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))


def open_libuv() -> None:
    """Have libuv make now what it keeps for the life of the process: one pipe.

    Else the first queue of a process would seem to leave two descriptors.
    """
    with contextlib.suppress(OSError, AttributeError):  # linked in another way
        uv = library("libtorch_cpu.so")
        loop = ctypes.create_string_buffer(uv.uv_loop_size())
        if uv.uv_loop_init(loop) == 0:
            uv.uv_loop_close(loop)


def init_cuda() -> None:
    """Make CUDA ready for TensorPipe's threads; only then torch counts its GPUs right.

    Before, it asks NVML, which shows others where MIG is in use.

    Raises:
        ForkedProcess: CUDA was used before this process was forked.
        TransportUnavailable: It cannot be initialised.
    """
    if torch.cuda._is_in_bad_fork():
        raise ForkedProcess(
            "CUDA was used in the process of which this one is a fork, and does not "
            "survive that; start processes with the method 'spawn' or 'forkserver'"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise TransportUnavailable(
            f"torch {torch.__version__} cannot initialise CUDA: "
            f"{first_line(error)}; use torchrpc:cpu"
        ) from error


log_level = LogLevel()
