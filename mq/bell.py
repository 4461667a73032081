"""What notes that views of a peer's memory have died, and tells who waits for that."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_ONE = (1).to_bytes(8, sys.byteorder)


class Bell:
    """Called with what has ended, by its weak reference.

    The compiled twin in ``_speed.c`` runs no handler of a signal meanwhile: what that
    raised, a Ctrl-C of the application's, would be printed and lost.

    Args:
        note: Notes it, by one call into C.

    Attributes:
        fd: Written to afterwards, 8 bytes as to an eventfd; none if negative.
    """

    __slots__ = ("_note", "fd")

    def __init__(self, note: Callable[[Any], object], /) -> None:
        self._note = note
        self.fd = -1

    def __call__(self, ended: object, /) -> None:
        self._note(ended)
        if self.fd >= 0:
            try:
                os.write(self.fd, _ONE)
            except OSError:  # full: it is readable anyway
                pass
