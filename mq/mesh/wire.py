"""The frames of the session protocol: their layouts, packing and checked parsing.

`docs/wire.md` describes the same for other implementations. All integers are
little-endian. A frame is one message of the link: a head, and for CHUNK a body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from mq import extensions as ext
from mq.frames import align, align_area
from mq.log import printable
from mq.message import MOST_KEPT

MAGIC: Final = b"MQMESH"
PROTOCOL_VERSION: Final = 1

# Before a session: see mq.mesh.handshake.
HELLO: Final = 1
CHALLENGE: Final = 2
GREETING: Final = 3
WELCOME: Final = 4
REFUSED: Final = 5
# In a session, numbered, resent until received.
DATA: Final = 10
CHUNK: Final = 11
SUBSCRIBE: Final = 12
SUBSCRIBED: Final = 13
UNSUBSCRIBE: Final = 14
CREDIT: Final = 15
RELEASE: Final = 16
BYE: Final = 17
ACCEPTS: Final = 18
WAITING: Final = 19
LENT: Final = 20
PIECE: Final = 21
RECLAIM: Final = 22
RETURNED: Final = 23
# In a session, not numbered.
RECEIVED: Final = 30
FENCED: Final = 31

UNHURRIED: Final = frozenset({CREDIT, RELEASE})
"""Nobody waits for the answer to these: what follows from them carries it."""

ANSWERS: Final = frozenset({SUBSCRIBED, RETURNED, RELEASE})
"""What a peer can ask for as often as it likes."""

HEADER: Final = struct.Struct("<BBHQQ")
"""kind, flags, zero, number of this frame (0: none), number received last."""
HEADER_BYTES: Final = HEADER.size
RUN: Final = struct.Struct("<IIQ")
"""Messages of consecutive sequences in a DATA frame: subscription, how many, sequence
of the first. Their times (f64), sizes (u32) and areas follow, each kind together."""
RUN_BYTES: Final = RUN.size
ALONE: Final = struct.Struct("<IIQdI")
"""The head of a run of one message, with its time and size."""
_ONE: Final = struct.Struct("<dI")
MESSAGE_BYTES: Final = 12
"""What a message of a run takes besides its area: time and size."""
CHUNK_HEAD: Final = struct.Struct("<IIQdQQ")
"""subscription, bytes of the first part, sequence, Unix time, total bytes, offset; the
first part follows, the second is the body."""
LENT_HEAD: Final = struct.Struct("<IIQdQQ")
"""subscription, segment, sequence, Unix time, offset in the segment, bytes."""

FLAG_ANSWER: Final = 1
"""The sender waits for this frame's RECEIVED: answer at once."""
PIECE_HEAD: Final = struct.Struct("<HHIQ")
"""Follows `CHUNK_HEAD` in a PIECE: area of the body, areas of the message, zero, offset
of the body in its area; the sizes of all areas (u64), then the first part."""

FLAG_LAST: Final = 2
"""This CHUNK or PIECE is the last of its message."""
FLAG_TENSOR: Final = 4
"""The body of this PIECE is a tensor and belongs to an area."""
FLAG_FILLING: Final = 8
"""The message of this LENT may not be there yet: `mq.segments.counted_bytes`."""
MAX_SEQUENCE: Final = 2**63 - 1
MAX_GAP: Final = 63
"""Bytes of padding between buffers that a CHUNK may skip at most."""
MOST_ENTRIES: Final = 1000
"""Of the list of a control frame: they are all carried out before anything else."""


Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
SequenceNumber = Annotated[int, msgspec.Meta(ge=-1, le=MAX_SEQUENCE)]
SubscriptionId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Keep = Annotated[int, msgspec.Meta(ge=1, le=MOST_KEPT)]


class Malformed(Exception):
    """A peer sent what the protocol does not allow; never leaves the mesh."""


class Subscribe(msgspec.Struct, array_like=True, frozen=True):
    """One subscription: `keep` is None for keep-all, else the n of keep-last.

    `messages` and `nbytes` are the first credit, absolute totals as in `Credit`. `seen`
    is the last sequence that came in an earlier session, or -1: a retained message up
    to it is not sent again. `follows` says that the subscriber reads messages of
    LENT frames while they are written.
    """

    subscription: SubscriptionId
    topic: str
    keep: Keep | None
    messages: Number
    nbytes: Number
    seen: SequenceNumber = -1
    follows: bool = False


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """The publisher's answer: the next new message will have this sequence.

    `retained` is the sequence of the retained message that comes first, or -1.
    """

    subscription: SubscriptionId
    next_sequence: Number
    retained: SequenceNumber


class Subscribed(Begun, array_like=True, frozen=True):
    """The same with the size of a retained message over the subscriber's limit.

    It does not come. Where there is none the size is left out.
    """

    withheld: Number = 0


class Credit(msgspec.Struct, array_like=True, frozen=True):
    """Totals that the publisher may have sent since the subscription began."""

    subscription: SubscriptionId
    messages: Number
    nbytes: Number


class Reclaim(msgspec.Struct, array_like=True, frozen=True):
    """Totals as in `Credit` to go down to, as far as no more is used.

    In the answer those that hold from now on. `serial` tells answers apart.
    """

    subscription: SubscriptionId
    serial: Number
    messages: Number
    nbytes: Number


class Release(msgspec.Struct, array_like=True, frozen=True):
    """The subscriber has no view of this message's memory any more."""

    subscription: SubscriptionId
    sequence: Number


_encode = msgspec.msgpack.Encoder().encode
_few = msgspec.Meta(max_length=MOST_ENTRIES)
_subscribe = msgspec.msgpack.Decoder(Annotated[list[Subscribe], _few])
_subscribed = msgspec.msgpack.Decoder(Annotated[list[Subscribed], _few])
_credit = msgspec.msgpack.Decoder(Annotated[list[Credit], _few])
_reclaim = msgspec.msgpack.Decoder(Annotated[list[Reclaim], _few])
_release = msgspec.msgpack.Decoder(Annotated[list[Release], _few])
_number: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(SubscriptionId)
_names = msgspec.msgpack.Decoder(list[str])
_flag = msgspec.msgpack.Decoder(bool)
_text = msgspec.msgpack.Decoder(str)

_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    SUBSCRIBE: _subscribe,
    SUBSCRIBED: _subscribed,
    UNSUBSCRIBE: _number,
    CREDIT: _credit,
    RECLAIM: _reclaim,
    RETURNED: _reclaim,
    RELEASE: _release,
    BYE: _text,
    ACCEPTS: _names,
    WAITING: _flag,
    FENCED: _text,
}


def encode(value: object) -> bytes:
    """The body of a control frame."""
    return _encode(value)


def decode(kind: int, raw: memoryview) -> Any:
    """The content of a control frame, of the type that belongs to `kind`.

    Raises:
        Malformed: It is not of that type.
    """
    try:
        content = _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"control frame {kind}: {error}") from error
    return printable(content) if type(content) is str else content


def pack_run(
    subscription: int, first: int, times: Sequence[float], areas: Sequence[bytes]
) -> list[bytes]:
    """The pieces of a run for the head of a DATA frame."""
    count = len(areas)
    return [
        RUN.pack(subscription, count, first),
        struct.pack(f"<{count}d{count}I", *times, *map(len, areas)),
        *areas,
    ]


def runs(
    view: memoryview, start: int
) -> Iterator[tuple[int, int, tuple[float, ...], list[memoryview]]]:
    """Cut a DATA frame into runs: subscription, first sequence, times, areas.

    Raises:
        Malformed: A run is cut off.
    """
    size = len(view)
    while start < size:
        if size - start < RUN_BYTES:
            raise Malformed("head of a run cut off")
        subscription, count, first = RUN.unpack_from(view, start)
        start += RUN_BYTES
        if not 0 < count <= (size - start) // MESSAGE_BYTES:
            raise Malformed(f"run of {count} messages in {size - start} bytes")
        if first + count > MAX_SEQUENCE:
            raise Malformed(f"run from sequence {first}")
        if count == 1:  # a message that somebody waits for
            published_at, nbytes = _ONE.unpack_from(view, start)
            start += MESSAGE_BYTES + nbytes
            if start > size:
                raise Malformed("run longer than its frame")
            area = view[start - nbytes : start]
            yield subscription, first, (published_at,), [area]
            continue
        numbers = struct.unpack_from(f"<{count}d{count}I", view, start)
        start += count * MESSAGE_BYTES
        ends = list(accumulate(numbers[count:], initial=start))
        start = ends[-1]
        if start > size:
            raise Malformed("run longer than its frame")
        areas = [view[a:b] for a, b in pairwise(ends)]
        yield subscription, first, numbers[:count], areas


class Chunk(NamedTuple):
    """The head of a CHUNK frame: where its two parts belong in which message."""

    subscription: int
    sequence: int
    published_at: float
    total: int
    offset: int
    part: memoryview

    def body_place(self, nbytes: int) -> slice:
        """Where a body of `nbytes` belongs: aligned, where a first part precedes it."""
        start = self.offset + len(self.part)
        if self.part and nbytes:
            start = align(start)
        return slice(start, start + nbytes)


def parse_chunk(view: memoryview) -> Chunk:
    """Raises: Malformed, if the head is not that of a CHUNK."""
    return _chunk(view, HEADER_BYTES + CHUNK_HEAD.size)


def _chunk(view: memoryview, start: int) -> Chunk:
    try:
        subscription, size, sequence, published_at, total, offset = (
            CHUNK_HEAD.unpack_from(view, HEADER_BYTES)
        )
    except struct.error as error:
        raise Malformed("head of a chunk cut off") from error
    if sequence > MAX_SEQUENCE:
        raise Malformed(f"chunk of sequence {sequence}")
    part = view[start:]
    if len(part) != size:
        raise Malformed(f"a first part of {len(part)} bytes in place of {size}")
    return Chunk(subscription, sequence, published_at, total, offset, part)


class Piece(NamedTuple):
    """The head of a PIECE frame: a chunk of a message that has areas on devices.

    Attributes:
        chunk: Where its first part belongs, and the body where that is no tensor.
        area: To which area a tensor belongs.
        start: Where in it.
        sizes: Of all areas, in bytes.
    """

    chunk: Chunk
    area: int
    start: int
    sizes: tuple[int, ...]


def pack_piece(area: int, start: int, sizes: Sequence[int]) -> bytes:
    """What follows `CHUNK_HEAD` in a PIECE, before the first part."""
    count = len(sizes)
    return PIECE_HEAD.pack(area, count, 0, start) + struct.pack(f"<{count}Q", *sizes)


def parse_piece(view: memoryview) -> Piece:
    """Raises: Malformed, if the head is not that of a PIECE."""
    place = HEADER_BYTES + CHUNK_HEAD.size
    try:
        area, count, _, start = PIECE_HEAD.unpack_from(view, place)
        place += PIECE_HEAD.size
        sizes = struct.unpack_from(f"<{count}Q", view, place)
    except struct.error as error:
        raise Malformed("head of a piece cut off") from error
    chunk = _chunk(view, place + 8 * count)
    if not 0 < count <= ext.MAX_AREAS or area >= count:
        raise Malformed(f"area {area} of {count}")
    host = chunk.total - sum(sizes)
    if (
        host <= 0
        or align(host) != host
        or any(n < 1 or align_area(n) != n for n in sizes)
    ):
        raise Malformed(f"areas of {sizes} bytes in a message of {chunk.total}")
    return Piece(chunk, area, start, sizes)


class Lent(NamedTuple):
    """The head of a LENT frame: where in the sender's memory a message is."""

    subscription: int
    segment: int
    sequence: int
    published_at: float
    offset: int
    nbytes: int


def parse_lent(view: memoryview) -> Lent:
    """Raises: Malformed, if the frame is not a LENT."""
    if len(view) != HEADER_BYTES + LENT_HEAD.size:
        raise Malformed(f"a reference of {len(view) - HEADER_BYTES} bytes")
    lent = Lent(*LENT_HEAD.unpack_from(view, HEADER_BYTES))
    if lent.sequence > MAX_SEQUENCE:
        raise Malformed(f"reference to sequence {lent.sequence}")
    return lent
