"""Whether a peer that greets is welcome: group, backend, versions, names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from mq.descriptors import free_descriptors
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.config import CODEC_VERSION
from mq.mesh.faults import LinkFault
from mq.mesh.handshake import Greeting, Refusal
from mq.mesh.liveness import ask_engine

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session
    from mq.transport import Conn

PROBE_SECONDS: Final = 2.0
"""For how long the holder of a name that another claims is silent when it loses it."""
_SPARE: Final = 3
"""To watch a peer's process, and for what passes between two that share memory."""


def objection(mesh: Mesh, greeting: Greeting) -> Refusal | None:
    """Why this peer is not welcome, or None.

    A later life of a member that is in session takes its place; a later life of this
    member itself ends this one.
    """
    config = mesh.config
    if greeting.to and greeting.to != config.incarnation:
        return Refusal(
            hs.OTHER, f"this is {config.name!r}, not the member it looks for"
        )
    if greeting.group != config.group:
        return Refusal(
            hs.GROUP,
            f"this is group {config.group!r}, not {greeting.group!r}; check the "
            "addresses",
        )
    if greeting.incarnation == config.incarnation:
        return Refusal(hs.SELF, "this is the same member")
    if greeting.backend != config.backend:
        return Refusal(
            hs.BACKEND,
            f"group {config.group!r} uses backend {config.backend!r}, not "
            f"{greeting.backend!r}; connect with the same backend",
        )
    codec = greeting.versions.get("codec")
    if codec != CODEC_VERSION:
        return Refusal(
            hs.VERSION,
            f"it encodes with version {codec} of the codec and {config.name!r} "
            f"with version {CODEC_VERSION}; install the same version of tensormq",
        )
    if mesh.leaving and not greeting.session:
        return Refusal(hs.LEAVING, f"{config.name!r} is leaving the group")
    if greeting.probe:
        return None
    return claim(mesh, greeting)


def claim(mesh: Mesh, greeting: Greeting) -> Refusal | None:
    """Why this peer cannot have its name, or None; fences an earlier holder."""
    config = mesh.config
    process = greeting.process
    by = f"replaced by another {greeting.name!r}, pid {process.pid} on {process.host}"
    if greeting.name == config.name:
        if greeting.generation > config.generation:
            mesh.replace(by)
            return Refusal(hs.LEAVING, "replaced by this very member")
        return _taken(config.greeting(), greeting)
    holder = mesh.by_name(greeting.name)
    if holder is None or holder.peer.incarnation == greeting.incarnation:
        return None
    if holder.watch is not None and holder.watch.ended():
        mesh.forget(holder, "its process ended", proven=True)
        return None
    if greeting.generation > holder.peer.generation:
        _fence(mesh, holder, by)
        return None
    return _contest(mesh, holder, greeting, by)


def _contest(
    mesh: Mesh, holder: Session, newcomer: Greeting, by: str
) -> Refusal | None:
    """As `claim`, where by its generation the newcomer has no right to the name.

    The rendezvous may have lost its memory, as with a service that ended together with
    the holder: so that is asked to answer, and has the name as long as it is heard of.
    """
    if mesh.leaving:  # nothing may follow its BYE
        return _taken(holder.peer, newcomer)
    now = mesh.clock()
    if holder.contest is not None:
        since, question = holder.contest
        mesh.reader.drain(holder)  # after a stall of this member it may have answered
        if not holder.alive:
            return None
        ask_engine(holder, now)
        # What the dead had sent before may arrive only now: that is no answer.
        answered = not holder.frames or holder.frames[0].number > question
        if now - since < PROBE_SECONDS:
            if not answered:
                return _asked(holder.peer)
            holder.contest = None
            return _taken(holder.peer, newcomer)
        if holder.last_heard <= since:
            _fence(mesh, holder, by)
            return None
    # It knows them, and answers all the same.
    holder.control(wire.ACCEPTS, sorted(mesh.config.accepts()))
    holder.contest = now, holder.number
    return _asked(holder.peer)


def _fence(mesh: Mesh, session: Session, by: str) -> None:
    """Another life of this member has taken its name: tell it and forget it."""
    if session.conn is not None:
        content = wire.encode(by)
        head = wire.HEADER.pack(wire.FENCED, 0, 0, 0, session.received) + content
        with contextlib.suppress(LinkFault):  # else it learns it when it comes back
            mesh.faults.asked(session.conn.try_send, head)
    mesh.dismiss(session, by)


def crowded(conn: Conn) -> str:
    """Why there is no room for one more peer, on this connection; "" where there is.

    It is said while there is enough left to accept the next one and say it again: who
    cannot be accepted learns nothing.
    """
    each = conn.descriptors_taken
    if not each:
        return ""
    free, why = free_descriptors()
    return "" if free >= each + _SPARE else f"too few file descriptors are left: {why}"


def _taken(holder: Greeting, newcomer: Greeting) -> Refusal:
    return Refusal(
        hs.NAME_TAKEN if newcomer.generation >= holder.generation else hs.REPLACED,
        f"{_held(holder)}; choose another name or end that process",
    )


def _asked(holder: Greeting) -> Refusal:
    return Refusal(
        hs.CONTESTED,
        f"{_held(holder)}, which is asked whether it lives, and loses it after "
        f"{PROBE_SECONDS:g} s of silence",
    )


def _held(holder: Greeting) -> str:
    process = holder.process
    return f"name {holder.name!r} is held by pid {process.pid} on {process.host}"
