"""File descriptors: how many this process may open, and what to do without."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

from mq.addresses import origin
from mq.errors import TransportUnavailable

SPARE_DESCRIPTORS: Final = 32
"""File descriptors that must be free to connect."""
_OPEN: Final = "/proc/self/fd"
_VERSION: Final = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
_COUNTS: Final = _VERSION >= (6, 2)
"""Whether the kernel tells how many are open as the size of `_OPEN`."""


def free_descriptors(enough: int) -> tuple[float, str]:
    """How many more this process may open, and why so few, in words.

    To list those that are open takes microseconds for each, and each handshake asks: a
    group of 60 in one process would never come together.

    Args:
        enough: If as many are free it may say fewer than there are, but not fewer than
            this.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return float("inf"), "RLIMIT_NOFILE is unlimited"
    used: float = _counted_by_kernel()
    if not used and limit - (slots := _slots()) >= enough:
        used = slots
    used = used or _listed(limit)
    return limit - used, f"{used} file descriptors are open, RLIMIT_NOFILE is {limit}"


def _counted_by_kernel() -> int:
    """How many are open; 0 where it does not tell."""
    try:
        return os.stat(_OPEN).st_size if _COUNTS else 0
    except OSError:
        return 0


def _slots() -> float:
    """What the kernel has room for so far: as many as are open, or up to double."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("FDSize:"):
                return int(line.split()[1])
    return float("inf")


def _listed(limit: int) -> int:
    """How many are open, counted one by one."""
    try:
        return len(os.listdir(_OPEN)) - 1  # that by which it is listed
    except OSError as error:  # where it cannot be known, but for one reason
        return limit if error.errno == errno.EMFILE else 0


def check_descriptors() -> None:
    """Raises: TransportUnavailable, if this process may open too few descriptors."""
    free, why = free_descriptors(SPARE_DESCRIPTORS)
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


class _Strange(Protocol):
    """Somebody who has proven nothing yet."""

    @property
    def address(self) -> str: ...


StrangerT = TypeVar("StrangerT", bound=_Strange)


def pushed_out(strangers: Iterable[StrangerT], newest: _Strange) -> StrangerT:
    """Who has to go of those that have proven nothing, where one more has come.

    One of those whose host has most of them, or a host that floods would push out the
    members of all others; and of these any, or beside a flood from the same host nobody
    would stay for as long as it takes to prove something over a wire with latency.

    Args:
        strangers: At least one.
        newest: Who has come, and is not among them.
    """
    origins = [(stranger, origin(stranger.address)) for stranger in strangers]
    count = Counter(where for _, where in origins)
    count[origin(newest.address)] += 1
    most = max(count[where] for _, where in origins)
    some = [one for one, where in origins if count[where] == most]
    return some[int.from_bytes(os.urandom(4), "big") % len(some)]


def out_of_descriptors(error: OSError) -> str:
    """What to do about it, where the error is that no file can be opened; else ""."""
    if error.errno == errno.EMFILE:
        return "this process has as many open files as it may; raise `ulimit -n`"
    if error.errno == errno.ENFILE:
        return "this machine has as many open files as it may; raise fs.file-max"
    return ""
