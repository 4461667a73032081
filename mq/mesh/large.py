"""Messages that travel in chunks, and whose memory they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from mq.errors import CodecError, first_line
from mq.frames import align
from mq.transport import CHUNK_BYTES

if TYPE_CHECKING:
    from mq.devices import Piece
    from mq.segments import Block

SMALL_BYTES: Final = 32 * 1024
"""Messages up to this size travel in batches; larger ones in their topics' turns."""
INLINE_BYTES: Final = 120 * 1024
"""Messages up to this size are a frame's head, within `MAX_HEAD_BYTES`; larger ones
travel in chunks, which have more to them than it takes to copy as much twice."""
MOST_CHUNKS: Final = 32
"""Chunks of a message, as far as the links carry larger ones than `CHUNK_BYTES`."""
_SLICE_ALIGNMENT: Final = 4096

Take = Callable[[int], memoryview]


class Chunk:
    """A part of a large message: small pieces, then a slice of a large one, or either.

    Attributes:
        offset: Where its first byte lies in the message's area.
        part: The small pieces and the pads between them, copied.
        view: The slice; the caller's memory until `own`. None: there is none.
        owned: Whether nobody will write to that memory while a view of it exists.
        piece: A tensor in place of the slice.
        area, start: To which of the message's areas it belongs, and where in it.
        lead: With how many bytes of no meaning the slice begins; see `Conn.lead`.
    """

    __slots__ = ("area", "lead", "offset", "owned", "part", "piece", "start", "view")

    def __init__(
        self,
        offset: int,
        part: bytes,
        view: memoryview | None,
        piece: Piece | None = None,
        area: int = 0,
        start: int = 0,
        lead: int = 0,
    ) -> None:
        self.lead = lead
        self.offset = offset
        self.part = part
        self.view = view
        self.owned = view is None
        self.piece = piece
        self.area = area
        self.start = start

    @property
    def body_nbytes(self) -> int:
        """Size of the slice, without what means nothing."""
        return 0 if self.view is None else len(self.view) - self.lead

    def offset_of(self, begin: int) -> int:
        """Where in the message's area this byte of the slice lies."""
        end = self.offset + len(self.part)
        return begin + (align(end) if self.part else end)

    def own(self, take: Take) -> None:
        """Copy the slice into memory of the pool, once for all subscribers."""
        if not self.owned:
            assert self.view is not None
            copy = take(len(self.view))
            copy[:] = self.view
            self.view = copy
            self.owned = True


class Large:
    """The chunks of a message, shared by all its subscribers.

    Its length is that of the message in bytes.

    Attributes:
        chunks: None in place of those that nobody needs any more; none at all before
            `cut_block` of a message in shared memory.
        owned: Whether nothing of it is the caller's memory.
        block: All of it in memory that some peers read in place, if it is there.
        areas: Sizes in bytes of its areas on devices.
        devices: Those devices.
        staged: All of it in host memory, where `stage` was called.
    """

    __slots__ = (
        "_chunk_bytes",
        "_nbytes",
        "areas",
        "block",
        "chunks",
        "devices",
        "owned",
        "staged",
    )

    def __init__(
        self,
        nbytes: int,
        chunks: list[Chunk | None],
        block: Block | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        areas: tuple[int, ...] = (),
        devices: frozenset[str] = frozenset(),
    ) -> None:
        self._nbytes = nbytes
        self._chunk_bytes = chunk_bytes
        self.staged: Large | None = None
        self.chunks = chunks
        self.block = block
        self.areas = areas
        self.devices = devices
        self.owned = block is not None

    def cut_block(self) -> None:
        """Cut what lies in shared memory, for those who cannot read it there."""
        if self.block is None or self.chunks:
            return
        self._cut_own(self.block.area)

    def _cut_own(self, memory: memoryview) -> None:
        """Cut memory that holds all of it."""
        chunks: list[Chunk | None] = []
        for begin, slice_ in slices(
            memory, usual_bytes(self._nbytes, self._chunk_bytes)
        ):
            chunk = Chunk(begin, b"", slice_)
            chunk.owned = True
            chunks.append(chunk)
        self.chunks = chunks  # in one step: an interrupt before it leaves none

    def must_be_staged(self, devices: Iterable[str] | None) -> bool:
        """Whether a peer gets not all of it, who gets tensors of these devices."""
        return not self.devices.issubset(devices or ())

    def stage(self, take: Take) -> None:
        """Have all of it in host memory, for those who do not get its areas otherwise.

        Copied once, and it waits for that. Every chunk must still be there.

        Raises:
            CodecError: A device has failed.
        """
        if self.staged is None:
            memory = take(self._nbytes)
            host = self._nbytes - sum(self.areas)
            begins = list(accumulate(self.areas, initial=host))
            end = 0
            for chunk in self.chunks:
                assert chunk is not None
                parts = ((chunk.offset, chunk.part), (chunk.offset_of(0), chunk.view))
                for begin, part in parts:
                    if part:
                        memory[end:begin] = bytes(begin - end)  # a pad, sent with it
                        end = begin + len(part)
                        memory[begin:end] = part
                if chunk.piece is not None:
                    begin = begins[chunk.area] + chunk.start
                    _copy(chunk.piece, memory[begin : begin + len(chunk.piece)])
            memory[end:host] = bytes(host - end)
            staged = Large(self._nbytes, [], chunk_bytes=self._chunk_bytes)
            staged._cut_own(memory)
            staged.owned = True
            self.staged = staged

    def __len__(self) -> int:
        return self._nbytes

    def own(
        self, take: Take, needed: Iterable[int], most_bytes: int | None = None
    ) -> bool:
        """Copy the chunks still needed, or about so many bytes of them.

        Returns:
            Whether that was all, so that the caller's memory is free again.
        """
        if self.owned:
            return True
        keep, copied = set(needed), 0
        for index, chunk in enumerate(self.chunks):
            if chunk is None or index not in keep:
                self.chunks[index] = None
            elif not chunk.owned:
                if most_bytes is not None and copied >= most_bytes:
                    return False
                chunk.own(take)
                copied += 0 if chunk.view is None else len(chunk.view)
        self.owned = True
        return True

    def free_before(self, index: int) -> None:
        """Every subscriber has the chunks before this one: let their memory go."""
        while index > 0 and self.chunks[index - 1] is not None:
            index -= 1
            self.chunks[index] = None


def _copy(piece: Piece, into: memoryview) -> None:
    try:
        piece.copy_to(into)
    except RuntimeError as error:
        raise CodecError(
            f"the tensors on {piece.tensor.device} cannot be copied into host memory: "
            f"{first_line(error)}"
        ) from error


def usual_bytes(nbytes: int, chunk_bytes: int, least: int = CHUNK_BYTES) -> int:
    """How large the chunks are of a message of so many bytes."""
    return min(chunk_bytes, max(least, nbytes // MOST_CHUNKS))


def slices(view: memoryview, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Parts of it that are about equal, each with its offset."""
    count = -(-len(view) // chunk_bytes)
    step = -(-len(view) // count)
    step = min(chunk_bytes, -(-step // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT)
    for begin in range(0, len(view), step):
        yield begin, view[begin : begin + step]
