"""An encoded message in pieces, and the one contiguous area that it is at a receiver.

The layout of the area is specified in ``docs/wire.md``, section *Payload*: a header
(prefix, table of buffer sizes, skeleton), then the raw buffers, each at a multiple of
`ALIGNMENT` bytes.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from mq.errors import CodecError

ALIGNMENT: Final = 64
"""Every buffer starts at a multiple of this many bytes from the start of the area."""

PLAIN: Final[bytes] = b"MQ\x01\x00"
"""Prefix of a message without buffers and without extension types."""

TABLED: Final[bytes] = b"MQ\x01\x01"
"""Prefix of a message with a table of buffers, which may be empty."""

MAX_SKELETON_BYTES: Final = 2**32 - 1
"""The largest skeleton of a tabled message."""

_PADS: Final = tuple(bytes(n) for n in range(ALIGNMENT))
_TABLE = struct.Struct("<4sII")  # prefix, bytes of skeleton, number of buffers


class Frames(NamedTuple):
    """An encoded message: what `publish` hands out, once for all subscribers.

    Attributes:
        header: Prefix, table and skeleton.
        buffers: 1-D, format 'B', contiguous; views of the caller's memory.
        nbytes: Size of the area in bytes.
        needs: What a receiver must accept to decode it: names of registered types, and
            "pickle". Empty for payloads of ordinary data.
    """

    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int
    needs: frozenset[str]

    def segments(self) -> list[tuple[int, memoryview]]:
        """The pieces in order, each with its offset in the area; pads are left out."""
        pieces = [(0, memoryview(self.header))]
        end = len(self.header)
        for buffer in self.buffers:
            start = align(end)
            end = start + buffer.nbytes
            if buffer.nbytes:
                pieces.append((start, buffer))
        return pieces

    def pack_into(self, area: memoryview) -> None:
        """Lay the message out; pads keep what they held.

        Args:
            area: Writable, format 'B', at least `nbytes` bytes.

        Raises:
            ValueError: `area` is too small.
        """
        if area.nbytes < self.nbytes:
            raise ValueError(
                f"a message of {self.nbytes} bytes does not fit into {area.nbytes}"
            )
        for start, piece in self.segments():
            area[start : start + piece.nbytes] = piece

    def pack(self) -> bytes:
        """The area as bytes, pads zero; without a copy where there are no buffers."""
        if not self.buffers:
            return self.header
        pieces: list[bytes | memoryview] = [self.header]
        end = len(self.header)
        for buffer in self.buffers:
            pieces += (_PADS[-end % ALIGNMENT], buffer)
            end = align(end) + buffer.nbytes
        return b"".join(pieces)


def align(offset: int) -> int:
    """The next offset at which a buffer may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def assemble(
    skeleton: bytes, buffers: tuple[memoryview, ...], needs: frozenset[str]
) -> Frames:
    """The tabled message of a skeleton and the buffers it refers to.

    Raises:
        CodecError: The skeleton is larger than `MAX_SKELETON_BYTES`.
    """
    if len(skeleton) > MAX_SKELETON_BYTES:
        raise CodecError(
            f"a payload's values outside of its arrays take {len(skeleton)} bytes, the "
            f"limit is {MAX_SKELETON_BYTES}; send large data as arrays or bytes"
        )
    sizes = [buffer.nbytes for buffer in buffers]
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    header = _TABLE.pack(TABLED, len(skeleton), len(sizes)) + table + skeleton
    end = len(header)
    for size in sizes:
        end = align(end) + size
    return Frames(header, buffers, end, needs)


def split(area: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Cut an area into its skeleton and its buffers.

    Nothing of it is trusted, and no memory is taken but for the views.

    Args:
        area: 1-D, format 'B', contiguous.

    Raises:
        CodecError: It is no area of this version, or its sizes do not add up.
    """
    prefix = area[:4]
    if prefix == PLAIN:
        return area[4:], []
    if prefix != TABLED:
        raise CodecError(_foreign(bytes(prefix)))
    if area.nbytes < _TABLE.size:
        raise CodecError(f"a message of {area.nbytes} bytes is shorter than its header")
    _, skeleton_bytes, count = _TABLE.unpack_from(area)
    start = _TABLE.size + 8 * count
    end = start + skeleton_bytes
    if end > area.nbytes:
        raise CodecError(
            f"a message of {area.nbytes} bytes announces a header of {end} bytes"
        )
    skeleton = area[start:end]
    buffers: list[memoryview] = []
    for size in struct.unpack_from(f"<{count}Q", area, _TABLE.size):
        first = align(end)
        end = first + size
        if end > area.nbytes:
            raise CodecError(
                f"buffer {len(buffers)} of {count} ends at byte {end} of a message of "
                f"{area.nbytes} bytes"
            )
        buffers.append(area[first:end])
    if end != area.nbytes:
        raise CodecError(f"a message of {area.nbytes} bytes ends at byte {end}")
    return skeleton, buffers


def _foreign(prefix: bytes) -> str:
    if prefix[:2] != PLAIN[:2]:
        return f"not a message of mq: it begins with {prefix.hex(' ') or 'nothing'}"
    return (
        f"message format {prefix[2:].hex('.')} is unknown to this member, which reads "
        "01.00 and 01.01; run the same version of tensormq everywhere"
    )
