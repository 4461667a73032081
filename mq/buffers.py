"""Memory for messages, used again: new pages are several times slower than warm ones.

A buffer returns to its pool when the last view of it dies: in any thread, at any
moment, even inside `Pool.take`. All that happens then is one call into C, which appends
to a deque: a finalizer in Python, and those of some engines, would run handlers of
signals and swallow what they raise, a Ctrl-C of the application's.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mq import speed

REGION_BYTES: Final = 128 * 1024
"""Buffers of this many bytes and more are mapped and pooled; others are allocated."""

_STEPS = 8  # size classes in each power of two: rounding up wastes 12.5 % at most
_ADVICE: Final = getattr(mmap, "MADV_HUGEPAGE", None)


def copy(source: memoryview, target: memoryview, whole: int = 0) -> None:
    """Copy bytes; other threads run meanwhile where there are many.

    Args:
        source, target: Contiguous, of the same number of bytes, format 'B'.
        whole: How many bytes are copied in all, where these are a part.
    """
    nbytes = len(source)
    if nbytes < REGION_BYTES:
        target[:] = source
    else:
        # Neither is in the cache any more when all of it has been copied.
        past_cache = 2 * max(nbytes, whole) > cache_bytes()
        speed.copy(source, target, past_cache)


@functools.cache
def cache_bytes() -> int:
    """Size of the largest cache of a processor core, as Linux tells it; else 32 MiB.

    What sysconf tells may be the sum of all such caches of the machine.
    """
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    with contextlib.suppress(OSError, ValueError):  # such as that there are none
        return max(int(file.read_text().removesuffix("K\n")) << 10 for file in files)
    return 32 << 20


class PoolStats(NamedTuple):
    """Counters of a pool; "in use" and "idle" are of now, the others since the start.

    Attributes:
        in_use: Regions of which views live.
        in_use_bytes: Their size in bytes.
        idle: Regions that wait to be used again.
        idle_bytes: Their size in bytes.
        hits: How many times `take` used an idle region.
        misses: How many times `take` had to map a new one.
        returned: Regions that came back.
        small: How many times `take` was asked for less than `REGION_BYTES`.
    """

    in_use: int
    in_use_bytes: int
    idle: int
    idle_bytes: int
    hits: int
    misses: int
    returned: int
    small: int


class _Lease(np.ndarray[Any, Any]):
    """Memory in use; a class of its own, as NumPy lets views skip plain arrays."""


class _Ending(weakref.ref[_Lease]):
    """Notes the end of a lease; keeps its memory until somebody has seen that."""

    __slots__ = ("memory",)

    memory: Any


class _Leases:
    """Memory of which views live."""

    def __init__(self) -> None:
        self._ended: deque[_Ending] = deque()
        self._all: dict[int, _Ending] = {}

    def lease(self, memory: mmap.mmap | memoryview, nbytes: int) -> memoryview:
        """The first bytes of it, writable."""
        lease = np.ndarray.__new__(_Lease, (nbytes,), np.uint8, memory)
        ending = _Ending(lease, self._ended.append)
        ending.memory = memory
        self._all[id(ending)] = ending
        view: memoryview = lease.data
        return view

    def ended(self) -> list[Any]:
        """The memory of which the last view has died since the last call."""
        found = []
        with contextlib.suppress(IndexError):  # no more, or another thread was faster
            while True:
                ending = self._ended.popleft()
                # None: a handler raised in the middle of `lease`.
                if self._all.pop(id(ending), None) is not None:
                    found.append(ending.memory)
        return found

    def sizes(self) -> list[int]:
        """The bytes of each memory of which a view lives."""
        return [len(ending.memory) for ending in list(self._all.values())]


class Pool:
    """Buffers that are used again, for any thread.

    A forked child starts with an empty pool; buffers that it inherited stay valid.

    Args:
        limit_bytes: How much idle memory is kept. It is enforced by the next `take`,
            `trim` or `stats` after a buffer returns.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._hits = self._misses = self._back = self._small = 0
        self._closed = False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = speed.Lock()  # no handler of a signal, which may close, runs in it
        self._clear()

    def _clear(self) -> None:
        self._leases = _Leases()
        # By size, the newest last; and the moment of each one's return.
        self._idle: dict[int, list[tuple[float, mmap.mmap]]] = {}
        self._idle_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """A writable buffer of any content.

        Returns:
            1-D, format 'B', of exactly `nbytes` bytes, aligned to `ALIGNMENT`.

        Raises:
            MemoryError: The system has no such memory.
        """
        if nbytes < REGION_BYTES:
            self._small += 1  # a count lost to a race does not matter
            return speed.take_aligned(nbytes)
        size = class_bytes(nbytes)
        with self._lock:
            self._collect()
            region = self._pop(size)
            # Once it is closed nobody looks for what has ended.
            leases = _Leases() if self._closed else self._leases
        # What waited for the lock's end may raise here, so nothing is counted yet.
        return leases.lease(_map_region(size) if region is None else region, nbytes)

    def trim(self, older_than_seconds: float = 0.0) -> None:
        """Give idle memory back to the system, where it is idle for so long."""
        _engines.ended()
        horizon = time.monotonic() - older_than_seconds
        with self._lock:
            self._collect()
            freed = [
                (size, entry)
                for size, entries in self._idle.items()
                for entry in entries
                if entry[0] <= horizon
            ]
            for size, entry in freed:
                self._drop(size, entry)

    def close(self) -> None:
        """Keep nothing from now on: what is in use goes with its last view."""
        global _engines
        # With nothing compiled the thread that has the lock may be in the middle of the
        # handler that waits for this; then it is all kept as long as the pool itself.
        if self._lock.acquire(timeout=1.0):
            try:
                self._closed = True
                self._clear()
            finally:
                self._lock.release()
        if not all(pool._closed for pool in list(_pools)):
            _engines.ended()
        else:
            # Nobody would ever look again. That it may swallow an interrupt, should one
            # come just as such memory goes, is less bad than to keep it for ever.
            _engines = _Leases()

    def stats(self) -> PoolStats:
        """The counters."""
        with self._lock:
            self._collect()
            in_use = self._leases.sizes()
            return PoolStats(
                in_use=len(in_use),
                in_use_bytes=sum(in_use),
                idle=sum(map(len, self._idle.values())),
                idle_bytes=self._idle_bytes,
                hits=self._hits,
                misses=self._misses,
                returned=self._back,
                small=self._small,
            )

    def _pop(self, size: int) -> mmap.mmap | None:
        entries = self._idle.get(size)
        if not entries:
            self._misses += 1
            return None
        self._hits += 1
        self._idle_bytes -= size
        return entries.pop()[1]

    def _collect(self) -> None:
        """Take in what has come back; needs the lock."""
        now = time.monotonic()
        for region in self._leases.ended():
            size = len(region)
            self._back += 1
            if size <= self._limit:
                self._idle.setdefault(size, []).append((now, region))
                self._idle_bytes += size
        while self._idle_bytes > self._limit:
            size = min(
                (size for size, entries in self._idle.items() if entries),
                key=lambda size: self._idle[size][0][0],
            )
            self._drop(size, self._idle[size][0])

    def _drop(self, size: int, entry: tuple[float, mmap.mmap]) -> None:
        # The mapping ends with its last reference: close() would refuse if, against all
        # rules, somebody still had a view.
        self._idle[size].remove(entry)
        self._idle_bytes -= size


def class_bytes(nbytes: int) -> int:
    """The size of the regions that serve buffers of `nbytes` bytes."""
    step = max(1 << (nbytes.bit_length() - 1), REGION_BYTES) // _STEPS
    return -(-nbytes // step) * step


def _map_region(size: int) -> mmap.mmap:
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for a message buffer of {size} bytes: {error}; lower "
            "max_message_bytes or window_bytes, or publish smaller parts"
        ) from error
    if _ADVICE is not None:
        try:
            region.madvise(_ADVICE)
        except OSError:  # a kernel without huge pages
            pass
    return region


def keep(memory: memoryview) -> memoryview:
    """Memory of an engine's, to hand out; it goes back when the next is kept.

    Or by the next `trim` of a pool, but not in the middle of the application's work.
    """
    _engines.ended()
    return _engines.lease(memory, len(memory))


_engines = _Leases()
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    global _engines
    _engines = _Leases()
    # Another thread may have held a lock, or been in the middle of a list.
    for pool in list(_pools):
        pool._reset()


os.register_at_fork(after_in_child=_after_fork)
