"""Turns a skeleton and its buffers, which may come from anybody, into a payload."""

from __future__ import annotations

import importlib
import pickle
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from mq import datetimes, forks, safe_types
from mq import extensions as ext
from mq.errors import CodecError, UntrustedPayload
from mq.foreign import build, failure
from mq.frames import align_area

MALFORMED: Final = (
    *(ArithmeticError, TypeError, ValueError, struct.error),
    msgspec.MsgspecError,
)
"""What reading bytes of anybody's may raise.

Before msgspec 0.21 its errors were no ValueErrors, and before 0.22 a map as the key of
a map was a TypeError.
"""

_decode = msgspec.msgpack.decode
_CONTAINERS: Final = frozenset({list, dict, tuple, set, frozenset, OrderedDict})


class Unpacker:
    """One message on its way to a payload.

    Attributes:
        device: Where tensors go; None leaves them views of the message.
        read_only: Whether arrays must be.
        ahead: Whether it is decoded under the queue's lock: see `not_ahead`.

    Of registered objects it takes the first from `made`, if they are there already.
    """

    __slots__ = (
        "_allow_pickle",
        "_areas",
        "_buffers",
        "_claimed",
        "_ends",
        "_made",
        "_states",
        "_taken",
        "ahead",
        "device",
        "read_only",
    )

    def __init__(
        self,
        buffers: list[memoryview],
        allow_pickle: bool,
        device: str | None,
        read_only: bool = False,
        areas: Sequence[Any] = (),
        ahead: bool = False,
        made: Iterable[Any] = (),
    ) -> None:
        self.device = device
        self.ahead = ahead
        self.read_only = read_only
        self._allow_pickle = allow_pickle
        self._buffers = buffers
        self._taken = 0
        self._areas = list(areas)
        self._claimed = [False] * len(areas)
        self._ends = [0] * len(areas)
        self._made = deque(made)
        # State of every registered object by the object's id, for the depth; holding
        # the objects keeps their ids from being used again.
        self._states: dict[int, tuple[object, object]] = {}

    def unpack(self, skeleton: memoryview) -> Any:
        """The payload.

        Raises:
            CodecError: Anything about it is malformed.
            UntrustedPayload: It needs what this process does not accept.
        """
        value = _decode(skeleton, ext_hook=self.extension)
        if self._taken != len(self._buffers):
            raise CodecError(
                f"a message has {len(self._buffers)} buffers, its skeleton refers to "
                f"{self._taken}"
            )
        for area, end in zip(self._areas, self._ends, strict=True):
            if max(align_area(end), ext.AREA_ALIGNMENT) != len(area):
                raise CodecError(
                    f"an area has {len(area)} bytes, the skeleton refers to {end}"
                )
        if skeleton.nbytes > ext.MAX_DEPTH:  # a level takes a byte at least
            check_depth(value, self._states)
        return value

    def take(self, nbytes: int) -> memoryview:
        """The next buffer, which must be of this size.

        Raises:
            CodecError: It is not, or there is none.
        """
        if self._taken == len(self._buffers):
            raise CodecError(
                f"a skeleton refers to more than its {self._taken} buffers"
            )
        buffer = self._buffers[self._taken]
        if buffer.nbytes != nbytes:
            raise CodecError(
                f"buffer {self._taken} has {buffer.nbytes} bytes in place of {nbytes}"
            )
        self._taken += 1
        return buffer

    def take_any(self) -> memoryview:
        """The next buffer, whatever its size."""
        taken = self._taken
        return self.take(
            self._buffers[taken].nbytes if taken < len(self._buffers) else 0
        )

    def take_of_area(
        self, index: Any, start: Any, nbytes: int, tensor_of: Callable[[Any], Any]
    ) -> Any:
        """The next bytes of an area, as a 1-D uint8 tensor.

        Args:
            tensor_of: Makes a tensor of an area, the first time it is referred to.

        Raises:
            CodecError: They are not the next ones, or it has no such bytes.
        """
        if type(index) is not int or not 0 <= index < len(self._areas):
            raise CodecError(
                f"a skeleton refers to area {index!r:.40} of {len(self._areas)}"
            )
        # Each byte belongs to one tensor, as in the buffers.
        if type(start) is not int or start != align_area(self._ends[index]):
            raise CodecError(f"a tensor at {start!r:.40} of an area is out of place")
        area = self._areas[index]
        end = start + nbytes
        if nbytes and end > len(area):
            raise CodecError(f"a tensor ends at {end} of an area of {len(area)} bytes")
        if not self._claimed[index]:
            area = self._areas[index] = tensor_of(area)
            self._claimed[index] = True
        if nbytes:
            self._ends[index] = end
        return area[start:end]

    def decode_list(self, body: memoryview, at_least: int) -> list[Any]:
        """The values of an extension's body.

        Raises:
            CodecError: It is no list, or shorter than `at_least`.
        """
        items = _decode(body, ext_hook=self.extension)
        if type(items) is not list or len(items) < at_least:
            raise CodecError("the body of an extension type is malformed")
        return items

    def extension(self, code: int, body: memoryview) -> Any:
        """The value of an extension type; what msgspec calls for each."""
        # Containers are dealt with here: a frame less for each level of nesting.
        if 1 <= code <= 5:
            if code == ext.ORDERED_DICT and body and body[0] == 0x91:  # [[...]]
                # One list less for each level, too: before Python 3.11 calls in C
                # count, and 256 levels would not fit in the usual 1000.
                return _ordered_dict([_decode(body[1:], ext_hook=self.extension)])
            items = _decode(body, ext_hook=self.extension)
            if type(items) is not list:
                raise CodecError("the body of a container is malformed")
            if code == ext.TUPLE:
                return tuple(items)
            if code == ext.MAP:
                return _mapping(items, dict)
            if code == ext.ORDERED_DICT:
                return _ordered_dict(items)
            return set(items) if code == ext.SET else frozenset(items)
        unpack = _UNPACKERS.get(code)
        if unpack is None:
            raise CodecError(f"extension type {code} is unknown to this member")
        return unpack(self, body)

    def not_ahead(self) -> None:
        """What follows takes its time, or runs code of the application's.

        Raises:
            CodecError: The message is being decoded ahead.
        """
        if self.ahead:
            raise CodecError("it is not decoded ahead")

    def unpack_object(self, body: memoryview) -> Any:
        """An object of a registered type."""
        self.not_ahead()
        name, state, *rest = self.decode_list(body, 2)
        entry = safe_types.by_name(name)
        if entry is None:
            raise UntrustedPayload(
                f"the payload has a {name!r:.260}, which this member does not accept: "
                "register that type with mq.add_safe_types before subscribing"
            )
        if rest:
            raise CodecError(f"a {name} is malformed")
        value = self._made.popleft() if self._made else build(entry, state)
        if type(value) is entry.kind:  # else it may be a part of its state
            self._states.setdefault(id(value), (value, state))
        return value

    def unpack_pickle(self, body: memoryview) -> Any:
        """An arbitrary object, of a sender that this process trusts."""
        self.not_ahead()
        if not self._allow_pickle:
            raise UntrustedPayload(
                "the payload has a pickled object, which this member does not accept: "
                "pass allow_pickle=True to mq.connect if you trust every member, or "
                "have the sender register the type with mq.add_safe_types"
            )
        sizes = self.decode_list(body, 1)
        raw, *buffers = [self.take(size) for size in sizes]
        if self.read_only:
            buffers = [buffer.toreadonly() for buffer in buffers]
        try:
            return pickle.loads(raw, buffers=buffers)
        except BaseException as error:  # unpickling runs anybody's code
            raise failure("unpickling", error) from error


def check_depth(
    value: Any, states: dict[int, tuple[object, object]] | None = None
) -> None:
    """See that containers are not nested too deep.

    Args:
        states: By its id, every other object that counts, with its content.

    Raises:
        CodecError: There are more than `MAX_DEPTH` levels.
    """
    kinds = _CONTAINERS.union(type(item) for item, _ in (states or {}).values())
    level = [value]
    for _ in range(ext.MAX_DEPTH + 1):
        level = [item for item in level if type(item) in kinds]
        if not level:
            return
        if states:  # what several states share is looked at once
            level = list({id(item): item for item in level}.values())
        below: list[Any] = []
        for container in level:
            for children in _children(container, states or {}):
                if not kinds.isdisjoint(map(type, children)):
                    below += children
        level = below
    raise CodecError(f"a message is nested more than {ext.MAX_DEPTH} levels deep")


def _children(
    container: Any, states: dict[int, tuple[object, object]]
) -> Iterable[Iterable[Any]]:
    if id(container) in states:
        return ((states[id(container)][1],),)
    if type(container) is dict:
        return (container, container.values())
    if type(container) is OrderedDict:
        metadata = getattr(container, "_metadata", None)
        return (container, container.values(), (metadata,))
    return (container,) if type(container) in _CONTAINERS else ()


def _mapping(items: list[Any], kind: type[dict[Any, Any]]) -> dict[Any, Any]:
    if len(items) % 2:
        raise CodecError("a mapping has a key without a value")
    return kind(zip(items[::2], items[1::2], strict=True))


def _ordered_dict(items: list[Any]) -> Any:
    pairs, *metadata = items or [None]
    if type(pairs) is not list or len(metadata) > 1:
        raise CodecError("an OrderedDict is malformed")
    mapping = _mapping(pairs, OrderedDict)
    if metadata:
        mapping._metadata = metadata[0]  # type: ignore[attr-defined]
    return mapping


def _unpack_complex(unpacker: Unpacker, body: memoryview) -> complex:
    return complex(*struct.unpack(">dd", body))


def _unpack_int(unpacker: Unpacker, body: memoryview) -> int:
    if body.nbytes > ext.MAX_INT_BYTES:
        raise CodecError(
            f"an int of {body.nbytes} bytes, the limit is {ext.MAX_INT_BYTES}"
        )
    return int.from_bytes(body, "big", signed=True)


def _unpack_bytearray(unpacker: Unpacker, body: memoryview) -> bytearray:
    return bytearray(body)


def _unpack_large_bytes(unpacker: Unpacker, body: memoryview) -> bytes:
    return bytes(unpacker.take_any())


def _unpack_large_bytearray(unpacker: Unpacker, body: memoryview) -> bytearray:
    return bytearray(unpacker.take_any())


def _unpack_large_str(unpacker: Unpacker, body: memoryview) -> str:
    return str(unpacker.take_any(), "utf-8")


def _load(kind: int, module: str, name: str) -> Callable[[Unpacker, memoryview], Any]:
    """What unpacks a kind from now on, without this detour."""
    with forks.importing:
        found: Callable[[Unpacker, memoryview], Any]
        found = getattr(importlib.import_module(module), name)
    _UNPACKERS[kind] = found
    return found


def _unpack_array(unpacker: Unpacker, body: memoryview) -> Any:
    unpacker.not_ahead()
    return _load(ext.ARRAY, "mq.arrays", "unpack_array")(unpacker, body)


def _unpack_scalar(unpacker: Unpacker, body: memoryview) -> Any:
    unpacker.not_ahead()
    return _load(ext.SCALAR, "mq.arrays", "unpack_scalar")(unpacker, body)


def _unpack_tensor(unpacker: Unpacker, body: memoryview) -> Any:
    unpacker.not_ahead()
    return _load(ext.TENSOR, "mq.tensors", "unpack_tensor")(unpacker, body)


def _unpack_on_device(unpacker: Unpacker, body: memoryview) -> Any:
    unpacker.not_ahead()
    return _load(ext.ON_DEVICE, "mq.tensors", "unpack_on_device")(unpacker, body)


_UNPACKERS: Final[dict[int, Callable[[Unpacker, memoryview], Any]]] = {
    ext.COMPLEX: _unpack_complex,
    ext.INT: _unpack_int,
    **datetimes.UNPACKERS,
    ext.BYTEARRAY: _unpack_bytearray,
    ext.LARGE_BYTES: _unpack_large_bytes,
    ext.LARGE_BYTEARRAY: _unpack_large_bytearray,
    ext.LARGE_STR: _unpack_large_str,
    ext.ARRAY: _unpack_array,
    ext.SCALAR: _unpack_scalar,
    ext.TENSOR: _unpack_tensor,
    ext.ON_DEVICE: _unpack_on_device,
    ext.OBJECT: Unpacker.unpack_object,
    ext.PICKLE: Unpacker.unpack_pickle,
}
