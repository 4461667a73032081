"""Turns a payload into a tree that msgpack can hold, and a list of raw buffers.

Values that msgpack holds exactly stay what they are; any other becomes an extension
type, or is refused with its place in the payload.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from mq import datetimes, foreign, forks, safe_types
from mq import extensions as ext
from mq.errors import CodecError

if TYPE_CHECKING:
    from mq.devices import Area

_Made = TypeVar("_Made")
encode: Final = msgspec.msgpack.Encoder().encode

LEAVES: Final = frozenset({type(None), bool, int, float, str})
"""Types of which msgpack holds (nearly) every value and which hold no others."""

CAREFUL_LEAVES: Final = frozenset({type(None), bool, float})
"""The same for payloads in which some int or str turned out too large for msgpack."""

APART_BYTES: Final = 4096
"""Bytes of this length are buffers, too, once so many have been put into the skeleton
that it would be large."""
MOST_APART_BYTES: Final = 8 << 20
"""Up to so many in all; of more, each would be copied before the first has left."""

Handler: TypeAlias = "Callable[[Packer, Any, int], Any]"


class Refusal(Exception):
    """A value that cannot travel; collects its place on the way out.

    Attributes:
        path: Keys and indices that lead to the value, innermost first.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []


class Packer:
    """One payload on its way into a skeleton and buffers.

    Attributes:
        buffers: What the skeleton refers to, in order.
        needs: What a receiver must accept.
        extended: Whether the skeleton has extension types.
        waits: What to call before the buffers hold their data.
        carried: Devices whose tensors stay there, as torch names them.
        areas: By device, what stays there.
        made: What `once` was asked, and what it made: for who packs it all again.
        passed: How many bytes `APART_BYTES` and `MOST_APART_BYTES` have been asked of.
    """

    __slots__ = (
        "_allow_pickle",
        "_before",
        "areas",
        "buffers",
        "carried",
        "extended",
        "leaves",
        "made",
        "needs",
        "passed",
        "waits",
    )

    def __init__(
        self,
        allow_pickle: bool,
        leaves: frozenset[type],
        carried: frozenset[str] = frozenset(),
        before: Iterable[tuple[Any, Any, Any]] = (),
    ) -> None:
        self._allow_pickle = allow_pickle
        self._before = deque(before)
        self.made: list[tuple[Any, Any, Any]] = []
        self.passed = 0
        self.leaves = leaves
        self.carried = carried
        self.areas: dict[str, Area] = {}
        self.buffers: list[memoryview] = []
        self.needs: set[str] = set()
        self.waits: list[Callable[[], object]] = []
        self.extended = False

    def pack(self, value: Any, depth: int) -> Any:
        """The value as msgpack takes it; `depth` containers are around it."""
        kind = type(value)
        if kind in self.leaves:
            return value
        return (_HANDLERS.get(kind) or self.handler(kind))(self, value, depth)

    def once(self, make: Callable[[Any], _Made], value: Any) -> _Made:
        """What the application's code makes of it, perhaps another thing the next time.

        Where the payload is packed again, it is what was made before.
        """
        made: _Made | foreign.Raised
        while self._before:
            maker, known, made = self._before.popleft()
            if known is value and maker is make:  # else what it is in has changed
                break
        else:
            made = make(value)
        if isinstance(made, foreign.Raised):
            raise made.take()
        self.made.append((make, value, made))
        return made

    def ext(self, code: int, body: bytes) -> msgspec.msgpack.Ext:
        """An extension value of the skeleton."""
        self.extended = True
        return msgspec.msgpack.Ext(code, body)

    def handler(self, kind: type) -> Handler:
        """How to pack a type that plain Python data does not have.

        Raises:
            Refusal: It cannot travel.
        """
        if safe_types.by_type(kind) is not None:
            return _pack_object
        _load_handlers()
        found = _HANDLERS.get(kind)
        if found is not None:
            return found
        if self._allow_pickle:
            return _pack_pickle
        raise Refusal(
            f"a {safe_types.type_name(kind)} is not data: {safe_types.remedy(kind)}"
        )

    def without_format(self, value: Any, problem: str) -> Any:
        """A value that has no format, unlike others of its type: a pickle, if allowed.

        Raises:
            Refusal: It is not, which is the problem; or it cannot be pickled.
        """
        if not self._allow_pickle:
            raise Refusal(problem)
        return _pack_pickle(self, value, 0)


def _pack_list(packer: Packer, items: list[Any], depth: int) -> list[Any]:
    _check_depth(depth)
    leaves = packer.leaves
    if leaves.issuperset(map(type, items)):
        return items
    packed: list[Any] = []
    # The dispatch of Packer.pack is repeated here: one frame less for each level keeps
    # 256 levels within the interpreter's recursion limit.
    try:
        for item in items:
            kind = type(item)
            if kind in leaves:
                packed.append(item)
            else:
                handler = _HANDLERS.get(kind) or packer.handler(kind)
                packed.append(handler(packer, item, depth + 1))
    except Refusal as refusal:
        refusal.path.append(f"[{len(packed)}]")
        raise
    return packed


def _pack_dict(packer: Packer, mapping: dict[Any, Any], depth: int) -> Any:
    _check_depth(depth)
    leaves = packer.leaves
    if not leaves.issuperset(map(type, mapping)):
        return packer.ext(ext.MAP, encode(_pack_pairs(packer, mapping, depth)))
    if leaves.issuperset(map(type, mapping.values())):
        return mapping
    packed = {}
    key = None
    try:
        for key, value in mapping.items():
            kind = type(value)
            if kind not in leaves:
                handler = _HANDLERS.get(kind) or packer.handler(kind)
                value = handler(packer, value, depth + 1)
            packed[key] = value
    except Refusal as refusal:
        refusal.path.append(_subscript(key))
        raise
    return packed


def _pack_pairs(packer: Packer, mapping: dict[Any, Any], depth: int) -> list[Any]:
    packed: list[Any] = []
    key = None
    try:
        for key, value in mapping.items():
            packed += (packer.pack(key, depth + 1), packer.pack(value, depth + 1))
    except Refusal as refusal:
        refusal.path.append(_subscript(key))
        raise
    return packed


def _pack_tuple(packer: Packer, items: tuple[Any, ...], depth: int) -> Any:
    if packer.leaves.issuperset(map(type, items)):
        _check_depth(depth)
        return packer.ext(ext.TUPLE, encode(items))
    return packer.ext(ext.TUPLE, encode(_pack_list(packer, items, depth)))  # type: ignore[arg-type]


def _pack_set(packer: Packer, items: set[Any], depth: int) -> Any:
    return packer.ext(ext.SET, encode(_pack_list(packer, list(items), depth)))


def _pack_frozenset(packer: Packer, items: frozenset[Any], depth: int) -> Any:
    return packer.ext(ext.FROZENSET, encode(_pack_list(packer, list(items), depth)))


def _pack_ordered_dict(packer: Packer, mapping: Any, depth: int) -> Any:
    # A state_dict is one, and load_state_dict reads its _metadata.
    _check_depth(depth)
    body = [_pack_pairs(packer, mapping, depth)]
    metadata = getattr(mapping, "_metadata", None)
    if metadata is not None:
        try:
            body.append(packer.pack(metadata, depth + 1))
        except Refusal as refusal:
            refusal.path.append("._metadata")
            raise
    return packer.ext(ext.ORDERED_DICT, encode(body))


def _pack_int(packer: Packer, value: int, depth: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    size = value.bit_length() // 8 + 1
    if size > ext.MAX_INT_BYTES:
        raise Refusal(
            f"an int of {size} bytes is over the limit of {ext.MAX_INT_BYTES}; send "
            "its bytes"
        )
    return packer.ext(ext.INT, value.to_bytes(size, "big", signed=True))


def _pack_str(packer: Packer, value: str, depth: int) -> Any:
    raw = utf8(value)
    if len(raw) < ext.LARGE:
        return value
    packer.buffers.append(memoryview(raw))
    return packer.ext(ext.LARGE_STR, b"")


def utf8(text: str) -> bytes:
    """The text's bytes.

    Raises:
        Refusal: It has lone surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            f"a str is not valid Unicode ({error}); send it as bytes, "
            'value.encode("utf-8", "surrogatepass")'
        ) from error


def _pack_bytes(packer: Packer, value: bytes, depth: int) -> Any:
    return packer.ext(ext.LARGE_BYTES, b"") if _goes_apart(packer, value) else value


def _pack_bytearray(packer: Packer, value: bytearray, depth: int) -> Any:
    if _goes_apart(packer, value):
        return packer.ext(ext.LARGE_BYTEARRAY, b"")
    return packer.ext(ext.BYTEARRAY, bytes(value))


def _goes_apart(packer: Packer, value: bytes | bytearray) -> bool:
    if len(value) < APART_BYTES:
        return False
    if len(value) < ext.LARGE:
        packer.passed += len(value)
        if not ext.LARGE <= packer.passed < MOST_APART_BYTES:
            return False
    packer.buffers.append(memoryview(value))
    return True


def _pack_complex(packer: Packer, value: complex, depth: int) -> Any:
    return packer.ext(ext.COMPLEX, struct.pack(">dd", value.real, value.imag))


def _pack_object(packer: Packer, value: Any, depth: int) -> Any:
    _check_depth(depth)
    entry = safe_types.by_type(type(value))
    assert entry is not None  # handler() looked it up
    try:
        if entry.fields is not None:  # its function is ours, and only looks
            state = entry.encode(value)
        else:
            state = packer.once(entry.encode, value)
    except CodecError as error:
        raise Refusal(str(error)) from error
    except Exception as error:  # the application's code may raise anything
        said = foreign.shown(error)
        raise Refusal(f"encoding a {entry.name} raised {said}") from error
    try:
        packed = packer.pack(state, depth + 1)
    except Refusal as refusal:
        if entry.by_field and refusal.path:
            refusal.path[-1] = "." + refusal.path[-1][2:-2]
        raise
    packer.needs.add(entry.name)
    return packer.ext(ext.OBJECT, encode([entry.name, packed]))


def _pickled(value: Any) -> list[memoryview]:
    out_of_band: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(value, protocol=5, buffer_callback=out_of_band.append)
    return [memoryview(raw), *(buffer.raw() for buffer in out_of_band)]


def _pack_pickle(packer: Packer, value: Any, depth: int) -> Any:
    try:
        views = packer.once(_pickled, value)
    except Exception as error:  # objects pickle themselves, and may raise anything
        raise Refusal(
            f"a {safe_types.type_name(type(value))} cannot be pickled: {error}"
        ) from error
    packer.needs.add(safe_types.PICKLE)
    packer.buffers += views
    return packer.ext(ext.PICKLE, encode([view.nbytes for view in views]))


def _check_depth(depth: int) -> None:
    if depth >= ext.MAX_DEPTH:
        raise Refusal(
            f"it is nested more than {ext.MAX_DEPTH} levels deep, or contains itself"
        )


def _subscript(key: Any) -> str:
    shown = foreign.shown(key)
    return f"[{shown if len(shown) <= 60 else shown[:57] + '...'}]"


def is_data(kind: type) -> bool:
    """Whether objects of exactly this type travel as they are."""
    if kind not in _HANDLERS:
        _load_handlers()
    return kind in LEAVES or kind in _HANDLERS


def _load_handlers() -> None:
    from mq.speed import Lock  # it loads NumPy, as every queue does

    # Handlers of signals wait: one may publish an array, for which it comes here, too.
    with Lock(), forks.importing:
        # A payload can hold arrays and tensors only where their library is loaded.
        if "numpy" in sys.modules:
            from mq import arrays

            _HANDLERS.update(arrays.HANDLERS)
        if "torch" in sys.modules:
            from mq import tensors

            _HANDLERS.update(tensors.HANDLERS)


_HANDLERS: Final[dict[type, Handler]] = {
    list: _pack_list,
    dict: _pack_dict,
    tuple: _pack_tuple,
    set: _pack_set,
    frozenset: _pack_frozenset,
    OrderedDict: _pack_ordered_dict,
    int: _pack_int,
    str: _pack_str,
    bytes: _pack_bytes,
    bytearray: _pack_bytearray,
    complex: _pack_complex,
    **datetimes.HANDLERS,
}
