"""The frames of the session protocol: their layouts, packing and checked parsing.

`docs/wire.md` describes the same for other implementations. All integers are
little-endian. A frame is one message of the link: a head, and for CHUNK a body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec

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
RELEASE: Final = 16  # reserved for links that lend memory; see docs/wire.md
BYE: Final = 17
ACCEPTS: Final = 18
WAITING: Final = 19
# In a session, not numbered.
RECEIVED: Final = 30
FENCED: Final = 31

HEADER: Final = struct.Struct("<BBHQQ")
"""kind, flags, zero, number of this frame (0: none), number received last."""
HEADER_BYTES: Final = HEADER.size
RECORD: Final = struct.Struct("<IIQd")
"""A message in a DATA frame: bytes that follow, subscription, sequence, Unix time."""
RECORD_BYTES: Final = RECORD.size
CHUNK_HEAD: Final = struct.Struct("<IIQdQQ")
"""subscription, zero, sequence, Unix time, total bytes, offset of the body."""

FLAG_ANSWER: Final = 1
"""The sender waits for this frame's RECEIVED: answer at once."""
FLAG_LAST: Final = 2
"""This CHUNK is the last of its message."""
MAX_GAP: Final = 63
"""Bytes of padding between buffers that a CHUNK may skip at most."""


Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Sequence = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
SubscriptionId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Keep = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Malformed(Exception):
    """A peer sent what the protocol does not allow; never leaves the mesh."""


class Subscribe(msgspec.Struct, array_like=True, frozen=True):
    """One subscription: `keep` is None for keep-all, else the n of keep-last.

    `messages` and `nbytes` are the first credit, absolute totals as in `Credit`. `seen`
    is the last sequence that came in an earlier session, or -1: a retained message up
    to it is not sent again.
    """

    subscription: SubscriptionId
    topic: str
    keep: Keep | None
    messages: Number
    nbytes: Number
    seen: Sequence = -1


class Subscribed(msgspec.Struct, array_like=True, frozen=True):
    """The publisher's answer: the next new message will have this sequence.

    `retained` is the sequence of the retained message that comes first, or -1.
    """

    subscription: SubscriptionId
    next_sequence: Number
    retained: Sequence


class Credit(msgspec.Struct, array_like=True, frozen=True):
    """Totals that the publisher may have sent since the subscription began."""

    subscription: SubscriptionId
    messages: Number
    nbytes: Number


_encode = msgspec.msgpack.Encoder().encode
_subscribe = msgspec.msgpack.Decoder(list[Subscribe])
_subscribed = msgspec.msgpack.Decoder(list[Subscribed])
_credit = msgspec.msgpack.Decoder(list[Credit])
_number: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(SubscriptionId)
_names = msgspec.msgpack.Decoder(list[str])
_flag = msgspec.msgpack.Decoder(bool)
_text = msgspec.msgpack.Decoder(str)

_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    SUBSCRIBE: _subscribe,
    SUBSCRIBED: _subscribed,
    UNSUBSCRIBE: _number,
    CREDIT: _credit,
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
        return _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"control frame {kind}: {error}") from error


def records(
    view: memoryview, start: int
) -> Iterator[tuple[int, int, float, memoryview]]:
    """Cut a DATA frame into messages: subscription, sequence, time, area.

    Raises:
        Malformed: A record is cut off.
    """
    unpack = RECORD.unpack_from
    end = len(view)
    while start < end:
        if end - start < RECORD_BYTES:
            raise Malformed("record header cut off")
        nbytes, subscription, sequence, published_at = unpack(view, start)
        start += RECORD_BYTES
        stop = start + nbytes
        if stop > end:
            raise Malformed("record longer than its frame")
        yield subscription, sequence, published_at, view[start:stop]
        start = stop


class Chunk(NamedTuple):
    """The head of a CHUNK frame: where its body belongs in which message."""

    subscription: int
    sequence: int
    published_at: float
    total: int
    offset: int


def parse_chunk(view: memoryview) -> Chunk:
    """Raises: Malformed, if the head is not that of a CHUNK."""
    try:
        subscription, _, sequence, published_at, total, offset = CHUNK_HEAD.unpack(
            view[HEADER_BYTES:]
        )
    except struct.error as error:
        raise Malformed("chunk head of a wrong size") from error
    return Chunk(subscription, sequence, published_at, total, offset)
