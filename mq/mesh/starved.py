"""What a session does for want of memory: it rests, and begins again where it was.

As long as a peer may be silent; what has to do with others goes on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mq.log import Log

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session

logger = Log(__name__)

NO_MEMORY: Final = "the system has no memory"
"""A MemoryError of Python's says nothing."""
REST_SECONDS: Final = 0.25
"""How long a session for whose message there was no memory is not resumed."""


def starved(mesh: Mesh, session: Session, reason: str, sending: bool) -> None:
    """There is no memory for a message of a peer, or for one to it."""
    now = mesh.clock()
    done = session.received
    if sending:
        done = session.frames[0].number if session.frames else session.number
    number, since = session.starved_at[sending]
    if number != done:
        since = now
        session.starved_at[sending] = (done, now)
        most = "" if session.timeout is None else f", for {session.timeout:g} s"
        logger.warning(
            "%s %s again until there is memory%s: %s",
            session.name,
            "is sent a message" if sending else "has to send a message",
            most,
            reason,
        )
    if session.timeout is not None and now - since >= session.timeout:
        mesh.forget(session, reason)
    else:
        session.rests_until = now + REST_SECONDS
        mesh.disconnect(session, reason)


def send(mesh: Mesh, session: Session, now: float, flush: bool = False) -> bool:
    """As `Session.pump`, where an engine copies and may have no memory for that."""
    try:
        return session.pump(now, flush)
    except MemoryError as error:
        session.sending = False
        starved(mesh, session, str(error) or NO_MEMORY, sending=True)
        return False
