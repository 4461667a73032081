"""Numbers of the wire format that packing and unpacking share; see ``docs/wire.md``."""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 256
"""How many containers may be nested."""

LARGE: Final = 64 * 1024
"""Strings of this many bytes and more travel as buffers."""

MAX_DIMENSIONS: Final = 64

MAX_INT_BYTES: Final = 64 * 1024

AREA_ALIGNMENT: Final = 256
"""Tensors of an area begin at multiples of this many bytes, and it ends at one."""

MAX_AREAS: Final = 64
"""Devices that the tensors of one message may be on."""

TUPLE: Final = 1
SET: Final = 2
FROZENSET: Final = 3
MAP: Final = 4
ORDERED_DICT: Final = 5
COMPLEX: Final = 6
INT: Final = 7
DATETIME: Final = 8
DATE: Final = 9
TIME: Final = 10
TIMEDELTA: Final = 11
BYTEARRAY: Final = 12
LARGE_BYTES: Final = 13
LARGE_BYTEARRAY: Final = 14
LARGE_STR: Final = 15
ARRAY: Final = 16
SCALAR: Final = 17
TENSOR: Final = 18
OBJECT: Final = 19
PICKLE: Final = 20
ON_DEVICE: Final = 21
