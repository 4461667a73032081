"""Torch tensors on the wire. Imported once a payload or message has one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mq import extensions as ext
from mq import modes
from mq.arrays import checked_size, with_sound_bools
from mq.errors import CodecError, first_line
from mq.mappings import address
from mq.packing import Packer, Refusal, encode
from mq.repeated import KINDS, Descriptions, Kind, described
from mq.speed import are_bools, know_tensors

if TYPE_CHECKING:
    from mq.devices import Landing
    from mq.packing import Handler
    from mq.repeated import Make
    from mq.unpacking import Unpacker

# NumPy has no type for some dtypes: their bits travel through one of the same size.
_CARRIERS: Final = {
    "bool": None,
    "uint8": None,
    "uint16": None,
    "uint32": None,
    "uint64": None,
    "int8": None,
    "int16": None,
    "int32": None,
    "int64": None,
    "float16": None,
    "float32": None,
    "float64": None,
    "complex64": None,
    "complex128": None,
    "complex32": torch.int32,
    "bfloat16": torch.int16,
    "float8_e4m3fn": torch.uint8,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
}
_known: Final = Descriptions()
_BY_DTYPE: Final[dict[torch.dtype, tuple[str, torch.dtype | None]]] = {}
_BY_NAME: Final[dict[str, tuple[torch.dtype, np.dtype[Any], bool]]] = {}
for _name, _carrier in _CARRIERS.items():
    _dtype = getattr(torch, _name, None)  # the newest dtypes are missing in torch 2.4
    if _dtype is not None:
        _BY_DTYPE[_dtype] = (_name, _carrier)
        _bits = np.dtype(str(_carrier or _dtype).removeprefix("torch."))
        _BY_NAME[_name] = (_dtype, _bits, _carrier is not None)


def sendable(dtype: torch.dtype) -> bool:
    """Whether dense tensors of a dtype can be sent as they are."""
    return dtype in _BY_DTYPE


def pack_tensor(packer: Packer, tensor: torch.Tensor, depth: int) -> Any:
    """A tensor as a description and a buffer."""
    try:
        return _packed(packer, tensor)
    except AssertionError as error:  # of torch's: any call of it may raise that
        raise Refusal(
            f"torch does not give a tensor's data here: {first_line(error)}; publish "
            "it outside of FakeTensorMode"
        ) from error
    except TypeError as error:
        if not torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            raise
        raise Refusal(
            "torch.jit.trace records what is done with a tensor here, and its shape is "
            "no numbers; publish outside of the function that is traced"
        ) from error
    except (torch.cuda.OutOfMemoryError, RecursionError):
        raise
    except RuntimeError as error:  # a GPU that has failed, above all
        raise Refusal(f"torch cannot copy a tensor: {first_line(error)}") from error


def _packed(packer: Packer, tensor: torch.Tensor) -> Any:
    key = None if packer.carried else _key(tensor)
    if key is not None:
        found = described.get(key)
        if found is None:
            body = encode([_BY_DTYPE[tensor.dtype][0], *tensor.shape])
            found = described[key] = packer.ext(ext.TENSOR, body)
        packer.extended = True
        if tensor.numel():
            packer.buffers.append(_own_buffer(tensor))
        return found
    if not _has_format(tensor):
        return packer.without_format(tensor, _unsendable(tensor))
    if tensor.numel() and not _has_memory(tensor):
        raise Refusal(  # a pickle of it would be refused on arrival
            f"a tensor of dtype {tensor.dtype} and shape {tuple(tensor.shape)} has no "
            "memory: its storage was freed, or it belongs to a transform of "
            "torch.func; send it once it has data, and outside of the transform"
        )
    name, carrier = _BY_DTYPE[tensor.dtype]
    if packer.carried and str(tensor.device) in packer.carried:
        return _pack_on_device(packer, tensor, name, carrier)
    if (
        tensor.requires_grad
        or not tensor.is_cpu
        or tensor.is_conj()
        or tensor.is_neg()
        or not tensor.is_contiguous()
    ):
        tensor = _plain(packer, tensor, carrier)
    body = encode([name, *tensor.shape])
    if tensor.numel():
        packer.buffers.append(_own_buffer(tensor))
    return packer.ext(ext.TENSOR, body)


def _has_format(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in _BY_DTYPE
        and tensor.layout is torch.strided
        and not tensor.is_nested  # it has no shape
        and not tensor.is_meta
        and tensor.dim() <= ext.MAX_DIMENSIONS
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Where it has none, NumPy takes some of its own, with anything in it."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # one that stands for others, as under torch.func.vmap
        return False


def _plain(
    packer: Packer, tensor: torch.Tensor, carrier: torch.dtype | None
) -> torch.Tensor:
    """The same numbers, contiguous in host memory, without history and lazy bits."""
    tensor = _contiguous(tensor, carrier)
    if tensor.is_cuda:
        return _stage(packer, tensor)
    return tensor.cpu()


def _contiguous(tensor: torch.Tensor, carrier: torch.dtype | None) -> torch.Tensor:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Refusal(
            f"the current stream captures a CUDA graph, and the copy of a tensor on "
            f"{tensor.device} would be made when that is replayed, and not now; "
            "publish it after the capture"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if carrier is not None:  # before any copy: torch warns of work in complex32
        tensor = tensor.view(carrier)
    return tensor.contiguous()


def _pack_on_device(
    packer: Packer, tensor: torch.Tensor, name: str, carrier: torch.dtype | None
) -> Any:
    """A tensor as a description and a place in the area of its device."""
    from mq.devices import Area

    flat = _contiguous(tensor, carrier).reshape(-1)
    if flat.numel() < 2:  # it may have any strides
        flat = flat.new_empty(flat.shape).copy_(flat)
    flat = flat.view(torch.uint8)
    device = str(tensor.device)
    area = packer.areas.get(device)
    if area is None:
        if len(packer.areas) == ext.MAX_AREAS:
            raise Refusal(f"its tensors are on more than {ext.MAX_AREAS} devices")
        area = packer.areas[device] = Area(tensor.device)
    start = area.append(flat)
    index = list(packer.areas).index(device)
    return packer.ext(ext.ON_DEVICE, encode([name, index, start, *tensor.shape]))


def _stage(packer: Packer, tensor: torch.Tensor) -> torch.Tensor:
    # torch caches pinned memory; a copy into it runs beside those of other tensors,
    # and the packer waits for all of them once.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))
    packer.waits.append(functools.partial(_finish, done, tensor.device))
    return host


def _finish(done: torch.cuda.Event, device: torch.device) -> None:
    try:
        done.synchronize()
    except RuntimeError as error:
        raise CodecError(
            f"tensors on {device} cannot be copied into host memory: "
            f"{first_line(error)}; nobody got the message"
        ) from error


def _unsendable(tensor: torch.Tensor) -> str:
    what = f"a tensor of dtype {tensor.dtype} and layout {tensor.layout}"
    if tensor.is_quantized:
        return f"{what} is quantised; send .dequantize(), or .int_repr() and its scale"
    if tensor.is_meta:
        return (
            f"{what} is on the meta device and has no data; create it on a real device"
        )
    if tensor.is_nested:
        return f"{what} is nested; send .unbind(), a list of the tensors in it"
    if tensor.layout is not torch.strided:
        return f"{what} is not strided; send .to_dense(), or its indices and values"
    if tensor.dim() > ext.MAX_DIMENSIONS:
        return (
            f"{what} has {tensor.dim()} dimensions, the limit is {ext.MAX_DIMENSIONS}; "
            "send .flatten() and its shape"
        )
    return f"{what} has no format on the wire; send .view(torch.uint8)"


def unpack_tensor(unpacker: Unpacker, body: memoryview) -> torch.Tensor:
    """A writable view of the message, or a copy on the device asked for."""
    return modes.outside(_unpacked, unpacker, body)


def _unpacked(unpacker: Unpacker, body: memoryview) -> torch.Tensor:
    known = _known.find(body)
    if known is not None:
        nbytes, make = known
        tensor = make(_writable(unpacker.take(nbytes)), unpacker.read_only)
        return _moved(tensor, unpacker.device)
    unpacker.not_ahead()  # torch calls what the application has for its functions
    name, *dims = unpacker.decode_list(body, 1)
    dtype, bits, carried = _dtype_of(name)
    nbytes = checked_size(dims, bits.itemsize)
    if nbytes:
        view = _writable(unpacker.take(nbytes))
        tensor = torch.from_numpy(with_sound_bools(np.ndarray(dims, bits, view)))
    else:  # from NumPy it would have other strides than one made here
        carrier = _BY_DTYPE[dtype][1]
        tensor = torch.empty(dims, dtype=carrier or dtype, device="cpu")
    if carried:
        tensor = _seen_as(dtype, tensor)
    _known.learn(body, nbytes, _maker(tensor))
    return _moved(tensor, unpacker.device)


def _seen_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as another dtype, whatever functions of torch a mode replaces."""
    with torch._C.DisableTorchFunction():
        return tensor.view(dtype)


def _writable(view: memoryview) -> memoryview:
    """Torch has no read-only tensors."""
    return memoryview(bytearray(view)) if view.readonly else view


def _moved(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    if device is None:
        return tensor
    with _work_on(device, tensor.nbytes):
        return tensor.to(device)


@contextlib.contextmanager
def _work_on(device: object, nbytes: int) -> Iterator[None]:
    """Make what torch raises the message's error, or a lack of memory, which may end.

    Raises:
        MemoryError, CodecError: In words that name the device.
    """
    try:
        yield
    except RuntimeError as error:
        full = isinstance(error, torch.cuda.OutOfMemoryError)
        raise (MemoryError if full else CodecError)(
            f"a tensor of {nbytes} bytes cannot be put on {device}: "
            f"{first_line(error)}; free memory there, or subscribe with another device"
        ) from error


def _dtype_of(name: object) -> tuple[torch.dtype, np.dtype[Any], bool]:
    found = _BY_NAME.get(name) if type(name) is str else None
    if found is None:
        raise CodecError(
            f"a tensor of dtype {name!r:.40}, which torch {torch.__version__} does not "
            "have here"
        )
    return found


def unpack_on_device(unpacker: Unpacker, body: memoryview) -> torch.Tensor:
    """A view of an area, where that is; or a copy on the device asked for."""
    return modes.outside(_unpacked_of_area, unpacker, body)


def _unpacked_of_area(unpacker: Unpacker, body: memoryview) -> torch.Tensor:
    unpacker.not_ahead()  # as in `unpack_tensor`; no member sends it in a batch
    name, index, start, *dims = unpacker.decode_list(body, 3)
    dtype, bits, _ = _dtype_of(name)
    nbytes = checked_size(dims, bits.itemsize)
    flat: torch.Tensor = unpacker.take_of_area(index, start, nbytes, _as_tensor)
    if dtype is torch.bool:
        with _work_on(flat.device, nbytes):
            tensor = flat.ne(0)  # every byte 0 or 1: libraries rely on it
    else:
        tensor = flat.view(dtype)
    return _moved(tensor.reshape(dims), unpacker.device)


def _as_tensor(area: memoryview | Landing) -> torch.Tensor:
    """An area's bytes."""
    if isinstance(area, memoryview):
        return torch.frombuffer(_writable(area), dtype=torch.uint8)
    return area.claim()


def _pack_parameter(packer: Packer, parameter: torch.Tensor, depth: int) -> Any:
    return pack_tensor(packer, parameter.detach(), depth)


def _pack_size(packer: Packer, size: tuple[int, ...], depth: int) -> Any:
    return packer.pack(tuple(size), depth)


HANDLERS: Final[dict[type, Handler]] = {
    torch.Tensor: pack_tensor,
    torch.nn.Parameter: _pack_parameter,
    torch.Size: _pack_size,
}


# -- again ----------


def _key(tensor: torch.Tensor) -> object:
    """What the header depends on, of a tensor whose memory is sent as it is."""
    if (
        tensor.dtype not in _BY_DTYPE
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or not tensor.is_contiguous()
        or not _has_memory(tensor)
    ):
        return None
    shape = tensor.shape
    return (tensor.dtype, shape) if len(shape) <= ext.MAX_DIMENSIONS else None


def _buffer(tensor: torch.Tensor) -> memoryview:
    carrier = _BY_DTYPE[tensor.dtype][1]
    if carrier is not None:
        tensor = tensor.view(carrier)
    return tensor.numpy().data.cast("B")  # contiguous: half the time of raw_bytes


def _own_buffer(tensor: torch.Tensor) -> memoryview:
    buffer = _buffer(tensor)
    if modes.is_any_on() and address(buffer) != tensor.data_ptr():
        raise AssertionError("a mode of torch's gives a tensor the data of another")
    return buffer


def _maker(tensor: torch.Tensor) -> Make | None:
    if not tensor.is_cpu:
        return None
    shape = tuple(tensor.shape)
    dtype, bits, carried = _BY_NAME[_BY_DTYPE[tensor.dtype][0]]
    from_numpy, array = torch.from_numpy, np.ndarray

    def make(memory: memoryview, read_only: bool) -> torch.Tensor:
        return from_numpy(array(shape, bits, memory))

    def make_bools(memory: memoryview, read_only: bool) -> torch.Tensor:
        found = array(shape, bits, memory)
        return from_numpy(found if are_bools(memory) else with_sound_bools(found))

    def make_carried(memory: memoryview, read_only: bool) -> torch.Tensor:
        return _seen_as(dtype, from_numpy(array(shape, bits, memory)))

    return make_carried if carried else make_bools if dtype is torch.bool else make


KINDS[torch.Tensor] = Kind(_key, _own_buffer, _maker)
know_tensors(torch.Tensor, torch.strided, _known.read, _buffer)
modes.know_torch()
