"""Threads: whether this process may begin as many as it needs, and what they do."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Final

from mq.errors import TransportUnavailable

_MOST_SECONDS: Final = 10.0
MORE_THREADS: Final = "raise `ulimit -u`, the container's pids.max, or `ulimit -v`"
QUEUE_THREADS: Final = 3
"""What every queue needs: its own, the log's, and one to wait for a store or a name."""


def check_threads(who: str, needed: int) -> None:
    """Begin and end as many at once: an engine that cannot begin its own may abort.

    Args:
        who: Needs them, in words.
        needed: How many.

    Raises:
        TransportUnavailable: They cannot be had.
    """
    done = threading.Event()
    begun: list[threading.Thread] = []
    try:
        for _ in range(needed):
            # Of an interrupted trial nobody may tell them that it is over.
            thread = threading.Thread(
                target=done.wait, args=(_MOST_SECONDS,), name="mq-trial", daemon=True
            )
            thread.start()
            begun.append(thread)
    except RuntimeError as error:
        if "shutdown" in str(error):  # which no limit has brought about
            raise
        raise TransportUnavailable(
            f"{who} needs {needed} threads, and {len(begun)} can be begun ({error}): "
            f"{MORE_THREADS}"
        ) from error
    finally:
        done.set()
        for thread in begun:
            thread.join()


def current_frames() -> dict[int, FrameType]:
    """What every thread is doing, by its ident.

    Up to Python 3.11.8 a garbage collection in the middle of `sys._current_frames` can
    wait for ever for a thread that starts or ends (CPython's issue 106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()
