"""The gate of a topic, where small messages pass that only join a batch."""

from __future__ import annotations

import threading
import time
from typing import Any

from mq.plain import encode_plain


class Gate:
    """While it is open a small message need only be appended to the log.

    Then there is credit, and it joins batches that are held and will leave in time. The
    compiled twin is in ``_speed.c``.
    """

    __slots__ = ("_largest", "_log", "_messages", "_nbytes", "_until")

    def __init__(self) -> None:
        self._log: list[Any] = []
        self.close()

    def open(
        self, log: list[Any], messages: int, nbytes: int, until: float, largest: int
    ) -> None:
        """Let messages pass from now on; the lock is held.

        Args:
            log: Where they go.
            messages: Until it holds so many.
            nbytes: Until so many bytes have passed.
            until: Until this Unix time.
            largest: The most bytes of one message.
        """
        self._log = log
        self._messages, self._nbytes, self._largest = messages, nbytes, largest
        self._until = until

    def close(self) -> None:
        """Have the next message looked at; the lock is held, or nobody else is left."""
        self._messages = self._nbytes = self._largest = 0
        self._until = 0.0
        self._log = []  # what was in it is not kept alive from here

    def admit(self, published_at: float, data: bytes) -> bool:
        """Commit a message, if the gate is open; else nothing is done.

        The lock is held.
        """
        if (
            len(self._log) < self._messages
            and published_at < self._until
            and self._nbytes > 0
            and len(data) <= self._largest
        ):
            self._nbytes -= len(data)
            self._log.append((published_at, data))
            return True
        return False

    def publish(self, payload: Any, lock: threading.Lock) -> bool:
        """Encode and commit a message, if that is all there is to do.

        Returns:
            False: nothing was done. The gate is closed, the payload is no plain
            data, or another thread has the lock.
        """
        if not self._until or lock.locked():
            return False
        data = encode_plain(payload)
        if data is None:
            return False
        published_at = time.time()
        with lock:
            return self.admit(published_at, data)
