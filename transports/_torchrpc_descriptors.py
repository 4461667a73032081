"""File descriptors: TensorPipe aborts the process where it cannot get one.

It takes them in a thread of its own, some time after a peer was added to the agent or
after the peer was told where the agent is. So for each connection under way what it
will take, out and in, is promised before either happens, until the first call of each
direction has come through: then everything of it is open.

How many a connection takes was counted with torch 2.13: `PIPE` and `START`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mq.descriptors import free_descriptors
from mq.errors import TransportUnavailable

PIPE: Final[Mapping[str, int]] = {
    "uv": 3,
    "shm": 28,
    "cma": 1,
    "basic": 0,
    "mpt_uv": 16,
}
"""What each end takes for one direction: the largest of the transports, and what the
channels take on top."""
UNCOUNTED: Final = 4
"""The same for what needs a device that there was none of."""
START: Final[Mapping[str, int]] = {"shm": 5, "mpt_uv": 112}
"""What the agent takes beside `LOOPS` for each of these."""
LOOPS: Final = 8
THREADS: Final[Mapping[str, int]] = {"shm": 2, "basic": 0, "mpt_uv": 16}
"""Loops that the agent begins for these, counted as above; 1 for any other name."""
OTHER_THREADS: Final = 4
"""Beside those and its workers: to listen, for time limits, and while it starts."""
SPARE: Final = 24
"""Free descriptors that are never promised: sockets that have not greeted yet,
the rendezvous, the application."""
GRACE_SECONDS: Final = 2.0
"""How long after its end a connection may still take what was promised to it."""


def pipe_size(transports: Sequence[str], channels: Sequence[str]) -> int:
    """What one direction of a connection takes at each end, at most."""
    most = max(PIPE.get(name, UNCOUNTED) for name in transports)
    return most + sum(PIPE.get(name, UNCOUNTED) for name in channels)


def start_threads(
    transports: Sequence[str], channels: Sequence[str], workers: int
) -> int:
    """How many threads an agent begins."""
    loops = sum(THREADS.get(name, 1) for name in (*transports, *channels))
    return loops + workers + OTHER_THREADS


def check_start(transports: Sequence[str], channels: Sequence[str]) -> None:
    """Raises: TransportUnavailable, for an agent without descriptors."""
    needed = LOOPS + sum(START.get(name, 0) for name in (*transports, *channels))
    needed += 2 * pipe_size(transports, channels)  # for its call to itself
    needed += SPARE
    free, why = free_descriptors(needed)
    if free < needed:
        raise TransportUnavailable(
            f"{why}, but TensorPipe needs {needed} to start with transports "
            f"{tuple(transports)} and channels {tuple(channels)}; raise it with "
            "`ulimit -n`"
        )


class Promise:
    """Descriptors that a connection may still take.

    Attributes:
        call: The first call that was made on it, once it was.
        heard: Whether the peer's first call has come.
        until: When it ends in any case, by the monotonic clock.
    """

    def __init__(self, pipe: int) -> None:
        self.call: Any = None
        self.heard = False
        self.until = float("inf")
        self._pipe = pipe

    def count(self) -> int:
        """How many are still to come."""
        answered = self.call is not None and self.call.done()
        return _needed(self._pipe, (not answered) + (not self.heard))

    def end(self, met: bool) -> None:
        """The connection is closed.

        Args:
            met: Whether the two ends knew each other, so that TensorPipe may still be
                about to connect them.
        """
        self.until = time.monotonic() + (GRACE_SECONDS if met else 0.0)


class Descriptors:
    """The promises of a process.

    Args:
        pipe: What one direction of a connection takes.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._promises: list[Promise] = []

    def promise(self) -> Promise:
        """For one connection that begins.

        Raises:
            OSError: There are too few; says what to do.
        """
        with self._lock:
            now = time.monotonic()
            self._promises = [p for p in self._promises if p.until > now and p.count()]
            promised = sum(promise.count() for promise in self._promises)
            needed = _needed(self._pipe, 2)
            free, why = free_descriptors(promised + needed + SPARE)
            if free < promised + needed + SPARE:
                raise OSError(
                    errno.EMFILE,
                    f"{why} and {promised} more are promised to peers, but one more "
                    f"peer needs {needed} and {SPARE} to spare; raise it with "
                    "`ulimit -n`",
                )
            found = Promise(self._pipe)
            self._promises.append(found)
            return found


def _needed(pipe: int, directions: int) -> int:
    """What so many directions of a connection take, and the watch on its process."""
    return pipe * directions + (directions > 0)
