"""Puts a mesh right after an exception, a KeyboardInterrupt above all, left it.

Nothing is undone. What had happened is read off the queues, what follows from it is
derived again, and where a connection may have been left in mid-message it is dropped
and resumed, which repeats whatever was not finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mq.mesh.burial import bury
from mq.mesh.dialling import Dialling
from mq.mesh.greeting import Greetings

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh


def recover(mesh: Mesh, *, polling: bool) -> None:
    """Make a consistent mesh of one that an exception left anywhere.

    Args:
        polling: Whether events of the links may have been lost, so that no connection
            can be trusted.
    """
    mesh.publisher.fill()
    for session in list(mesh.sessions.values()):
        if session.fate is not None:
            bury(mesh, session)
    _drop_strays(mesh)
    sessions = list(mesh.sessions.values())
    for session in sessions:
        session.repair()
        mesh.liveness.watch(session)
    mesh.publisher.repair(sessions)
    mesh.subscriber.repair(sessions)
    mesh.greetings.recover()
    for session in sessions:
        if session.conn is None or polling or session.sending:
            session.sending = False
            mesh.disconnect(session, "interrupted in the middle of a frame")


def let_go(mesh: Mesh) -> None:
    """Keep nothing in memory of what is published or being received."""
    for session in list(mesh.sessions.values()):
        mesh.publisher.remove(session)  # what it lacks is counted
        session.frames.clear()
        session.lent.clear()
    for topic in mesh.publisher.topics.values():
        topic.drop_all()
    for subscription in mesh.subscriber.topics.values():
        subscription.end()
    mesh.subscriber.copies.clear()


def abandon(mesh: Mesh, in_the_middle: bool) -> None:
    """Empty a mesh in a forked child, where nothing is to be sent or put right.

    Args:
        in_the_middle: A signal's handler has forked in the middle of the mesh's work,
            which goes on here.
    """
    mesh.publisher.close_gates()
    # A segment that the parent gives back would exist as long as the child, beyond the
    # limit. What is not shared is as all else that a child has, and may be an engine's.
    if not in_the_middle and any(link.lender is not None for link in mesh.links):
        mesh.subscriber.returns.abandon()  # first: it would be told of views that die
        let_go(mesh)
        mesh.subscriber.discard_all()
    mesh.sessions, mesh.conns, mesh.links = {}, {}, []
    mesh.dialling = Dialling(mesh)
    mesh.greetings = Greetings(mesh)


def _drop_strays(mesh: Mesh) -> None:
    """Close connections that belong to no session any more, or not yet."""
    for conn, session in list(mesh.conns.items()):
        known = mesh.sessions.get(session.peer.incarnation) is session
        if not known or session.conn is not conn:
            del mesh.conns[conn]
            mesh.faults.close(conn)
    for session in mesh.sessions.values():
        if session.conn is not None and session.conn not in mesh.conns:
            mesh.faults.close(session.conn)
            session.detach()
