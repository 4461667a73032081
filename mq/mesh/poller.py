"""Waits for file descriptors: the one place where our threads sleep in the kernel."""

from __future__ import annotations

import os
import select
import sys
import threading

_ONE = (1).to_bytes(8, sys.byteorder)


class Poller:
    """A set of file descriptors to wait for, and a way to end that wait.

    `wait` may run in one or several threads while others register, unregister or wake.
    It is level-triggered: it returns at once as long as a registered descriptor is
    readable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._edge = hasattr(os, "eventfd") and hasattr(select, "epoll")
        if self._edge:
            # Each write is an edge, so that nobody need read: a system call less, and
            # with it a hand-over of the interpreter lock.
            self._reader = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._writer = self._reader
        else:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
        self._fds = {self._reader}
        self._woken = False
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            edge = select.EPOLLET if self._edge else 0
            self._epoll.register(self._reader, select.EPOLLIN | edge)

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
                os.write(self._writer, _ONE)
            except (BlockingIOError, OSError):  # full: the wait ends anyway; or closed
                pass

    def wait(self, timeout: float | None) -> list[int]:
        """Sleep until a descriptor is readable, `wake`, or `timeout` seconds.

        Returns:
            The registered descriptors that are readable; none after a time-out or a
            mere wake-up.
        """
        if self._epoll is not None:
            ready = [
                fd for fd, _ in self._epoll.poll(-1 if timeout is None else timeout)
            ]
        else:
            with self._lock:
                fds = list(self._fds)
            ready = select.select(fds, [], [], timeout)[0]
        if self._reader in ready:
            if not self._edge:
                try:
                    os.read(self._reader, 4096)
                except BlockingIOError:  # another waiting thread was first
                    pass
            self._woken = False  # only now, else a wake-up in between would stick
            ready.remove(self._reader)
        return ready

    def close(self) -> None:
        """Close the descriptors of the poller itself; idempotent."""
        with self._lock:
            fds, self._fds = self._fds, set()
        self._woken = True  # nobody writes to a descriptor that may be another's by now
        if fds:
            if self._epoll is not None:
                self._epoll.close()
            os.close(self._reader)
            if self._writer != self._reader:
                os.close(self._writer)
