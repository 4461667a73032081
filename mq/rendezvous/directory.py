"""A rendezvous in a directory: of one user on one host, or on a shared file system.

Each state of a name is a file of its own, ``m-<name's hash>-<generation>``: the
holder's record as JSON, or nothing once the name was given back. Such a file comes into
being complete by `link`, which also decides between claimants on NFS; the highest
generation counts. Locks play no part in this. A lease is the age of that file by the
clock of the file system itself, so clocks of hosts may differ; a renewal sets the time
of the file that was read, never of one that replaced it.

That clock may be set, too: so no record is removed for its age alone, but by who joins
and finds its member dead, or silent. Of names that were given back long ago one file
tells the generation, ``free-<generation>``, which so never falls: else who was stopped
meanwhile could take a name from its next holder.

`lock` is held shared by every process that uses the directory. Who gets it exclusively
was the last and removes everything. Where the file system has no locks, the directory
with its key stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from mq import forks, paths, process
from mq.addresses import has_listener
from mq.errors import ConnectRefused, ConnectTimeout, PeerLost, TransportUnavailable
from mq.log import Log, WarnOnce
from mq.rendezvous import claimants, states, unread
from mq.rendezvous.files import (
    publish_file,
    read_file,
    remedy_of,
    sockets_of,
    sweep_sockets,
)
from mq.rendezvous.record import MAX_RECORD_BYTES, Cell, Entry, Record
from mq.rendezvous.store import CellStore

KEY_BYTES: Final = 32
FREE_SECONDS: Final = 10.0
"""How long a name that was given back has a file of its own."""
SWEEP_SECONDS: Final = 3600.0
"""After this long, any member removes groups of the killed."""

_NOUN: Final = "rendezvous directory"
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class _File(NamedTuple):
    """The file of a state that was read, or None, and when its lease began."""

    name: str | None
    renewed: float


class DirectoryStore(CellStore[_File]):
    """Records as files.

    Args:
        base: Directory for all groups. The user's own of this host is made and removed
            as needed, and checked; a shared one must exist.
        group: Name of the group.
        shared: Whether `base` is on a file system that other hosts see too.
        timeout, until: As of any store, to wait for who is removing the directory.

    Raises:
        TransportUnavailable: The directory belongs to somebody else, is open to
            others, or cannot be used.
    """

    def __init__(
        self,
        base: str,
        group: str,
        *,
        shared: bool,
        timeout: float,
        until: float = math.inf,
    ) -> None:
        self.timeout, self.until = timeout, until
        self.path = os.path.join(base, paths.safe_name(group))
        self.directory = None if shared else self.path
        self.slow = shared
        self.description = f"directory {self.path}"
        self._base, self._shared = base, shared
        self._mutex = threading.RLock()
        self._lock_fd: int | None = None
        self._has_locks = True
        self._closed = False
        self._warn = WarnOnce(Log(__name__))
        self._parsed: dict[str, Record | None] = {}
        forks.register(self)
        try:
            self._enter()
            self.secret = self._share_key(None)
            if not shared:
                self._sweep_groups()
        except OSError as error:
            self.close()
            if isinstance(error, ConnectTimeout):
                raise
            remedy = remedy_of(error) or "make it writable for this user"
            raise TransportUnavailable(
                f"cannot meet in {self.path}: {error}; {remedy}, or give another "
                "rendezvous"
            ) from error
        except BaseException:
            self.close()
            raise

    # Entering and leaving

    def _enter(self) -> None:
        """Make the directory where needed, and hold its lock."""
        deadline = self.deadline()
        pause = threading.Event()
        while True:
            if self._shared:
                paths.check_shared(self._base)
            else:
                paths.make_private(self._base, _NOUN, shared=False)
            try:
                paths.make_private(self.path, _NOUN, shared=self._shared)
                if self._try_lock():
                    return
            except FileNotFoundError as error:  # the last member just left
                if self._shared and error.filename == self.path:
                    raise  # its base is there, but takes no directories
            if time.monotonic() >= deadline:
                raise ConnectTimeout(
                    f"{self.path} was being removed for {self.timeout:g} s; if no "
                    "process of the group runs any more, remove it yourself"
                )
            pause.wait(0.005)  # flock has no time-out

    def _try_lock(self) -> bool:
        lock = self._file("lock")
        try:
            fd = paths.hold_lock(lock, fcntl.LOCK_SH)
            self._has_locks = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            fd = paths.open_private(lock, os.O_RDWR)
            self._has_locks = False
        if fd is None:
            return False
        self.abandon()  # that of a file which somebody has removed
        self._lock_fd = fd
        return True

    def _share_key(self, key: bytes | None) -> bytes:
        """The directory's key, which is `key` or a new one if there was none."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                found = read_file(self._file("key"), KEY_BYTES)[0]
                if len(found) != KEY_BYTES:
                    raise TransportUnavailable(
                        f"{self._file('key')} is damaged; end all members of the group "
                        "and remove the directory"
                    )
                return found
            publish_file(self.path, "key", key or secrets.token_bytes(KEY_BYTES))

    def _stay(self) -> None:
        """Come back if somebody, such as a cleaner of /tmp, removed the directory."""
        if self._closed or self._lock_fd is None:
            raise PeerLost(f"the rendezvous in {self.path} is closed", self.path)
        if not paths.is_current(self._lock_fd, self._file("lock")):
            self._enter()
            self._parsed.clear()  # generations begin anew
        if self._share_key(self.secret) != self.secret:
            self._warn(
                "key",
                "%s was removed while in use and made anew by others: members from "
                "before and after cannot reach each other; keep cleaners off it, or "
                "set MQ_SECRET in all members",
                self.path,
            )

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            fd, self._closed = self._lock_fd, True
            with contextlib.suppress(OSError):  # what stays is swept by the next member
                if fd is not None and self._is_last(fd):
                    paths.remove_files(self.path)
            self.abandon()
            # Not before the lock is closed: NFS keeps the names of open files.
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
                if not self._shared:
                    os.rmdir(self._base)

    def _is_last(self, fd: int) -> bool:
        if not self._has_locks or not paths.is_current(fd, self._file("lock")):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Some mounts keep locks to the host; then only the leases speak for others.
        here = process.here()
        return not self._shared or all(
            entry.expired or claimants.has_ended(entry.record, here)
            for entry in self._list()
        )

    def _sweep_groups(self) -> None:
        """Remove the directories of groups whose last member was killed long ago."""
        paths.sweep_sockets(self._base)
        for name in os.listdir(self._base):
            if name.startswith(paths.SOCKETS):
                continue
            path = os.path.join(self._base, name)
            with contextlib.suppress(OSError):  # it is no directory of a group
                age = time.time() - os.lstat(os.path.join(path, "lock")).st_mtime
                if path != self.path and age > SWEEP_SECONDS:
                    paths.remove_if_deserted(path)

    def abandon(self) -> None:
        """Let go of the lock, which whoever else has its descriptor keeps."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    # Cells

    def read(self, name: str) -> tuple[Cell | None, _File]:
        with self._guard():
            while True:
                file = states.current(name, os.listdir(self.path))
                if file is None:
                    return None, _File(None, 0.0)
                self._parsed.pop(file, None)  # a cleaner may have had it replaced
                with contextlib.suppress(FileNotFoundError):
                    return self._load(file)

    def swap(self, name: str, token: _File, new: Cell) -> bool:
        with self._guard():
            mine = f"{states.hash_of(name)}-{new.generation}"
            text = "" if new.record is None else new.record.to_json()
            if not publish_file(self.path, mine, text.encode()):
                return False
            others = [file for file in os.listdir(self.path) if file != mine]
            now = states.current(name, others)
            if now != token.name and not states.is_below(now, new.generation):
                self._unlink(mine)  # we compared with a state long gone
                return False
            for file in others:
                if file.startswith(states.hash_of(name)):
                    with contextlib.suppress(OSError):
                        sweep_sockets(self._load(file)[0].record, self.path)
                    self._unlink(file)
            return True

    def touch(self, name: str, token: _File, cell: Cell) -> bool:
        with self._guard():
            try:
                for file in ("key", "lock", str(token.name)):  # cleaners look at ages
                    os.utime(self._file(file))
            except FileNotFoundError:
                return False
            return True

    def entry(self, cell: Cell, token: _File) -> Entry | None:
        if cell.record is None:
            return None
        with self._guard():
            return Entry(cell.record, max(0.0, self._now() - token.renewed))

    def records(self) -> list[Entry]:
        with self._guard():
            return self._list()

    def recent(self) -> list[Entry]:
        with self._guard():
            return self._list(strict=False)

    def is_listening(self, record: Record) -> bool:
        with self._guard():
            return any(map(has_listener, sockets_of(record, self.path)))

    def version(self) -> str:
        with self._guard():
            files = sorted(states.newest(os.listdir(self.path)).values())
            return hashlib.sha256(",".join(files).encode()).hexdigest()

    def _list(self, *, strict: bool = True) -> list[Entry]:
        there = os.listdir(self.path)
        files = set(states.newest(there).values())
        free, entries = states.of_all_free(there), list[Entry]()
        now = self._now()
        for file in files.difference(free):
            try:
                cell, token = self._load(file)
                if token.renewed > now:  # the clock was set back
                    os.utime(self._file(file), follow_symlinks=False)
            except FileNotFoundError:  # given back, or taken over, in this moment
                continue
            except ConnectRefused as error:
                self._warn.or_raise(error, strict=strict)
                continue
            age = max(0.0, now - token.renewed)
            if cell.record is not None:
                entries.append(Entry(cell.record, age))
            elif age > FREE_SECONDS:
                free.append(file)
        if free:
            self._forget(free)
        self._parsed = {f: r for f, r in self._parsed.items() if f in files}
        return sorted(entries, key=lambda entry: entry.record.name)

    def _forget(self, free: list[str]) -> None:
        """Have one file in place of these, of names that nobody holds."""
        kept = f"{states.FREE}-{max(map(states.generation, free))}"
        with contextlib.suppress(OSError):  # no room for it: they stay
            if kept not in free:
                publish_file(self.path, kept, b"")
            for file in free:
                if file != kept:
                    self._unlink(file)

    def _load(self, file: str) -> tuple[Cell, _File]:
        if file in self._parsed:  # what is under a name never changes
            renewed = os.lstat(self._file(file)).st_mtime
            return Cell(states.generation(file), self._parsed[file]), _File(
                file, renewed
            )
        record, text, path = None, b"", self._file(file)
        found = os.lstat(path)
        renewed = found.st_mtime
        try:
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no regular file")
            text, renewed = read_file(path, MAX_RECORD_BYTES)
            record = Record.from_json(text) if text else None
            if (
                record is not None
                and states.hash_of(record.name) != file.rpartition("-")[0]
            ):
                raise ValueError(f"it is the record of {record.name!r}")
        except ValueError as error:
            if not unread.has_ended(text):
                raise unread.refusal(path, error) from error
            record = None
        self._parsed[file] = record
        return Cell(states.generation(file), record), _File(file, renewed)

    # Files

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        with self._mutex:
            try:
                self._stay()
                yield
            except OSError as error:
                if isinstance(error, (PeerLost, ConnectRefused, ConnectTimeout)):
                    raise
                remedy = (
                    remedy_of(error) or "check its file system's space and permissions"
                )
                raise PeerLost(
                    f"the {_NOUN} {self.path} failed: {error}; {remedy}",
                    self.path,
                ) from error

    def _now(self) -> float:
        """The file system's own clock, in its seconds."""
        os.utime(self._file("lock"))
        return os.stat(self._file("lock")).st_mtime

    def _unlink(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(self._file(file))
