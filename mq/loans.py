"""Memory that `MQ.loan` hands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mq.buffers import Pool


def allocate(pool: Pool, shape: Sequence[int], dtype: Any) -> Any:
    """An uninitialised tensor or array in pooled memory.

    Args:
        pool: Where the memory comes from, and returns to when the last view dies.
        shape: Of the result.
        dtype: A torch dtype for a tensor; anything that NumPy knows for an array.

    Raises:
        ValueError: The shape is negative, or the dtype holds Python objects.
        TypeError: NumPy does not know the dtype.
    """
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape {sizes} has a negative size")
    count = math.prod(sizes)
    if type(dtype).__module__ == "torch":
        import torch

        if not count:
            return torch.empty(sizes, dtype=dtype)
        memory = pool.take(count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).reshape(sizes)
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"dtype {kind} holds Python objects and cannot be sent")
    memory = pool.take(count * kind.itemsize)
    return np.frombuffer(memory, dtype=kind, count=count).reshape(sizes)
