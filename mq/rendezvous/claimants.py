"""The members of this very program, told from those of one that called `exec`.

Such a process goes on with its id and its start, so that nobody else can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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
