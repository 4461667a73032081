"""How much of large messages a peer's connection takes in a short while."""

from __future__ import annotations

from typing import Final

WAIT_SECONDS: Final = 0.15
"""A message may wait so long for the bodies ahead of it, beside the wire's own."""
FIRST_BYTES: Final = 4 << 20
"""May be under way before anything is known of a connection."""
LEAST_BYTES: Final = 1 << 20
"""May always be under way: who takes its time for each frame is no slow wire, and the
smaller they are the longer it takes for all."""
_PROBE_EVERY: Final = 16
_PROBE_SHARE: Final = 0.125
_PROBE_BYTES: Final = 128 * 1024
_FILL: Final = 1.5
"""Times what a wire holds keep it full although answers come in no even time."""
_FEWER: Final = 0.7
_ALIKE: Final = 0.85
_CLOCK_SECONDS: Final = 0.001
_NOTHING: Final = 1 << 64


class Pace:
    """What may be under way to a peer, by how long its answers take.

    One frame is timed at a time. All that was under way when it left has arrived by the
    time it is answered, so that is how long any other message would have waited. Where
    that was too long less may be under way; where not, as much more as would have been
    in time. So a wire that is fast, or not used to the full, has no limit that matters,
    and a slow one is full all the time.

    An answer takes its time with nothing ahead, too: on a long wire, or from a peer
    that is busy. As long as a queue stands that is not seen, so now and then, for one
    answer, little is under way; if it takes longer than the one before, it was late and
    tells nothing. And where an answer takes as long although there was less ahead than
    before, it is not what was ahead that took so long.

    Between processes of one host there is no slow wire, and nothing is bounded.

    Attributes:
        is_bounded: Whether that is to be; from the next connection on.
        window: How many bytes of bodies may be under way.
        held: How many of them it takes to keep a long wire full.
        timed: Number of the frame that is timed; beyond all numbers: there is none.
    """

    __slots__ = (
        "_ahead",
        "_before",
        "_delay",
        "_probe_in",
        "_probes",
        "_since",
        "held",
        "is_bounded",
        "timed",
        "window",
    )

    def __init__(self) -> None:
        self.is_bounded = False
        self.begin()

    def begin(self) -> None:
        """A new connection, over another wire perhaps."""
        self.window = FIRST_BYTES if self.is_bounded else _NOTHING
        self.timed = _NOTHING
        self.held = self._ahead = 0
        self._since = 0.0
        self._delay = float("inf")
        self._before = (0, 0.0)  # how much was ahead of the last slow one, and its time
        self._probe_in = 0
        self._probes = False

    def left(self, number: int, ahead: int, now: float) -> None:
        """A frame has left.

        Args:
            ahead: How many bytes of bodies are under way with it.
        """
        if self.timed == _NOTHING and self.is_bounded:
            self.timed, self._ahead, self._since = number, ahead, now

    def answered(self, now: float) -> None:
        """The frame that is timed has arrived."""
        self.timed = _NOTHING
        ahead, seconds = self._ahead, max(_CLOCK_SECONDS, now - self._since)
        before, before_seconds = self._before
        is_fewer = ahead <= _FEWER * before
        is_alike = _ALIKE * before_seconds <= seconds <= before_seconds / _ALIKE
        tells = is_alike or (self._probes and seconds < before_seconds)
        if is_fewer and tells:
            self._delay = seconds
        else:
            self._delay = min(self._delay, seconds)
        in_time = WAIT_SECONDS + self._delay
        if self._probes:
            if is_fewer:
                self._probes = False
                rate = max(before / before_seconds, ahead / seconds)
                self.window = max(LEAST_BYTES, int(rate * in_time))
                self.held = int(_FILL * rate * self._delay)
        elif ahead:
            least = self.window if seconds <= in_time else LEAST_BYTES
            self.window = max(least, int(ahead * in_time / seconds))
            self.held = int(_FILL * ahead * self._delay / seconds)
            if seconds > WAIT_SECONDS:
                self._before = ahead, seconds
                self._probe()

    def _probe(self) -> None:
        """Have little under way when it is due, if that is less than there was."""
        self._probe_in -= 1
        if self._probe_in > 0:
            return
        ahead, seconds = self._before
        little = int(ahead / seconds * WAIT_SECONDS * _PROBE_SHARE)
        little = max(_PROBE_BYTES, min(LEAST_BYTES, little))
        if 2 * little <= ahead:
            self.window = little
            self._probes = True
            self._probe_in = _PROBE_EVERY
