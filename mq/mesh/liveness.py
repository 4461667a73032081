"""Whether peers live: their processes are watched, their silence is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session

MAX_TICK: Final = 0.25
"""Seconds between looks at the peers' liveness, at most."""
TICKS: Final = 8
"""How many of them there are within this member's `peer_timeout`, at least."""
STALLED_TICKS: Final = 4
"""Looks that did not come: it is this member that has stood still, not its peers."""
MAX_GRACE: Final = 1.0
"""Seconds for what peers sent meanwhile to be read, at most."""
GRACE_PART: Final = 0.25
"""The same as a part of `peer_timeout`."""
HEARTBEATS: Final = 4
"""How many there are within a `peer_timeout`, at least: an outage that is to lose
nothing must be shorter by one."""
MAX_HEARTBEAT: Final = 2.5
"""Seconds between them, at most, also where there is no `peer_timeout`: as many as they
are with the default of `connect`."""
ASK_PART: Final = 0.5
"""The part of `peer_timeout` after which the engine is asked whether a message is still
arriving: two heartbeats did not come."""
REDIAL_PART: Final = 0.6
"""The part after which another connection is dialled: soon after the engine was asked,
as the session must be resumed in the rest."""


class Liveness:
    """Forgets peers that have died or fallen silent, and shows them that we live.

    Attributes:
        tick_seconds: How often `tick` is to be called.
        watches: Sessions by the descriptor that tells when the peer's process ends.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.tick_seconds = MAX_TICK
        if mesh.config.peer_timeout is not None:
            self.tick_seconds = min(MAX_TICK, mesh.config.peer_timeout / TICKS)
        self.watches: dict[int, Session] = {}

    def next_tick(self, now: float) -> float:
        """When `tick` is due again: all members of a host look at the same moments.

        Then heartbeats of many arrive together, and cost one wake-up in place of many.
        """
        ticks = now // self.tick_seconds + 1
        at = ticks * self.tick_seconds  # rounded, it may be no later than now
        return at if at > now else (ticks + 1) * self.tick_seconds

    def watch(self, session: Session) -> None:
        """Watch the process of a peer, where that can be done; idempotent."""
        if session.watch is None:
            session.watch = self._mesh.config.watch(session.peer.process)
        fd = None if session.watch is None else session.watch.fileno()
        if fd is not None and fd not in self.watches:
            self.watches[fd] = session
            self._mesh.watch_added(fd)

    def unwatch(self, session: Session) -> None:
        """The peer is gone; its process need not be watched any more."""
        if session.watch is not None:
            fd = session.watch.fileno()
            if fd is not None and self.watches.pop(fd, None) is not None:
                self._mesh.watch_removed(fd)
            session.watch.close()

    def check_process(self, session: Session) -> None:
        """Forget the peer if its process has ended, once all it sent is read."""
        if session.watch is not None and session.watch.ended():
            self._mesh.reader.drain(session)
            self._mesh.forget(session, "its process ended", proven=True)

    def show(self, now: float) -> None:
        """Have each peer hear of this member. None is judged, as not all are read."""
        for session in self._mesh.sessions.values():
            _heartbeat(session, now)

    def tick(self, now: float, stalled: float) -> None:
        """Look at every peer.

        Args:
            now: The time by the mesh's clock.
            stalled: Seconds for which this member has not polled.
        """
        for session in list(self._mesh.sessions.values()):
            self.check_process(session)
            if not session.alive or session.timeout is None:
                _heartbeat(session, now)
                continue
            if stalled > STALLED_TICKS * self.tick_seconds:
                # It was us who slept: what the peer sent meanwhile is still to come.
                grace = min(MAX_GRACE, GRACE_PART * session.timeout)
                heard = now - session.timeout + grace
                session.last_heard = max(session.last_heard, heard)
            if now - session.last_heard > ASK_PART * session.timeout:
                _ask_engine(session, now)
            silent = now - session.last_heard
            if silent >= session.timeout:
                why = f"silent for {silent:.1f} s; {self._explain(session)}"
                self._mesh.forget(session, why)
            elif session.conn is not None:
                if session.dialler and silent > REDIAL_PART * session.timeout:
                    self._mesh.disconnect(session, "silent")
                else:
                    _heartbeat(session, now)

    def _explain(self, session: Session) -> str:
        """What is known of a peer that is silent, or what to do about it."""
        if session.conn is None:
            problem = self._mesh.dialling.problem_of(session)
            if problem:
                return f"to reach it again failed, last by: {problem}"
            if not session.dialler:
                return "its connection ended, and it has not dialled this member again"
        return "raise peer_timeout if such stalls are normal here"


def is_silent(session: Session, now: float) -> bool:
    """Whether a peer will be given up unless it is heard of again."""
    if session.timeout is None:
        return False
    return session.conn is None or now - session.last_heard > (
        ASK_PART * session.timeout
    )


def _ask_engine(session: Session, now: float) -> None:
    """Whether a message that is not complete yet has gone on arriving."""
    quiet = None if session.conn is None else session.conn.quiet_seconds()
    if quiet is not None:
        session.last_heard = max(session.last_heard, now - quiet)


def _heartbeat(session: Session, now: float) -> None:
    interval = MAX_HEARTBEAT
    if session.timeout is not None:
        interval = min(session.timeout / HEARTBEATS, interval)
    # Half of it, as the next look may come as much later.
    period = interval / 2
    if (
        session.conn is not None
        and session.last_sent < now // period * period
        and now - session.last_sent >= period / 2
    ):
        session.answer(now)
