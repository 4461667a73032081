"""Changes that a KeyboardInterrupt cannot leave half done: of queues, and of a lock.

The interpreter looks for signals between bytecodes, never inside one call into C. So
what must happen as a whole is arranged to be appending to deques, and done by one call.
"""

from __future__ import annotations

from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading

_consume = deque[None](maxlen=0).extend
_append = deque.append
_release = methodcaller("release")


def append_to_all(queues: tuple[deque[Any] | list[Any], ...], item: object) -> None:
    """Append one item to every queue, in one step."""
    _consume(map(methodcaller("append", item), queues))


def append_each(queues: tuple[deque[Any], ...], items: tuple[object, ...]) -> None:
    """Append to every queue its own item, in one step."""
    _consume(map(_append, queues, items))


def give_up(lock: threading.Lock, given: deque[object]) -> None:
    """Release a lock in the middle of `with`, until `take_back` with the same `given`.

    Args:
        given: Empty. It tells how far both are, and each step is one call into C.
    """
    given.extend(map(_release, (lock,)))


def take_back(lock: threading.Lock, given: deque[object]) -> None:
    """Take a lock again that was given up, if it was, and once only.

    An interrupt waits until it is taken: `with` would else release another thread's.
    It may come as this begins, so call it again in a further ``finally``.
    """
    interrupt: BaseException | None = None
    while len(given) == 1:
        try:
            given.extend(map(lock.acquire, (True,)))
        except BaseException as error:  # noqa: PERF203 - that is what it loops for
            interrupt = error
    if interrupt is not None:
        raise interrupt
