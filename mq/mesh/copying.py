"""Messages on their way from a publisher's memory into the receiver's own.

They are copied piece by piece, between looks at what else arrives: a message of 640 MB
delays those of other topics by the time of one piece. One that its publisher is still
writing is read on behind it; where its publisher stops, it is looked at now and then.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mq import speed
from mq.borrowing import is_borrowed
from mq.buffers import copy
from mq.mesh.large import Take
from mq.mesh.wire import Lent, Malformed
from mq.segments import COUNTER_BYTES, counted_bytes

if TYPE_CHECKING:
    from mq.mesh.incoming import Run

PIECE_BYTES: Final = 4 << 20
"""What is copied at a time: some tenths of a millisecond."""
FIRST_PAUSE_SECONDS: Final = 0.0005
LAST_PAUSE_SECONDS: Final = 0.01
"""Between looks at a message of which nothing more comes; each is twice the last."""
UNMAPPED_SECONDS: Final = 0.25
"""How long a message that can only be copied at once is waited for."""

Borrow = Callable[[int, int, int, Take], memoryview]


class Copying:
    """A message of which a part has been copied.

    Attributes:
        run: The message, in the inbox, where it waits for the rest.
        done: How many bytes that is.
        wanted: False once it was dropped from there.
    """

    __slots__ = ("_counter", "_own", "_shared", "done", "run", "wanted")

    def __init__(self, run: Run, counter: memoryview | None, own: memoryview) -> None:
        self.run = run
        self.wanted = True
        shared = run.areas[0]
        assert isinstance(shared, memoryview)  # what is on devices is never lent
        self._shared = shared
        self._counter = counter
        self._own = own
        self.done = 0

    def lacks(self) -> bool:
        """Whether its publisher has not written all of it."""
        counter = self._counter
        if counter is None:
            return False
        return int.from_bytes(counter, sys.byteorder) < len(self._shared)

    def go_on(self) -> bool:
        """Copy a piece; whether that was the last one, or nobody wants it."""
        run, shared, own = self.run, self._shared, self._own
        if not self.wanted:
            run.copying = None  # each refers to the other
            return True
        start = self.done
        stop = min(start + PIECE_BYTES, len(shared))
        if self._counter is not None:
            stop = speed.follow(shared, self._counter, start, stop, own)
        else:
            copy(shared[start:stop], own[start:stop], len(own))
        self.done = stop
        if stop < len(shared):
            return False
        run.areas = [own]
        run.copying = None  # from now on it can be taken
        return True


class Copies:
    """Those under way, each in turn.

    Attributes:
        waiting: They, the next one first.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self.waiting: deque[Copying] = deque()
        self._pause = 0.0
        self._in_vain = 0
        self._due = 0.0

    def begin(self, run: Run, counter: memoryview | None) -> None:
        """Copy the one message of a run, which is not in the inbox yet.

        Args:
            counter: How much of it is there; None: all of it.
        """
        run.copying = Copying(run, counter, self._take(len(run.areas[0])))
        self.waiting.append(run.copying)
        self._progress()

    def clear(self) -> None:
        """Nobody wants them any more."""
        while self.waiting:
            self.waiting.popleft().run.copying = None

    def _progress(self) -> None:
        self._due = self._pause = 0.0
        self._in_vain = 0

    def next_deadline(self, latest: float) -> float:
        """When there is something to do, by the mesh's clock, or `latest`.

        Until then those that publish these messages have to go on.
        """
        return min(latest, self._due) if self.waiting else latest

    def go_on(self, now: float, *, at_once: bool = False) -> bool:
        """Copy a piece of one message, if there is any; whether it was.

        Args:
            now: The time by the mesh's clock.
            at_once: Look for more of it even before the deadline.
        """
        if not self.waiting or (now < self._due and not at_once):
            return False
        copying = self.waiting[0]
        before = copying.done
        session = copying.run.source.session
        # It may be in no inbox, from where it would be cut: after an interrupt.
        lost = not session.alive and copying.lacks()
        if lost or copying.go_on():
            self.waiting.popleft()
        else:
            self.waiting.rotate(-1)
        self._in_vain += 1
        if copying.done > before or not copying.wanted:
            self._progress()
            return True
        if self._in_vain >= len(self.waiting):
            pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LAST_PAUSE_SECONDS)
            self._pause = pause
            self._due = now + pause
        return False


def counter_of(lent: Lent, borrow: Borrow, take: Take) -> memoryview | None:
    """Where a message's publisher says how much of it is there; None: all of it is.

    Raises:
        ValueError: It is no part of the segment.
        Malformed: There is no counter, or this process cannot map the message and it
            was not there in time.
    """
    offset = lent.offset + counted_bytes(lent.nbytes) - COUNTER_BYTES
    if offset % COUNTER_BYTES:
        raise Malformed(f"a counter at {offset}, which is no multiple of its size")
    give_up = time.monotonic() + UNMAPPED_SECONDS
    while True:
        counter = borrow(lent.segment, offset, COUNTER_BYTES, take)
        if int.from_bytes(counter, sys.byteorder) >= lent.nbytes:
            return None
        if is_borrowed(counter):
            return counter
        if time.monotonic() >= give_up:
            raise Malformed("its publisher stopped in the middle of a message")
        time.sleep(0.001)  # rarely more than once: the publisher is writing it
