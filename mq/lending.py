"""Shared memory of this process for messages that peers on the same host read in place.

A segment (`mq.segments`) is cut into blocks of one size; a message is one block,
written once whatever the number of subscribers. A block returns when the last view of
it dies here and every peer that was told of it has released it.

Its end is noted by a weak reference whose callback is one call into C: a finalizer in
Python could be interrupted by a signal, and the block would be lost. What is in use is
read off one dictionary and never counted beside it, for the same reason.
"""

from __future__ import annotations

import errno
import mmap
import time
import weakref
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np

from mq import forks, speed
from mq.buffers import class_bytes
from mq.descriptors import most_open
from mq.log import Log
from mq.segments import COUNTER_BYTES, Segment, counted_bytes
from mq.settings import memory_bytes

logger = Log(__name__)

BLOCK_BYTES: Final = 32 * 1024
"""Smaller blocks are not made: such messages are quicker through the socket."""
MAX_SEGMENT_BYTES: Final = 64 << 20
"""Blocks share segments up to this size, so that descriptors stay few."""
MIN_SEGMENT_BYTES: Final = 2 << 20
MOST_SEGMENTS: Final = 1024
"""Of one member; and never more than a quarter of its descriptors."""
_SHARE: Final = 16
"""One segment has at most this part of the memory, unless one block needs more: a view
that is kept for long keeps its whole segment from blocks of other sizes."""


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


Place = tuple[Segment, int]
"""A block: its segment and its offset there."""


class _Lease(np.ndarray[Any, Any]):
    """A block in use; every view of it refers to it."""


class _Out(weakref.ref[_Lease]):
    """Tells when a lease has died, and what it was of."""

    __slots__ = ("place",)
    place: Place


class Block:
    """A message's place in a segment.

    Attributes:
        segment: Where it is.
        offset: Of its first byte in the segment.
        area: Its bytes, writable, format 'B'.
        counter: Where it says how many of them are there, if it is told of before.
    """

    __slots__ = ("area", "counter", "offset", "segment")

    def __init__(
        self,
        segment: Segment,
        offset: int,
        area: memoryview,
        counter: memoryview | None = None,
    ) -> None:
        self.segment = segment
        self.offset = offset
        self.area = area
        self.counter = counter

    def fill(self, pieces: list[tuple[int, memoryview]]) -> None:
        """Write what others read behind it, if it has a counter; again is harmless.

        Args:
            pieces: And where each begins, in order.
        """
        if self.counter is not None:
            speed.fill(pieces, self.area, self.counter)

    def part(self, start: int, stop: int) -> Block:
        """Bytes `start` to `stop` of it; the whole stays in use."""
        return Block(self.segment, self.offset + start, self.area[start:stop])


class Lender:
    """Segments that are used again, for any thread.

    Args:
        limit_bytes: How much memory it takes from the system at most; None: a quarter
            of what this process may use.

    Attributes:
        segments: Those in use, by id. A retired one is none of them: its blocks are
            never used again.
        dropped: How many were retired.
        waits: How many times `publish` or `loan` found no memory.
        full: Whether the last block that was not there will be when others return.
            Otherwise it is descriptors that are short, and not memory.
        refusal: Why the system gave no memory, if it did not the last time.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = memory_bytes() // 4 if limit_bytes is None else limit_bytes
        self.waits = 0
        self.full = False
        self.refusal = ""
        self._complained = False
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # Handlers of signals wait for it: they may come to the same place.
        self._lock = speed.Lock()
        self._closed = False
        self.segments: dict[int, Segment] = {}
        self.dropped = 0
        # What is in `_out` is in use. Whatever else `_idle` has, perhaps twice after
        # an interrupt, is free.
        self._idle: dict[int, list[Place]] = {}
        self._out: dict[Place, _Out] = {}
        self._ended: deque[_Out] = deque()

    def fits(self, nbytes: int) -> bool:
        """Whether there can ever be a block of this size."""
        return self._size(nbytes) <= self.limit_bytes and not self._closed

    def _size(self, nbytes: int) -> int:
        size = _block_bytes(nbytes)
        return size if size <= self.limit_bytes else _pages(nbytes)

    def take(
        self, nbytes: int, counted: bool = False, grow: bool = True
    ) -> Block | None:
        """A block of any content; None while there is no memory for it.

        Args:
            counted: With a counter behind it, which is zero, unless that is what does
                not fit.
            grow: Whether memory may be taken from the system.
        """
        counted = counted and self.fits(counted_bytes(nbytes))
        whole = counted_bytes(nbytes) if counted else nbytes
        if not self.fits(whole):
            return None
        with self._lock:
            self._collect()
            place = self._find(self._size(whole), grow)
            if place is not None:
                segment, offset = place
                area = (whole,), np.uint8, segment.map, offset
                lease = np.ndarray.__new__(_Lease, *area)
                out = _Out(lease, self._ended.append)
                out.place = place
                self._out[place] = out
                self._idle[segment.block_bytes].pop()
        if place is None:
            self._complain(whole)
            return None
        if not counted:
            return Block(segment, offset, lease.data)
        counter = lease.data[-COUNTER_BYTES:]
        counter[:] = bytes(COUNTER_BYTES)
        return Block(segment, offset, lease.data[:nbytes], counter)

    def block_bytes(self, nbytes: int, counted: bool) -> int:
        """The size of the blocks that `take` makes for such a message."""
        whole = counted_bytes(nbytes)
        return self._size(whole if counted and self.fits(whole) else nbytes)

    def retire(self, segment: Segment) -> None:
        """Never use its memory again: a peer may read it who can no longer be asked."""
        with self._lock:
            self._retire(segment)

    def trim(self, older_than_seconds: float = 0.0) -> None:
        """Give segments back of which no block was in use for so long.

        Not while another thread takes memory from the system: that may take seconds,
        and who calls this has to show the peers that this member lives.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._collect()
            horizon = time.monotonic() - older_than_seconds
            for segment in self._unused():
                if segment.used_at <= horizon:
                    self._retire(segment)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give back all that is not in use; the rest goes with its last view."""
        with self._lock:
            self._closed = True
            for segment in list(self.segments.values()):
                self._retire(segment)
            self._idle.clear()
            self._out.clear()
            self._ended.clear()

    def abandon(self) -> None:
        """In a forked child: the memory is the parent's to write to."""
        # Another thread may have held the lock.
        for segment in self._all():
            segment.close()
        self._reset()

    def stats(self) -> LendingStats:
        """The counters."""
        with self._lock:
            self._collect()
            segments = self._all()
            return LendingStats(
                self.limit_bytes,
                sum(segment.nbytes for segment in segments),
                sum(segment.block_bytes for segment, _ in self._out),
                len(segments),
                self.waits,
            )

    # -- with the lock ----------

    def _all(self) -> set[Segment]:
        """Those of which a block can be used or is, retired ones too."""
        return {*self.segments.values(), *(segment for segment, _ in self._out)}

    def _unused(self) -> list[Segment]:
        """Those of which no block is in use, the one unused for longest first."""
        used = {segment for segment, _ in self._out}
        unused = [s for s in self.segments.values() if s not in used]
        return sorted(unused, key=lambda segment: segment.used_at)

    def _find(self, size: int, grow: bool) -> Place | None:
        """A free block, the last of the idle ones of its size."""
        while True:
            places = self._idle.get(size) or (self._grow(size) if grow else None)
            if not places:
                return None
            if places[-1] not in self._out:
                return places[-1]
            places.pop()

    def _grow(self, size: int) -> list[Place] | None:
        """Take a segment from the system, if need be in place of unused ones."""
        self.full = True
        unused, segments = self._unused(), self._all()
        count, most = len(segments), most_open(MOST_SEGMENTS)
        mapped = sum(segment.nbytes for segment in segments)
        if mapped - sum(s.nbytes for s in unused) + size > self.limit_bytes:
            return None  # it would be in vain
        while unused and (mapped + size > self.limit_bytes or count >= most):
            mapped -= unused[0].nbytes
            count -= 1
            self._retire(unused.pop(0))
        if count >= most:
            self.full = False
            return None
        alike = sum(s.nbytes for s in self.segments.values() if s.block_bytes == size)
        share = min(MAX_SEGMENT_BYTES, self.limit_bytes // _SHARE)
        wanted = min(max(MIN_SEGMENT_BYTES, alike), share, self.limit_bytes - mapped)
        segment = self._allocate(max(1, wanted // size), size, unused)
        if segment is None:
            return None
        self.segments[segment.id] = segment
        places = self._idle.setdefault(size, [])
        places += [(segment, at) for at in range(segment.nbytes - size, -1, -size)]
        return places

    def _allocate(
        self, blocks: int, size: int, unused: list[Segment]
    ) -> Segment | None:
        """A segment; where the system refuses, a small one or one for unused ones."""
        try:
            segment = Segment(blocks * size, size)
            self.refusal = ""
            return segment
        except OSError as error:
            if blocks == 1 and not unused:
                self.refusal = str(error)
                self.full = error.errno not in (errno.EMFILE, errno.ENFILE)
                return None
        if blocks == 1:
            self._retire(unused.pop(0))
        return self._allocate(1, size, unused)

    def _complain(self, nbytes: int) -> None:
        """Without the lock: a handler of the log may publish, too."""
        if self.refusal and not self._complained:
            self._complained = True
            logger.warning(
                "no shared memory for a message of %d bytes: %s; such messages wait "
                "for others to be read, or go through the socket. Raise the limit that "
                "the error names, or lower shm_bytes",
                nbytes,
                self.refusal,
            )

    def _collect(self) -> None:
        """Take in what has died."""
        now = time.monotonic()
        while self._ended:
            out = self._ended[0]
            place = getattr(out, "place", None)  # none after an interrupt in `take`
            if place is not None and self._out.get(place) is out:
                segment = place[0]
                segment.used_at = now
                if segment.id in self.segments:
                    self._idle[segment.block_bytes].append(place)
                del self._out[place]
            self._ended.popleft()

    def _retire(self, segment: Segment) -> None:
        places = self._idle.get(segment.block_bytes, [])
        self._idle[segment.block_bytes] = [p for p in places if p[0] is not segment]
        if self.segments.pop(segment.id, None) is not None:
            self.dropped += 1


def _block_bytes(nbytes: int) -> int:
    return _pages(class_bytes(max(nbytes, BLOCK_BYTES)))


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
