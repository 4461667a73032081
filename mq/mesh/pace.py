"""How much of large messages a peer's connection takes in a short while."""

from __future__ import annotations

from typing import Final

WAIT_SECONDS: Final = 0.15
"""A message may wait so long for the bodies ahead of it, beside the wire's own."""
FIRST_BYTES: Final = 4 << 20
"""May be under way before anything is known of a connection."""
LEAST_BYTES: Final = 128 * 1024
"""May always be under way; what takes long with less is the wire's delay."""
_GROWTH: Final = 2.0
_CLOCK_SECONDS: Final = 0.001
_NOTHING: Final = 1 << 64


class Pace:
    """What may be under way to a peer, by how long its answers take.

    One frame is timed at a time. All that was under way when it left has arrived by the
    time it is answered, so that is how long any other message would have waited. Where
    that was too long less may be under way; where not, as much more as would have been
    in time. So a wire that is fast, or not used to the full, has no limit that matters,
    and a slow one is full all the time.

    Attributes:
        window: How many bytes of bodies may be under way.
        timed: Number of the frame that is timed; beyond all numbers: there is none.
    """

    __slots__ = ("_ahead", "_delay", "_since", "timed", "window")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new connection, over another wire perhaps."""
        self.window = FIRST_BYTES
        self.timed = _NOTHING
        self._ahead = 0
        self._since = self._delay = 0.0

    def left(self, number: int, ahead: int, now: float) -> None:
        """A frame has left.

        Args:
            ahead: How many bytes of bodies are under way with it.
        """
        if self.timed == _NOTHING:
            self.timed, self._ahead, self._since = number, ahead, now

    def answered(self, now: float) -> None:
        """The frame that is timed has arrived."""
        self.timed = _NOTHING
        ahead, seconds = self._ahead, max(_CLOCK_SECONDS, now - self._since)
        if ahead <= LEAST_BYTES:
            # It may grow, as by others' traffic, but not by one answer that was late.
            known = self._delay
            self._delay = min(seconds, _GROWTH * known) if known else seconds
        if ahead:
            in_time = WAIT_SECONDS + self._delay
            fitting = int(ahead * in_time / seconds)
            least = self.window if seconds <= in_time else LEAST_BYTES
            self.window = max(least, fitting)
