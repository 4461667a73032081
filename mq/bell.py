"""What tells who waits for it that a view of a peer's memory has died."""

from __future__ import annotations

import os
import sys

_ONE = (1).to_bytes(8, sys.byteorder)


class Bell:
    """Wakes a poller, as the callback of a weak reference.

    The compiled twin in ``_speed.c`` runs no handler of a signal meanwhile: what that
    raised, a Ctrl-C of the application's, would be printed and lost.

    Attributes:
        fd: Written to when it is called, 8 bytes as to an eventfd; none if negative.
    """

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = -1

    def __call__(self, *ended: object) -> None:
        if self.fd >= 0:
            try:
                os.write(self.fd, _ONE)
            except OSError:  # full: it is readable anyway
                pass
