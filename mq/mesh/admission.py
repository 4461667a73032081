"""Whether a peer that greets is welcome: group, backend, versions, names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from mq.descriptors import free_descriptors
from mq.log import printable
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.config import CODEC_VERSION
from mq.mesh.faults import LinkFault
from mq.mesh.handshake import Greeting, Refusal
from mq.mesh.liveness import is_silent

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session
    from mq.transport import Conn

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
            f"this is group {config.group!r}, not {printable(greeting.group)!r}; check "
            "the addresses",
        )
    if greeting.incarnation == config.incarnation:
        return Refusal(hs.SELF, "this is the same member")
    if greeting.backend != config.backend:
        return Refusal(
            hs.BACKEND,
            f"group {config.group!r} uses backend {config.backend!r}, not "
            f"{printable(greeting.backend)!r}; connect with the same backend",
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
    # It may be dead where nobody can see that, as in another container.
    until = "" if holder.timeout is None else f" ({holder.timeout:g} s)"
    more = f", and wait until {config.name!r} gives it up{until}"
    refusal = _taken(holder.peer, greeting, more)
    if refusal.code == hs.NAME_TAKEN and is_silent(holder, mesh.clock()):
        return Refusal(hs.NAME_WAITS, refusal.text)
    return refusal


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
    needed = each + _SPARE
    free, why = free_descriptors(needed)
    return "" if free >= needed else f"too few file descriptors are left: {why}"


def _taken(holder: Greeting, newcomer: Greeting, more: str = "") -> Refusal:
    process = holder.process
    return Refusal(
        hs.NAME_TAKEN if newcomer.generation >= holder.generation else hs.REPLACED,
        f"name {holder.name!r} is held by pid {process.pid} on {process.host}; choose "
        f"another name or end that process{more}",
    )
