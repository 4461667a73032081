"""Where the directories of a user are, and that nobody else can enter them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from typing import Final
from urllib.parse import unquote, urlsplit

from mq import process
from mq.errors import TransportUnavailable
from mq.log import Log, WarnOnce

_warn = WarnOnce(Log(__name__))

SOCKETS: Final = "s."
"""What directories of socket files begin with, as no `safe_name` does."""

_MAX_PATH: Final = 70  # a unix socket's path has at most 107 bytes, with its name


def safe_name(group: str) -> str:
    """A short file name for a group: readable in part, and different for each group."""
    digest = hashlib.sha256(group.encode()).hexdigest()[:16]
    return f"{re.sub('[^A-Za-z0-9_]', '_', group)[:12]}-{digest}"


def shared_path(spec: str) -> str:
    """The directory of ``file:///path``.

    Raises:
        ValueError: It has another form.
    """
    for character in spec:
        if character < " ":  # some of which `urlsplit` leaves out
            raise ValueError(
                f"rendezvous {spec!r} has a control character; in a path write "
                f"%{ord(character):02X}"
            )
    parts = urlsplit(spec)
    path = unquote(parts.path, errors="surrogateescape")  # as `os.fsdecode` has it
    if parts.netloc not in ("", "localhost") or len(path) < 2 or "\0" in path:
        raise ValueError(
            f"rendezvous {spec!r} is not of the form file:///shared/path: three "
            "slashes and an absolute path"
        )
    if "?" in spec or "#" in spec:
        raise ValueError(
            f"rendezvous {spec!r} has a '?' or '#', which no file:// address has; in a "
            "path write %3F and %23, and give each group a group= of its own"
        )
    return path


def local_base() -> str:
    """This user's directory for all groups on this host; it need not exist yet.

    Raises:
        TransportUnavailable: There is nowhere to make it.
    """
    wanted = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [wanted]
    with contextlib.suppress(FileNotFoundError):  # there is none that it can write to
        places.append(tempfile.gettempdir())
    places.append("/tmp")
    for place in places:
        base = os.path.join(place, f"mq-{os.geteuid()}")
        short = (
            len(os.fsencode(base)) + len("/") + len(safe_name("g" * 12)) <= _MAX_PATH
        )
        if os.path.isabs(place) and short and os.access(place, os.W_OK | os.X_OK):
            if wanted and place != wanted:
                _warn(
                    wanted,
                    "XDG_RUNTIME_DIR is %r, which is not there, not writable, or too "
                    "long for socket paths: members that are told no rendezvous meet "
                    "in %s, and do not find those that could use it",
                    wanted,
                    base,
                )
            return base
    raise TransportUnavailable(
        "this host has no directory for files of this user: none of "
        f"{[place for place in places if place]} is writable and short enough for "
        "socket paths; set XDG_RUNTIME_DIR or TMPDIR to one that is"
    )


def check_shared(path: str) -> None:
    """Check a directory that members of several hosts were told to meet in.

    Raises:
        TransportUnavailable: There is none.
    """
    problem = "does not exist; create it"
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return
        problem = "is not a directory; give one"
    except PermissionError:
        problem = "is in one that this user may not enter; give one"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            problem = f"cannot be used ({error.strerror}); give one"
    raise TransportUnavailable(
        f"the rendezvous directory {path} {problem}, on a file system that all "
        "members see"
    )


def make_private(path: str, what: str, *, shared: bool) -> None:
    """Make a directory only this user can enter, or check that it is one.

    One that a umask has closed to this user, too, is opened.

    Args:
        path: The directory.
        what: It is, in words.
        shared: Whether it is in one that was given, for members of several hosts.

    Raises:
        TransportUnavailable: It is something else, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return  # removed again by the last member; the caller tries once more
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    elif found.st_mode & 0o077:
        problem = (
            f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
        )
    elif found.st_mode & 0o700 != 0o700 and not _open_to_owner(path, found):
        problem = (
            f"is closed to its owner (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
        )
    else:
        return
    remedy = "set XDG_RUNTIME_DIR or TMPDIR to a directory of your own"
    if shared:
        remedy = "give the members of one user a file:// directory of their own"
    raise TransportUnavailable(f"the {what} {path} {problem}; remove it, or {remedy}")


def _open_to_owner(path: str, found: os.stat_result) -> bool:
    """Whether the directory that was found there has mode 0700 now."""
    with contextlib.suppress(OSError):
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags)
        try:
            if os.path.samestat(os.fstat(fd), found):
                os.chmod(f"/proc/self/fd/{fd}", 0o700)  # not what has its name by now
                return True
        finally:
            os.close(fd)
    return False


def open_private(path: str, flags: int) -> int:
    """Open a file for this user alone, and make it, if it is not there.

    A umask may take from the owner, too, who could not open it again.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o600 != 0o600:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def hold_lock(path: str, how: int, *, make: bool = True) -> int | None:
    """Lock a file for as long as the descriptor is open; waits for nobody.

    Args:
        path: The file.
        how: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        make: Whether to make the file, if it is not there.

    Returns:
        The descriptor. None: others hold it, or the file has lost its name meanwhile,
        so that this is the lock of nothing.

    Raises:
        OSError: There is no such file, or it cannot be locked.
    """
    if make:
        fd = open_private(path, os.O_RDWR)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    held = False
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        held = is_current(fd, path)
    except BlockingIOError:
        pass
    finally:
        if not held:
            os.close(fd)
    return fd if held else None


def is_current(fd: int, path: str) -> bool:
    """Whether an open file still is the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # the latter on NFS
            raise
        return False


def remove_if_deserted(path: str) -> None:
    """Remove a directory, unless somebody holds the lock in it.

    Raises:
        OSError: It has no lock, or cannot be removed.
    """
    fd = hold_lock(os.path.join(path, "lock"), fcntl.LOCK_EX, make=False)
    if fd is None:
        return
    try:
        remove_files(path)
    finally:
        os.close(fd)
    os.rmdir(path)


def new_sockets_name() -> str:
    """A name for a directory of socket files that one process holds the lock of."""
    return f"{_sockets_prefix()}{secrets.token_hex(6)}"


def _sockets_prefix() -> str:
    return f"{SOCKETS}{process.boot_id().replace('-', '')[:12]}."


def sweep_sockets(base: str) -> None:
    """Remove the directories of socket files whose processes have ended.

    The kernel gives a lock back with the process, in whatever namespace that is. But
    only with one of its own: other hosts may see the directory as well.
    """
    if not process.boot_id():
        return
    for name in os.listdir(base):
        if not name.startswith(_sockets_prefix()):
            continue
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):  # what is left is the next one's to remove
            try:
                remove_if_deserted(path)
            except FileNotFoundError:  # left before it was locked; else not empty
                os.rmdir(path)


def remove_files(path: str) -> None:
    """Empty a directory, as far as that can be done."""
    for name in sorted(os.listdir(path), key="lock".__eq__):  # the lock comes last
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, name))
