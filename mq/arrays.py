"""NumPy arrays and scalars on the wire. Imported once a payload or message has one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mq import extensions as ext
from mq.errors import CodecError
from mq.packing import Packer, Refusal, encode, utf8
from mq.repeated import KINDS, Descriptions, Kind, Memory, described
from mq.speed import are_bools, know_arrays

if TYPE_CHECKING:
    from mq.packing import Handler
    from mq.repeated import Make
    from mq.unpacking import Unpacker

AnyArray: TypeAlias = "npt.NDArray[Any]"
AnyDType: TypeAlias = "np.dtype[Any]"

_NAME = re.compile(r"[<>|]([biufcmMSUV])\d{1,10}(\[([1-9]\d{0,8})?[a-zA-Zμ]{1,7}\])?")
_REPEATED: Final = frozenset("biufcmM")
"""Kinds of dtypes that are described by a name of their own."""
_known: Final = Descriptions()
_SCALARS: Final = frozenset("biufc")
"""Kinds of dtypes of which a type of scalars has one."""
_scalar_starts: Final[dict[type, bytes]] = {}
_scalar_makers: Final[Memory[bytes, Callable[[bytes], Any]]] = Memory()
_MAX_ITEM_BYTES: Final = 2**31 - 1
_MAX_NESTED_DTYPES: Final = 16


def pack_array(packer: Packer, array: AnyArray, depth: int) -> Any:
    """An array as a description and a buffer; `array` is a `numpy.ndarray`."""
    try:
        name = describe(array.dtype)
    except Refusal as refusal:
        return packer.without_format(array, str(refusal))
    if array.nbytes:
        packer.buffers.append(raw_bytes(array))
    found = packer.ext(ext.ARRAY, encode([name, *array.shape]))
    if (key := _key(array)) is not None:
        described[key] = found
    return found


def raw_bytes(array: AnyArray) -> memoryview:
    """The elements in C order: a view where they lie so, else of a copy."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def unpack_array(unpacker: Unpacker, body: memoryview) -> AnyArray:
    """A view of the message; read-only where the message is."""
    known = _known.find(body)
    if known is not None:
        nbytes, make = known
        again: AnyArray = make(unpacker.take(nbytes), unpacker.read_only)
        return again
    name, *dims = unpacker.decode_list(body, 1)
    dtype = dtype_of(name)
    nbytes = checked_size(dims, dtype.itemsize)
    buffer = unpacker.take(nbytes) if nbytes else None
    if buffer is not None and unpacker.read_only:
        buffer = buffer.toreadonly()
    array = with_sound_bools(np.ndarray(dims, dtype, buffer))
    _known.learn(body, nbytes, _maker(array))
    return array


def with_sound_bools(array: AnyArray) -> AnyArray:
    """The array, with every byte of its bools 0 or 1; a copy only where it must be.

    NumPy counts the true elements of a mask by adding up bytes, and reserves memory
    by that count: other bytes could make it write beyond.
    """
    if any(part.size and part.max() > 1 for part in _bools(array)):
        if not array.flags.writeable:
            array = array.copy()
        for part in _bools(array):
            np.minimum(part, np.uint8(1), out=part)  # NumPy 1 takes 1 for an int64
    return array


def _bools(array: AnyArray) -> Iterator[npt.NDArray[np.uint8]]:
    if array.dtype.kind == "b":
        yield array.view(np.uint8)
    for name in array.dtype.names or ():
        yield from _bools(array[name])


def checked_size(dims: Sequence[object], itemsize: int) -> int:
    """The bytes of an array, from dimensions that may be anything.

    Raises:
        CodecError: They are no dimensions, or too large for any memory.
    """
    if len(dims) > ext.MAX_DIMENSIONS:
        raise CodecError(
            f"an array of {len(dims)} dimensions, the limit is {ext.MAX_DIMENSIONS}"
        )
    # Empty arrays count too: NumPy and torch multiply the other dimensions.
    product = max(itemsize, 1)
    empty = itemsize == 0
    for dim in dims:
        if type(dim) is not int or dim < 0:
            raise CodecError(f"{dim!r:.40} is no dimension of an array")
        product *= max(dim, 1)
        if product >= 2**63:  # at once: a dimension may have many digits
            raise CodecError(
                f"an array of {len(dims)} such dimensions does not fit any memory"
            )
        empty = empty or dim == 0
    return 0 if empty else product


def _pack_scalar(packer: Packer, scalar: np.generic, depth: int) -> Any:
    # NumPy's own form of a str_ or bytes_ ends at the last character that is not NUL.
    if isinstance(scalar, np.str_):
        text = str.__str__(scalar)
        utf8(text)
        body = encode(["str", text])
    elif isinstance(scalar, np.bytes_):
        body = encode(["bytes", bytes(scalar)])
    else:
        try:
            name = describe(scalar.dtype)
        except Refusal as refusal:
            return packer.without_format(scalar, str(refusal))
        body = encode([name, scalar.tobytes()])
        if scalar.dtype.kind in _SCALARS:
            _scalar_starts[type(scalar)] = body[: -scalar.nbytes]
    return packer.ext(ext.SCALAR, body)


def unpack_scalar(unpacker: Unpacker, body: memoryview) -> Any:
    """A NumPy scalar of exactly the type that was sent."""
    name, raw, *rest = unpacker.decode_list(body, 2)
    if name == "str" and type(raw) is str and not rest:
        return np.str_(raw)
    if type(raw) is not bytes or rest:
        raise CodecError("a NumPy scalar is malformed")
    if name == "bytes":
        return np.bytes_(raw)
    dtype = dtype_of(name)
    if len(raw) != dtype.itemsize:
        raise CodecError(f"a NumPy scalar of {dtype} with {len(raw)} bytes")
    array = with_sound_bools(np.ndarray((), dtype, bytearray(raw) if raw else None))
    array.flags.writeable = False  # a record is a view, and hashed only where it is not
    if dtype.kind in _SCALARS:
        again = encode([name, raw])  # of the body nothing is read twice
        if body == again:
            _scalar_makers[again[: -len(raw)]] = _scalar_maker(dtype)
    return array[()]


def _scalar_maker(dtype: AnyDType) -> Callable[[bytes], Any]:
    if dtype.kind == "b":
        return lambda raw: np.bool_(raw != b"\0")
    return lambda raw: np.ndarray((), dtype, raw)[()]


@functools.lru_cache(maxsize=512)
def describe(dtype: AnyDType) -> Any:
    """The wire's name of a dtype: a string, or a list for a structured one.

    Raises:
        Refusal: It has objects, is not NumPy's own, or would be refused on arrival.
    """
    name = _name_of(dtype)
    try:
        dtype_of(name)
    except CodecError as error:
        raise Refusal(
            f"a NumPy array or scalar of {dtype!r:.80}, which receivers refuse: "
            f"{error}; send its fields one by one"
        ) from error
    return name


def _name_of(dtype: AnyDType) -> Any:
    if dtype.hasobject:
        raise Refusal(
            f"a NumPy array or scalar of dtype {dtype} holds Python objects; convert "
            "it with .astype(...) or .tolist()"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["subarray", _name_of(base), *shape]
    if dtype.names is not None and dtype.fields is not None:
        utf8("".join(dtype.names))
        if any(len(dtype.fields[name]) > 2 for name in dtype.names):
            raise Refusal(
                f"a NumPy array or scalar of dtype {dtype} has titles of fields, which "
                "do not travel; send array.view(...) with a dtype of the names alone"
            )
        fields = [
            [name, dtype.fields[name][1], _name_of(dtype.fields[name][0])]
            for name in dtype.names
        ]
        return ["struct", dtype.itemsize, *fields]
    name = dtype.str
    if _NAME.fullmatch(name) is None or np.dtype(name) != dtype:
        raise Refusal(
            f"NumPy dtype {dtype!r} is not one of NumPy's plain dtypes; send "
            "array.view(numpy.uint8) or array.astype(...)"
        )
    return name


def dtype_of(name: object, nested: int = 0) -> AnyDType:
    """The dtype that a message describes.

    Raises:
        CodecError: It describes none, or one that holds objects.
    """
    if type(name) is str:
        return _plain_dtype(name)
    if type(name) is not list or len(name) < 2 or nested == _MAX_NESTED_DTYPES:
        raise CodecError(f"{name!r:.80} describes no NumPy dtype")
    what, *rest = name
    try:
        if what == "struct":
            return _struct_dtype(rest[0], rest[1:], nested)
        if what == "subarray":
            return _subarray_dtype(rest[0], rest[1:], nested)
    except (TypeError, ValueError) as error:
        raise CodecError(f"{name!r:.80} describes no NumPy dtype: {error}") from error
    raise CodecError(f"{name!r:.80} describes no NumPy dtype")


@functools.lru_cache(maxsize=512)
def _plain_dtype(name: str) -> AnyDType:
    if _NAME.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"{name!r} is no NumPy dtype here: {error}") from error
    raise CodecError(f"{name!r:.80} is no NumPy dtype of this format")


def _subarray_dtype(base: object, dims: list[Any], nested: int) -> AnyDType:
    dtype = dtype_of(base, nested + 1)
    if checked_size(dims, dtype.itemsize) > _MAX_ITEM_BYTES:
        raise CodecError(f"a NumPy dtype of more than {_MAX_ITEM_BYTES} bytes")
    return np.dtype((dtype, tuple(dims)))


def _struct_dtype(itemsize: Any, fields: list[Any], nested: int) -> AnyDType:
    if type(itemsize) is not int or not 0 <= itemsize <= _MAX_ITEM_BYTES:
        raise CodecError(f"{itemsize!r:.40} is no size of a NumPy dtype")
    names, formats, offsets = [], [], []
    for name, offset, form in fields:
        dtype = dtype_of(form, nested + 1)
        if type(name) is not str or type(offset) is not int:
            raise CodecError("a field of a NumPy dtype is malformed")
        if not 0 <= offset <= itemsize - dtype.itemsize:
            raise CodecError(f"field {name!r:.40} of a NumPy dtype lies outside of it")
        names.append(name)
        formats.append(dtype)
        offsets.append(offset)
    _check_bools(zip(names, formats, offsets, strict=True))
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    )


def _check_bools(fields: Iterable[tuple[str, AnyDType, int]]) -> None:
    """Refuse a bool whose bytes are another field's, too: they are made 0 or 1.

    Each byte of an item is then looked at once at most.
    """
    any_end = bool_end = 0
    for name, dtype, offset in sorted(fields, key=itemgetter(2)):
        if not dtype.itemsize:
            continue
        has_bools = _has_bools(dtype)
        if offset < (any_end if has_bools else bool_end):
            raise CodecError(
                f"field {name!r:.40} of a NumPy dtype overlaps another, "
                "and one of them holds bools"
            )
        any_end = max(any_end, offset + dtype.itemsize)
        if has_bools:
            bool_end = offset + dtype.itemsize


def _has_bools(dtype: AnyDType) -> bool:
    if dtype.subdtype is not None:
        return _has_bools(dtype.subdtype[0])
    if dtype.names is not None and dtype.fields is not None:
        return any(_has_bools(dtype.fields[name][0]) for name in dtype.names)
    return dtype.kind == "b"


def _scalar_types() -> set[type]:
    # Void aside, a scalar type that is no plain dtype's own is refused by _name_of.
    return {kind for kind in np.sctypeDict.values() if kind is not np.object_}


HANDLERS: Final[dict[type, Handler]] = {
    np.ndarray: pack_array,
    np.memmap: pack_array,
    **dict.fromkeys(_scalar_types(), _pack_scalar),
}


# -- again ----------


def _key(array: AnyArray) -> object:
    """What the header depends on, of an array whose memory is sent as it is."""
    dtype = array.dtype
    if dtype.kind not in _REPEATED or not array.flags.c_contiguous:
        return None
    return dtype, array.shape


def _maker(array: AnyArray) -> Make | None:
    dtype, shape = array.dtype, array.shape
    if dtype.kind not in _REPEATED:
        return None

    def make(memory: memoryview, read_only: bool) -> AnyArray:
        array: AnyArray = np.ndarray(
            shape, dtype, memory.toreadonly() if read_only else memory
        )
        return array

    def make_bools(memory: memoryview, read_only: bool) -> AnyArray:
        array = make(memory, read_only)
        return array if are_bools(memory) else with_sound_bools(array)

    return make_bools if dtype.kind == "b" else make


KINDS[np.ndarray] = Kind(_key, raw_bytes, _maker)
know_arrays(np.ndarray, _known.read, raw_bytes, _scalar_starts, _scalar_makers)
