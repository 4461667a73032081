"""A large message on its way in: the chunks of it that have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mq.buffers import copy, keep
from mq.frames import ARRAY_ALIGNMENT, Spread
from mq.mappings import address
from mq.mesh import wire
from mq.mesh.large import Take
from mq.mesh.wire import Chunk, Malformed

if TYPE_CHECKING:
    from mq.devices import Landing, Piece


class Stream:
    """Where the chunks of a message go.

    Args:
        chunk: Its first one.
        sizes: Of its areas on devices, in bytes.
        take: Gives host memory for the rest.
    """

    __slots__ = ("_host", "_landed", "_placed", "_sizes", "sequence")

    def __init__(self, chunk: Chunk, sizes: tuple[int, ...], take: Take) -> None:
        self.sequence = chunk.sequence
        self._sizes = sizes
        self._host = take(chunk.total - sum(sizes))
        # Where the newest chunk that is in its place begins and ends.
        self._placed = (0, 0)
        # One fact, so that an interrupt cannot leave half of it: the areas that have
        # begun, how much of the last one is there, and where its last piece began.
        self._landed: tuple[list[Landing], int, int] = ([], 0, -1)

    def place(
        self, chunk: Chunk, nbytes: int, sizes: tuple[int, ...]
    ) -> memoryview | None:
        """Put a chunk's first part in its place; where the body of `nbytes` goes.

        None if it is there already.

        Raises:
            Malformed: It does not fit to those before it.
        """
        if sizes != self._sizes or chunk.total != len(self._host) + sum(sizes):
            raise Malformed("message changes its size")
        if not nbytes and not chunk.part:
            return self._host[:0]
        place = chunk.body_place(nbytes)
        if (chunk.offset, place.stop) == self._placed:
            return None  # its frame was not handled to the end, and came again
        next_offset = self._placed[1]
        if (
            not next_offset <= chunk.offset <= next_offset + wire.MAX_GAP
            or place.stop > len(self._host)
        ):
            raise Malformed("chunk out of place")
        part = chunk.part
        end = chunk.offset + len(part)
        self._skip(next_offset, chunk.offset)
        self._host[chunk.offset : end] = part
        self._skip(end, place.start)
        return self._host[place]

    def _skip(self, start: int, stop: int) -> None:
        """Nothing comes for these bytes, which hold what was in that memory before.

        They need not be a pad: who sends says in the message itself what is.
        """
        if start < stop:
            self._host[start:stop] = bytes(stop - start)

    def land(self, place: wire.Piece, piece: Piece) -> None:
        """Put a tensor in its place.

        Raises:
            Malformed: It does not fit to those before it, or finds no room there.
            MemoryError: It found none to arrive.
        """
        landings, filled, last = self._landed
        area = len(landings) - 1
        if (place.area, place.start, len(piece)) == (area, last, filled - last):
            return  # its frame was not handled to the end, and came again
        if not landings or filled == self._sizes[area]:
            area, filled = area + 1, 0
            landings = [*landings, piece.begin(self._sizes[min(area, place.area)])]
        if (place.area, place.start) != (area, filled):
            raise Malformed(f"piece of area {place.area} out of place")
        filled += len(piece)
        if filled > self._sizes[area]:
            raise Malformed(f"piece beyond the end of area {area}")
        try:
            landings[-1].add(place.start, piece)
        except ValueError as error:
            raise Malformed(str(error)) from error
        self._landed = (landings, filled, place.start)

    def placed(self, chunk: Chunk, nbytes: int, last: bool) -> None:
        """The body of a chunk is in its place.

        Raises:
            Malformed: It is the last one, and something is missing.
        """
        start, stop = self._placed
        if nbytes or chunk.part:
            start, stop = chunk.offset, chunk.body_place(nbytes).stop
        if not last:
            self._placed = (start, stop)
        elif (
            stop + wire.MAX_GAP < len(self._host)
            or len(self._landed[0]) < len(self._sizes)
            or self._landed[1] < sum(self._sizes[-1:])
        ):
            raise Malformed("message ends early")
        else:
            self._skip(stop, len(self._host))

    def content(self) -> memoryview | Spread:
        """All of it."""
        if self._sizes:
            return Spread(self._host, tuple(self._landed[0]))
        return self._host


def kept(body: memoryview, take: Take, nbytes: int) -> memoryview:
    """A message where it arrived, or a copy where its arrays would not be aligned."""
    if not address(body) % ARRAY_ALIGNMENT:
        return keep(body)
    area = take(nbytes)
    copy(body, area)
    return area
