"""Outages in which all that is sent vanishes, and nobody is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted import Parcel, ScriptedConn
from world import World

from mq.mesh import wire
from mq.mesh.dial import ATTEMPT_SECONDS, LONGEST_PACE

TIMEOUT = 4.0
SECOND = "script://second"


@pytest.fixture
def world() -> Iterator[World]:
    """Two members, each of which listens to the other."""
    world = World("a", "b", peer_timeout=TIMEOUT)
    for name in "ab":
        world[name].subscribe("t")
    world.settle()
    yield world
    world.close()


def begin(world: World) -> None:
    """What was sent and not received yet is lost, too, and so is every dial."""
    for conn in world.net.between(world["a"].link, world["b"].link):
        world.net.cut(conn, lose=(1000, 1000), hold=(True, True))
    world.net.on_dial = lambda source, target: "hang"


def end(world: World) -> None:
    """Dials get through again; those begun before do not, as TCP waits too long."""
    world.net.on_dial = lambda source, target: "open"


def expect_resumed(world: World, *published: bytes) -> None:
    """Nobody was forgotten, and each has got all that the other published."""
    for name in "ab":
        assert world[name].payloads() == list(published)
        stats = world[name].mesh.stats
        assert (stats.forgotten, stats.malformed) == (0, 0)
        (session,) = world[name].mesh.sessions.values()
        assert session.stats.connections == 2
        assert not world[name].mesh.dialling.dials
        assert len(world[name].link.conns) == 1


def second_address(world: World, manner: str = "open") -> list[str]:
    """Give a member another address, not as good; what is dialled from then on.

    Args:
        manner: What becomes of dials to the good one.
    """
    a, b = world["a"], world["b"]
    world.net.links[SECOND] = a.link
    b.session(a).peer.addresses.append(SECOND)
    dialled: list[str] = []

    def on_dial(source: str, target: str) -> str:
        dialled.append(target)
        return "open" if target == SECOND else manner

    world.net.on_dial = on_dial
    return dialled


@pytest.mark.parametrize("share", [0.65, 0.7, 0.75, 0.8, 0.85])
def test_an_outage_shorter_than_peer_timeout_loses_nothing(
    world: World, share: float
) -> None:
    """An attempt to connect that began in it does not keep the next one waiting."""
    begin(world)
    for name in "ab":
        assert world[name].publish("t", b"1")
    world.advance(share * TIMEOUT)
    for name in "ab":
        assert world[name].publish("t", b"2")
    end(world)
    world.advance(2.5)
    expect_resumed(world, b"1", b"2")


def test_who_could_not_be_reached_again_is_given_up_with_the_reason(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is known; a stall, which `peer_timeout` is for, would be another."""
    (conn,) = world.net.between(world["a"].link, world["b"].link)
    world.net.cut(conn)
    world.net.on_dial = lambda source, target: "fail"
    world.advance(TIMEOUT + 1.0)
    failed, ended = sorted(line for line in caplog.messages if "gave up" in line)
    assert "to reach it again failed, last by: connection refused" in failed
    assert "it has not dialled this member again" in ended
    assert "peer_timeout" not in failed + ended


def test_attempts_side_by_side_resume_a_session_once(world: World) -> None:
    """The first that is answered does, wherever the others are; none is left over."""
    world.stall("a")
    world.cut("a", "b")
    world.advance(0.45 * TIMEOUT)
    dialled = world["b"].link.conns
    assert len(dialled) > 2
    world.unstall("a")
    for name in "ab":
        assert world[name].publish("t", b"1")
    world.settle()
    expect_resumed(world, b"1")


def test_attempts_side_by_side_keep_to_the_best_address(world: World) -> None:
    """A session does not go on over a worse wire since its peer was slow to answer."""
    dialled = second_address(world)
    world.stall("a")
    world.cut("a", "b")
    world.advance(0.45 * TIMEOUT)
    assert dialled == [world["a"].link.address] * len(dialled)
    assert len(dialled) > 2
    world.unstall("a")
    world.settle()
    expect_resumed(world)


def test_an_address_that_never_answers_is_left(world: World) -> None:
    """However many attempts were begun there, in time for the next."""
    dialled = second_address(world, manner="hang")
    world.cut("a", "b")
    world.advance(0.7 * TIMEOUT)
    assert dialled[-1] == SECOND
    expect_resumed(world)


def test_the_address_that_was_answered_is_remembered(world: World) -> None:
    """Not that of another attempt: after the next outage it is dialled first."""
    dialled = second_address(world)
    a, b = world["a"], world["b"]
    a.mesh.config.dial_back = False
    world.stall("a")
    world.cut("a", "b")
    world.advance(0.55 * TIMEOUT)
    assert dialled[-1] == SECOND
    a.mesh.forget(a.session(b), "a new session must begin")
    world.unstall("a")
    world.settle()
    assert b.session(a).dialled == b.session(a).wire == a.link.address


def test_attempts_side_by_side_end_with_the_session(world: World) -> None:
    """A peer that never answers leaves no connection behind."""
    world.stall("a")
    world.cut("a", "b")
    world.advance(0.45 * TIMEOUT)
    session = world["b"].session(world["a"])
    world["b"].mesh.forget(session, "given up", proven=True)
    assert not world["b"].link.conns
    world.advance(1.0)
    assert not world["b"].mesh.dialling.dials


def test_who_greets_again_is_not_silent(world: World) -> None:
    """A session is not given up between the greeting and what follows it."""
    a, b = world["a"], world["b"]
    begin(world)
    session = a.session(b)
    world.advance(0.7 * TIMEOUT)
    # The one was heard longer ago than the other, as outages begin at any time.
    session.last_heard = world.clock() - 0.9 * TIMEOUT

    def part(conn: ScriptedConn, parcel: Parcel) -> None:
        if conn.link is a.link and parcel[0][0] == wire.GREETING:
            world.partition("a", "b")

    world.net.watcher = part
    end(world)
    world.advance(0.2 * TIMEOUT)
    assert world.net.separated
    world.net.watcher = lambda conn, parcel: None
    world.heal()
    assert a.publish("t", b"1")
    assert b.publish("t", b"1")
    world.settle()
    expect_resumed(world, b"1")


def test_attempts_side_by_side_are_few_where_many_have_not_greeted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the descriptors that others need; one there always is."""
    monkeypatch.setattr("mq.mesh.dialling.MAX_BESIDE", 2)
    world.stall("a")
    world.cut("a", "b")
    for _ in range(3):
        world.advance(0.15 * TIMEOUT)
        assert 1 <= len(world["b"].link.conns) <= 2
    world.unstall("a")
    world.settle()
    expect_resumed(world)


FAR = 0.3 * ATTEMPT_SECONDS
"""Of this a handshake takes four times, beside the time to connect."""


def travel(world: World) -> None:
    """Let each message be on its way for `FAR`."""
    arrives: dict[ScriptedConn, tuple[Parcel, float]] = {}
    is_free = world.net._can_step

    def can_step(conn: ScriptedConn) -> bool:
        if not conn.flight:
            return is_free(conn)
        parcel, due = arrives.get(conn, (None, 0.0))
        if parcel is not conn.flight[0]:
            due = world.clock() + FAR
            arrives[conn] = conn.flight[0], due
        return world.clock() >= due

    world.net._can_step = can_step  # type: ignore[method-assign]


def wait(world: World, attempts: float) -> None:
    """Let time pass in steps in which things can arrive."""
    for _ in range(int(20 * attempts)):
        world.advance(ATTEMPT_SECONDS / 20)


@pytest.mark.parametrize("blind", [False, True])
def test_a_dial_goes_a_long_way(blind: bool) -> None:
    """Where a handshake takes longer than a first attempt, a later one waits for it."""
    world = World()
    a, b = world.add("a"), world.add("b")
    travel(world)
    dial = a.dial_blindly(b.link.address) if blind else a.dial(b)
    wait(world, 12)
    assert dial.done
    assert (a.peers(), b.peers()) == (["b"], ["a"])
    world.close()


def test_a_session_is_resumed_over_a_long_way() -> None:
    """By one of the attempts, which are not many beside each other for that."""
    world = World("a", "b", peer_timeout=20 * ATTEMPT_SECONDS)
    travel(world)
    world.cut("a", "b")
    most = 0
    for _ in range(8):
        wait(world, 1)
        most = max(most, len(world["b"].link.conns))
    assert 2 < most <= 2 + ATTEMPT_SECONDS / LONGEST_PACE
    for name in "ab":
        assert not world[name].mesh.dialling.dials
        (session,) = world[name].mesh.sessions.values()
        assert session.stats.connections == 2
    world.close()
