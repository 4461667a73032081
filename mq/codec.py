"""Payload to `Frames` and back: data, and nothing but data, unless pickle is allowed.

The format is specified in ``docs/wire.md``, section *Payload*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from mq import extensions as ext
from mq import foreign, frames, modes, packing, repeated, safe_types
from mq.errors import CodecError
from mq.foreign import failure
from mq.frames import Frames, Spread, has_buffers
from mq.plain import decode_plain, is_plain
from mq.safe_types import add_safe_types
from mq.speed import (
    encode_plain,
    know_objects,
    pack_mixed,
    pack_repeated,
    take_aligned,
    unpack_mixed,
    unpack_repeated,
)
from mq.unpacking import MALFORMED, Unpacker

if TYPE_CHECKING:
    from mq.devices import Landing

__all__ = ["Codec", "add_safe_types"]

_NOTHING: Final[frozenset[str]] = frozenset()
_new_frames = tuple.__new__  # what `Frames` calls, with one call less for each message
_SHOWN_STEPS: Final = 8
"""At either end of a long way to what cannot be sent."""
_encode = packing.encode


def large_str(nbytes: int) -> re.Pattern[bytes]:
    """Finds the opcode of a string of 64 KiB or more in a skeleton of so many bytes.

    Numbers, too, have its byte: looking at each of those would take longer than to
    encode them, so the first byte of a length that there is no room for ends it.
    """
    most = min(nbytes >> 24, 0xFF)
    longer = b"|[\x01-%b]" % re.escape(bytes([most])) if most else b""
    return re.compile(rb"\xdb(?=\x00[^\x00]%b)" % longer, re.DOTALL)


def _copied(memory: memoryview) -> memoryview:
    """A copy of what another process could change while it is looked at."""
    return memoryview(bytes(memory))


def _place(refusal: packing.Refusal) -> str:
    """Where in the payload it is; shortened, as where that contains itself."""
    steps = refusal.path[::-1]
    if len(steps) > 2 * _SHOWN_STEPS:
        steps[_SHOWN_STEPS:-_SHOWN_STEPS] = [" ... "]
    return "payload" + "".join(steps)


def _may_hold_large_str(skeleton: bytes) -> bool:
    for match in large_str(len(skeleton)).finditer(skeleton):
        size = int.from_bytes(skeleton[match.end() : match.end() + 4], "big")
        if ext.LARGE <= size <= len(skeleton) - match.end() - 4:
            return True
    return False


class Codec:
    """Encodes and decodes payloads. Holds no state: any thread may use it at any time.

    What arrives equals what was sent, in value and in type, but for this:

    - Tensors and arrays are contiguous in C order, tensors are on the CPU or on the
      device asked for, without `requires_grad`; `nn.Parameter` arrives as a tensor,
      `torch.Size` as a tuple, `numpy.memmap` as an array.
    - Each reference to an object arrives as an object of its own; two tensors that
      share memory arrive as two that do not.
    - A zone of a datetime arrives as its offset from UTC.
    - `numpy.longlong` and `numpy.ulonglong` arrive as `numpy.int64` and `numpy.uint64`.
    - Pads of structured dtypes are not kept, nor that one was made with `align=True`,
      which leaves it equal, and `numpy.record` as the type of one arrives as
      `numpy.void`. A single record is read-only, so that it can be in a set.
    - A `TensorDict` arrives unlocked; what is no tensor in it has its batch size.

    Args:
        allow_pickle: Whether any other object travels, and is accepted, as a pickle;
            also tensors and arrays that have no format, such as sparse ones.
            Whoever can send this process a pickle can run any code in it.
    """

    __slots__ = ("_accepts", "_allow_pickle")

    def __init__(self, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def accepts(self) -> frozenset[str]:
        """What this process decodes beyond plain data, as in `Frames.needs`."""
        names = safe_types.names()
        return names | {safe_types.PICKLE} if self._allow_pickle else names

    def encode(
        self, payload: Any, topic: str = "", carried: frozenset[str] = _NOTHING
    ) -> Frames:
        """Encode a payload; large data is referred to, not copied.

        Args:
            payload: Data, arrays, tensors and objects of registered types, nested.
            topic: For the text of errors.
            carried: Devices whose tensors stay there, as torch names them; those on
                others are copied into host memory.

        Returns:
            Frames whose buffers view the payload's own memory.

        Raises:
            CodecError: A value cannot travel; says which, where, and the remedies.
        """
        header = encode_plain(payload)
        if header is not None:
            return _new_frames(Frames, (header, (), len(header), _NOTHING, ()))
        packed: repeated.Packed | list[Any] | None
        packed = None if carried else pack_repeated(payload, repeated.headers)
        tensors = None if packed is not None else repeated.tensors_of(payload)
        if packed is None and tensors is None and not carried:
            packed = pack_mixed(payload, repeated.described)
        if type(packed) is bytes:
            return _new_frames(Frames, (packed, (), len(packed), _NOTHING, ()))
        if type(packed) is tuple:
            return _new_frames(Frames, (*packed, ()))
        if tensors is not None and not carried:
            known = repeated.encode(payload, tensors)
            if known is not None:
                return known
        encoded = self._pack(payload, topic, packing.LEAVES, carried, packed or ())
        if tensors is not None:
            repeated.learn_header(payload, tensors, encoded)
        return encoded

    def _pack(
        self,
        payload: Any,
        topic: str,
        leaves: frozenset[type],
        carried: frozenset[str],
        before: Iterable[Any] = (),
    ) -> Frames:
        packer = packing.Packer(self._allow_pickle, leaves, carried, before)
        try:
            skeleton = _encode(packer.pack(payload, 0))
        except packing.Refusal as refusal:
            place = _place(refusal) + (f" on topic {topic!r}" if topic else "")
            raise CodecError(f"cannot send {place}: {refusal}") from refusal
        except RecursionError as error:
            raise CodecError(
                "cannot send the payload: it is nested too deep for the stack that is "
                "left here; raise sys.setrecursionlimit or flatten it"
            ) from error
        except (OverflowError, UnicodeEncodeError):
            if leaves is packing.CAREFUL_LEAVES:
                raise
            return self._pack_carefully(payload, topic, carried, packer.made)
        if (
            len(skeleton) >= ext.LARGE
            and leaves is packing.LEAVES
            and _may_hold_large_str(skeleton)
        ):
            return self._pack_carefully(payload, topic, carried, packer.made)
        for wait in packer.waits:
            wait()
        if not packer.extended:
            header = frames.PLAIN + skeleton
            return Frames(header, (), len(header), _NOTHING)
        return frames.assemble(
            skeleton,
            tuple(packer.buffers),
            frozenset(packer.needs),
            tuple(packer.areas.values()),
        )

    def _pack_carefully(
        self, payload: Any, topic: str, carried: frozenset[str], before: Iterable[Any]
    ) -> Frames:
        """Once more, after some int or str turned out too large for msgpack."""
        return self._pack(payload, topic, packing.CAREFUL_LEAVES, carried, before)

    def _encode_plainly(self, payload: Any) -> Frames:
        return self._pack(payload, "", packing.LEAVES, _NOTHING)

    def decode(
        self,
        area: memoryview | Spread,
        *,
        device: str | None = None,
        read_only: bool = False,
        own: bool = False,
    ) -> Any:
        """Decode a message that may come from anybody.

        Args:
            area: 1-D, format 'B', contiguous, owned by this message. Where the message
                has buffers, and is writable, aligned to `frames.ARRAY_ALIGNMENT` bytes:
                arrays and tensors are views of it and keep it alive.
            device: Where tensors are copied to; None leaves them where they arrived.
            read_only: Make arrays read-only; torch has no such tensors.
            own: Whether of a read-only message, which then may be at any address, a
                copy is decoded.

        Returns:
            The payload. It takes up to about a hundred times the memory of the
            skeleton, for containers that are empty, beside the area itself.

        Raises:
            CodecError: It is malformed.
            UntrustedPayload: It needs a type or the permission that is missing here.
            MemoryError: There is none for it, here or on the device.
        """
        try:
            return self._decode(area, device, read_only, own)
        except CodecError:
            raise
        except MALFORMED as error:
            raise CodecError(f"a message is malformed: {error!s:.500}") from error
        except RecursionError as error:
            raise CodecError(
                "a message is nested too deep for the stack that is left here"
            ) from error
        except MemoryError:
            raise
        except BaseException as error:  # of `__eq__`, `__hash__` of a registered type
            raise failure("decoding a message", error) from error

    def decode_ahead(self, areas: Iterable[memoryview]) -> list[Any]:
        """Payloads of messages, while that is quick and runs no application's code.

        Args:
            areas: As for `decode`; of read-only ones copies are decoded.

        Returns:
            Of those that come first; the next one is left to `decode`, which may say
            what is the matter.
        """
        return modes.outside(self._decode_ahead, areas)

    def _decode_ahead(self, areas: Iterable[memoryview]) -> list[Any]:
        payloads: list[Any] = []
        for area in areas:
            try:
                payload = self._decode(area, None, False, own=True, ahead=True)
            except Exception:
                break
            payloads.append(payload)
        return payloads

    def _unpack_again(
        self,
        area: memoryview,
        read_only: bool,
        ahead: bool,
        made: list[Any] | None = None,
    ) -> Any:
        payload = unpack_repeated(area, repeated.known, read_only)
        if payload is None:
            payload = unpack_mixed(area, read_only, made)
            if payload is not None and not ahead:
                repeated.learn(area, payload, self._encode_plainly)
        return payload

    def _decode(
        self,
        area: memoryview | Spread,
        device: str | None,
        read_only: bool,
        own: bool,
        ahead: bool = False,
    ) -> Any:
        apart: Sequence[Landing] = ()
        if isinstance(area, Spread):
            apart = area.areas
            area = area.host
        if is_plain(area) and not apart:
            return decode_plain(_copied(area) if read_only else area)
        copies = own and area.readonly
        made: list[Any] = []
        if not apart and device is None and (copies or not area.readonly):
            if ahead:  # which is outside of them already
                payload = self._unpack_again(area, read_only, ahead)
            elif modes.is_any_on():  # which is for registered types to see
                payload = modes.outside(self._unpack_again, area, read_only, ahead)
            else:
                payload = self._unpack_again(area, read_only, ahead, made)
            if payload is not None:
                return payload
            if area.readonly:  # it may be another one by now
                made = []
        if copies and has_buffers(area):
            shared, area = area, take_aligned(len(area))
            area[:] = shared
        skeleton, buffers, areas = frames.split(area, apart)
        if read_only:
            skeleton = _copied(skeleton)
        unpacker = Unpacker(
            buffers, self._allow_pickle, device, read_only, areas, ahead, made
        )
        payload = unpacker.unpack(skeleton)
        if not apart and not ahead:
            modes.outside(repeated.learn, area, payload, self._encode_plainly)
        return payload


know_objects(
    *(safe_types.tables, foreign.attempt, foreign.Raised, foreign.build, foreign.fail)
)
