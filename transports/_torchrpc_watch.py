"""A thread that looks how far a GPU is, for those who cannot wait for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mq.devices import is_to_come

if TYPE_CHECKING:
    from transports._torchrpc_lanes import Inbox, Lane


class Watch:
    """Tells lanes that a GPU is further: nothing else does, so this looks, and looks.

    It also closes what was mapped, for which the driver may wait for the GPU. A
    callback of CUDA's would run in a thread of its driver's, where Python may not wait
    for its lock.
    """

    LEAST: Final = 20e-6
    MOST: Final = 1e-3
    END_SECONDS: Final = 2.0
    """A driver that is busy with other processes takes this long to close memory."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, None] = {}
        self._kept: list[tuple[Inbox, Sequence[Any]]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, lane: Lane) -> None:
        """Call its `notice` once it `is_due`; from any thread."""
        with self._changed:
            self._lanes[lane] = None
            looks = self._closed or self._wake()
        if not looks:
            lane.notice()  # whose mesh looks again itself

    def let_go(self, mapped: Sequence[tuple[Inbox, Sequence[Any]]]) -> None:
        """Close each once its events are reached, however long that takes."""
        with self._changed:
            self._kept += mapped
            looks = not mapped or self._wake()
        if not looks:
            self._close_reached(tuple(mapped))

    def _wake(self) -> bool:
        """Whether there is a thread that looks; else it begins when it next can."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name="mq-torchrpc-watch", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # there are too many, or the process ends
                return False
            self._thread = thread
        self._changed.notify()
        return True

    def _run(self) -> None:
        nap = self.LEAST
        while True:
            with self._changed:
                while not (self._lanes or self._kept or self._closed):
                    nap = self.LEAST
                    self._changed.wait()
                lanes = () if self._closed else tuple(self._lanes)
                kept = tuple(self._kept)
                if self._closed and not kept:
                    return
            for lane in lanes:
                if lane.is_due():
                    nap = self.LEAST
                    with self._changed:
                        self._lanes.pop(lane, None)
                    lane.notice()
            self._close_reached(kept)
            # The GPU's work takes its time, and tells nobody of its end.
            time.sleep(nap)
            nap = min(1.5 * nap, self.MOST)

    def _close_reached(self, kept: Sequence[tuple[Inbox, Sequence[Any]]]) -> None:
        for entry in kept:
            inbox, events = entry
            if any(map(is_to_come, events)):
                continue
            with self._changed:
                if entry not in self._kept:  # another thread closes it
                    continue
                self._kept.remove(entry)
            inbox.close()

    def close(self) -> None:
        """End the thread, if there is one: at the latest once all is closed."""
        with self._changed:
            self._closed = True
            self._lanes.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self.END_SECONDS)
