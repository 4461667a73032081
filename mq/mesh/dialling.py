"""Dials under way: where to, when again, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mq.descriptors import most_open, pushed_out
from mq.log import Log
from mq.mesh import handshake as hs
from mq.mesh.config import PEER_TIMEOUT
from mq.mesh.dial import (
    LONGEST_PACE,
    MAX_BESIDE,
    MAX_GREETERS,
    PACES,
    Dial,
    Doubted,
    Greeter,
    Window,
)
from mq.transport import Conn

if TYPE_CHECKING:
    from mq.mesh.handshake import Greeting
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session
    from mq.transport import Link

logger = Log(__name__)

FAILED_ROUNDS: Final = 8
"""Of a dial that took some two seconds: then it is no collision of two dials."""
RESUMING_DELAY: Final = 0.25
"""Longest pause between attempts to resume a session, half of that of other dials: the
peer counts its `peer_timeout` meanwhile."""
ESTRANGED_DELAY: Final = 2.0
"""The same to reach a peer that was given up, which may be gone for ever."""
ESTRANGED_SECONDS: Final = 60.0
"""For how long that is tried, at least."""
ESTRANGED_TIMEOUTS: Final = 30
"""For how many times its `peer_timeout`: five minutes by default. Who stood still for
longer is found by the rendezvous, where there is one."""


class Dialling:
    """The dials of a mesh; their connections greet once they are open.

    Attributes:
        dials: Those under way.
        greeters: The connections in their handshake, also those accepted.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._faults = mesh.faults
        self.dials: list[Dial] = []
        self.greeters: dict[Conn, Greeter] = {}
        self.window = Window()

    def routes(
        self, addresses: Sequence[str], same_host: bool
    ) -> list[tuple[Link, str]]:
        """How a peer with these addresses can be reached, best first."""
        return [
            (link, address)
            for link in self._mesh.links
            for address in link.rank(addresses, same_host)
        ]

    def start(self, dial: Dial) -> Dial:
        """Begin to dial; progress is in the attributes of `dial`."""
        now = dial.next_at = self._mesh.clock()
        self.dials.append(dial)
        self.attempt_due(now)
        return dial

    def redial(self, session: Session) -> None:
        """Resume a session that this side dialled, from the next `poll` on."""
        if self._mesh.leaving and not session.frames:
            return
        if any(dial.session is session and not dial.done for dial in self.dials):
            return
        dial = Dial(
            self._session_routes(session),
            incarnation=session.peer.incarnation,
            name=session.name,
            session=session,
            max_delay=RESUMING_DELAY,
            pace=min(LONGEST_PACE, (session.timeout or math.inf) / PACES),
        )
        dial.next_at = session.rests_until
        self.dials.append(dial)

    def dial_estranged(self, session: Session) -> None:
        """Reach a peer again that was forgotten, from the next `poll` on."""
        if self._mesh.leaving or not (session.dialled or self._mesh.config.dial_back):
            return
        timeout = session.timeout or PEER_TIMEOUT
        seconds = max(ESTRANGED_SECONDS, ESTRANGED_TIMEOUTS * timeout)
        self.dials.append(
            Dial(
                self._session_routes(session),
                incarnation=session.peer.incarnation,
                name=session.name,
                returning=True,
                max_delay=ESTRANGED_DELAY,
                until=self._mesh.clock() + seconds,
            )
        )

    def _session_routes(self, session: Session) -> list[tuple[Link, str]]:
        same_host = self._mesh.config.is_near(session.peer.process)
        routes = self.routes(session.peer.addresses, same_host)
        if session.dialled:
            # The address that worked may be forwarded, unknown to the peer itself.
            first = self.routes([session.dialled], same_host)
            routes = first + [route for route in routes if route not in first]
            if not self._mesh.config.dial_back:
                routes = first
        return routes

    def problem_of(self, session: Session) -> str:
        """Why the last attempt to resume a session failed; "" where none has."""
        dials = [dial for dial in self.dials if dial.session is session]
        return next((dial.error for dial in dials if dial.error), "")

    def attempt(self, dial: Dial, now: float) -> None:
        """Try the next of a dial's routes, unless it has come to an end."""
        if dial.done:
            return
        if dial.session is not None and not dial.session.alive:
            dial.done = True
            return
        known = self._mesh.sessions.get(dial.incarnation)
        if known is not None and dial.session is None and not dial.probe:
            dial.done = True
            return
        link, address = dial.next_route(now)
        try:
            conn = link.dial(address)
            if not isinstance(conn, Conn):
                raise TypeError(f"it returned {conn!r}, which is no Conn")
        except (OSError, ValueError) as error:
            dial.failed(f"{address}: {error}", now)
            return
        except Exception as error:
            dial.failed(f"{address}: {error}", now)  # first, as the next line may raise
            reason = f"{address}: {self._faults.fault(link.dial, error)}"
            if not dial.returning:
                self.refuse(dial, hs.LINK, reason)
            return
        greeter = Greeter(self._mesh.config.secret, dial, dial.deadline(now), now)
        self.greeters[conn] = greeter
        dial.conn = conn
        dial.next_at = now + dial.pace  # last: an interrupt leaves it due till then

    def cancel(self, dial: Dial) -> None:
        """Stop dialling, by all attempts."""
        dial.done = True
        dial.conn = None
        for conn in [c for c, g in self.greeters.items() if g.dial is dial]:
            self.close(conn)

    def refuse(self, dial: Dial, code: str, reason: str) -> None:
        """End a dial that was refused."""
        dial.refusal = code
        dial.error = reason
        self.cancel(dial)
        self._mesh.changed += 1

    def end(
        self,
        conn: Conn,
        greeter: Greeter,
        dial: Dial,
        code: str,
        reason: str,
        *,
        proven: bool = False,
    ) -> None:
        """No repetition changes it, but for a peer that may yet be reached again."""
        if dial.returning or (dial.doubts and not proven):
            dial.doubted = Doubted(code, reason, greeter.address)
            self.fail(conn, greeter, reason)
        else:
            self.refuse(dial, code, reason)

    def goes_on(self, incarnation: str) -> bool:
        """Whether a dial to a peer is the one that goes on, if that dials, too.

        Of two members that dial each other at once the smaller incarnation wins.
        """
        if self._mesh.config.incarnation > incarnation:
            return False
        return any(
            dial.incarnation == incarnation
            and dial.conn is not None
            and not dial.probe
            and dial.session is None
            for dial in self.dials
        )

    def cancel_redial(self, session: Session) -> None:
        """The session is gone: what an attempt under way may resume must not begin."""
        for dial in self.dials:
            if dial.session is session:
                self.cancel(dial)

    def cancel_all(self, incarnation: str) -> None:
        """Stop all dials to a peer but those that only ask whether it is there."""
        for dial in self.dials:
            if dial.incarnation == incarnation and not dial.probe:
                self.cancel(dial)

    def fail(self, conn: Conn, greeter: Greeter, reason: str) -> None:
        """End an attempt, or what was accepted; a dial tries again."""
        self.close(conn)
        dial = greeter.dial
        if dial is not None and dial.conn is conn:
            dial.failed(reason, self._mesh.clock())
            self._mesh.changed += 1

    def answered(self, dial: Dial) -> None:
        """A peer has answered in time."""
        dial.doubted = None
        if dial.takes_turns:
            self.window.answered()

    def time_out(self, conn: Conn, greeter: Greeter, now: float) -> None:
        """The peer has not answered in time."""
        if greeter.opened and greeter.dial is not None and greeter.dial.takes_turns:
            self.window.timed_out(now)
        self.fail(conn, greeter, f"{conn.address}: no answer")

    def make_room(self, newest: Conn) -> None:
        """Close a connection that has not greeted, if there are many."""
        origins = {
            conn: greeter.origin
            for conn, greeter in self.greeters.items()
            if greeter.dial is None and greeter.granted is None
        }
        if len(origins) >= most_open(MAX_GREETERS, newest.descriptors_taken):
            self._mesh.stats.refused += 1
            self.close(pushed_out(origins))

    def close(self, conn: Conn) -> None:
        """End the handshake on a connection, if there is one, and close it."""
        if conn in self.greeters:
            self._faults.close(conn)
            del self.greeters[conn]  # an interrupt before it is repeated by `recover`

    def next_deadline(self, limit: float) -> float:
        """When a dial is due, if that is before `limit`."""
        for dial in self.dials:
            # One whose turn has not come waits for what ends another, or the next tick.
            if not dial.done and dial.next_at < limit and not dial.waits_its_turn:
                limit = dial.next_at
        return limit

    def attempt_due(self, now: float) -> None:
        """Begin the attempts that are due, those that have waited for longest first."""
        due = [dial for dial in self.dials if dial.done or now >= dial.next_at]
        due.sort(key=lambda dial: dial.next_at)
        # Where others wait, none goes on with another attempt beside its own.
        some_wait = any(
            dial.takes_turns and dial.conn is None and not dial.done for dial in due
        )
        room = self.window.room(self.greeters.values(), now) if some_wait else 1.0
        for dial in due:
            if dial.done:
                self.dials.remove(dial)
                continue
            has_turn = not (some_wait and dial.takes_turns) or room >= 1
            dial.waits_its_turn = not has_turn and dial.conn is None
            if dial.waits_its_turn:
                continue
            if has_turn and (dial.conn is None or self._has_room_beside(dial.conn)):
                self.attempt(dial, now)
                room -= dial.takes_turns
            else:
                dial.next_at = now + dial.pace

    def _has_room_beside(self, conn: Conn) -> bool:
        return len(self.greeters) < most_open(MAX_BESIDE, conn.descriptors_taken)

    def tell_of_failures(self, greeting: Greeting) -> None:
        """Say why only the peer could dial, which `connect` has waited for."""
        for dial in self.dials:
            if dial.incarnation != greeting.incarnation or dial.returning or dial.done:
                continue
            if dial.attempt >= FAILED_ROUNDS * len(dial.routes):
                logger.warning(
                    "the session with %s is by its dial alone; dials of this member to "
                    "%s fail: %s",
                    greeting.name,
                    greeting.name,
                    dial.error,
                )
