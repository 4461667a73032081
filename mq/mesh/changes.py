"""The condition on which calls wait that do not poll."""

from __future__ import annotations

import threading
from collections import deque

from mq import signals
from mq.mesh.atomic import give_up
from mq.speed import take_back


class Changes(threading.Condition):
    """A condition whose `wait` has the lock in the end, even if it is interrupted.

    It may end early, so that signals are seen: who waits looks again in any case.
    """

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._mutex = lock
        self._waits = threading.local()  # how far each thread's is, as `give_up` has it

    def wait(self, timeout: float | None = None) -> bool:
        given: deque[object] = deque()
        self._waits.given = given
        try:
            return super().wait(signals.one_piece(timeout))
        finally:
            take_back(self._mutex, given)  # it was interrupted before it did so

    def _release_save(self) -> None:  # what `wait` gives the lock up by
        give_up(self._mutex, self._waits.given)

    def _acquire_restore(self, state: object) -> None:  # and takes it back
        take_back(self._mutex, self._waits.given)
