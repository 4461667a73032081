"""Tensors by memory that two processes map, with memory of the host for a GPU's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from carrying_link import SHARED_BYTES, CarryingLink, HostEvent
from lane_worlds import (
    a_piece,
    arrived,
    lane_of,
    later,
    messages,
    reasons,
    sharing_of,
    world,
)
from torchrpc_links import rpc_conn

from mq.testing.link_world import PATIENCE, World
from mq.transport import What
from transports import _torchrpc_calls as calls
from transports import _torchrpc_lanes as lanes
from transports import _torchrpc_outboxes as outboxes
from transports._torchrpc_arrivals import Arrivals
from transports._torchrpc_native import Heap
from transports._torchrpc_outboxes import HEADER_BYTES, PLACES, Outbox
from transports._torchrpc_pieces import weight_of

__all__ = ["world"]  # fixtures


# -- what leaves ----------


def test_a_piece_that_is_not_filled_holds_up_what_is_behind_it_alone(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """It is not copied before, and leaves by itself once it is filled."""
    (late, late_there), (other, other_there) = world.connect(), world.connect()
    ready = HostEvent()
    piece = a_piece(1, ready)
    assert late.try_send_piece(b"late", piece)
    assert late.try_send(b"behind")
    assert late.try_send_piece(b"behind, too", a_piece(2))
    for number in range(2):
        assert other.try_send_piece(b"other", a_piece(number))
    expected = [(b"other", bytes([number]) * 1000) for number in range(2)]
    assert arrived(world, other_there, 2) == expected
    assert late.try_send(b"last")
    assert not messages(late_there)
    assert rpc_conn(late)._calls.waits_for_devices()  # of which the peer is told
    piece.tensor.fill_(3)
    ready.reached = True
    assert arrived(world, late_there, 4) == [
        (b"late", bytes([3]) * 1000),
        (b"behind", b""),
        (b"behind, too", bytes([2]) * 1000),
        (b"last", b""),
    ]


@pytest.mark.parametrize("module", [outboxes, lanes], ids=["there", "from there"])
def test_a_copy_that_takes_long_is_told_of_once_it_is_done(
    monkeypatch: pytest.MonkeyPatch, world: World, module: Any
) -> None:
    """Nobody is asked meanwhile; what is behind it keeps its place."""
    conn, accepted = world.connect()
    events = later(monkeypatch, module)
    assert conn.try_send_piece(b"slow", a_piece(9))
    assert conn.try_send(b"behind")
    world.until(lambda: bool(events), "the copy")
    for _ in range(3):
        world.members[0].pump()
        world.members[1].pump()
    assert not messages(accepted)
    if module is lanes:
        assert accepted.quiet_seconds() == 0.0  # the peer may be silent as long
    events[0].reached = True
    assert arrived(world, accepted, 2) == [
        (b"slow", bytes([9]) * 1000),
        (b"behind", b""),
    ]
    world.until(lambda: not rpc_conn(conn).unanswered, "the answers")
    assert not lane_of(accepted).is_busy


def test_a_peer_that_never_answers_leaves_places_to_others(world: World) -> None:
    """It is refused more, and goes on once it answers."""
    (stuck, stuck_there), (other, other_there) = world.connect(), world.connect()
    held: list[Any] = []

    def take(batch: Any, keep: bool) -> Any:
        held.append(calls.Future[Any]())
        return held[-1]

    lane_of(stuck_there).take = take
    nbytes = CarryingLink.piece_bytes
    count = 0
    while stuck.try_send_piece(b"stuck", a_piece(count % 251, nbytes=nbytes)):
        count += 1
    assert 0 < count <= PLACES // 2
    for number in range(100):
        world.until(
            lambda: other.try_send_piece(b"other", a_piece(number, nbytes=nbytes)),  # noqa: B023
            "room",
        )
        assert arrived(world, other_there, 1) == [(b"other", bytes([number]) * nbytes)]
    assert not stuck.try_send_piece(b"stuck", a_piece(0, nbytes=nbytes))
    known = len(world.members[0].conns(What.WRITABLE))

    def more() -> bool:
        while held:
            held.pop().set_result(True)
        writable = world.members[0].conns(What.WRITABLE)[known:]
        return stuck in writable and stuck.try_send_piece(b"more", a_piece(1))

    world.until(more, "room for more")
    world.until(lambda: bool(held), "the last call")
    held.pop().set_result(True)


# -- what arrives ----------


@pytest.mark.parametrize("early", [False, True])
def test_a_call_that_comes_before_the_greeting_waits_for_it(
    world: World, early: bool
) -> None:
    """The end that was dialled may send before the other one knows it."""
    dialler, listener = world.members
    dialled = dialler.link.dial(listener.addresses[0])
    deadline = time.monotonic() + PATIENCE
    while not listener.conns(What.ACCEPTED):
        assert time.monotonic() < deadline
        listener.pump()
        world.poller.wait(0.02)
    (accepted,) = listener.conns(What.ACCEPTED)
    assert accepted.try_send_piece(b"early", a_piece(5))
    while early and not lane_of(dialled)._early:
        assert time.monotonic() < deadline
        listener.pump()
        world.poller.wait(0.02)
    assert arrived(world, dialled, 1) == [(b"early", bytes([5]) * 1000)]
    world.until(lambda: not rpc_conn(accepted).unanswered, "the answer")


def test_a_call_that_came_before_the_greeting_is_answered_at_the_end() -> None:
    """Where no greeting comes any more."""
    with World(CarryingLink) as world:
        conn = rpc_conn(world.members[0].link.dial(world.members[1].addresses[0]))
        assert conn.lane is not None
        answer = conn.lane.take((0, [b"head"], [(0, "cpu", 0, 1000, 1)]), False)
        assert not answer.done()
        conn.close()
        assert answer.value() is False


@pytest.mark.parametrize("late", [False, True])
def test_a_piece_whose_place_was_given_away_breaks_the_connection(
    monkeypatch: pytest.MonkeyPatch, world: World, late: bool
) -> None:
    """What came before it is handed out, but neither it nor what came after it."""
    conn, accepted = world.connect()
    events = later(monkeypatch, lanes) if late else []
    assert conn.try_send(b"before")
    assert arrived(world, accepted, 1) == [(b"before", b"")]
    (outbox,) = sharing_of(world, 0).devices.values()
    aside = lanes.aside

    def overwritten(devices: Any) -> Any:
        (at,) = outbox._places
        outbox.memory[at : at + 8].view(torch.int64).fill_(1 << 40)
        return aside(devices)

    monkeypatch.setattr(lanes, "aside", overwritten)
    assert conn.try_send_piece(b"torn", a_piece(1))
    assert conn.try_send(b"after")
    if late:
        world.until(lambda: bool(events), "the copy")
        events[0].reached = True
    world.lost(1, accepted)
    world.lost(0, conn)
    assert not messages(accepted)
    (reason,) = reasons(world, 1)
    assert reason.endswith("cannot be taken in: a piece that its sender had given up")


MALFORMED: list[tuple[Any, ...]] = [
    ("0", "cpu", 0, 1000, 1),
    (False, "cpu", 0, 1000, 1),
    (None, "cpu", 0, 1000, 1),
    (1, "cpu", 0, 1000, 1),
    (-1, "cpu", 0, 1000, 1),
    (0, "cuda:0", 0, 1000, 1),
    (0, "", 0, 1000, 1),
    (0, None, 0, 1000, 1),
    (0, ["cpu"], 0, 1000, 1),
    (0, "cpu", "0", 1000, 1),
    (0, "cpu", 0.0, 1000, 1),
    (0, "cpu", 1, 1000, 1),
    (0, "cpu", -HEADER_BYTES, 1000, 1),
    (0, "cpu", SHARED_BYTES - HEADER_BYTES, 1, 1),
    (0, "cpu", SHARED_BYTES, 1, 1),
    (0, "cpu", 0, 0, 1),
    (0, "cpu", 0, -1, 1),
    (0, "cpu", 0, True, 1),
    (0, "cpu", 0, SHARED_BYTES, 1),
    (0, "cpu", 0, b"", 1),
    (0, "cpu", 0, 1000, None),
    (0, "cpu", 0, 1000, 1.0),
    (0, "cpu", 0, 1000),
    (0, "cpu", 0, 1000, 1, 1),
]


@pytest.mark.parametrize("body", MALFORMED, ids=repr)
def test_a_parcel_that_no_member_sends_breaks_the_connection(
    monkeypatch: pytest.MonkeyPatch, world: World, body: tuple[Any, ...]
) -> None:
    """It is counted, and nothing is handed out."""
    conn, accepted = world.connect()
    monkeypatch.setattr(outboxes.Parcel, "body", lambda parcel: body)
    assert conn.try_send_piece(b"head", a_piece(1))
    world.lost(1, accepted)
    world.lost(0, conn)
    assert not messages(accepted)
    assert world.members[1].link.malformed == 1
    assert reasons(world, 1) == ["the peer sent what no member does"]


@pytest.mark.parametrize("body", [MALFORMED[3], MALFORMED[8]], ids=repr)
def test_one_that_comes_before_the_greeting_does_so_too(
    monkeypatch: pytest.MonkeyPatch, world: World, body: tuple[Any, ...]
) -> None:
    """It is looked at once the greeting is read."""
    dialler, listener = world.members
    dialled = dialler.link.dial(listener.addresses[0])
    answer = lane_of(dialled).take((0, [b"head"], [body]), False)
    world.lost(0, dialled)
    assert answer.value() is False
    assert reasons(world, 0) == ["the peer sent what no member does"]
    assert dialler.link.malformed == 1


# -- the end, while a call comes ----------


def small_lane() -> tuple[Any, list[Any]]:
    """A lane that has met this process, and what it has let go of."""
    box = Outbox(torch.zeros(1 << 16, dtype=torch.uint8), b"")
    let_go: list[Any] = []
    agent: Any = SimpleNamespace(alive=True, heap=Heap())
    arrivals = Arrivals(agent, 1 << 20, lambda: None)
    shared: Any = SimpleNamespace(
        targets={"cpu"},
        watch=SimpleNamespace(add=lambda lane: None),
        ends=lambda peer, carried, whom: ({}, {0: box}),
        let_go=let_go.extend,
    )
    lane: Any = lanes.Lane(
        arrivals,
        lambda *batch: weight_of(*batch, 1000),
        lambda reason: None,
        lambda: None,
        shared,
    )
    lane.meet(None, {}, False, "")
    return lane, let_go


def test_a_connection_may_end_while_a_copy_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another thread: the call is answered, the memory kept for the copy."""
    lane, let_go = small_lane()

    class Ending(HostEvent):
        def query(self) -> bool:
            lane.close()
            return super().query()

    events = [Ending()]
    monkeypatch.setattr(lanes, "filled", lambda device: events[0])
    answer = lane.take((0, [b"head"], [(0, "cpu", 0, 8, 0)]), False)
    assert answer.value() is False
    assert not lane.is_busy
    ((_, kept),) = let_go
    assert kept == events
    late = lane.take((1, [b"head"], [(0, "cpu", 0, 8, 0)]), False)
    assert late.value() is False


@pytest.mark.parametrize("heads", [[b"head"], [b"head", b"more"]], ids=len)
def test_copies_of_a_batch_that_is_refused_are_awaited_too(
    monkeypatch: pytest.MonkeyPatch, heads: list[bytes]
) -> None:
    """They are under way when its other parts turn out to be none."""
    lane, let_go = small_lane()
    event = HostEvent()
    monkeypatch.setattr(lanes, "filled", lambda device: event)
    bodies = [(0, "cpu", 0, 8, 0), (0, "cpu", 1, 8, 0)]
    assert lane.take((0, heads, bodies), False).value() is False
    lane.close()
    ((_, kept),) = let_go
    assert kept == [event]


def test_a_place_that_was_answered_for_is_found_for_what_waits(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Nobody has looked at it since; other peers get theirs by host memory."""
    (outbox,) = sharing_of(world, 0).devices.values()
    monkeypatch.setattr(outbox, "_free", [0])  # a single place
    (conn, accepted), (other, other_there) = world.connect(), world.connect()
    held: list[Any] = []

    def take(batch: Any, keep: bool) -> Any:
        held.append(calls.Future[Any]())
        return held[-1]

    with monkeypatch.context() as patch:
        patch.setattr(lane_of(accepted), "take", take)
        assert conn.try_send_piece(b"first", a_piece(1))
        world.until(lambda: bool(held), "the call")
    assert not conn.try_send_piece(b"head", a_piece(2))
    assert other.try_send_piece(b"head", a_piece(3))
    assert arrived(world, other_there, 1) == [(b"head", bytes([3]) * 1000)]
    for _ in range(3):
        world.members[0].pump()
    held[0].set_result(True)
    world.until(lambda: conn in world.members[0].conns(What.WRITABLE), "room")
    assert conn.try_send_piece(b"head", a_piece(2))


@pytest.mark.parametrize("linger", [0.0, PATIENCE])
def test_places_of_what_was_sent_are_kept_for_it_after_close(
    monkeypatch: pytest.MonkeyPatch, world: World, linger: float
) -> None:
    """Until the peer has copied, or the link is closed."""
    conn, accepted = world.connect()
    (outbox,) = sharing_of(world, 0).devices.values()
    events = later(monkeypatch, lanes)
    assert conn.try_send_piece(b"sent", a_piece(6))
    world.until(lambda: bool(events), "the copy")
    conn.close()
    assert len(outbox._places) == 1
    if linger:
        events[0].reached = True
        assert arrived(world, accepted, 1) == [(b"sent", bytes([6]) * 1000)]
        world.until(lambda: not outbox._places, "the answer")
    else:
        world.members[0].link.close(linger=0.0)
        assert not outbox._places


def test_a_call_with_several_parcels_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Else it would keep all places that its connection may have."""
    conn, accepted = world.connect()
    for _ in range(3):  # so that calls may wait
        assert conn.try_send(b"call")
        assert arrived(world, accepted, 1)
        assert accepted.try_send(b"answer")
        assert arrived(world, conn, 1)
    ready = HostEvent()
    for number in range(3):
        assert conn.try_send_piece(b"head", a_piece(number, ready))
    ready.reached = True
    assert len(arrived(world, accepted, 3)) == 3
    world.until(lambda: not rpc_conn(conn).unanswered, "the answer")
    assert conn.try_send_piece(b"head", a_piece(4))


def test_places_are_free_again_however_their_calls_are_answered(world: World) -> None:
    """Also by a message the other way."""
    conn, accepted = world.connect()
    for number in range(3 * PLACES):
        assert conn.try_send_piece(b"call", a_piece(number))
        assert arrived(world, accepted, 1) == [(b"call", bytes([number]) * 1000)]
        assert accepted.try_send(b"answer")
        assert arrived(world, conn, 1) == [(b"answer", b"")]


def test_a_batch_of_which_a_part_is_there_is_not_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the mesh's thread would be woken over and over for nothing."""
    lane, _ = small_lane()
    events: list[HostEvent] = []

    def filled(device: torch.device) -> HostEvent:
        events.append(HostEvent(reached=not events))
        return events[-1]

    monkeypatch.setattr(lanes, "filled", filled)
    assert lane.is_due()  # nothing is waited for
    answer = lane.take((0, [b"a", b"b"], [(0, "cpu", 0, 8, 0)] * 2), False)
    assert not lane.is_due()
    lane.settle()
    assert not answer.done()
    events[1].reached = True
    assert lane.is_due()
    lane.settle()
    assert answer.value() is True
    lane.close()


def test_a_batch_whose_taking_was_interrupted_breaks_the_connection(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """All that comes after it would wait for it, for ever."""
    conn, accepted = world.connect()
    events = later(monkeypatch, lanes)
    assert conn.try_send_piece(b"head", a_piece(1))
    world.until(lambda: lane_of(accepted).is_busy, "the copy")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rpc_conn(accepted)._arrivals, "take_late", interrupted)
        events[0].reached = True
        with pytest.raises(KeyboardInterrupt):
            world.lost(1, accepted)
    assert conn.try_send(b"after")
    world.lost(1, accepted)
    world.lost(0, conn)
    assert "interrupted" in reasons(world, 1)[0]
    world.until(lambda: not rpc_conn(conn).unanswered, "the answer")
