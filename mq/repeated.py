"""Payloads that repeat: one tensor, or a dict of tensors, as the one before.

What is in a message before the tensors' bytes depends on their names, dtypes and shapes
alone. So it is made, and understood, once, and then looked up: of the time of a small
tensor that is a tenth, and more of a small batch's. Among other values that holds of
each tensor's description. Here NumPy's arrays are tensors, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from mq import frames

MOST_HEADERS: Final = 256
"""How many are remembered; then all are forgotten."""
LONGEST_HEADER: Final = 4096
LONGEST_DESCRIPTION: Final = 64
"""Bytes of a dtype and shape on the wire, to be remembered."""
MOST_TENSORS: Final = 16
"""In a dict; of more the look takes longer than it saves."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Make = Callable[[memoryview, bool], Any]
"""Makes a tensor of its bytes, which are writable; an array is read-only if it must."""
BytesOf = Callable[[Any], memoryview]
"""As `Kind.buffer`."""
Packed = bytes | tuple[bytes, tuple[memoryview, ...], int, frozenset[str]]
"""The area of a small message; of another, as one that needs anything of a receiver,
what `Frames` begins with."""


class Kind(NamedTuple):
    """A type of tensor.

    Attributes:
        key: What a description of it depends on; None: it is not sent as it lies there.
        buffer: Its bytes.
        maker: What makes another like it of its bytes; None: that takes more.
    """

    key: Callable[[Any], Any]
    buffer: BytesOf
    maker: Callable[[Any], Make | None]


KINDS: Final[dict[type, Kind]] = {}
"""Known once their library is loaded."""


class Memory(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dict that forgets everything when there is too much in it."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= MOST_HEADERS:
            self.clear()
        super().__setitem__(key, value)


class Descriptions:
    """What stood for tensors of a type in skeletons: dtype and shape.

    Attributes:
        read: By a description, how many bytes such a tensor has, and what makes it.
    """

    def __init__(self) -> None:
        self.read: Memory[bytes, tuple[int, Make]] = Memory()

    def find(self, body: memoryview) -> tuple[int, Make] | None:
        """How many bytes such a tensor has, and what makes it; None: not known."""
        return self.read.get(bytes(body[: LONGEST_DESCRIPTION + 1]))

    def learn(self, body: memoryview, nbytes: int, make: Make | None) -> None:
        """Remember what was found sound, if it can be of use."""
        if nbytes and len(body) <= LONGEST_DESCRIPTION and make is not None:
            self.read[bytes(body)] = nbytes, make

    def clear(self) -> None:
        """Forget everything."""
        self.read.clear()


class Known(NamedTuple):
    """How to decode what has a certain header.

    Attributes:
        nbytes: Of the whole message.
        names: None for a tensor that is in no dict.
        parts: Of each tensor, what makes it, and the first byte and the last.
    """

    nbytes: int
    names: list[str] | None
    parts: list[tuple[Make, int, int]]


headers: Final[Memory[Any, tuple[bytes, int]]] = Memory()
"""By `_key`, headers and the sizes of their messages."""
described: Final[Memory[Any, Any]] = Memory()
"""By a tensor's key, the extension type that stands for it."""
known: Final[Memory[bytes, Known]] = Memory()
"""By their headers, how messages are decoded."""
_strange: Memory[bytes, None] = Memory()
"""Headers of messages that were decoded to tensors, but not of them alone."""


def tensors_of(payload: Any) -> Sequence[Any] | None:
    """The tensors of a payload that may repeat; None: it is another one."""
    if type(payload) is not dict:
        return (payload,) if type(payload) in KINDS else None
    values = list(payload.values())
    if not 0 < len(values) <= MOST_TENSORS:
        return None
    for value in values:
        if type(value) not in KINDS:
            return None
    return values if set(map(type, payload)) == {str} else None


def _key(payload: Any, tensors: Sequence[Any]) -> Any:
    """What the header depends on, or None."""
    keys = [KINDS[type(tensor)].key(tensor) for tensor in tensors]
    if None in keys:
        return None
    return (*payload, *keys) if type(payload) is dict else keys[0]


def encode(payload: Any, tensors: Sequence[Any]) -> frames.Frames | None:
    """What `learn_header` saw of a payload like this; None: nothing.

    Args:
        tensors: As `tensors_of` gave them.
    """
    if (key := _key(payload, tensors)) is None or (found := headers.get(key)) is None:
        return None
    header, nbytes = found
    try:
        buffers = tuple([KINDS[type(tensor)].buffer(tensor) for tensor in tensors])
    except (AssertionError, TypeError, RuntimeError, Warning):  # what torch raises
        return None
    return frames.Frames(header, buffers, nbytes, frozenset())


def learn_header(payload: Any, tensors: Sequence[Any], encoded: frames.Frames) -> None:
    """Remember how a payload was encoded, if it can be of use."""
    if (
        len(encoded.header) <= LONGEST_HEADER
        and len(encoded.buffers) == len(tensors)
        and not encoded.areas
        and (key := _key(payload, tensors)) is not None
    ):
        headers[key] = encoded.header, encoded.nbytes


def take_aligned(nbytes: int) -> memoryview:
    """So many bytes of memory at a multiple of `frames.ALIGNMENT`, of any content.

    The compiled twin is in ``_repeated.c``.
    """
    import numpy as np

    memory = np.empty(nbytes + frames.ALIGNMENT, np.uint8)
    start: int = -memory.__array_interface__["data"][0] % frames.ALIGNMENT
    return memory.data[start : start + nbytes]


def unpack(area: memoryview, known: dict[bytes, Known], read_only: bool) -> Any:
    """The payload that `learn` saw with this header; None: it saw none.

    Of what is read-only a copy is unpacked. The compiled twin is in ``_repeated.c``.
    """
    end = frames.header_bytes(area, LONGEST_HEADER)
    if not end:
        return None
    found = known.get(bytes(area[:end]))
    if found is None or found.nbytes != len(area):
        return None
    if area.readonly:
        own = take_aligned(found.nbytes)
        own[:] = area
        area = own
    made = [make(area[start:stop], read_only) for make, start, stop in found.parts]
    return made[0] if found.names is None else dict(zip(found.names, made, strict=True))


def learn(
    area: memoryview, payload: Any, encode_again: Callable[[Any], frames.Frames]
) -> None:
    """Remember what a message, which was found sound, was decoded to.

    Only if it is what we would send of that payload. Otherwise there is more to it: a
    registered type, a pickle, or a peer that writes to the message meanwhile.
    """
    tensors = tensors_of(payload)
    end = 0 if tensors is None else frames.header_bytes(area, LONGEST_HEADER)
    if tensors is None or not end or _key(payload, tensors) is None:
        return
    header = bytes(area[:end])
    if header in _strange:
        return
    again = encode_again(payload)
    if again.header != header or again.nbytes != len(area):
        _strange[header] = None
        return
    parts = []
    for tensor in tensors:
        make = KINDS[type(tensor)].maker(tensor)
        if make is None:
            return
        start = frames.align(end)
        end = start + tensor.nbytes
        parts.append((make, start, end))
    if end == len(area):
        names = list(payload) if type(payload) is dict else None
        known[header] = Known(len(area), names, parts)
