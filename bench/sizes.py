"""What sizes payloads can have; without torch, as plans are made by it."""

from __future__ import annotations

import itertools

_EMPTY = 35
"""Bytes of a message whose text is empty."""

_HEADERS = ((65_535, 4), (255, 2), (31, 1))
"""Lengths beyond which the header of a text takes so many bytes more than one."""


def kind_of(workload: str, nbytes: int) -> str:
    """Which payloads a workload has: "tensor", "message" or "batch"."""
    codec = workload == "codec"
    if workload == "rate" or (codec and nbytes <= 1000):
        return "message"
    if workload == "fanin" or (codec and nbytes <= 100_000):
        return "batch"
    return "tensor"


def carried(kind: str, nbytes: int) -> int:
    """Bytes of what `payloads.make` makes, which is to have `nbytes`."""
    if kind == "tensor":
        return nbytes // 4 * 4
    if kind == "batch":
        part = nbytes // 4
        return 3 * (part // 4 * 4) + part // 8 * 8
    text = max(0, nbytes - _EMPTY)
    text -= _longer(text)
    return _EMPTY + text + _longer(text)


def _longer(text: int) -> int:
    """Bytes that the header of a text of that length has beyond the first."""
    return next((more for length, more in _HEADERS if text > length), 0)


def following(kind: str, nbytes: int) -> int:
    """The next size that a payload has to the byte, from `nbytes` on.

    `nbytes` itself where no payload has it to the byte, but one to within 1 in 100.
    """
    if abs(carried(kind, nbytes) - nbytes) * 100 <= nbytes:
        return nbytes
    return next(n for n in itertools.count(nbytes) if carried(kind, n) == n)
