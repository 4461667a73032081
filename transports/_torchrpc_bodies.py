"""Bodies as they go into a call: bytes, or a tensor over the memory they are in."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mq.devices import Piece
from mq.transport import MAX_HEAD_BYTES
from transports._torchrpc_outboxes import Inline

INLINE_BYTES: Final = 128 * 1024
"""Bodies below this are copied into the call; others travel as tensors."""

Body = Any  # None, bytes, a tensor of bytes, or a Piece


def is_tensor(body: Body) -> bool:
    """Whether it travels as a tensor, or has one in it."""
    return isinstance(body[-1] if type(body) is tuple else body, torch.Tensor)


def is_plain(body: Body) -> bool:
    """Whether an answer can carry it: nobody would hear when a tensor was read."""
    if isinstance(body, Inline):
        return body.is_small
    return body is None or type(body) is bytes


def outgoing(body: memoryview | None) -> Body:
    """The body as it goes into a call; a tensor of its memory where it is large."""
    if body is None:
        return None
    if body.nbytes < INLINE_BYTES:
        return bytes(body)
    array = np.frombuffer(body, np.uint8)
    if body.readonly:  # torch warns, but nobody writes to it
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


class _Writable:
    """Passes read-only memory off as writable."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._owner = array


def size_of(heads: Any, bodies: Any, chunk_bytes: int) -> int | None:
    """The size of a batch in bytes, its pieces left out; None: it is none."""
    if type(heads) is not list or type(bodies) is not list or len(heads) != len(bodies):
        return None
    nbytes = 0
    for head, body in zip(heads, bodies, strict=True):
        if type(head) is not bytes or not 0 < len(head) <= MAX_HEAD_BYTES:
            return None
        nbytes += len(head)
        if body is None or isinstance(body, Piece):
            continue
        if isinstance(body, torch.Tensor):
            if (
                body.dtype != torch.uint8
                or body.dim() != 1
                or body.device.type != "cpu"
                or not body.is_contiguous()
            ):
                return None
        elif type(body) is not bytes:
            return None
        if not 0 < len(body) <= chunk_bytes:
            return None
        nbytes += len(body)
    return nbytes
