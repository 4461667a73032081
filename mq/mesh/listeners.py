"""Who is told, in whatever thread, that something has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Listener: TypeAlias = Callable[[], bool]
"""What is called then; whether it is to be called again."""


class Listeners:
    """Those of one queue; used under its lock."""

    def __init__(self) -> None:
        self._all: list[Listener] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, listener: Listener) -> bool:
        """Tell it of all changes from now on; False if it was told before, too."""
        if listener in self._all:
            return False
        self._all.append(listener)
        return True

    def remove(self, listener: Listener) -> None:
        """Tell it of none any more; it may be gone already."""
        if listener in self._all:
            self._all.remove(listener)

    def tell(self) -> None:
        """Something has changed."""
        if self._all:
            self._all = [listener for listener in self._all if listener()]
