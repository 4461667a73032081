"""File descriptors: how many this process may open, and what to do without."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Final, TypeVar

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


StrangerT = TypeVar("StrangerT")


def pushed_out(origins: Mapping[StrangerT, str]) -> StrangerT:
    """Who has to go of those that have proven nothing, for one more that has come.

    By chance, or beside a flood nobody would stay for as long as it takes to prove
    something over a wire with latency. One of each origin as likely as the cube of how
    many that has, and never where that is less than a fourth of the most: so who floods
    pushes out its own, but where they come from all over the world not always those of
    a host that has two.

    Args:
        origins: Where each comes from, as `mq.addresses.origin` has it; at least one.
    """
    count = Counter(origins.values())
    few = max(count.values()) / 4
    weights = {where: n * n if n >= few else 0 for where, n in count.items()}
    ends = list(accumulate(map(weights.__getitem__, origins.values())))
    at = int.from_bytes(os.urandom(8), "big") % ends[-1]
    return next(islice(origins, bisect(ends, at), None))


def out_of_descriptors(error: OSError) -> str:
    """What to do about it, where the error is that no file can be opened; else ""."""
    if error.errno == errno.EMFILE:
        return "this process has as many open files as it may; raise `ulimit -n`"
    if error.errno == errno.ENFILE:
        return "this machine has as many open files as it may; raise fs.file-max"
    return ""
