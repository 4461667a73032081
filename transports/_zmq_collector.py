"""The thread with which pyzmq frees what was sent without a copy."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.garbage import gc

if TYPE_CHECKING:
    from transports.zmq import ZmqLink

_COLLECT_SECONDS = 0.5


class _Collector:
    """When that thread runs.

    It starts with the first such message of a process, when there may be no descriptors
    for it, so the first link starts it. It never ends, so the last link ends it, unless
    the application uses it too.
    """

    def __init__(self) -> None:
        # pyzmq does not: a start in the middle of an end leaves neither.
        self._turn = threading.Lock()
        self._links: set[int] = set()
        self._ours = False

    def use(self, link: ZmqLink) -> None:
        """A link opens.

        Raises:
            zmq.ZMQError: The thread cannot start.
        """
        with self._turn:
            if not self._links:
                self._ours = not gc.is_alive()
            self._links.add(id(link))
            zmq.Frame(b"start", copy=False, copy_threshold=0)

    def leave(self, link: ZmqLink) -> None:
        """A link has closed, its context is terminated, so nothing of it is read."""
        with self._turn:
            self._links.discard(id(link))
            if self._links or not self._ours or not gc.is_alive():
                return
            deadline = time.monotonic() + _COLLECT_SECONDS
            while gc.refs and gc.thread and time.monotonic() < deadline:
                gc.thread.join(0.001)
            if not gc.refs:  # else the application has messages of its own under way
                gc.stop()

    def after_fork(self) -> None:
        """In a forked child, where neither that thread nor any link lives on."""
        self._turn = threading.Lock()
        self._links.clear()


collector = _Collector()
os.register_at_fork(after_in_child=collector.after_fork)
