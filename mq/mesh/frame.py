"""A frame that a session keeps until the peer has received it."""

from __future__ import annotations

from typing import Final

from mq.mesh import wire
from mq.mesh.feed import Feed
from mq.mesh.large import Large
from mq.mesh.outgoing import Outgoing
from mq.speed import know_frames

CHUNKS_PER_ANSWER: Final = 4


class Frame:
    """A numbered frame that the peer has not received yet.

    Attributes:
        parts: What follows the header in the head.
        completes: Subscriptions, and the last message of each that the frame completes.
        large, chunk: A large message, and the index of its chunk in the frame.
        part: Where in the chunk's body that of the frame begins and ends; None: all.
        turn_nbytes: Size of a message that had its topic's turn, though it has no body.
    """

    __slots__ = (
        "chunk",
        "completes",
        "flags",
        "kind",
        "large",
        "number",
        "part",
        "parts",
        "sent_before",
        "turn_nbytes",
    )

    def __init__(
        self,
        kind: int,
        number: int,
        parts: list[bytes],
        flags: int = 0,
        completes: list[tuple[Feed, int]] | None = None,
        large: Large | None = None,
        chunk: int = 0,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.kind = kind
        self.number = number
        self.parts = parts
        self.flags = flags
        self.completes = completes
        self.large = large
        self.chunk = chunk
        self.part = part
        self.sent_before = False
        self.turn_nbytes = 0

    @property
    def is_batch(self) -> bool:
        """Whether it has small messages, the next of which wait for its answer."""
        return self.kind == wire.DATA and not self.turn_nbytes

    @property
    def body_nbytes(self) -> int:
        """Size of the body in host memory, or of what is none; 0: there is neither."""
        if self.large is None or self.kind == wire.LENT:
            return self.turn_nbytes
        if self.part is not None:
            begin, end = self.part
            return end - begin
        chunk = self.large.chunks[self.chunk]
        return 0 if chunk is None or chunk.view is None else len(chunk.view)

    @property
    def served_nbytes(self) -> int:
        """How much it brings of a message that takes turns, wherever that is."""
        if self.large is None:
            return self.turn_nbytes
        if self.kind == wire.LENT:
            return len(self.large)
        chunk = self.large.chunks[self.chunk]
        piece = 0 if chunk is None or chunk.piece is None else len(chunk.piece)
        return len(self.parts[-1]) + self.body_nbytes + piece


def chunk_frame(
    number: int,
    feed: Feed,
    message: Outgoing,
    large: Large,
    index: int,
    part: tuple[int, int],
    ahead: bool,
) -> Frame:
    """The frame of a chunk of a large message, or of a part of its body.

    Args:
        part: Where in the body that begins and ends.
        ahead: Whether so much is under way that the peer must answer.
    """
    chunk = large.chunks[index]
    assert chunk is not None
    begin, end = part
    ends = end == chunk.body_nbytes
    last = ends and index + 1 == len(large.chunks)
    small = b"" if begin else chunk.part
    head = wire.CHUNK_HEAD.pack(
        feed.subscription,
        len(small),
        message.sequence,
        message.published_at,
        len(large),
        chunk.offset_of(begin) if begin else chunk.offset,
    )
    parts = [head, small]
    if large.areas:
        parts.insert(1, wire.pack_piece(chunk.area, chunk.start, large.areas))
    flags = wire.FLAG_LAST if last else 0
    if chunk.piece is not None:
        flags |= wire.FLAG_TENSOR
    if last or ahead or (index + 1) % CHUNKS_PER_ANSWER == 0:
        flags |= wire.FLAG_ANSWER
    return Frame(
        wire.PIECE if large.areas else wire.CHUNK,
        number,
        parts,
        flags,
        [(feed, message.sequence)] if last else None,
        large,
        index,
        part if begin or not ends else None,
    )


def unlent(frame: Frame) -> list[Frame]:
    """What a frame becomes for a peer that cannot read the sender's memory.

    Of a LENT frame that is its message in chunks, and then the frame without it: who
    has a message releases it again, unless what was lent had come and is still viewed.
    """
    large = frame.large
    if frame.kind != wire.LENT or large is None:
        return [frame]
    assert frame.completes is not None
    feed, sequence = frame.completes[0]
    published_at = wire.Lent(*wire.LENT_HEAD.unpack(frame.parts[0])).published_at
    message = Outgoing(published_at, large, sequence)
    large.cut_block()
    frames: list[Frame] = []
    for index, chunk in enumerate(large.chunks):
        assert chunk is not None
        part = 0, chunk.body_nbytes
        number = frame.number + index
        frames.append(chunk_frame(number, feed, message, large, index, part, False))
    return [*frames, Frame(wire.LENT, number + 1, frame.parts)]


know_frames(Frame)
