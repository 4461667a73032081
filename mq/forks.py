"""What a forked child has to let go of: known from the moment that it exists.

A fork copies one thread, and what all the others were in the middle of. So whoever
opens descriptors says so here before it opens the first, in place of waiting until a
queue has been made of it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, Protocol

from mq.log import Log

logger = Log(__name__)


class Inherited(Protocol):
    """Something that a forked child must not keep."""

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, without harm to the parent.

        The thread that uses it may have been in the middle of anything when another
        one forked: of opening or closing it, too, and with any lock. May be repeated.
        """


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def register(thing: Inherited) -> None:
    """Have `thing.abandon` called in every forked child, for as long as it is there."""
    _inherited.add(thing)


def _after_fork() -> None:
    for thing in list(_inherited):
        _abandon(thing)


def _abandon(thing: Inherited) -> None:
    try:
        thing.abandon()
    except Exception:  # the others are to be let go of all the same
        logger.exception("a forked child could not let go of %r", thing)


importing: Final = threading.RLock()
"""Held while something is imported on first use: who forks waits until it is there.

A child would wait for ever for a module that another thread was in the middle of. A
handler of a signal's may fork in the importing thread, and so it can be taken again."""

os.register_at_fork(
    before=importing.acquire,
    after_in_parent=importing.release,
    after_in_child=importing.release,
)
os.register_at_fork(after_in_child=_after_fork)
