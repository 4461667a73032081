"""A payload's trip to a receiver, and whether it is what was sent."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch

from mq.codec import Codec
from mq.frames import Frames

CODEC = Codec()
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def area_of(frames: Frames) -> memoryview:
    """What a receiver holds: writable and aligned."""
    raw = np.zeros(frames.nbytes + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    area = raw.data[start : start + frames.nbytes]
    frames.pack_into(area)
    return area


def travel(payload: Any, codec: Codec = CODEC) -> Any:
    """The payload after a trip; decoded ahead it is the same."""
    frames = codec.encode(payload)
    arrived = codec.decode(area_of(frames))
    for ahead in codec.decode_ahead([area_of(frames)]):
        assert same(ahead, arrived)
    return arrived


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor of any dtype, in order."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.element_size() in BITS:
        tensor = tensor.view(BITS[tensor.element_size()])
    return bytes(tensor.numpy().tobytes())


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    if isinstance(a, str | bytes):  # NumPy's too, of which tobytes drops NULs
        return len(a) == len(b) and a[:] == b[:]
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape) and all(
            x.tobytes() == y.tobytes() for x, y in _columns(a, b)
        )
    if isinstance(a, dict):
        metadata = (getattr(one, "_metadata", None) for one in (a, b))
        return (
            len(a) == len(b)
            and same(*metadata)
            and all(
                same(k, m) and same(v, n)
                for (k, v), (m, n) in zip(a.items(), b.items(), strict=True)
            )
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | complex):
        return np.array(a).tobytes() == np.array(b).tobytes()
    if isinstance(a, datetime.datetime | datetime.time):
        return a == b and (a.utcoffset(), a.fold) == (b.utcoffset(), b.fold)
    return bool(a == b)


def _columns(a: Any, b: Any) -> list[tuple[Any, Any]]:
    if a.dtype.names is None:
        return [(np.asarray(a), np.asarray(b))]
    found = []
    for name in a.dtype.names:  # not what lies between the fields
        found += _columns(np.asarray(a[name]), np.asarray(b[name]))
    return found
