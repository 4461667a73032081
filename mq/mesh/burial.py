"""What is done once a peer is given up; it may be repeated after an interrupt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mq.log import Log

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session

logger = Log(__name__)


def bury(mesh: Mesh, session: Session) -> None:
    """Carry out `Mesh.forget`."""
    assert session.fate is not None
    reason, proven, superseded = session.fate
    _end_loans(mesh, session)
    mesh.cut(session)
    mesh.liveness.unwatch(session)
    mesh.dialling.cancel_redial(session)
    undelivered = session.describe_undelivered()
    mesh.publisher.remove(session)
    mesh.subscriber.remove(session, may_return=not proven)
    mesh.changed += 1
    if not superseded:
        mesh.forgotten.append((session.peer, proven))
    if proven:
        quiet = session.left or mesh.leaving or not undelivered  # `close` warns
        say = logger.debug if quiet else logger.warning
        say("%s is gone: %s%s", session.name, reason, undelivered)
    elif superseded and not session.received:
        logger.debug("another session with %s is used", session.name)
    else:
        mesh.stats.forgotten += 1
        # Who was replaced is not heard by others, which are not to blame.
        quiet = mesh.replaced and not undelivered
        say = logger.debug if quiet else logger.warning
        say("gave up %s: %s%s", session.name, reason, undelivered)
        if not superseded:
            mesh.dialling.dial_estranged(session)
    session.drop_frames()
    del mesh.sessions[session.peer.incarnation]


def _end_loans(mesh: Mesh, session: Session) -> None:
    """The peer will not release what it was lent.

    It, or if its process has ended a child of it, may still read that memory, which is
    therefore never used again.
    """
    for link in mesh.links:
        for block in session.lent.values():
            if link.lender is not None:
                link.lender.retire(block.segment)
    session.lent.clear()
    session.peer_waits = False
    mesh.hurry()
