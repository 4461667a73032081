"""How messages are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mq.buffers import copy
from mq.frames import ALIGNMENT
from mq.mesh.large import Chunk, Large, Take, slices, usual_bytes
from mq.transport import CHUNK_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.transport import Link

GATHER_BYTES: Final = 64 * 1024
"""Pieces below this size travel in heads of chunks, up to as many bytes together."""
JOINED_BYTES: Final = 128 * 1024
"""Chunks below this size that follow each other are copied together: one more of them
takes longer than that."""
MOST_JOINED_BYTES: Final = 12 << 20
"""Of messages up to this size: it is copied at once, while others wait for the lock."""

_Pieces = list[tuple[int, memoryview]]
"""Of an area, in order, each with its offset."""


class Cutting(NamedTuple):
    """How messages are cut, so that every link carries what comes out.

    Attributes:
        chunk_bytes: What the links carry. Only messages of many times that size are cut
            so coarsely: several chunks must be under way for the copies at both ends to
            overlap, and another topic's message waits for one of them.
        least_chunk_bytes: The size of the chunks of smaller messages.
        piece_bytes: The size of tensors, all but the last of an area.
        mixes: Whether no message may be one body, whatever its connection says.
    """

    chunk_bytes: int
    least_chunk_bytes: int = CHUNK_BYTES
    piece_bytes: int = PIECE_BYTES
    mixes: bool = False

    @classmethod
    def of(cls, links: Sequence[Link]) -> Cutting:
        """What suits all of these links."""
        chunk_bytes = min(link.chunk_bytes for link in links)
        return cls(
            chunk_bytes,
            min(chunk_bytes, *(link.least_chunk_bytes for link in links)),
            min(link.piece_bytes for link in links),
            any(link.mixes for link in links),
        )


def whole(frames: Frames, take: Take, lead: int = 0) -> Large:
    """An area as one chunk, in memory of the pool.

    It costs one frame, and its receiver may keep it in the memory in which it arrives,
    as nothing has to be put together there.

    Args:
        lead: Of the links that carry it; see `Conn.lead`.
    """
    skipped = -lead % ALIGNMENT
    memory = take(skipped + lead + frames.nbytes)[skipped:]
    memory[:lead] = bytes(lead)
    _fill(memory[lead:], frames.segments())
    chunk = Chunk(0, b"", memory, lead=lead)
    chunk.owned = True
    large = Large(frames.nbytes, [chunk])
    large.owned = True
    return large


def cut(
    frames: Frames, cutting: Cutting, most: int = 0, take: Take | None = None
) -> Large:
    """Cut an area into chunks: slices of its large pieces, small ones with the next.

    Args:
        most: As large as this they do no harm; see `Conn.whole_bytes`.
        take: Gives memory for chunks that are copied together, as long as there is
            some; None: none are.
    """
    least = max(cutting.least_chunk_bytes, min(cutting.chunk_bytes, most))
    chunk_bytes = usual_bytes(frames.nbytes, cutting.chunk_bytes, least)
    chunks: list[Chunk | None] = []
    plan, rest = _planned(frames.segments(), chunk_bytes)
    if rest and not frames.areas:
        plan.append(_Planned(rest, None))
    for planned in plan if take is None else _joined(plan, chunk_bytes, take):
        if isinstance(planned, Chunk):
            chunks.append(planned)
        else:
            chunks.append(Chunk(planned.begin, _part(planned.small), planned.slice))
    if not frames.areas:
        return Large(frames.nbytes, chunks)
    part, offset = _part(rest), rest[0][0] if rest else 0
    for index, area in enumerate(frames.areas):
        start = 0
        for piece in area.pieces(cutting.piece_bytes):
            if not part:
                offset = frames.nbytes
            chunks.append(Chunk(offset, part, None, piece, index, start))
            start += len(piece)
            part = b""
    return Large(
        frames.nbytes,
        chunks,
        chunk_bytes=chunk_bytes,
        areas=tuple(area.nbytes for area in frames.areas),
        devices=frozenset(area.device for area in frames.areas),
    )


class _Planned(NamedTuple):
    """What goes into a chunk: small pieces, then a slice of a large one, or either."""

    small: _Pieces
    slice: memoryview | None
    start: int = 0

    @property
    def pieces(self) -> _Pieces:
        """All of them."""
        if self.slice is None:
            return self.small
        return [*self.small, (self.start, self.slice)]

    @property
    def begin(self) -> int:
        """Where in the area the first of them lies."""
        return self.small[0][0] if self.small else self.start

    @property
    def end(self) -> int:
        """Where the last one ends."""
        start, last = self.pieces[-1]
        return start + len(last)


def _planned(segments: _Pieces, chunk_bytes: int) -> tuple[list[_Planned], _Pieces]:
    """What goes into each chunk; and small pieces that are left over."""
    gathered = min(GATHER_BYTES, chunk_bytes)
    plan: list[_Planned] = []
    small: _Pieces = []
    for start, view in segments:
        if len(view) < gathered:
            if small and start + len(view) - small[0][0] > gathered:
                plan.append(_Planned(small, None))
                small = []
            small.append((start, view))
            continue
        for begin, slice_ in slices(view, chunk_bytes):
            plan.append(_Planned(small, slice_, start + begin))
            small = []
    return plan, small


def _joined(
    plan: list[_Planned], chunk_bytes: int, take: Take
) -> Iterator[_Planned | Chunk]:
    """Chunks in order, those copied together that had better be one."""
    joined: list[_Planned] = []
    for planned in plan:
        if joined and not (
            joined[-1].end - joined[-1].begin < JOINED_BYTES
            and planned.end - planned.begin < JOINED_BYTES
            and planned.end - joined[0].begin <= chunk_bytes
        ):
            yield from _copied(joined, take)
            joined = []
        joined.append(planned)
    yield from _copied(joined, take)


def _part(pieces: _Pieces) -> bytes:
    """Small pieces and the pads between them, copied."""
    part = bytearray()
    for start, piece in pieces:
        part += bytes(start - pieces[0][0] - len(part))
        part += piece
    return bytes(part)


def _copied(joined: list[_Planned], take: Take) -> Sequence[_Planned | Chunk]:
    """Several chunks as one, in memory of the pool, if there is any."""
    if len(joined) < 2:
        return joined
    offset = joined[0].begin
    try:
        memory = take(joined[-1].end - offset)
    except MemoryError:
        return joined  # each leaves from where it lies
    _fill(memory, [piece for planned in joined for piece in planned.pieces], offset)
    chunk = Chunk(offset, b"", memory)
    chunk.owned = True
    return [chunk]


def _fill(area: memoryview, pieces: _Pieces, offset: int = 0) -> None:
    """Copy pieces to their places; pads are zeros, as what was there may be secret."""
    end = 0
    for begin, piece in pieces:
        start = begin - offset
        area[end:start] = bytes(start - end)
        end = start + len(piece)
        copy(piece, area[start:end], len(area))
    area[end:] = bytes(len(area) - end)
