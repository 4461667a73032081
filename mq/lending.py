"""Shared memory of this process for messages that peers on the same host read in place.

A segment is a sealed memfd, so it has no name, leaves nothing behind, and no peer can
write to it or shrink it under a reader. It is cut into blocks of one size; a message is
one block, written once whatever the number of subscribers. A block returns when the
last view of it dies here and every peer that was told of it has released it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections import deque
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np

from mq.buffers import class_bytes
from mq.settings import memory_bytes

BLOCK_BYTES: Final = 32 * 1024
"""Smaller blocks are not made: such messages are quicker through the socket."""
MAX_SEGMENT_BYTES: Final = 64 << 20
"""Blocks share segments up to this size, so that descriptors stay few."""
MIN_SEGMENT_BYTES: Final = 2 << 20

_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, which Python has no name for yet
_ids = count(1)


class LendingStats(NamedTuple):
    """Counters of a `Lender`.

    Attributes:
        limit_bytes: How much it may take from the system.
        mapped_bytes: How much it has.
        in_use_bytes: Blocks of messages on their way, unread or viewed, and of loans.
        segments: How many memfds that is.
        waits: How many times `publish` or `loan` found no memory.
    """

    limit_bytes: int
    mapped_bytes: int
    in_use_bytes: int
    segments: int
    waits: int


class Segment:
    """A memfd and its mapping in this process.

    Attributes:
        id: Never used again by this process.
        fd: For passing on; closed when nobody refers to the segment any more.
        nbytes: Size.
        block_bytes: Size of its blocks.
        out: How many of its blocks are in use.
        retired: Whether its blocks are never used again, because a peer that was given
            up without proof of death may still read them.
    """

    __slots__ = (
        "__weakref__",
        "block_bytes",
        "fd",
        "id",
        "map",
        "nbytes",
        "out",
        "retired",
        "used_at",
    )

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self.id = next(_ids)
        self.nbytes = nbytes
        self.block_bytes = block_bytes
        self.out = 0
        self.retired = False
        self.used_at = 0.0
        self.fd = -1
        try:
            self.fd = os.memfd_create("mq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Where there is no memory this fails, in place of a SIGBUS later.
            os.posix_fallocate(self.fd, 0, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
            seal(self.fd)
        except OSError as error:
            raise MemoryError(
                f"no shared memory for messages: {nbytes} bytes: {error}; lower "
                "shm_bytes, or raise the limit that the error names"
            ) from error

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def seal(fd: int) -> None:
    """Let nobody shrink, grow or newly map for writing what is mapped here."""
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size | _FUTURE_WRITE)
    except OSError:  # a kernel before 5.1: peers are trusted not to map it writable
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class _Lease(np.ndarray[Any, Any]):
    """A block in use; every view of it refers to it."""

    _place: tuple[Segment, int] | None = None
    _returned: deque[tuple[Segment, int]]

    def __del__(self) -> None:
        if self._place is not None:
            self._returned.append(self._place)


class Block:
    """A message's place in a segment.

    Attributes:
        segment: Where it is.
        offset: Of its first byte in the segment.
        area: Its bytes, writable, format 'B'.
    """

    __slots__ = ("area", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, area: memoryview) -> None:
        self.segment = segment
        self.offset = offset
        self.area = area

    def part(self, start: int, stop: int) -> Block:
        """Bytes `start` to `stop` of it; the whole stays in use."""
        return Block(self.segment, self.offset + start, self.area[start:stop])


class Lender:
    """Segments that are used again, for any thread.

    Args:
        limit_bytes: How much memory it takes from the system at most; None: a quarter
            of what this process may use.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = memory_bytes() // 4 if limit_bytes is None else limit_bytes
        self._reset()
        _lenders.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[tuple[Segment, int]] = deque()
        self._idle: dict[int, list[tuple[Segment, int]]] = {}
        self.segments: dict[int, Segment] = {}
        self._mapped = self._in_use = self._waits = 0
        self.dropped = 0

    def fits(self, nbytes: int) -> bool:
        """Whether there can ever be a block of this size."""
        return nbytes <= self.limit_bytes

    def take(self, nbytes: int) -> Block | None:
        """A block of any content; None while there is no memory for it.

        Raises:
            MemoryError: The system refuses memory that the limit allows.
        """
        size = _block_bytes(nbytes)
        if size > self.limit_bytes >= nbytes:
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._collect()
            if not self._idle.get(size) and not self._grow(size):
                self._waits += 1
                return None
            segment, offset = self._idle[size].pop()
            segment.out += 1
            self._in_use += size
        lease = np.ndarray.__new__(_Lease, (nbytes,), np.uint8, segment.map, offset)
        lease._returned = self._returned
        lease._place = (segment, offset)
        return Block(segment, offset, memoryview(lease))

    def retire(self, segment: Segment) -> None:
        """Never use its memory again: a peer may read it who can no longer be asked."""
        with self._lock:
            self._retire(segment)

    def trim(self, older_than_seconds: float = 0.0) -> None:
        """Give segments back of which no block was in use for so long."""
        horizon = time.monotonic() - older_than_seconds
        with self._lock:
            self._collect()
            for segment in list(self.segments.values()):
                if not segment.out and segment.used_at <= horizon:
                    self._retire(segment)

    def close(self) -> None:
        """Give back all that is not in use; the rest goes with its last view."""
        with self._lock:
            self._collect()
            for segment in list(self.segments.values()):
                self._retire(segment)

    def stats(self) -> LendingStats:
        """The counters."""
        with self._lock:
            self._collect()
            return LendingStats(
                self.limit_bytes,
                self._mapped,
                self._in_use,
                len(self.segments),
                self._waits,
            )

    # -- with the lock ----------

    def _grow(self, size: int) -> bool:
        """Take a segment from the system, if need be in place of an idle one."""
        room = self.limit_bytes - self._mapped
        if room < size:
            idle = [s for s in self.segments.values() if not s.out]
            for segment in sorted(idle, key=lambda segment: segment.used_at):
                self._retire(segment)
                room = self.limit_bytes - self._mapped
                if room >= size:
                    break
            else:
                return False
        alike = sum(s.nbytes for s in self.segments.values() if s.block_bytes == size)
        wanted = max(size, min(MAX_SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, alike)), size)
        blocks = min(wanted, room) // size
        segment = Segment(blocks * size, size)
        segment.used_at = time.monotonic()
        self.segments[segment.id] = segment
        self._mapped += segment.nbytes
        places = [(segment, n * size) for n in reversed(range(blocks))]
        self._idle.setdefault(size, []).extend(places)
        return True

    def _collect(self) -> None:
        """Take in what finalizers returned."""
        if not self._returned:
            return
        now = time.monotonic()
        while self._returned:
            segment, offset = self._returned.popleft()
            segment.out -= 1
            segment.used_at = now
            self._in_use -= segment.block_bytes
            if not segment.retired:
                self._idle[segment.block_bytes].append((segment, offset))

    def _retire(self, segment: Segment) -> None:
        if segment.retired:
            return
        segment.retired = True
        size = segment.block_bytes
        self._idle[size] = [p for p in self._idle[size] if p[0] is not segment]
        del self.segments[segment.id]
        self._mapped -= segment.nbytes
        self.dropped += 1


def _block_bytes(nbytes: int) -> int:
    size = class_bytes(max(nbytes, BLOCK_BYTES))
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()


def _after_fork() -> None:
    # The memory is the parent's to write to; another thread may have held the lock.
    for lender in list(_lenders):
        lender._reset()


os.register_at_fork(after_in_child=_after_fork)
