"""The harness's deadlines and watch, and its way to wait for a state without events."""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Callable

STEP = 20.0
"""Seconds that any step of a case may take."""
CASE = 120.0
"""Seconds that a whole case may take; its steps are shorter, but it may repeat them."""
PEER_TIMEOUT = 2.0
"""The `peer_timeout` of cases in which a member falls silent, in seconds."""


class StepTimeout(AssertionError):
    """A step took longer than its deadline; the text holds all stacks."""


class MemberDied(AssertionError):
    """A member's process ended although the case did not end it."""


class Stopwatch:
    """Seconds since it was made, without those in which a process had no processor.

    No program answers while the host of a virtual machine has taken a core away, or
    while others are on it. Linux counts both: "steal" in proc(5), and how long each
    thread that was ready to run has waited. Threads wait for one another, as for the
    interpreter lock, so all their waits count: that is at most what was taken, and
    nothing where the machine is idle.

    Args:
        pid: The process.

    Attributes:
        began: When it was made, by `time.monotonic`.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stolen = stolen_seconds()
        self._waited = ready_seconds(pid)
        self.began = time.monotonic()

    def seconds(self, until: float) -> float:
        """From the start to a time of `time.monotonic`, which has come."""
        pairs = zip(stolen_seconds(), self._stolen, strict=False)
        stolen = max((now - then for now, then in pairs), default=0.0)
        now = ready_seconds(self._pid)
        waited = sum(s - self._waited.get(thread, 0.0) for thread, s in now.items())
        return until - self.began - stolen - waited


def ready_seconds(pid: int) -> dict[str, float]:
    """How long each thread of a process was ready to run, and had no core.

    The second number of ``schedstat``, in nanoseconds: Documentation/scheduler/
    sched-stats.rst of Linux.
    """
    waited = {}
    for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError), open(path) as file:  # it may have ended
            waited[path] = int(file.read().split()[1]) / 1e9
    return waited


def state_of(thread: int) -> str:
    """What a thread, or the main thread of a process, does: "S" sleeps, "T" stopped.

    The third field of ``stat``: proc_pid_stat(5). "" where it has ended.
    """
    with contextlib.suppress(OSError), open(f"/proc/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def has_stopped(pid: int) -> bool:
    """Whether all threads of a process have taken a SIGSTOP."""
    threads = os.listdir(f"/proc/{pid}/task")
    return all(state_of(int(thread)) == "T" for thread in threads)


def stolen_seconds() -> list[float]:
    """How long each core was taken away since the machine was started."""
    with open("/proc/stat") as file:
        rows = [line.split() for line in file if line.startswith("cpu")]
    return [int(row[8]) / os.sysconf("SC_CLK_TCK") for row in rows[1:] if len(row) > 8]


def wait_until(holds: Callable[[], bool], what: str, timeout: float = STEP) -> None:
    """Wait for a state of another process or of a counter, which tells nobody.

    Raises:
        StepTimeout: It did not hold within `timeout` seconds.
    """
    never = threading.Event()
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            raise StepTimeout(f"waited {timeout} s for {what}")
        never.wait(0.005)
