"""Who wants the name of a member that is recorded no more, and may live or not."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
from meeting import DEADLINE, free_port, process_of
from world import World

import mq
from mq import process
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.admission import PROBE_SECONDS, claim
from mq.mesh.dial import Dial

BEFORE, AFTER = PROBE_SECONDS - 0.1, 1.0
"""Seconds to just before a silent holder loses its name, and from there to after."""

lower_or_equal = pytest.mark.parametrize("generation", [1, 3])
"""Generations of the holder; where its record was forgotten the newcomer has 1."""


def contested(world: World, key: str = "new") -> Dial:
    """Somebody claims the name of ``b`` from ``a``, whose rendezvous has no memory."""
    return world.add(key, name="b", generation=1).dial(world["a"])


def pair(generation: int) -> World:
    """``a`` and ``b``, which never leaves for its silence alone."""
    world = World("a", peer_timeout=None)
    world.join("b", generation=generation)
    world.settle()
    return world


@lower_or_equal
def test_who_is_silent_loses_its_name_to_who_has_it_where_members_meet(
    generation: int,
) -> None:
    """The service may have ended with it, and begun anew without its record."""
    world = pair(generation)
    old = world["b"]
    world.stall("b")
    dial = contested(world)
    world.advance(BEFORE)
    assert not dial.done
    assert not dial.refusal
    assert "'b'" in dial.error
    assert list(world["a"].mesh.sessions) == [old.incarnation]
    world.advance(AFTER)
    assert list(world["a"].mesh.sessions) == [world["new"].incarnation]
    world.unstall("b")
    world.advance(AFTER)
    assert "replaced" in old.mesh.replaced
    assert not world["new"].mesh.replaced
    assert world["a"].peers() == ["b"]


def test_who_finds_it_there_meets_it_too() -> None:
    """A member dials whom it finds recorded, also under a name that it knows."""
    world = pair(1)
    world.stall("b")
    new = world.add("new", name="b", generation=1)
    world["a"].dial(new)
    world.advance(BEFORE + AFTER)
    assert world["a"].session(new).introduced


def test_an_idle_holder_is_asked_and_keeps_its_name() -> None:
    """The newcomer is told at once; a higher generation is what it would need."""
    world = pair(1)
    session = world["a"].session(world["b"])
    world.advance(AFTER)
    dial = contested(world)
    world.settle()
    assert dial.refusal == hs.NAME_TAKEN
    assert world["a"].session(world["b"]) is session
    assert session.stats.connections == 1


def test_a_holder_whose_connection_is_resumed_keeps_its_name() -> None:
    """It could not be asked before."""
    world = pair(1)
    world.partition("a", "b")
    world.cut("a", "b")
    dial = contested(world)
    world.advance(BEFORE)
    assert not dial.done
    world.heal()
    world.advance(AFTER)
    assert dial.refusal == hs.NAME_TAKEN
    assert world["a"].session(world["b"]).stats.connections == 2


def test_what_a_dead_holder_had_sent_is_no_sign_of_life() -> None:
    """It arrives while it is being asked."""
    world = pair(1)
    world["a"].subscribe("t")
    world.settle()
    world.partition("a", "b")
    assert world["b"].publish("t", b"late")
    world["b"].poll()
    world.stall("b")
    dial = contested(world)
    world.advance(BEFORE / 2)
    world.heal()
    world.advance(BEFORE / 2)
    assert world["a"].payloads() == [b"late"]
    world.advance(AFTER)
    assert not dial.refusal
    world.advance(PROBE_SECONDS)
    assert world["a"].session(world["new"]).introduced


def test_what_was_answered_long_ago_says_nothing() -> None:
    """Each newcomer has the holder asked, and waits for its silence."""
    world = pair(1)
    contested(world, "first")
    while not world["a"].session(world["b"]).contest:
        world["a"].poll()
        world["first"].poll()
        world.net.deliver_all()
    world.kill("first")
    world.advance(2 * PROBE_SECONDS)
    world.stall("b")
    old = world["b"].incarnation
    dial = contested(world, "second")
    world.advance(BEFORE)
    assert not dial.refusal
    assert list(world["a"].mesh.sessions) == [old]
    world.advance(AFTER)
    assert world["a"].session(world["second"]).introduced


def test_who_leaves_asks_nobody() -> None:
    """Nothing follows a BYE."""
    world = pair(1)
    a, new = world["a"], world.add("new", name="b", generation=1)
    a.mesh.leave("left")
    refusal = claim(a.mesh, new.mesh.config.greeting())
    assert refusal is not None
    assert refusal.code == hs.NAME_TAKEN
    assert a.session(world["b"]).frames[-1].kind == wire.BYE


def _contained(options: dict[str, Any], pipe: Connection) -> None:
    """Be a member whose end nobody can prove, as in a container of its own."""
    process._namespace = lambda kind: os.getpid()
    with mq.connect(name="host", **options) as queue:
        pipe.send([member.name for member in queue.members()])
        pipe.recv()


def test_a_host_of_the_rendezvous_that_was_killed_comes_back_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though others are in session with its last life, and nobody else is at hand."""
    options = {
        "backend": "tcp",
        "group": f"reborn-{os.getpid()}",
        "rendezvous": f"tcp://127.0.0.1:{free_port()}",
        "peer_timeout": 10 * DEADLINE,
        "connect_timeout": DEADLINE,
    }

    def is_not_here(*_: object) -> None:
        raise OSError("this host does not have that address")

    with process_of(_contained, options) as (child, pipe):
        monkeypatch.setattr("mq.rendezvous.tcp.listen", is_not_here)
        assert pipe.recv() == ["host"]
        with mq.connect(name="other", **options) as queue:
            first = queue.members()
            child.kill()
            child.join(DEADLINE)
            with process_of(_contained, options) as (_, again):
                assert again.recv() == ["host", "other"]
                second = queue.members()
                assert [member.name for member in second] == ["host", "other"]
                assert first[0].incarnation != second[0].incarnation
                again.send("close")
