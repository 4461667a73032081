"""The memory that GPU tensors leave by, with memory of the host in its place."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from carrying_link import HostEvent
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mq.devices import Piece
from mq.testing.link_world import PATIENCE
from transports import _torchrpc_outboxes as outboxes
from transports._torchrpc_outboxes import (
    HEADER_BYTES,
    PLACES,
    Inline,
    Outbox,
    Parcel,
)
from transports._torchrpc_watch import Watch

SIZE = 16 * HEADER_BYTES
NBYTES = PLACES * SIZE + 100


class Lane:
    """What an outbox and a watch know of a lane."""

    def __init__(self) -> None:
        self.due = False
        self.told = 0
        self.noticed = threading.Event()
        self.asked = threading.Event()

    def freed(self) -> None:
        """There may be a place."""
        self.told += 1

    def is_due(self) -> bool:
        """Whether to be noticed."""
        self.asked.set()
        return self.due

    def notice(self) -> None:
        """What was waited for may have come."""
        self.noticed.set()


def outbox() -> Outbox:
    return Outbox(torch.zeros(NBYTES, dtype=torch.uint8), b"handle")


def a_piece(number: int, nbytes: int = 1000, ready: Any = None) -> Piece:
    return Piece(torch.full((nbytes,), number, dtype=torch.uint8), ready)


def parcel_of(
    box: Outbox, lane: Any, piece: Piece, kind: type[Parcel] = Parcel
) -> Parcel:
    at = box.take(lane)
    assert at is not None
    return kind(box, lane, at, piece, "cuda:0")


def stamp_at(box: Outbox, at: int) -> int:
    return int(box.memory[at : at + 8].view(torch.int64))


def content(box: Outbox, parcel: Parcel) -> bytes:
    *_, at, nbytes, stamp = parcel.body()
    assert stamp_at(box, at) == stamp
    return box.memory[at + HEADER_BYTES :][:nbytes].numpy().tobytes()


# -- places ----------


class OutboxMachine(RuleBasedStateMachine):
    """Places are taken and given back as a plain model says."""

    def __init__(self) -> None:
        super().__init__()
        self.box = outbox()
        self.lanes: list[Any] = [Lane() for _ in range(3)]
        self.places: dict[int, Any] = {}
        self.waiting: list[Any] = []

    def _told(self) -> None:
        """All that wait are told, once each."""
        for lane in self.lanes:
            assert lane.told == (lane in self.waiting)
            lane.told = 0
        self.waiting.clear()

    @rule(number=st.integers(0, 2))
    def take(self, number: int) -> None:
        lane = self.lanes[number]
        mine = sum(owner is lane for owner in self.places.values())
        free = PLACES - len(self.places)
        at = self.box.take(lane)
        if 2 * (mine + 1) > free + 1:
            assert at is None
            if lane not in self.waiting:
                self.waiting.append(lane)
        else:
            assert at is not None
            assert at % SIZE == 0
            assert 0 <= at < PLACES * SIZE
            assert at not in self.places
            self.places[at] = lane

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.places:
            at = data.draw(st.sampled_from(sorted(self.places)))
            self.box.give_back(at, self.places.pop(at))
            self._told()

    @rule(data=st.data(), number=st.integers(0, 2))
    def give_back_what_is_anothers(self, data: st.DataObject, number: int) -> None:
        at = data.draw(st.sampled_from(sorted({NBYTES, *self.places})))
        if self.places.get(at) is not self.lanes[number]:
            self.box.give_back(at, self.lanes[number])
            self._told()

    @rule(number=st.integers(0, 2))
    def forget(self, number: int) -> None:
        lane = self.lanes[number]
        self.box.forget(lane)
        self.waiting = [one for one in self.waiting if one is not lane]
        mine = [at for at, owner in self.places.items() if owner is lane]
        for at in mine:
            del self.places[at]
        if mine:
            self._told()

    @invariant()
    def as_the_model_says(self) -> None:
        assert self.box._places == self.places
        assert len(self.box._free) == PLACES - len(self.places)
        assert self.box.is_scarce == (2 * len(self.box._free) < PLACES)
        assert list(self.box._waiting) == self.waiting
        assert not any(lane.told for lane in self.lanes)


TestOutbox = OutboxMachine.TestCase


# -- parcels ----------


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> HostEvent:
    """After which a copy to an outbox is there."""
    found = HostEvent()
    monkeypatch.setattr(outboxes, "filled", lambda device: found)
    return found


def test_a_piece_is_copied_once_it_is_filled_and_there_once_that_is_done(
    event: HostEvent,
) -> None:
    """And what is awaited is told of."""
    box, ready = outbox(), HostEvent()
    piece = a_piece(1, ready=ready)
    parcel = parcel_of(box, Lane(), piece)
    assert len(parcel) == 1000
    assert not parcel.is_there()
    assert parcel.awaited is ready
    assert not box.memory.any()
    piece.tensor.fill_(2)
    ready.reached = True
    assert not parcel.is_there()
    assert parcel.awaited is event
    piece.tensor.fill_(3)
    assert not parcel.is_there()
    event.reached = True
    assert parcel.is_there()
    assert content(box, parcel) == bytes([2]) * 1000


def test_each_use_of_a_place_has_its_own_stamp() -> None:
    """Whoever reads there sees which use it is."""
    box, lane = outbox(), Lane()
    stamps = set()
    for number in range(5):
        parcel = parcel_of(box, lane, a_piece(number))
        assert parcel.is_there()
        assert content(box, parcel) == bytes([number]) * 1000
        stamps.add(parcel.body()[-1])
        parcel.give_back()
    assert len(stamps) == 5
    assert 0 not in stamps  # as memory is before its first use


@pytest.mark.parametrize("copied", [False, True])
def test_a_device_that_fails_is_told_of(event: HostEvent, copied: bool) -> None:
    """Before the copy, and while it is under way."""
    ready = HostEvent(reached=copied)
    parcel = parcel_of(outbox(), Lane(), a_piece(1, ready=ready))
    assert not parcel.is_there()
    (event if copied else ready).problem = "a failed assert"
    with pytest.raises(RuntimeError, match="a failed assert"):
        parcel.is_there()


# -- the watch ----------


def test_who_is_due_is_told_and_others_are_not() -> None:
    """By one thread, which is there once it is needed."""
    watch, first, second = Watch(), Lane(), Lane()
    one: Any = first
    other: Any = second
    assert watch._thread is None
    watch.add(one)
    watch.add(other)
    assert first.asked.wait(PATIENCE)
    assert second.asked.wait(PATIENCE)
    assert not first.noticed.is_set()
    first.due = True
    assert first.noticed.wait(PATIENCE)
    assert not second.noticed.is_set()
    first.noticed.clear()
    watch.add(one)  # who was told is forgotten, until it asks again
    assert first.noticed.wait(PATIENCE)
    second.due = True
    assert second.noticed.wait(PATIENCE)
    watch.close()
    assert watch._thread is not None
    assert not watch._thread.is_alive()


def test_a_watch_that_is_closed_starts_no_thread() -> None:
    """Nor tells anyone anything."""
    watch, lane = Watch(), Lane()
    one: Any = lane
    watch.close()
    watch.add(one)
    assert watch._thread is None
    assert not lane.asked.is_set()


def test_a_copy_that_was_interrupted_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ctrl-C may come between the stamp and the content."""
    box = outbox()
    parcel = parcel_of(box, Lane(), a_piece(7))

    class Interrupting:
        def __init__(self, device: torch.device) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outboxes, "filled", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            parcel.is_there()
    box.memory.zero_()
    assert parcel.is_there()
    assert content(box, parcel) == bytes([7]) * 1000


# -- small pieces ----------


def test_a_small_piece_is_copied_to_host_memory_once_it_is_filled() -> None:
    """It leaves with its bytes as they were then."""
    ready = HostEvent()
    piece = a_piece(1, ready=ready)
    small = Inline(piece, "cuda:1")
    assert not small.is_there()
    assert small.awaited is ready
    piece.tensor.fill_(2)
    ready.reached = True
    assert small.is_there()
    piece.tensor.fill_(3)
    assert small.is_there()
    assert small.body() == ("cuda:1", bytes([2]) * 1000)


def test_a_small_piece_on_a_device_that_fails_is_told_of() -> None:
    """Nothing of it leaves."""
    ready = HostEvent()
    ready.problem = "a failed assert"
    with pytest.raises(RuntimeError, match="a failed assert"):
        Inline(a_piece(1, ready=ready), "cuda:0").is_there()


class Inbox:
    """Memory of a peer, once mapped."""

    closed = 0

    def close(self) -> None:
        """Map it no more."""
        self.closed += 1


def test_a_watch_without_room_for_a_thread_closes_and_tells_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once if copies are done, else with the next thread that there is room for."""
    watch, done, copying = Watch(), Inbox(), Inbox()
    event, lane = HostEvent(), Lane()
    kept: Any = [(done, [HostEvent(reached=True)]), (copying, [event])]
    one: Any = lane

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        watch.let_go(kept)
        assert (done.closed, copying.closed) == (1, 0)
        watch.add(one)
        assert lane.noticed.is_set()  # and looks itself
    event.reached = True
    watch.add(one)
    watch.close()
    assert (done.closed, copying.closed) == (1, 1)


def test_a_watch_waits_at_its_end_for_a_driver_that_takes_its_time() -> None:
    """Else a closed queue would leave a thread for a while."""

    class Busy(Inbox):
        def close(self) -> None:
            threading.Event().wait(0.6)  # as one was that 14 processes kept busy
            super().close()

    watch, inbox = Watch(), Busy()
    kept: Any = [(inbox, [])]
    watch.let_go(kept)
    watch.close()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
    assert inbox.closed == 1
