"""Whether the member of a record is dead, as far as this process can tell.

The members of this very program are told from those of one that called `exec`: such a
process goes on with its id and its start, so that nobody else can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mq.process import ProcessId, is_gone
from mq.rendezvous.record import Record

_open: Final[set[str]] = set()


def add(incarnation: str) -> None:
    """A member of this program is about to claim a name."""
    _open.add(incarnation)


def forget(incarnations: Iterable[str]) -> None:
    """They hold no names any more."""
    _open.difference_update(incarnations)


def has(incarnation: str) -> bool:
    """Whether one of them has this incarnation."""
    return incarnation in _open


def has_ended(record: Record, here: ProcessId) -> bool:
    """Whether the member that wrote a record is known to be dead.

    Args:
        here: This process.
    """
    if not here.same_kernel(record.process):
        return False
    if here.pid == record.process.pid:  # whatever program it ran then
        return not has(record.incarnation)
    return is_gone(record.process)
