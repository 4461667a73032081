"""Changes of several queues that a KeyboardInterrupt cannot leave half done.

The interpreter looks for signals between bytecodes, never inside one call into C. So
what must happen as a whole is arranged to be appending to deques, and done by one call.
"""

from __future__ import annotations

from collections import deque
from operator import methodcaller
from typing import Any

_consume = deque[None](maxlen=0).extend
_append = deque.append
_extend: Any = deque.extend


def append_to_all(queues: tuple[deque[Any] | list[Any], ...], item: object) -> None:
    """Append one item to every queue, in one step."""
    _consume(map(methodcaller("append", item), queues))


def append_each(queues: tuple[deque[Any], ...], items: tuple[object, ...]) -> None:
    """Append to every queue its own item, in one step."""
    _consume(map(_append, queues, items))


def extend_each(
    queues: tuple[deque[Any], ...], runs: tuple[list[Any] | tuple[Any, ...], ...]
) -> None:
    """Extend every queue by its own items, in one step."""
    _consume(map(_extend, queues, runs))
