"""Lanes whose memory cannot be mapped, whose device fails, and that end."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from carrying_link import MEMORY, SHARED_BYTES, CarryingLink, HostEvent
from lane_worlds import (
    a_piece,
    arrived,
    check_places,
    in_vain,
    lane_of,
    later,
    mapping,
    sharing_of,
    unmappable,
    world,
)
from torchrpc_links import rpc_conn

import mq
from mq import registry
from mq.testing.link_world import PATIENCE, World
from transports import _torchrpc_cuda_memory as cuda_memory
from transports import _torchrpc_lanes as lanes
from transports import _torchrpc_outboxes as outboxes
from transports._torchrpc_control import Greeting
from transports._torchrpc_sharing import Sharing

__all__ = ["world"]  # fixtures


# -- what fails ----------


@pytest.mark.parametrize("when", ["filled", "sent", "received"])
def test_a_device_that_fails_is_told_of_where_the_piece_would_land(
    monkeypatch: pytest.MonkeyPatch, world: World, when: str
) -> None:
    """In its place; what is before it and after it arrives, the place is free again."""
    conn, accepted = world.connect()
    ready = HostEvent(reached=when != "filled")
    events = [ready]
    if when != "filled":
        events = later(monkeypatch, outboxes if when == "sent" else lanes)
    assert conn.try_send_piece(b"head", a_piece(1, ready))
    assert conn.try_send(b"after")
    world.until(lambda: bool(events), "the copy")
    events[0].problem = "a failed assert\nand much more"
    heads: list[bytes] = []

    def is_told() -> bool:
        heads.extend(bytes(head) for head, _ in filter(None, [accepted.receive()]))
        return bool(heads)

    world.until(is_told, "the head")
    assert heads == [b"head"]
    piece = accepted.take_piece()
    with pytest.raises(ValueError, match=r"on cpu did not arrive: .*a failed assert$"):
        piece.begin(1000).add(0, piece)
    assert arrived(world, accepted, 1) == [(b"after", b"")]
    world.until(lambda: not rpc_conn(conn).unanswered, "the answers")


@pytest.mark.parametrize("failing", [0, 1], ids=["dialler", "listener"])
def test_tensors_are_staged_where_the_peers_memory_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, world: World, failing: int
) -> None:
    """After one connection in vain; other peers are offered memory as before."""
    link = sharing_of(world, failing)
    monkeypatch.setattr(link, "_map", unmappable)
    assert "no such memory" in in_vain(world)
    conn, accepted = world.connect()
    assert link.offers("another")
    for ours, theirs in ((conn, accepted), (accepted, conn)):
        assert not lane_of(ours)._outboxes
        assert ours.try_send_piece(b"head", a_piece(4))
        assert arrived(world, theirs, 1) == [(b"head", bytes([4]) * 1000)]


def greeting(agent: str, handle: bytes = b"gone") -> Greeting:
    outbox = (0, MEMORY.uuid(0), handle.hex(), SHARED_BYTES)
    return Greeting("2.13", agent, "", "", (), "", outboxes=(outbox,))


def test_peers_that_have_died_switch_nothing_off() -> None:
    """Nor does one that had several queues, which greet as one agent."""
    shared = Sharing({0: "cpu"}, SHARED_BYTES, MEMORY)
    for agent, whom in (("one", "one"), ("two", "a link"), ("two", "another link")):
        with pytest.raises(OSError, match="cannot be mapped"):
            shared.ends(greeting(agent), {"cpu": "cpu"}, whom)
    assert shared.offers("three")
    (handle,) = (outbox.handle for outbox in shared.devices.values())
    outgoing, inboxes = shared.ends(greeting("three", handle), {"cpu": "cpu"}, "three")
    assert list(outgoing) == ["cpu"]
    assert list(inboxes) == [0]
    shared.close()


def test_a_peer_whose_memory_cannot_be_mapped_is_offered_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By either side of a connection; the log says so once, if it comes again."""
    shared = Sharing({0: "cpu"}, SHARED_BYTES, MEMORY)
    with pytest.raises(OSError, match="cannot be mapped"):
        shared.ends(greeting("one"), {"cpu": "cpu"}, "its link")
    assert not caplog.messages  # it may have died
    for whom in ("one", "its link", "one"):
        assert not shared.offers(whom)
        assert shared.ends(greeting("one"), {"cpu": "cpu"}, whom) == ({}, {})
    (said,) = caplog.messages
    assert "cannot be mapped" in said
    shared.close()


class OldDriver:
    """Of CUDA, without what came later."""

    def cuDeviceGet(self, *arguments: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, *arguments: Any) -> int:
        return 0


def test_nothing_is_shared_where_the_driver_is_too_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what it lacks; `connect` goes on."""
    monkeypatch.setattr(cuda_memory, "_driver", OldDriver)
    monkeypatch.setattr(cuda_memory, "_primary", cuda_memory._primary.__wrapped__)
    shared = Sharing({0: "cuda:0"}, SHARED_BYTES, cuda_memory)
    assert not shared.offers("")
    (said,) = caplog.messages
    assert "has no cuDeviceGetUuid_v2" in said
    shared.close()


def test_a_driver_that_is_no_driver_is_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is not there."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: OldDriver())
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle_v2"):
        cuda_memory._driver.__wrapped__()


# -- the end ----------


def test_what_is_mapped_is_kept_until_no_copy_is_under_way(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """The connection ends at once all the same, and so do its calls."""
    closed = mapping(monkeypatch, sharing_of(world, 1))
    conn, accepted = world.connect()
    events = later(monkeypatch, lanes)
    for head in (b"one", b"two"):
        assert conn.try_send_piece(head, a_piece(1))
    world.until(lambda: len(events) == 2, "the copies")
    accepted.close()
    world.lost(0, conn)
    world.until(lambda: not rpc_conn(conn).unanswered, "the answers")
    events[0].reached = True
    assert not closed
    events[1].reached = True
    world.until(lambda: len(closed) == 1, "its end")


def test_what_is_mapped_is_closed_after_its_copy_though_the_link_is_closed() -> None:
    """By a thread that ends then: the caller of `close` does not wait for that."""
    shared = Sharing({0: "cpu"}, SHARED_BYTES, MEMORY)
    copied, closed = HostEvent(), threading.Event()
    closers: list[threading.Thread] = []

    def close() -> None:
        closers.append(threading.current_thread())
        closed.set()

    inbox: Any = SimpleNamespace(close=close)
    shared.let_go([(inbox, [HostEvent(reached=True), copied])])
    shared.close()
    assert not closers
    copied.reached = True
    assert closed.wait(PATIENCE)
    (closer,) = closers
    assert closer is not threading.current_thread()
    closer.join(PATIENCE)
    assert not closer.is_alive()


def test_a_link_that_is_closed_leaves_nothing_mapped_whose_copy_is_done() -> None:
    """Nor a thread."""
    shared = Sharing({0: "cpu"}, SHARED_BYTES, MEMORY)
    before = threading.active_count()
    closed: list[int] = []
    inbox: Any = SimpleNamespace(close=lambda: closed.append(1))
    shared.let_go([(inbox, [HostEvent(reached=True)])] * 3)
    shared.close()
    assert len(closed) == 3
    assert threading.active_count() == before


def test_nothing_is_left_of_a_connection_whose_tensors_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed, lost, or with its link; `world` looks."""
    pairs = [world.connect() for _ in range(3)]
    for conn, _ in pairs:
        assert conn.try_send_piece(b"never", a_piece(1, HostEvent()))
    pairs[0][0].close()
    pairs[1][1].close()
    world.lost(1, pairs[0][1])
    world.lost(0, pairs[1][0])
    (outbox,) = sharing_of(world, 0).devices.values()
    assert len(outbox._places) == 1


def test_two_queues_of_one_process_hand_tensors_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own memory it need not map."""
    monkeypatch.setitem(registry._TABLE, "carrying", registry.Entry(CarryingLink))
    with (
        mq.connect("carrying", group="one-process", name="a") as a,
        mq.connect("carrying", group="one-process", name="b") as b,
    ):
        for sender, receiver in ((a, b), (b, a)):
            receiver.subscribe("t", timeout=PATIENCE)
            for number in range(20):
                x = torch.full((500_000,), number)
                sender.publish("t", x, timeout=PATIENCE)
                x.fill_(-1)
                got = receiver.recv(timeout=PATIENCE).payload
                assert got.shape == (500_000,)
                assert bool((got == number).all())
    check_places()


@pytest.mark.parametrize("handle", ["abc", "00"])
def test_a_handle_that_is_none_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, world: World, handle: str
) -> None:
    """And nothing else: what it is, the memory says."""
    link = sharing_of(world, 0)
    ((index, uuid, _, nbytes),) = link.offers("")
    monkeypatch.setattr(link, "_offers", [(index, uuid, handle, nbytes)])
    assert "cannot be mapped" in in_vain(world)


def test_descriptors_are_promised_to_no_peer_whose_memory_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """They would be kept until the process ends."""
    monkeypatch.setattr(sharing_of(world, 1), "_map", unmappable)
    in_vain(world)
    link = world.members[0].link
    assert isinstance(link, CarryingLink)
    promises = link.agent.descriptors._promises
    assert [promise.until for promise in promises if promise.until == math.inf] == []


def test_an_end_that_was_interrupted_is_made_again(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Else its places would be taken until the process ends."""
    conn, accepted = world.connect()
    assert conn.try_send_piece(b"never", a_piece(1, HostEvent()))
    (outbox,) = sharing_of(world, 0).devices.values()

    def interrupted(lane: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conn.close()
    conn.close()
    check_places()
    world.lost(1, accepted)
