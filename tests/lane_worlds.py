"""Two links that hand tensors over by memory that both map, and what tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from carrying_link import MEMORY, CarryingLink, HostEvent
from torchrpc_links import rpc_conn

from mq.devices import Piece
from mq.testing.link_world import World
from mq.transport import Conn
from transports import _torchrpc_sharing as sharing

Message = tuple[bytes, bytes]


def check_places() -> None:
    """See that none is taken: the memory is that of the process, for good."""
    for outbox in sharing._outboxes.values():
        assert not outbox._places
        assert not outbox._waiting


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Links that read where a test does; no place stays taken, however they end."""
    monkeypatch.setattr("transports._torchrpc_lanes.INLINE_BYTES", 0)
    with World(CarryingLink) as world:
        world.nap = 0.05  # a copy that begins wakes nobody
        for member in world.members:
            member.reading = False
        yield world
    check_places()


def a_piece(number: int, ready: Any = None, nbytes: int = 1000) -> Piece:
    return Piece(torch.full((nbytes,), number, dtype=torch.uint8), ready)


def lane_of(conn: Conn) -> Any:
    lane = rpc_conn(conn).lane
    assert lane is not None
    return lane


def sharing_of(world: World, member: int) -> Any:
    link = world.members[member].link
    assert isinstance(link, CarryingLink)
    return link.sharing


def messages(conn: Conn) -> list[Message]:
    """What can be received, tensors or not."""
    found = []
    while (message := conn.receive()) is not None:
        head, body = bytes(message[0]), bytearray(message[1])
        if conn.holds_piece:
            body[:] = conn.take_piece().tensor.numpy().tobytes()
        elif body:
            assert conn.receive_body(memoryview(body))
        found.append((head, bytes(body)))
    return found


def arrived(world: World, conn: Conn, count: int) -> list[Message]:
    """Pump until so many messages have come."""
    got: list[Message] = []

    def all_there() -> bool:
        got.extend(messages(conn))
        return len(got) >= count

    world.until(all_there, f"{count} messages")
    return got


def reasons(world: World, member: int) -> list[str]:
    return [event.reason for event in world.members[member].events if event.reason]


def in_vain(world: World, member: int = 0) -> str:
    """Why a dial between the two ended, at the end that dials."""
    dialler, listener = world.members[member], world.members[1 - member]
    conn = dialler.link.dial(listener.addresses[0])
    world.lost(member, conn)
    return reasons(world, member)[-1]


def later(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[HostEvent]:
    """Have copies take until a test says that their events are reached."""
    events: list[HostEvent] = []

    def filled(device: torch.device) -> HostEvent:
        events.append(HostEvent())
        return events[-1]

    monkeypatch.setattr(module, "filled", filled)
    return events


def mapping(monkeypatch: pytest.MonkeyPatch, link: Any) -> list[Any]:
    """Have a link map memory of its own process, too; what it has let go of."""
    closed: list[Any] = []

    def real(index: int, handle: str, nbytes: int) -> Any:
        inbox = MEMORY.map(index, bytes.fromhex(handle), nbytes)
        close = inbox.close

        def noted() -> None:
            closed.append(inbox)
            close()

        monkeypatch.setattr(inbox, "close", noted)
        return inbox

    monkeypatch.setattr(link, "_map", real)
    return closed


def unmappable(index: int, handle: str, nbytes: int) -> Any:
    raise RuntimeError("no such memory")
