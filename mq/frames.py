"""An encoded message in pieces, and the one contiguous area that it is at a receiver.

The layout of the area is specified in ``docs/wire.md``, section *Payload*: a header
(prefix, table of buffer sizes, skeleton), then the raw buffers, each at a multiple of
`ALIGNMENT` bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mq import extensions as ext
from mq.errors import CodecError

if TYPE_CHECKING:
    from mq.devices import Area, Landing

ALIGNMENT: Final = 64
"""Every buffer starts at a multiple of this many bytes from the start of the area."""

ARRAY_ALIGNMENT: Final = 16
"""Torch reads complex numbers by so many aligned bytes, or ends the process."""

PLAIN: Final[bytes] = b"MQ\x01\x00"
"""Prefix of a message without buffers and without extension types."""

TABLED: Final[bytes] = b"MQ\x01\x01"
"""Prefix of a message with a table of buffers, which may be empty."""

SPREAD: Final[bytes] = b"MQ\x01\x02"
"""Prefix of a tabled message whose last buffers may be on devices: its areas."""

MAX_SKELETON_BYTES: Final = 2**32 - 1
"""The largest skeleton of a tabled message."""

_PADS: Final = tuple(bytes(n) for n in range(ALIGNMENT))
_TABLE = struct.Struct("<4sII")  # prefix, bytes of skeleton, number of buffers
_NONE = bytes(4)  # that many buffers
_AREAS = struct.Struct("<I")  # how many of these are areas, in a spread message


class Frames(NamedTuple):
    """An encoded message: what `publish` hands out, once for all subscribers.

    Attributes:
        header: Prefix, table and skeleton.
        buffers: 1-D, format 'B', contiguous; views of the caller's memory.
        nbytes: Size of the area in bytes.
        needs: What a receiver must accept to decode it: names of registered types, and
            "pickle". Empty for payloads of ordinary data.
        areas: The buffers after `buffers`, each the tensors that stay on one device:
            the end of the message is theirs, without pads.
    """

    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int
    needs: frozenset[str]
    areas: tuple[Area, ...] = ()

    def segments(self) -> list[tuple[int, memoryview]]:
        """What is in host memory, in order, each with its offset; without the pads."""
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

    def packed(self) -> Frames:
        """The same message without areas, in one piece: its header, with pads of zero.

        Without a copy where there are no buffers.
        """
        if not self.buffers:
            return self
        return Frames(self.pack(), (), self.nbytes, self.needs)

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


def align_area(offset: int) -> int:
    """The next offset in an area at which a tensor may start, or the area end."""
    return -(-offset // ext.AREA_ALIGNMENT) * ext.AREA_ALIGNMENT


class Spread:
    """A message that has arrived, part of it in host memory, the rest on devices.

    Its length is that of the whole message in bytes.

    Attributes:
        host: What comes before the areas.
        areas: The last buffers.
    """

    __slots__ = ("_nbytes", "areas", "host")

    def __init__(self, host: memoryview, areas: tuple[Landing, ...]) -> None:
        self.host = host
        self.areas = areas
        self._nbytes = len(host) + sum(map(len, areas))

    def __len__(self) -> int:
        return self._nbytes


def assemble(
    skeleton: bytes,
    buffers: tuple[memoryview, ...],
    needs: frozenset[str],
    areas: tuple[Area, ...] = (),
) -> Frames:
    """The tabled or spread message of a skeleton and the buffers it refers to.

    Raises:
        CodecError: The skeleton is larger than `MAX_SKELETON_BYTES`.
    """
    if len(skeleton) > MAX_SKELETON_BYTES:
        raise CodecError(
            f"a payload's values outside of its arrays take {len(skeleton)} bytes, the "
            f"limit is {MAX_SKELETON_BYTES}; send large data as arrays or bytes"
        )
    sizes = [buffer.nbytes for buffer in buffers] + [area.nbytes for area in areas]
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    if areas:
        table = _AREAS.pack(len(areas)) + table
    prefix = SPREAD if areas else TABLED
    header = _TABLE.pack(prefix, len(skeleton), len(sizes)) + table + skeleton
    end = len(header)
    for size in sizes:
        end = align(end) + size
    return Frames(header, buffers, end, needs, areas)


def has_buffers(area: memoryview) -> bool:
    """Whether a message may have any; else it can be anywhere in memory."""
    return len(area) > 3 and area[3] != PLAIN[3] and area[8:12] != _NONE


def header_bytes(area: memoryview, most: int) -> int:
    """Size of the header of a tabled message that has buffers; 0: it is larger."""
    if area.nbytes < _TABLE.size:
        return 0
    prefix, skeleton_bytes, count = _TABLE.unpack_from(area)
    end: int = _TABLE.size + 8 * count + skeleton_bytes
    return end if prefix == TABLED and count and end <= most else 0


def split(
    area: memoryview, apart: Sequence[Landing] = ()
) -> tuple[memoryview, list[memoryview], list[memoryview | Landing]]:
    """Cut a message into its skeleton, its buffers, and those of them that are areas.

    Nothing of it is trusted, and no memory is taken but for the views.

    Args:
        area: 1-D, format 'B', contiguous: the message, or what is before its areas.
        apart: Its areas, where they are not in `area`.

    Raises:
        CodecError: It is no message of this version, or its sizes do not add up.
    """
    prefix = area[:4]
    if prefix == PLAIN and not apart:
        return area[4:], [], []
    if prefix not in (TABLED, SPREAD):
        raise CodecError(_foreign(bytes(prefix)))
    spread = prefix == SPREAD
    start = _TABLE.size + (_AREAS.size if spread else 0)
    if area.nbytes < start:
        raise CodecError(f"a message of {area.nbytes} bytes is shorter than its header")
    _, skeleton_bytes, count = _TABLE.unpack_from(area)
    of_areas = _AREAS.unpack_from(area, _TABLE.size)[0] if spread else 0
    table, start = start, start + 8 * count
    end = start + skeleton_bytes
    if end > area.nbytes:
        raise CodecError(
            f"a message of {area.nbytes} bytes announces a header of {end} bytes"
        )
    if of_areas > min(count, ext.MAX_AREAS) or spread > of_areas:
        raise CodecError(f"{of_areas} of {count} buffers of a message are areas")
    skeleton = area[start:end]
    sizes = list(struct.unpack_from(f"<{count}Q", area, table))
    if apart:
        there = list(map(len, apart))
        if sizes[count - of_areas :] != there:
            raise CodecError(f"a message came with areas of {there} bytes")
        sizes = sizes[: count - of_areas]
    buffers: list[memoryview] = []
    for size in sizes:
        first = align(end)
        end = first + size
        if end > area.nbytes:
            raise CodecError(
                f"buffer {len(buffers)} of {count} ends at byte {end} of a message of "
                f"{area.nbytes} bytes"
            )
        buffers.append(area[first:end])
    if apart:
        end = align(end)
    if end != area.nbytes:
        raise CodecError(f"a message of {area.nbytes} bytes ends at byte {end}")
    if apart:
        return skeleton, buffers, list(apart)
    first_area = len(buffers) - of_areas
    return skeleton, buffers[:first_area], list(buffers[first_area:])


def _foreign(prefix: bytes) -> str:
    if prefix[:2] != PLAIN[:2]:
        return f"not a message of mq: it begins with {prefix.hex(' ') or 'nothing'}"
    return (
        f"message format {prefix[2:].hex('.')} is unknown to this member, which reads "
        "01.00 to 01.02; run the same version of tensormq everywhere"
    )
