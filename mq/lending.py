"""Shared memory of this process for messages that peers on the same host read in place.

A segment (`mq.segments`) is cut into blocks of one size; a message is one block,
written once whatever the number of subscribers. A block returns when the last view of
it dies here and every peer that was told of it has released it.

Its end is noted by a weak reference whose callback is one call into C: a finalizer in
Python could be interrupted by a signal, and the block would be lost. What is in use is
read off one dictionary and never counted beside it, for the same reason.

The system may take seconds to give a segment, so nobody waits for that but who needs
it. The segment counts from before it is asked for, so that the limit is kept.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mq import forks, speed
from mq.buffers import class_bytes
from mq.descriptors import most_open
from mq.log import Log, WarnOnce
from mq.segments import COUNTER_BYTES, Block, Segment, counted_bytes, seal
from mq.settings import memory_bytes
from mq.stats import LendingStats

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


Place = tuple[Segment, int]
"""A block: its segment and its offset there."""
Taken = tuple[Segment, int, memoryview]
"""A block in use, and its bytes."""


class _Lease(np.ndarray[Any, Any]):
    """A block in use; every view of it refers to it."""


class _Out(weakref.ref[_Lease]):
    """Tells when a lease has died, and what it was of."""

    __slots__ = ("place",)
    place: Place


class _Growth:
    """A call that takes memory from the system.

    Attributes:
        thread: Its thread.
        segment: What it takes, once that is counted.
    """

    __slots__ = ("segment", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.segment: Segment | None = None


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
        freed: Called without any lock when memory is there, or is not to come, that
            was still being taken when another thread found none.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = memory_bytes() // 4 if limit_bytes is None else limit_bytes
        self.waits = 0
        self.full = False
        self.refusal = ""
        self.freed: Callable[[], None] = lambda: None
        self._warn = WarnOnce(logger)
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
        self._growing: set[_Growth] = set()
        self._wanted = False

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
        size = self._size(whole)
        with self._lock:
            self._collect()
            taken = self._find(size, whole)
        if taken is None and grow:
            taken = self._grow(size, whole)
        if taken is None:
            self._complain(whole)
            return None
        segment, offset, area = taken
        if not counted:
            return Block(segment, offset, area)
        counter = area[-COUNTER_BYTES:]
        counter[:] = bytes(COUNTER_BYTES)
        return Block(segment, offset, area[:nbytes], counter)

    def block_bytes(self, nbytes: int, counted: bool) -> int:
        """The size of the blocks that `take` makes for such a message."""
        whole = counted_bytes(nbytes)
        return self._size(whole if counted and self.fits(whole) else nbytes)

    def retire(self, segment: Segment) -> None:
        """Never use its memory again: a peer may read it who can no longer be asked."""
        with self._lock:
            self._retire(segment)

    def trim(self, older_than_seconds: float = 0.0) -> None:
        """Give segments back of which no block was in use for so long."""
        with self._lock:
            self._collect()
            horizon = time.monotonic() - older_than_seconds
            for segment in self._unused():
                if segment.used_at <= horizon:
                    self._retire(segment)

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
        # Another thread may have held the lock. What this one is taking, if a signal's
        # handler has forked, is let go of where that goes on.
        own = {g.segment for g in self._growing if g.thread == threading.get_ident()}
        for segment in self._all() - own:
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

    # -- without the lock ----------

    def _grow(self, size: int, nbytes: int) -> Taken | None:
        """A block of a new segment."""
        growth = _Growth()
        try:
            try:
                return self._take_new(growth, size, nbytes)
            finally:
                self._growing.discard(growth)
        finally:
            self._growing.discard(growth)  # a Ctrl-C came before the first did so
            if self._wanted and growth.segment is not None:
                self._wanted = False
                self.freed()

    def _take_new(self, growth: _Growth, size: int, nbytes: int) -> Taken | None:
        """The same; where the system refuses, of a small one or one for unused ones."""
        smallest = False
        while True:
            with self._lock:
                self._collect()
                found = self._find(size, nbytes)  # it has just come back
                segment = None if found else self._reserve(growth, size, smallest)
            if segment is None:
                return found
            try:
                segment.open()
            except OSError as error:
                self._growing.discard(growth)
                with self._lock:
                    if segment.nbytes == size and not self._make_room(growth, error):
                        return None
                smallest = True
            else:
                with self._lock:
                    return self._add(growth, segment, nbytes)

    def _complain(self, nbytes: int) -> None:
        """A handler of the log may publish, too."""
        if self.refusal:
            self._warn(
                "refused",
                "no shared memory for a message of %d bytes: %s; such messages wait "
                "for others to be read, or go through the socket. Raise the limit that "
                "the error names, or lower shm_bytes",
                nbytes,
                self.refusal,
            )

    # -- with the lock ----------

    def _all(self) -> set[Segment]:
        """Those of which a block can be used or is, retired ones too, or will be."""
        lent = (segment for segment, _ in self._out)
        growing = (growth.segment for growth in tuple(self._growing))
        return {*self.segments.values(), *lent, *filter(None, growing)}

    def _unused(self) -> list[Segment]:
        """Those of which no block is in use, the one unused for longest first."""
        used = {segment for segment, _ in self._out}
        unused = [s for s in self.segments.values() if s not in used]
        return sorted(unused, key=lambda segment: segment.used_at)

    def _find(self, size: int, nbytes: int) -> Taken | None:
        """A free block, the last of the idle ones of its size."""
        places = self._idle.get(size)
        while places:
            if places[-1] not in self._out:
                return self._lease(places[-1], nbytes)
            places.pop()
        return None

    def _lease(self, place: Place, nbytes: int) -> Taken:
        """Take the last idle block of its size."""
        segment, offset = place
        lease = np.ndarray.__new__(_Lease, (nbytes,), np.uint8, segment.map, offset)
        out = _Out(lease, self._ended.append)
        out.place = place
        self._out[place] = out
        self._idle[segment.block_bytes].pop()
        return segment, offset, lease.data

    def _reserve(self, growth: _Growth, size: int, smallest: bool) -> Segment | None:
        """A segment to be taken, if need be in place of unused ones."""
        self.full = True
        if self._growing:
            self._wanted = True  # before it is seen that they leave no room
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
        blocks = 1 if smallest else max(1, wanted // size)
        growth.segment = Segment(blocks * size, size)
        self._growing.add(growth)
        return growth.segment

    def _make_room(self, growth: _Growth, error: OSError) -> bool:
        """Retire a segment, where the system refuses a small one; else say so."""
        unused = self._unused()
        if unused:
            self._retire(unused[0])
            return True
        if self.refusal:
            growth.segment = None  # or two that wait would tell each other for ever
        self.refusal = str(error)
        self.full = error.errno not in (errno.EMFILE, errno.ENFILE)
        return False

    def _add(self, growth: _Growth, segment: Segment, nbytes: int) -> Taken | None:
        """A block of a segment that is there, unless it has come too late."""
        if self._closed or growth not in self._growing:
            return None  # in a forked child it is the parent's, who has yet to seal it
        seal(segment.fd)
        self.refusal = ""
        size = segment.block_bytes
        self.segments[segment.id] = segment
        places = self._idle.setdefault(size, [])
        places += [(segment, at) for at in range(segment.nbytes - size, -1, -size)]
        return self._lease(places[-1], nbytes)

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
