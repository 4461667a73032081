"""File descriptors: how many this process may open, and what to do without."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from mq.errors import TransportUnavailable

SPARE_DESCRIPTORS: Final = 32
"""File descriptors that must be free to connect."""


def free_descriptors() -> tuple[float, str]:
    """How many more this process may open, and why so few, in words."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return float("inf"), "RLIMIT_NOFILE is unlimited"
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # that by which it is listed
    except OSError as error:  # where it cannot be known, but for one reason
        used = limit if error.errno == errno.EMFILE else 0
    return limit - used, f"{used} file descriptors are open, RLIMIT_NOFILE is {limit}"


def check_descriptors() -> None:
    """Raises: TransportUnavailable, if this process may open too few descriptors."""
    free, why = free_descriptors()
    if free < SPARE_DESCRIPTORS:
        raise TransportUnavailable(
            f"{why}, but a queue needs {SPARE_DESCRIPTORS} and a few more for each "
            "member; raise it with `ulimit -n`"
        )


def most_open(most: int, each: int = 1) -> int:
    """How much may be open of what others decide, such as to connect.

    Args:
        most: In any case.
        each: Descriptors that one takes; all of them together a fourth of the limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not each or limit == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, limit // (4 * each)))


def out_of_descriptors(error: OSError) -> str:
    """What to do about it, where the error is that no file can be opened; else ""."""
    if error.errno == errno.EMFILE:
        return "this process has as many open files as it may; raise `ulimit -n`"
    if error.errno == errno.ENFILE:
        return "this machine has as many open files as it may; raise fs.file-max"
    return ""
