"""Memory of a GPU that other processes of this host can map, by CUDA's driver.

torch shares a tensor's memory only together with an event for the other process to wait
for. What is here is the memory alone. The driver is loaded where torch has a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch

HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from error
    # By value, and of 64 bits: what ctypes cannot know.
    address = ctypes.c_uint64
    for name, types in (
        ("cuIpcOpenMemHandle_v2", [ctypes.POINTER(address), _Handle, ctypes.c_uint]),
        ("cuIpcCloseMemHandle", [address]),
        ("cuIpcGetMemHandle", [ctypes.POINTER(_Handle), address]),
        ("cuMemAlloc_v2", [ctypes.POINTER(address), ctypes.c_size_t]),
        ("cuMemFree_v2", [address]),
    ):
        _function(driver, name).argtypes = types
    return driver


def _function(driver: Any, name: str) -> Any:
    try:
        return getattr(driver, name)
    except AttributeError as error:
        raise RuntimeError(f"the driver of CUDA has no {name}") from error


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    status = _function(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or status}")


@functools.cache
def _primary(index: int) -> tuple[ctypes.c_int, ctypes.c_void_p]:
    """A GPU, and the context in which torch uses it; kept until the process ends."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return device, context


@contextlib.contextmanager
def _current(index: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _primary(index)[1])
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Pointer:
    """Memory as torch takes it over; what keeps it is elsewhere."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor(index: int, address: int, nbytes: int) -> torch.Tensor:
    # Not as a tensor of inference mode, which nothing outside of that may write to; and
    # with this GPU as the current one, else torch would take memory of the first.
    with torch.inference_mode(False), torch.cuda.device(index):
        found = torch.as_tensor(_Pointer(address, nbytes), device=f"cuda:{index}")
    assert found.data_ptr() == address  # it would be a copy
    return found


def uuid(index: int) -> str:
    """By which every process that sees a GPU knows it, whatever its index there.

    Raises:
        RuntimeError: The driver fails.
    """
    found = _Uuid()
    _call("cuDeviceGetUuid_v2", ctypes.byref(found), _primary(index)[0])
    return bytes(found.bytes).hex()


def allocate(index: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
    """Memory of a GPU until the process ends, and the handle that others open.

    Returns:
        A tensor of uint8 with one dimension.

    Raises:
        RuntimeError: There is none, or this GPU shares none.
    """
    address, handle = ctypes.c_uint64(), _Handle()
    with _current(index):
        _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except RuntimeError:
            _call("cuMemFree_v2", address)
            raise
    return _tensor(index, address.value, nbytes), bytes(handle.reserved)


class _Mapped:
    """Memory of another process; `memory` is a tensor of uint8 with one dimension."""

    def __init__(self, index: int, handle: bytes, nbytes: int) -> None:
        address = ctypes.c_uint64()
        with _current(index):
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                _LAZY_PEER_ACCESS,
            )
        self._index, self._address = index, address
        self.memory = _tensor(index, address.value, nbytes)

    def close(self) -> None:
        """Let go of it; nothing may be under way from there."""
        del self.memory
        with contextlib.suppress(RuntimeError), _current(self._index):
            _call("cuIpcCloseMemHandle", self._address)


def map(index: int, handle: bytes, nbytes: int) -> _Mapped:
    """Memory of another process.

    Args:
        index: The GPU, as this process counts.
        handle: What `allocate` gave there.
        nbytes: Its size there.

    Raises:
        RuntimeError: It cannot be opened here, or is not there any more.
    """
    return _Mapped(index, handle, nbytes)
