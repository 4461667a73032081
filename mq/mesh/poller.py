"""Waits for file descriptors, for whoever leads."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from mq import forks
from mq.signals import attentive
from mq.speed import SPINNER, Spinner

SPIN_SECONDS: Final = 400e-6
"""How long a wait looks again and again before it sleeps."""
SLOW_SECONDS: Final = 100e-6
"""Parts this far apart come over a slow wire: 1500 bytes at 120 Mbit/s."""
PARTS_SECONDS: Final = 5e-3
"""How long waits spin in all for such parts of one thing."""
_LONGEST_PAUSE: Final = 256
"""Short waits to go by, at most, before one spins again."""
_ONE = (1).to_bytes(8, sys.byteorder)


class Poller:
    """A set of file descriptors to wait for, and a way to end that wait.

    `wait` may run in one or several threads while others register, unregister or wake.
    It is level-triggered: it returns at once as long as a registered descriptor is
    readable.

    **Spinning.** A thread that sleeps is woken late, often on another core and with
    cold caches, which costs more than all our work on a small message. So a wait may
    look again and again for `SPIN_SECONDS` before it sleeps, as long as that
    succeeds. After it was in vain a number of waits that short must go by, twice as
    many each time, before one spins again. So where events are rarer, or the other
    side has no core to run on, nearly all waits sleep at once. Nor does it pay for
    each packet of what takes long to arrive. Between two looks others may have the
    core: the engine and the peers need it.

    Attributes:
        spins: Whether waits may spin at all: not where one core is all there is, nor
            where what comes is from threads of this process, which need the interpreter
            lock for it.
        wake_fd: 8 bytes written there, as to an eventfd, wake it, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.spins = cores() > 1
        # First: where the others cannot be had these close themselves.
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._spinner: Spinner | None = None
        if SPINNER is not None and self._epoll is not None and self.spins:
            self._spinner = SPINNER(self._epoll.fileno())
        self._edge = hasattr(os, "eventfd") and self._epoll is not None
        if self._edge:
            # Each write is an edge, so that nobody need read: a system call less, and
            # with it a hand-over of the interpreter lock.
            self._reader = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.wake_fd = self._reader
        else:
            self._reader, self.wake_fd = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self.wake_fd, False)
        self._fds = {self._reader}
        self._woken = False
        self._pause = 1
        self._short_waits_left = 1
        self._seen = 0
        self._spun = 0.0  # for slow parts, while that stayed the same
        if self._epoll is not None:
            edge = select.EPOLLET if self._edge else 0
            self._epoll.register(self._reader, select.EPOLLIN | edge)
        forks.register(self)

    def register(self, fd: int) -> None:
        """Wake `wait` whenever `fd` is readable."""
        with self._lock:
            if fd in self._fds:
                return
            self._fds.add(fd)
        if self._epoll is not None:
            self._epoll.register(fd, select.EPOLLIN)
        else:
            self.wake()

    def unregister(self, fd: int) -> None:
        """Forget `fd`, before it is closed. Unknown descriptors are ignored."""
        with self._lock:
            if fd not in self._fds:
                return
            self._fds.discard(fd)
        if self._epoll is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):  # its owner closed it first
                pass
        else:
            self.wake()

    def wake(self) -> None:
        """End a running or else the next `wait`. From any thread, takes no lock."""
        if not self._woken:
            self._woken = True
            try:
                os.write(self.wake_fd, _ONE)
            except (BlockingIOError, OSError):  # full: the wait ends anyway; or closed
                pass

    def wait(self, timeout: float | None, seen: int | None = None) -> list[int]:
        """Sleep until a descriptor is readable, `wake`, or `timeout` seconds.

        Args:
            timeout: Seconds; None waits.
            seen: Where somebody waits for what comes, so that spinning may pay: a
                number that is another one once something has come as a whole.

        Returns:
            The registered descriptors that are readable; none after a time-out or a
            mere wake-up.
        """
        # A wake-up may have been taken by a wait that a signal's handler interrupted,
        # which waits itself now; without this no other would ever be written.
        self._have_written()
        try:
            ready = self._wait(timeout, seen if self.spins else None)
            if self._reader in ready and not self._edge:
                try:
                    os.read(self._reader, 4096)
                except BlockingIOError:  # another waiting thread was first
                    pass
        except BaseException as error:
            self._have_written()  # it may have taken a wake-up, too
            if self._fds or not isinstance(error, ValueError | OSError):
                raise
            return []  # closed meanwhile: by another thread, or by a signal's handler
        if self._reader in ready:
            self._have_written()  # only now, else a wake-up in between would stick
            ready.remove(self._reader)
        return ready

    def _have_written(self) -> None:
        """From here on `wake` writes, unless the descriptor is closed."""
        self._woken = False
        if not self._fds:
            self._woken = True

    def _wait(self, timeout: float | None, seen: int | None) -> list[int]:
        if seen is None:
            return attentive(self._look, timeout)
        if seen != self._seen:
            self._seen, self._spun = seen, 0.0
        began = time.monotonic()
        ready = []
        if not self._short_waits_left and self._spun < PARTS_SECONDS:
            ready = self._spin(timeout, began)
        if not ready:
            ready = attentive(self._look, timeout)
            if ready and time.monotonic() - began < SPIN_SECONDS:
                self._short_waits_left = max(0, self._short_waits_left - 1)
        return ready

    def _spin(self, timeout: float | None, began: float) -> list[int]:
        if timeout is not None and timeout < SPIN_SECONDS:
            return []
        if self._spinner is not None:
            ready = self._spinner.spin(SPIN_SECONDS)
        else:
            ready = self._look_again(began + SPIN_SECONDS)
        if ready:
            spun = time.monotonic() - began
            if spun > SLOW_SECONDS:
                self._spun += spun
            self._pause = max(1, self._pause // 2)
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._short_waits_left = self._pause
        return ready

    def _look_again(self, until: float) -> list[int]:
        """Look until a descriptor is readable, or it is time."""
        look, clock = self._look, time.monotonic
        while clock() < until:
            ready = look(0)
            if ready:
                return ready
            _yield()
        return []

    def _look(self, timeout: float | None) -> list[int]:
        if self._epoll is not None:
            found = self._epoll.poll(-1 if timeout is None else timeout)
            return [fd for fd, _ in found]
        with self._lock:
            fds = list(self._fds)
        return select.select(fds, [], [], timeout)[0]

    def close(self) -> None:
        """Close the descriptors of the poller itself; idempotent."""
        with self._lock:
            fds, self._fds = self._fds, set()
        self._woken = True  # nobody writes to a descriptor that may be another's by now
        if fds:
            if self._spinner is not None:
                self._spinner.close()
            if self._epoll is not None:
                self._epoll.close()
            os.close(self._reader)
            if self.wake_fd != self._reader:
                os.close(self.wake_fd)

    def abandon(self) -> None:
        """In a forked child: as `close`, whoever has the lock in the parent."""
        self._lock = threading.Lock()
        self.close()


_yield: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: None)


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
