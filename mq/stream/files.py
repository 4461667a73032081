"""The files of a link's unix sockets: what they are called, and that they go."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from fcntl import LOCK_SH
from typing import Final

from mq import addresses, forks, paths
from mq.errors import TransportUnavailable
from mq.log import Log

logger = Log(__name__)

_NOUN: Final = "directory for socket files"
_TOKEN_BYTES: Final = 6
_ATTEMPTS: Final = 100  # each fails only if another process sweeps or leaves just then


def checked_wires(wires: Sequence[str]) -> tuple[str, ...]:
    """The wires of a link that was told which it has, best first.

    Raises:
        ValueError: They are others than ``ipc`` and ``tcp``, or none.
    """
    if not wires or not set(wires) <= {"ipc", "tcp"}:
        raise ValueError(f"wires are 'ipc', 'tcp' or both, not {wires!r}")
    return tuple(wires)


class SocketFiles:
    """The files of the sockets on which one link listens.

    Args:
        engine: What listens, which their names end with.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._paths: list[str] = []
        self._own_directory = ""
        self._base = ""
        self._lock_fd: int | None = None
        forks.register(self)

    def check(self, listen: Sequence[str], wires: Sequence[str]) -> None:
        """Refuse what a link of these wires cannot listen on.

        A mere "ipc" is a new file.

        Raises:
            ValueError: An address is of another scheme, or malformed.
        """
        for address in listen:
            if address != "ipc" or "ipc" not in wires:
                addresses.check(address, wires, self._engine)

    def wanted(
        self, listen: Sequence[str], wires: Sequence[str], directory: str | None
    ) -> list[str]:
        """What a link of these wires listens on, with the whole paths of files.

        Args:
            listen: What `check` has let pass; empty: each of its wires. Without a
                place for the file of ``ipc`` that is the other wires, if any.
            wires: Best first.
            directory: As for `new`.

        Raises:
            TransportUnavailable: There is no place for a file, and no other wire.
            ValueError: No socket file can have such a path.
        """
        return [
            addresses.absolute(
                f"ipc://{self.new(directory)}" if address == "ipc" else address
            )
            for address in listen or self._usual(wires, directory)
        ]

    def _usual(self, wires: Sequence[str], directory: str | None) -> list[str]:
        found = []
        for wire in wires:
            if wire != "ipc":
                found.append(f"{wire}://127.0.0.1:0")
                continue
            try:
                found.append(f"ipc://{self.new(directory)}")
            except TransportUnavailable as error:
                others = ", ".join(other for other in wires if other != wire)
                if not others:
                    raise
                logger.warning("%s on this host, too: %s", others, error)
        return found

    def new(self, directory: str | None) -> str:
        """A path that nobody has.

        Args:
            directory: Of mode 0700, as for `Link.open`; None: one is made.

        Raises:
            TransportUnavailable: There is nowhere to make one, or members could not
                tell each other where it is.
        """
        if directory is None:
            if not self._own_directory:
                self._make_directory()
            directory = self._own_directory
        if not directory.isprintable():
            raise TransportUnavailable(
                f"no socket files in {directory!r}, which cannot be printed; set "
                "XDG_RUNTIME_DIR or TMPDIR to another directory"
            )
        name = f"{secrets.token_hex(_TOKEN_BYTES)}.{self._engine}"
        return os.path.join(directory, name)

    def _make_directory(self) -> None:
        """Make one that others sweep once this process has ended, if that can be."""
        try:
            base = paths.local_base()
            for _ in range(_ATTEMPTS):
                paths.make_private(base, _NOUN, shared=False)
                with contextlib.suppress(FileNotFoundError):
                    paths.sweep_sockets(base)
                    if self._lock_directory(base):
                        return
            problem: object = f"{base} was being removed"
        except (TransportUnavailable, OSError) as error:
            problem = error
        try:
            self._own_directory = tempfile.mkdtemp(prefix="mq-")
        except OSError as error:
            raise TransportUnavailable(f"no socket files: {problem}") from error
        # Whatever the umask is.
        paths.make_private(self._own_directory, _NOUN, shared=False)
        logger.warning(
            "socket files are in %s, which would stay if this process was killed: %s",
            self._own_directory,
            problem,
        )

    def _lock_directory(self, base: str) -> bool:
        path = os.path.join(base, paths.new_sockets_name())
        paths.make_private(path, _NOUN, shared=False)
        try:
            fd = paths.hold_lock(os.path.join(path, "lock"), LOCK_SH)
        except FileNotFoundError:
            fd = None
        except OSError:  # such as of a file system without locks: nobody sweeps there
            _remove(path, base)
            raise
        if fd is None:  # a sweeper was quicker, which saw nobody's lock on it
            return False
        self._own_directory, self._base, self._lock_fd = path, base, fd
        return True

    def add(self, path: str, mode: int | None = None) -> None:
        """A socket of the link is bound there, to which its owner may connect.

        Args:
            path: Its file.
            mode: What that is to have; None: what the umask leaves to others, too.
        """
        self._paths.append(path)
        found = stat.S_IMODE(os.stat(path).st_mode)
        wanted = found | 0o600 if mode is None else mode
        if wanted != found:
            os.chmod(path, wanted)

    def remove(self) -> None:
        """Remove them all, as far as they are there, and the directory made for them.

        Idempotent.
        """
        while self._paths:
            with contextlib.suppress(OSError):
                os.unlink(self._paths.pop())
        directory, base = self._own_directory, self._base
        if directory:
            self.abandon()  # first, for NFS keeps the names of open files
            _remove(directory, base)

    def abandon(self) -> None:
        """In a forked child: they are the parent's to remove."""
        self._paths.clear()
        self._own_directory = self._base = ""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)


def _remove(directory: str, base: str) -> None:
    with contextlib.suppress(OSError):
        paths.remove_files(directory)
        os.rmdir(directory)
        if base:
            os.rmdir(base)  # others may have something there
