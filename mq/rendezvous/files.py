"""Files that are there complete, or not at all, and those of sockets beside them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import Final

from mq import paths
from mq.descriptors import out_of_descriptors
from mq.rendezvous.record import Record

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def publish_file(directory: str, name: str, content: bytes) -> bool:
    """Make a complete file at once; False if there is one of that name."""
    temporary = os.path.join(directory, f"t-{secrets.token_hex(8)}")
    fd = paths.open_private(temporary, os.O_WRONLY | os.O_EXCL)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.link(temporary, os.path.join(directory, name))
    except FileExistsError:
        # A repeated request on NFS says so too after a lost answer.
        return os.stat(temporary).st_nlink == 2
    finally:
        os.unlink(temporary)
    return True


def read_file(path: str, limit: int) -> tuple[bytes, float]:
    """What is in a file, but one byte beyond the limit at most, and when it was made.

    Made, or touched: by the clock of the file system.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda path, _: os.open(path, flags)) as file:
        return file.read(limit + 1), os.fstat(file.fileno()).st_mtime


def sockets_of(record: Record | None, directory: str) -> list[str]:
    """The socket files in the directory that go with a record."""
    addresses = () if record is None else record.addresses
    files = [address.partition("://")[2] for address in addresses]
    return [file for file in files if os.path.dirname(file) == directory]


def sweep_sockets(record: Record | None, directory: str) -> None:
    """Remove those."""
    for file in sockets_of(record, directory):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(file).st_mode):
                os.unlink(file)


def remedy_of(error: OSError) -> str:
    """What helps where a file failed, if that can be told; else ""."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there"
    if error.filename2 is not None and error.errno in _NO_LINKS:  # `link` has two
        return "choose a directory on a file system with hard links"
    if isinstance(error, IsADirectoryError):
        return "remove it"
    return out_of_descriptors(error)
