"""Payloads that are one tensor: what comes before its bytes depends on its type alone.

So that is made, and understood, once for each dtype and shape, and then looked up: of
the time of a small tensor that is a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from mq import frames

MOST_HEADERS: Final = 256
"""How many are remembered; then all are forgotten."""
LONGEST_HEADER: Final = 128
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Make = Callable[[memoryview], Any]


class Kind(NamedTuple):
    """A type of payload that has a short way.

    Attributes:
        key: What its header depends on; None: this payload goes the long way.
        buffer: Its bytes.
        maker: Given a decoded payload, what makes another like it of its bytes, which
            are writable; None: such payloads go the long way.
    """

    key: Callable[[Any], Any]
    buffer: Callable[[Any], memoryview]
    maker: Callable[[Any], Make | None]


KINDS: Final[dict[type, Kind]] = {}
"""Known once their library is loaded."""


class _Memory(dict[_Key, _Value], Generic[_Key, _Value]):
    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= MOST_HEADERS:
            self.clear()
        super().__setitem__(key, value)


_headers: _Memory[Any, tuple[bytes, int]] = _Memory()
_makers: _Memory[bytes, tuple[Make, int, int]] = _Memory()


def encode(payload: Any) -> frames.Frames | None:
    """What `learn_header` saw of a payload like this; None: nothing."""
    kind = KINDS.get(type(payload))
    if kind is None:
        return None
    found = _headers.get(key := kind.key(payload))
    if found is None or key is None:
        return None
    header, nbytes = found
    return frames.Frames(header, (kind.buffer(payload),), nbytes, frozenset())


def learn_header(payload: Any, encoded: frames.Frames) -> None:
    """Remember how a payload was encoded, if it can be of use."""
    kind = KINDS.get(type(payload))
    if (
        kind is not None
        and len(encoded.buffers) == 1
        and not encoded.areas
        and (key := kind.key(payload)) is not None
    ):
        _headers[key] = encoded.header, encoded.nbytes


def decode(area: memoryview) -> Any:
    """The payload that `learn_maker` saw with this header; None: it saw none."""
    end = frames.header_bytes(area, LONGEST_HEADER)
    if not end or area.readonly:
        return None
    found = _makers.get(bytes(area[:end]))
    if found is None:
        return None
    make, start, nbytes = found
    return make(area[start:]) if len(area) == nbytes else None


def learn_maker(area: memoryview, payload: Any) -> None:
    """Remember what a message, which was found sound, was decoded to."""
    kind = KINDS.get(type(payload))
    end = 0 if kind is None else frames.header_bytes(area, LONGEST_HEADER)
    if kind is None or not end:
        return
    make = kind.maker(payload)
    start = frames.align(end)
    if make is not None and start < len(area):
        _makers[bytes(area[:end])] = make, start, len(area)
