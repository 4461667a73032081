"""How a member that was given addresses reaches whoever listens there."""

from __future__ import annotations

import functools
import time
from typing import Final

from mq import addresses
from mq.errors import ConnectTimeout
from mq.log import Log
from mq.mesh.dial import Dial
from mq.mesh.dialling import ESTRANGED_DELAY
from mq.mesh.driver import Driver
from mq.settings import Settings

logger = Log(__name__)

FIRST_PAUSE: Final = 0.02
"""Seconds before who has ended is dialled again while `connect` waits; then doubled."""
MOST_PAUSE: Final = 0.5
REFUSED_SECONDS: Final = 2.0
"""The same after a refusal, while the queue lives: its log has others to tell of."""
MOST_REFUSED_SECONDS: Final = 60.0
LONG_SECONDS: Final = 10.0
"""After so long without whoever listens at an address the log tells why."""


class _Place:
    """One of the addresses.

    Attributes:
        dial: The last one of it.
        refused: Code of the refusal that was told of; "": none since it was reached.
        pause: Seconds between dials that are refused.
        next_at: When one that was refused is begun anew, by `time.monotonic`, or None.
        told_at: When it is told of that nobody is reached there, by the same; None: not
            before somebody was. Of a refusal it is told at once.
    """

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.refused = ""
        self.pause = REFUSED_SECONDS
        self.next_at: float | None = None
        self.told_at: float | None = None

    def was_reached(self, now: float) -> None:
        """Whoever listens there does not refuse this member."""
        self.told_at = now + LONG_SECONDS
        self.refused = ""
        self.pause = REFUSED_SECONDS

    def is_missed(self, now: float) -> None:
        """Nobody is reached there; tells of it, once, if that lasts."""
        if self.told_at is not None and now >= self.told_at:
            self.told_at = None
            logger.warning(
                "nobody was reached at %s of attach_to for %g s; it is tried again: %s",
                self.dial.address,
                LONG_SECONDS,
                self.dial.outcome(),
            )

    def may_begin(self, now: float) -> bool:
        """Whether one that has ended may be begun anew; tells of a refusal."""
        if self.dial.refusal and self.next_at is None:
            if self.refused != self.dial.refusal:
                logger.warning(
                    "who listens at %s of attach_to now refuses this member, which "
                    "tries again: %s",
                    self.dial.address,
                    self.dial.error,
                )
            self.refused = self.dial.refusal
            self.next_at = now + self.pause
            self.told_at = self.next_at + LONG_SECONDS
            self.pause = min(2 * self.pause, MOST_REFUSED_SECONDS)
        return self.next_at is None or now >= self.next_at


class Attached:
    """The addresses of `attach_to`, and who listens there as long as the queue lives.

    Nobody else tells of them: who is begun anew at such an address, or was given up and
    comes back after a long time, is found by dialling it.
    """

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._mesh = driver.mesh
        self._places: list[_Place] = []
        self._all_reached = False

    def reach(self, deadline: float) -> None:
        """Have a session with whoever listens at each of them.

        Raises:
            ValueError: One of them is no address of this backend.
            ConnectTimeout, ConnectRefused, AuthenticationFailed: Not at all of them.
        """
        for address in self._settings.attach_to:
            dialling = self._mesh.dialling
            find = functools.partial(dialling.routes, [address], same_host=True)
            routes = self._driver.look(find)
            if not routes or addresses.is_any_port(address):
                raise ValueError(
                    f"attach_to={address!r} is no address of backend "
                    f"{self._settings.backend!r}; give what describe()['addresses'] of "
                    "another member says, over TCP with its port"
                )
            place = _Place(Dial(routes, until=deadline + 1.0))
            self._places.append(place)
            self._begin(place)
        pause = FIRST_PAUSE
        while not self._are_reached(deadline):
            left = deadline - time.monotonic()
            self._driver.wait_until(lambda: False, max(0.0, min(left, pause)))
            pause = min(2 * pause, MOST_PAUSE)
            for place in self._ended():
                why = place.dial.error or "who was reached there has ended"
                place.dial = Dial(place.dial.routes, until=deadline + 1.0)
                place.dial.error = why
                self._begin(place)
        for place in self._places:
            place.was_reached(time.monotonic())
        self._all_reached = True

    def _are_reached(self, deadline: float) -> bool:
        """Wait until all are; False: some were, and have ended.

        Raises:
            ConnectTimeout, ConnectRefused, AuthenticationFailed: Not at all of them.
        """
        dials = [place.dial for place in self._places]

        def settled() -> bool:
            ends = any(dial.refusal or self._has_ended(dial) for dial in dials)
            return ends or all(map(self._is_reached, dials))

        left = max(0.0, deadline - time.monotonic())
        self._driver.wait_until(settled, left)
        with self._driver.lead.lock:
            for dial in dials:
                dial.raise_refusal()
            missing = [dial for dial in dials if not self._is_reached(dial)]
            told = "; ".join(f"{d.address} ({d.outcome()})" for d in missing)
        if missing and time.monotonic() >= deadline:
            raise ConnectTimeout(
                f"could not greet within {self._settings.connect_timeout:g} s: {told}. "
                "Is a member of this group listening there? On a slow network raise "
                "connect_timeout"
            )
        return not missing

    def keep(self) -> None:
        """Dial where somebody was and is no more; called from time to time."""
        kept = self._places and self._all_reached
        if not kept or self._driver.lead.closing or self._mesh.replaced:
            return
        now = time.monotonic()
        with self._driver.lead.lock:
            reached = [p for p in self._places if self._is_reached(p.dial)]
        for place in self._places:
            if place in reached:
                place.was_reached(now)
            elif not place.dial.done:
                place.is_missed(now)
        for place in self._ended():
            if place.dial.incarnation and not place.dial.refusal:  # it was, since
                place.was_reached(now)
            if place.may_begin(now):
                place.next_at = None
                place.dial = Dial(place.dial.routes, max_delay=ESTRANGED_DELAY)
                self._begin(place)

    def _begin(self, place: _Place) -> None:
        start = self._mesh.dialling.start
        self._driver.run(functools.partial(start, place.dial))

    def _is_reached(self, dial: Dial) -> bool:
        session = self._mesh.sessions.get(dial.incarnation)
        return session is not None and session.introduced

    def _ended(self) -> list[_Place]:
        with self._driver.lead.lock:
            return [place for place in self._places if self._has_ended(place.dial)]

    def _has_ended(self, dial: Dial) -> bool:
        """Whether nothing more comes of it; the lock is held, as by all that look."""
        return dial.done and dial.incarnation not in self._mesh.sessions
