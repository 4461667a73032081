"""All open queues: closed at exit, told of new types."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from mq import safe_types
from mq.log import Log

if TYPE_CHECKING:
    from mq.membership import Membership

logger = Log(__name__)

EXIT_LINGER: Final = 5.0
"""Seconds that exit waits for messages to be delivered."""

_open: set[Membership] = set()
# Strong references: a queue whose last name is gone is still to be closed properly.
_pid = 0


def register(queue: Membership) -> None:
    """Close this queue at exit, unless it was closed before."""
    global _pid
    _open.add(queue)
    if _pid == os.getpid():
        return
    if not _pid:
        safe_types.on_change.append(_types_changed)
    _pid = os.getpid()
    atexit.register(_close_all)
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process():
        # multiprocessing's children leave by os._exit, before 3.13 without atexit.
        util.Finalize(None, _close_after_threads, exitpriority=100)


def unregister(queue: Membership) -> None:
    """The queue is closed, or another process's."""
    _open.discard(queue)


def _types_changed() -> None:
    """A payload type was registered: every open queue announces it."""
    for queue in list(_open):
        queue.types_changed()


def _close_after_threads() -> None:
    """Close all once the threads have ended that keep this process from ending.

    Before Python 3.13 multiprocessing calls this first, and waits for them last. It
    goes on meanwhile: what they wait for may be what it does next.
    """
    if _others():
        threading.Thread(target=_close_when_alone, name="mq-exit", daemon=False).start()
    else:
        _close_all()


def _close_when_alone() -> None:
    while threads := _others():
        for thread in threads:
            thread.join()
    _close_all()


def _others() -> list[threading.Thread]:
    """The threads, but this one and the main one, that Python waits for at exit."""
    own = (threading.current_thread(), threading.main_thread())
    return [t for t in threading.enumerate() if not t.daemon and t not in own]


def _close_all() -> None:
    for queue in list(_open):
        _close(queue)


def _close(queue: Membership) -> None:
    try:
        queue.close_at_exit(EXIT_LINGER)
    except Exception:
        logger.exception("could not close %r at exit", queue)
