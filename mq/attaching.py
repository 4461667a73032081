"""How a member that was given addresses reaches whoever listens there."""

from __future__ import annotations

import functools
import time

from mq import addresses
from mq.errors import ConnectTimeout
from mq.log import Log, WarnOnce
from mq.mesh.dial import Dial
from mq.mesh.dialling import ESTRANGED_DELAY
from mq.mesh.driver import Driver
from mq.settings import Settings

logger = Log(__name__)


class Attached:
    """The addresses of `attach_to`, and who listens there as long as the queue lives.

    Nobody else tells of them: who is begun anew at such an address, or was given up and
    comes back after a long time, is found by dialling it.
    """

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._mesh = driver.mesh
        self._dials: list[Dial] = []
        self._warn = WarnOnce(logger)
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
            self._begin(Dial(routes, until=deadline + 1.0))
        while not self._are_reached(deadline):
            self._begin_anew(deadline + 1.0, "who was reached there has ended")
        self._all_reached = True

    def _are_reached(self, deadline: float) -> bool:
        """Wait until all are; False: some were, and have ended.

        Raises:
            ConnectTimeout, ConnectRefused, AuthenticationFailed: Not at all of them.
        """

        def settled() -> bool:
            ends = any(d.refusal or self._has_ended(d) for d in self._dials)
            return ends or all(map(self._is_reached, self._dials))

        left = max(0.0, deadline - time.monotonic())
        arrived = self._driver.wait_until(settled, left)
        with self._driver.lead.lock:
            for dial in self._dials:
                dial.raise_refusal()
            missing = [d for d in self._dials if not self._is_reached(d)]
            places = "; ".join(f"{d.address} ({d.outcome()})" for d in missing)
        if not arrived:
            raise ConnectTimeout(
                f"could not greet within {self._settings.connect_timeout:g} s: "
                f"{places}. Is a member of this group listening there? On a slow "
                "network raise connect_timeout"
            )
        return not missing

    def keep(self) -> None:
        """Dial where somebody was and is no more; called from time to time."""
        over = self._driver.lead.closing or self._mesh.replaced
        if self._all_reached and not over:
            self._begin_anew(None, "")

    def _begin_anew(self, until: float | None, error: str) -> None:
        with self._driver.lead.lock:
            over = [dial for dial in self._dials if self._has_ended(dial)]
        for old in over:
            if old.refusal:
                self._warn(
                    (old.address, old.refusal),
                    "who listens at %s of attach_to now refuses this member, which "
                    "tries again: %s",
                    old.address,
                    old.error,
                )
            self._dials.remove(old)
            new = Dial(old.routes, max_delay=ESTRANGED_DELAY, until=until)
            new.error = error
            self._begin(new)

    def _begin(self, dial: Dial) -> None:
        self._dials.append(dial)
        self._driver.run(functools.partial(self._mesh.dialling.start, dial))

    def _is_reached(self, dial: Dial) -> bool:
        session = self._mesh.sessions.get(dial.incarnation)
        return session is not None and session.introduced

    def _has_ended(self, dial: Dial) -> bool:
        """Whether nothing more comes of it; the lock is held, as by all that look."""
        return dial.done and dial.incarnation not in self._mesh.sessions
