"""Plain messages: payloads that msgpack holds as they are, such as a small dict.

`mq.codec.Codec` takes every payload; this is the short way of those that come by the
hundred thousand. The compiled twins of `encode_plain` and `decode_run` are in
``_speed.c``; `mq.speed` chooses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from mq import extensions as ext
from mq import frames, packing
from mq.errors import CodecError
from mq.message import Message
from mq.unpacking import MALFORMED, check_depth

MOST_LEVELS: Final = 16
"""Of lists and dicts in one another; `mq.packing` takes deeper ones."""
_NBYTES: Final = len(frames.PLAIN)
_PREFIX: Final = list(frames.PLAIN)
_STRIDE: Final = _NBYTES + 1
_ARRAY32: Final = struct.Struct(">BI")
_encode = packing.encode
_leaves_only = packing.LEAVES.issuperset
_new_message = tuple.__new__


def _refuse_extension(code: int, body: memoryview) -> Any:
    raise CodecError(f"a plain message has extension type {code}")


_decode: Final = msgspec.msgpack.Decoder(ext_hook=_refuse_extension).decode


def encode_plain(payload: Any) -> bytes | None:
    """The whole area of plain data, if there is little of it; None: another payload.

    It takes one call of msgspec.
    """
    if _holds_plain(payload, 0, [ext.LARGE]):
        try:
            header = frames.PLAIN + _encode(payload)
        except (OverflowError, UnicodeEncodeError):
            return None
        if len(header) < ext.LARGE:
            return header
    return None


def _holds_plain(value: Any, levels: int, room: list[int]) -> bool:
    """Whether msgpack has the types of all that is in it.

    Args:
        levels: Of lists and dicts around it.
        room: How many elements there may be still: each takes a byte at least.
    """
    kind = type(value)
    if kind is dict:
        if not _leaves_only(map(type, value)):
            return False
        inner = value.values()
    elif kind is list:
        inner = value
    else:
        return kind in packing.LEAVES or kind is bytes
    room[0] -= len(inner)
    if levels >= MOST_LEVELS or room[0] < 0:
        return False
    if _leaves_only(map(type, inner)):  # most are
        return True
    return all(_holds_plain(item, levels + 1, room) for item in inner)


def is_plain(area: memoryview) -> bool:
    """Whether a message says that it is one."""
    return area[:_NBYTES] == frames.PLAIN


def decode_plain(area: memoryview) -> Any:
    """The value of a plain message.

    Raises:
        CodecError, RecursionError, ValueError: It is malformed.
    """
    value = _decode(area[_NBYTES:])
    if area.nbytes > ext.MAX_DEPTH:  # a level takes a byte at least
        _check(value)
    return value


def _check(value: Any) -> None:
    # Most messages are one dict of plain values.
    if not (type(value) is dict and _leaves_only(map(type, value.values()))):
        check_depth(value)


def _decode_together(areas: Sequence[memoryview]) -> list[Any] | None:
    """The values of plain messages, by one call for all; None: that cannot be done.

    The prefix is four small integers in msgpack, so areas one after the other are the
    elements of an array, which takes half the time of a call for each. A peer could cut
    them elsewhere than before a prefix, or write its 1 as true: no member does, and it
    could as well have sent the values that come of it.

    Raises:
        CodecError, RecursionError, ValueError: As for one of them.
    """
    count = len(areas)
    values = _decode(b"".join([_ARRAY32.pack(0xDD, _STRIDE * count), *areas]))
    payloads: list[Any] = values[_NBYTES::_STRIDE]
    del values[_NBYTES::_STRIDE]
    if values != _PREFIX * count:
        return None
    if max(map(len, areas)) > ext.MAX_DEPTH:
        for payload in payloads:
            _check(payload)
    return payloads


def decode_several(areas: Sequence[memoryview]) -> list[Any]:
    """The values of the plain messages that come first.

    The first message that is another, or malformed, ends it: `Codec.decode` tells what
    is the matter.
    """
    decoded: list[Any] = []
    if len(areas) > 1 and is_plain(areas[0]):
        try:
            together = _decode_together(areas)
        except (RecursionError, *MALFORMED):
            together = None  # one of them is to blame
        if together is not None:
            return together
    try:
        for area in areas:
            if not is_plain(area):
                break
            decoded.append(decode_plain(area))
    except (RecursionError, *MALFORMED):
        pass
    return decoded


DecodeRun = Callable[
    [type[Message], str, str, str, int, tuple[float, ...], list[memoryview]],
    list[Message],
]
"""As `decode_run`."""


def decode_run(
    kind: type[Message],
    topic: str,
    sender: str,
    incarnation: str,
    first: int,
    times: tuple[float, ...],
    areas: list[memoryview],
) -> list[Message]:
    """The plain messages that come first in a run, as `recv` returns them.

    The compiled twin may return fewer of them, but not none.

    Args:
        first: Sequence of the first.
        times: When they were published.
    """
    # Half the time of Message(...), which parses its arguments in Python.
    return [
        _new_message(
            kind,
            (topic, payload, sender, sequence, incarnation, published_at, len(area)),
        )
        for sequence, payload, published_at, area in zip(
            range(first, first + len(areas)),
            decode_several(areas),
            times,
            areas,
            strict=False,
        )
    ]
