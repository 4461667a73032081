"""The thread of a rendezvous that may take long to answer."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from mq import forks


class Worker:
    """A thread for what may take long, and to notice that the store hung up.

    Args:
        watched: The socket whose hang-up matters, if any at the moment.
        on_hang_up: Called on the thread after each hang-up.
    """

    def __init__(
        self, watched: Callable[[], int | None], on_hang_up: Callable[[], None]
    ) -> None:
        self._watched = watched
        self._on_hang_up = on_hang_up
        self._jobs: dict[str, Callable[[], None]] = {}
        self._stopping = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._closed = False
        self._lock = threading.Lock()
        forks.register(self)
        self._thread = threading.Thread(
            target=self._run, name="mq-rendezvous", daemon=True
        )
        self._thread.start()

    def submit(self, key: str, job: Callable[[], None]) -> None:
        """Run a job soon, in place of one of the same key that waits."""
        with self._lock:
            self._jobs[key] = job
        self.look_again()

    def look_again(self) -> None:
        """Notice new jobs and a new socket."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writer, b"\0")

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                key = next(iter(self._jobs), None)
                job = None if key is None else self._jobs.pop(key)
            if job is not None:
                job()
            elif self._wait():
                self._on_hang_up()

    def _wait(self) -> bool:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        watched = self._watched()
        if watched is not None and watched >= 0:
            # Answers make the socket readable too; only its end is of interest here.
            poller.register(watched, getattr(select, "POLLRDHUP", 0))
        ready = {fd for fd, _ in poller.poll()}
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        return watched in ready

    def stop(self) -> None:
        """Begin no further job."""
        self._stopping = True
        self.look_again()

    def close(self) -> None:
        """Wait for the thread, whose job the closed store has ended; idempotent."""
        self._thread.join(5.0)
        self._free()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        self._free()

    def _free(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)
