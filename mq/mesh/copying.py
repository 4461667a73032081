"""Messages on their way from a publisher's memory into the receiver's own.

They are copied piece by piece, between looks at what else arrives: a message of 640 MB
delays those of other topics by the time of one piece.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from mq.buffers import copy
from mq.mesh.large import Take

if TYPE_CHECKING:
    from mq.mesh.incoming import Run

PIECE_BYTES: Final = 4 << 20
"""What is copied at a time: some tenths of a millisecond."""


class Copying:
    """A message of which a part has been copied.

    Attributes:
        run: The message, in the inbox, where it waits for the rest.
        wanted: False once it was dropped from there.
    """

    __slots__ = ("_done", "_own", "_shared", "run", "wanted")

    def __init__(self, run: Run, take: Take) -> None:
        self.run = run
        self.wanted = True
        shared = run.areas[0]
        assert isinstance(shared, memoryview)  # what is on devices is never lent
        self._shared = shared
        self._own = take(len(self._shared))
        self._done = 0

    def go_on(self) -> bool:
        """Copy a piece; whether that was the last one, or nobody wants it."""
        if not self.wanted:
            self.run.copying = None  # each refers to the other
            return True
        start = self._done
        stop = min(start + PIECE_BYTES, len(self._own))
        copy(self._shared[start:stop], self._own[start:stop], len(self._own))
        self._done = stop
        if stop < len(self._own):
            return False
        run = self.run
        run.areas = [self._own]
        run.copying = None  # from now on it can be taken
        return True


class Copies:
    """Those under way, each in turn."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiting: deque[Copying] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, run: Run) -> None:
        """Copy the one message of a run, which is not in the inbox yet."""
        run.copying = Copying(run, self._take)
        self._waiting.append(run.copying)

    def go_on(self) -> None:
        """Copy a piece of one message."""
        copying = self._waiting[0]
        if copying.go_on():
            self._waiting.popleft()
        else:
            self._waiting.rotate(-1)
