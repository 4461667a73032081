"""Who a process is, and proof that it has ended.

A process id alone says little: it is reused, and it means something else on another
host or in another container. `ProcessId` adds what tells these apart, and
`ProcessWatch` asks the kernel. Nothing here ever sends a signal.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

_DEAD_STATES: Final = ("Z", "X", "x")
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_MOST_HOST_CHARACTERS: Final = 64
"""As many as the kernel lets a name have, where it is escaped, too."""
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Its inode, the same on each kernel; other namespaces of processes are containers'."""
_MOST_PID: Final = 2**31 - 1
"""The kernel's type: what a peer says beyond it is the id of no process."""


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from every other one that ever ran.

    Attributes:
        host: Name of the host, for people to read.
        pid: Process id in its own pid namespace.
        boot_id: The kernel's random id of this boot; "" where it cannot be known.
        pid_namespace: Inode of the pid namespace; 0 where it cannot be known.
        time_namespace: Inode of the time namespace, by whose clock `started` is; 0
            where the kernel has none.
        started: Start of the process in clock ticks since boot; 0 where unknown.
    """

    host: str
    pid: int
    boot_id: str
    pid_namespace: int
    time_namespace: int
    started: int

    def same_kernel(self, other: ProcessId) -> bool:
        """Whether pid and start of one mean the same process to the other."""
        return (
            self.boot_id != ""
            and self.pid_namespace != 0
            and self.boot_id == other.boot_id
            and self.pid_namespace == other.pid_namespace
            and self.time_namespace == other.time_namespace
        )

    def is_same(self, other: ProcessId) -> bool:
        """Whether it is the very same process, whatever its host is called by now."""
        return replace(other, host=self.host) == self


def here() -> ProcessId:
    """The identity of the calling process; asked anew, so right after a fork too."""
    stat = _read_stat("self")
    return ProcessId(
        host=host_name(),
        pid=os.getpid(),
        boot_id=boot_id(),
        pid_namespace=_namespace("pid"),
        time_namespace=_namespace("time"),
        started=stat.started if stat is not None else 0,
    )


def host_name() -> str:
    """What this host is called, for people to read, whatever its name is made of."""
    name = socket.gethostname()
    if not name.isprintable():
        name = ascii(name)[1:-1][:_MOST_HOST_CHARACTERS]
    return name or "localhost"


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def has_unique_id() -> bool:
    """Whether no other process of this host has the calling process's id.

    Containers count from 1, each of them, and may have the name of one host.
    """
    return _namespace("pid") == _INITIAL_PID_NAMESPACE


def boot_id() -> str:
    """The kernel's random id of this boot; "" where it cannot be known."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


class _Stat(NamedTuple):
    state: str
    started: int


def _read_stat(pid: int | str) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        # The command's name comes second, in parentheses, and may hold any byte.
        fields = text[text.rindex(b")") + 1 :].split()
        return _Stat(fields[0].decode("ascii"), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def _proc_is_ours() -> bool:
    """Whether /proc shows our pid namespace; not so after a bare `unshare --pid`."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


class ProcessWatch:
    """Tells whether a process has ended, for as long as somebody wants to know.

    The kernel's pidfd is used where there is one: it stays with the process when its
    id is reused, and a poller can wait for it. Elsewhere every question looks at /proc.

    Args:
        process: Any process; of one that is not comparable nothing is ever known.
    """

    def __init__(self, process: ProcessId) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_it = False  # whether the descriptor is known to be of this process
        self._ended = False
        self._comparable = 0 < process.pid <= _MOST_PID and process.same_kernel(here())
        if self._comparable:
            self._open()

    def _open(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._fd = os.pidfd_open(self.process.pid)
        except OSError as error:  # ENOSYS, EPERM, EMFILE: /proc must do
            self._ended = error.errno == errno.ESRCH
            return
        # Only now does the id stay put: whatever started at another time is another.
        found = self._look()
        self._is_it = found is False
        if found is True:
            self._ended = True
            self.close()

    def ended(self) -> bool | None:
        """Whether the process has ended; a zombie has.

        Returns:
            True is proof. False: the very process runs. None: nothing can be proven
            from here (another host or namespace, or /proc hides it).
        """
        if not self._comparable or self._ended:
            return True if self._ended else None
        with self._lock:
            # Readable means that the holder of the id at opening has ended: that was
            # our process, or else ours had ended before.
            if self._fd is not None:
                if _is_readable(self._fd):
                    self._ended = True
                    return True
                if self._is_it:
                    return False  # a look into /proc costs ten times as much
        found = self._look()
        self._ended = found is True
        return found

    def _look(self) -> bool | None:
        pid, started = self.process.pid, self.process.started
        stat = _read_stat(pid) if _proc_is_ours() else None
        if stat is None:
            return None if _is_taken(pid) else True
        if started == 0:
            return True if stat.state in _DEAD_STATES else None
        return stat.started != started or stat.state in _DEAD_STATES

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when the process ends, if there is one.

        None where `ended` must be asked now and then, and where it is True already.
        It belongs to the watch: unregister it before `close`.
        """
        return self._fd

    def close(self) -> None:
        """Free the descriptor; idempotent. `ended` goes on to work."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)


def is_gone(process: ProcessId) -> bool:
    """Whether there is proof, at this moment, that a process has ended."""
    watch = ProcessWatch(process)
    try:
        return watch.ended() is True
    finally:
        watch.close()


def _is_readable(fd: int) -> bool:
    poller = select.poll()  # select() cannot take descriptors beyond 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _is_taken(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 asks whether the id exists and delivers nothing
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
