"""Shared memory of tests, and a system that takes its time to give it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from mq.lending import Lender
from mq.mappings import reserve
from mq.segments import Block, Segment, seal


def segment_of(nbytes: int, block_bytes: int) -> Segment:
    """A segment that can be lent."""
    segment = Segment(nbytes, block_bytes)
    segment.open()
    seal(segment.fd)
    return segment


class SlowSystem:
    """Has threads wait for the memory that they ask the system for.

    Attributes:
        spared: Those that need not wait, by their idents: the one that makes it.
        error: What they get in the end in place of memory, if any.
        asked: Released by each that waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Callable[[], BaseException] | None = None
        self.asked = threading.Semaphore(0)
        self._go_on = threading.Event()
        self._reserve = reserve
        self.spared: set[int] = {threading.get_ident()}
        self._threads: list[threading.Thread] = []
        monkeypatch.setattr("mq.segments.reserve", self._wait)

    def _wait(self, fd: int, memory: memoryview) -> None:
        if threading.get_ident() not in self.spared:
            self.asked.release()
            assert self._go_on.wait(60.0)
            if self.error is not None:
                raise self.error()
        self._reserve(fd, memory)

    def take(self, lender: Lender, nbytes: int) -> list[Block | None]:
        """Have a thread take a block; what it gets is there after `go_on`."""
        got: list[Block | None] = []

        def run() -> None:
            with contextlib.suppress(KeyboardInterrupt):
                got.append(lender.take(nbytes))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert self.asked.acquire(timeout=60.0)
        self._threads.append(thread)
        return got

    def go_on(self) -> None:
        """Let all of them go on to their end."""
        self._go_on.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive()
