"""A GPU that has failed, or is full, with memory of the host in its place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from carrying_link import CarryingLink
from lane_worlds import check_places

import mq
from mq import devices, registry
from mq.devices import Piece
from mq.testing.link_world import PATIENCE
from transports._torchrpc_lanes import Lane
from transports._torchrpc_outboxes import Parcel

LARGE, SMALL = 1_000_000, 100


class Failing:
    """A function that raises as long as it is to."""

    def __init__(self, error: RuntimeError) -> None:
        self.error: RuntimeError | None = error
        self.calls = 0
        self.lasts = -1  # calls; -1: for ever

    def put(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def function(*args: Any) -> Any:
            if owner is devices and len(args) > 1:  # of what leaves
                return real(*args)
            self.calls += 1
            if self.lasts < 0 or self.calls <= self.lasts:
                raise self.error or AssertionError
            return real(*args)

        patch.setattr(owner, name, function)


@contextlib.contextmanager
def two_queues(
    monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[tuple[mq.MQ, mq.MQ]]:
    monkeypatch.setitem(registry._TABLE, "carrying", registry.Entry(CarryingLink))
    options = {"group": "failing", **options}
    with (
        mq.connect("carrying", name="a", **options) as a,
        mq.connect("carrying", name="b", **options) as b,
    ):
        b.subscribe("cpu")
        b.subscribe("gpu")
        yield a, b
    check_places()


ASSERT = "CUDA error: device-side assert triggered"
FAILURES = {
    "leaves": (Parcel, "_copy", LARGE),
    "leaves, small": (Piece, "copy_to", SMALL),
    "arrives": (Lane, "_copy", LARGE),
    "arrives, small": (devices, "aside", SMALL),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_gpu_that_has_failed_ends_the_session_after_a_few_tries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The log says why, and so does what is lost; what is on the CPU goes on."""
    caplog.set_level(logging.WARNING)
    owner, name, count = FAILURES[where]
    with two_queues(monkeypatch, peer_timeout=None) as (a, b):
        failing = Failing(RuntimeError(f"{ASSERT}\nand much more"))
        with monkeypatch.context() as patch:
            failing.put(patch, owner, name)
            a.publish("gpu", torch.ones(count), timeout=PATIENCE)
            with pytest.raises(mq.MessagesLost, match=ASSERT) as caught:
                b.recv(timeout=PATIENCE)
            assert caught.value.topics == ("gpu",)
            for number in range(3):
                a.publish("cpu", number, timeout=PATIENCE)
                assert b.recv(timeout=PATIENCE).payload == number
            assert b.stats()["mesh"]["malformed"] == 3
        a.publish("gpu", torch.ones(count), timeout=PATIENCE)
        assert b.recv(timeout=PATIENCE).payload.shape == (count,)
    told = [record.name for record in caplog.records if ASSERT in record.message]
    expected = ["mq.mesh.setbacks", "mq.mesh.burial"]
    if where.startswith("leaves"):
        expected.insert(0, "transports._torchrpc_sharing")
    assert told == expected


def full() -> RuntimeError:
    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_what_finds_no_room_on_a_gpu_comes_once_there_is_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again now and then, which the log says once; nothing is lost."""
    with two_queues(monkeypatch, peer_timeout=None) as (a, b):
        failing = Failing(full())
        failing.lasts = 5  # more than what breaks the protocol may
        failing.put(monkeypatch, Lane, "_copy")
        a.publish("gpu", torch.ones(LARGE), timeout=PATIENCE)
        a.publish("cpu", "after it", timeout=PATIENCE)
        assert b.recv(timeout=PATIENCE).payload.shape == (LARGE,)
        assert b.recv(timeout=PATIENCE).payload == "after it"
    told = [r.message for r in caplog.records if "out of memory" in r.message]
    assert len(told) == 1
    assert "until there is memory" in told[0]


def test_what_never_finds_room_on_a_gpu_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After `peer_timeout`, with the reason."""
    with two_queues(monkeypatch, peer_timeout=1.0) as (a, b):
        failing = Failing(full())
        failing.put(monkeypatch, Lane, "_copy")
        a.publish("gpu", torch.ones(LARGE), timeout=PATIENCE)
        with pytest.raises(mq.MessagesLost, match="CUDA out of memory"):
            b.recv(timeout=PATIENCE)
        a.publish("cpu", "after it", timeout=PATIENCE)
        assert b.recv(timeout=PATIENCE).payload == "after it"
