"""Shared memory in pieces that a process takes from the system and passes to peers.

A segment is a sealed memfd, so it has no name, leaves nothing behind, and no peer can
write to it or shrink it under a reader.
"""

from __future__ import annotations

import fcntl
import os
import time
from itertools import count
from typing import Final

from mq import speed
from mq.mappings import map_descriptor, reserve

COUNTER_BYTES: Final = 8
"""Of an unsigned integer in the order of the machine."""

_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, which Python has no name for yet
_ids = count(1)


class Segment:
    """A memfd and its mapping in this process, once it is opened.

    Attributes:
        id: Never used again by this process.
        fd: For passing on; closed when nobody refers to the segment any more.
        map: All of it.
        nbytes: Size.
        block_bytes: Size of its blocks.
        used_at: When a block of it was last in use, by the monotonic clock.
    """

    __slots__ = ("__weakref__", "block_bytes", "fd", "id", "map", "nbytes", "used_at")

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self.fd = -1
        self.id = next(_ids)
        self.nbytes = nbytes
        self.block_bytes = block_bytes
        self.used_at = time.monotonic()

    def open(self) -> None:
        """Take it from the system, which may take seconds; it is to be sealed then.

        Raises:
            OSError: The system has no such memory.
        """
        self.fd = os.memfd_create("mq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        self.map = map_descriptor(self.fd, self.nbytes, private=False)
        reserve(self.fd, self.map)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as it is mapped."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


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


def seal(fd: int) -> None:
    """Let nobody shrink, grow or newly map for writing what is mapped here."""
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size | _FUTURE_WRITE)
    except OSError:  # a kernel before 5.1: peers are trusted not to map it writable
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def counted_bytes(nbytes: int) -> int:
    """What a block takes whose counter lies behind it, on a cache line of its own."""
    return -(-nbytes // 64) * 64 + COUNTER_BYTES
