"""Memory that `MQ.loan` hands out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mq import forks
from mq.arrays import checked_size, describe
from mq.buffers import copy
from mq.frames import ALIGNMENT, align
from mq.mappings import address
from mq.packing import Refusal

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.segments import Block

HEADER_BYTES: Final = 1024
"""Kept free before the data for the message's header; a multiple of `ALIGNMENT`."""


def _checked(shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    """The shape, the dtype and the size of the data in bytes."""
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError as error:
        raise TypeError(
            f"shape is {shape!r}, not a sequence of whole numbers"
        ) from error
    if dtype is None:  # NumPy takes it for one
        raise TypeError("dtype is None: name one, of torch's or NumPy's")
    if type(dtype).__module__ == "torch":
        with forks.importing:
            from mq.tensors import sendable

        if not sendable(dtype):
            raise ValueError(f"tensors of dtype {dtype} cannot be sent")
    else:
        dtype = np.dtype(dtype)
        if dtype.subdtype is not None:
            base, inner = dtype.subdtype
            raise ValueError(
                f"dtype {dtype} is one of arrays: loan dtype {base}, with {inner} at "
                "the end of the shape"
            )
        try:
            describe(dtype)
        except Refusal as refusal:
            raise ValueError(f"dtype {dtype} cannot be sent: {refusal}") from refusal
    return sizes, dtype, checked_size(sizes, dtype.itemsize)


def room(shape: Sequence[int], dtype: Any) -> int:
    """How many bytes `lay_out` needs.

    Raises:
        ValueError: The shape or the dtype cannot be sent.
        TypeError: The shape is none, or NumPy does not know the dtype.
    """
    return HEADER_BYTES + _checked(shape, dtype)[2]


def lay_out(memory: memoryview, shape: Sequence[int], dtype: Any) -> Any:
    """An uninitialised tensor or array, with room for a header before it.

    Args:
        memory: Aligned to `ALIGNMENT`, of at least `room` bytes.
        shape: Of the result.
        dtype: A torch dtype for a tensor; anything that NumPy knows for an array.
    """
    sizes, dtype, nbytes = _checked(shape, dtype)
    data = memory[HEADER_BYTES : HEADER_BYTES + nbytes]
    if type(dtype).__module__ == "torch":
        import torch

        if not nbytes:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=dtype).reshape(sizes)
    return np.ndarray(sizes, dtype, data)


def finish(block: Block, frames: Frames) -> Block | None:
    """Put the header before data that was filled in place.

    Args:
        block: What the data was laid out in.
        frames: The encoded data.

    Returns:
        The whole message, or None where its data is not in the block.
    """
    if len(frames.buffers) != 1:
        return None
    data, start = frames.buffers[0], align(len(frames.header))
    if start > HEADER_BYTES or address(data) != address(block.area) + HEADER_BYTES:
        return None
    first = HEADER_BYTES - start
    copy(memoryview(frames.header), block.area[first : first + len(frames.header)])
    return block.part(first, first + frames.nbytes)


assert HEADER_BYTES % ALIGNMENT == 0
