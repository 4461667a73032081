"""How many handshakes a member begins at once, and when heartbeats of many leave.

A hundred members that joined at once on two cores never came together: each began all
of its handshakes, none ended in time, and each began anew.
"""

from __future__ import annotations

import pytest
from world import Member, World

from mq.mesh.dial import (
    ATTEMPT_SECONDS,
    COUNTED_SECONDS,
    FIRST_WINDOW,
    LEAST_WINDOW,
    Dial,
    Window,
)
from mq.mesh.liveness import MAX_HEARTBEAT

MANY = 5 * FIRST_WINDOW


def crowd(count: int = MANY) -> tuple[World, Member, list[str]]:
    """A member and others, none of which knows any."""
    world = World()
    names = [f"m{number:02}" for number in range(count)]
    for name in ("a", *names):
        world.add(name)
    return world, world["a"], names


def under_way(member: Member) -> int:
    """How many attempts that were begun a short time ago have not ended."""
    greeters = member.mesh.dialling.greeters.values()
    return sum(greeter.counts(member.world.now) for greeter in greeters)


def dial_all(world: World, member: Member, names: list[str]) -> list[Dial]:
    return [member.dial(world[name]) for name in names]


def test_few_are_dialled_at_once_and_more_with_each_answer() -> None:
    """While none answers no more is begun; once they do all are greeted at once."""
    world, a, names = crowd()
    for name in names:
        world.stall(name)
    dial_all(world, a, names)
    world.settle()
    assert under_way(a) == FIRST_WINDOW
    for name in names:
        world.unstall(name)
    world.settle()
    assert a.peers() == names
    assert not under_way(a)
    assert not any(world[name].mesh.dialling.greeters for name in names)


def test_what_is_not_answered_in_time_leaves_room_for_half() -> None:
    """Down to two, and each of them has its turn."""
    world, a, names = crowd()
    for name in names:
        world.stall(name)
    dials = dial_all(world, a, names)
    most = float(FIRST_WINDOW)
    while most > LEAST_WINDOW:
        world.advance(ATTEMPT_SECONDS + 0.5)
        most /= 2
        assert under_way(a) <= most
    world.advance(20 * ATTEMPT_SECONDS)
    assert under_way(a) <= LEAST_WINDOW
    assert all(dial.attempt for dial in dials)
    for name in names:
        world.unstall(name)
    world.advance(10 * ATTEMPT_SECONDS)
    assert a.peers() == names


@pytest.mark.parametrize("manner", ["silent", "gone"])
def test_who_does_not_answer_holds_up_others_for_no_long(manner: str) -> None:
    """Members that stand still, or whose hosts are gone, before others in the list."""
    world, a, names = crowd()
    first, others = names[: 2 * FIRST_WINDOW], names[2 * FIRST_WINDOW :]
    gone = {world[name].link.address for name in first}
    if manner == "silent":
        for name in first:
            world.stall(name)
    else:
        world.net.on_dial = lambda source, target: "hang" if target in gone else "open"
    dial_all(world, a, names)
    world.advance(COUNTED_SECONDS)
    assert not a.peers()
    world.advance(COUNTED_SECONDS + 0.3)
    assert a.peers() == others
    assert a.mesh.dialling.window.room([], world.now) > FIRST_WINDOW


def test_a_member_that_waits_for_its_turn_may_dial_meanwhile() -> None:
    """Then nothing is begun in vain."""
    world, a, names = crowd()
    for name in names[:FIRST_WINDOW]:
        world.stall(name)
    dials = dial_all(world, a, names)
    last = world[names[-1]]
    assert dials[-1].waits_its_turn
    last.dial(a)
    world.settle()
    assert a.peers() == [last.name]
    assert dials[-1].done
    assert not dials[-1].attempt


def test_resuming_and_asking_who_lives_wait_for_no_turn() -> None:
    """A peer counts its time meanwhile, and so does who wants a name."""
    world, a, names = crowd()
    for name in names[:-1]:
        world.stall(name)
    dial_all(world, a, names[:-1])
    dialling, last = a.mesh.dialling, world[names[-1]]
    routes = dialling.routes([last.link.address], True)
    probe = dialling.start(Dial(routes, incarnation=last.incarnation, probe=True))
    world.settle()
    assert probe.welcome is not None
    assert not a.mesh.sessions


def test_the_window_is_halved_once_for_what_was_begun_together() -> None:
    """As TCP halves its own once for a round trip."""
    window = Window()
    for _ in range(8):
        window.answered()
    for _ in range(5):
        window.timed_out(100.0)
    assert window.room([], 100.0) == FIRST_WINDOW
    window.timed_out(100.1 + ATTEMPT_SECONDS)
    assert window.room([], 110.0) == FIRST_WINDOW / 2
    for number in range(9):
        window.timed_out(200.0 + 10 * number)
    assert window.room([], 300.0) == LEAST_WINDOW


@pytest.mark.parametrize("peer_timeout", [10.0, 1.0, 3.0, None])
def test_heartbeats_of_many_leave_at_the_same_moments(
    peer_timeout: float | None,
) -> None:
    """However they joined; and none is silent for longer than before."""
    world = World("a", "b", peer_timeout=peer_timeout)
    world.advance(0.611)
    world.join("c")
    world.advance(0.37)
    interval = min(MAX_HEARTBEAT, (peer_timeout or 10.0) / 4)
    world.advance(2 * interval)
    begun, moments, longest = world.now, set[float](), 0.0
    sessions = [s for m in world.members.values() for s in m.mesh.sessions.values()]
    while world.now < begun + 20 * interval:
        world.advance(interval / 40)
        moments |= {session.last_sent for session in sessions}
        silent = max(world.now - session.last_heard for session in sessions)
        longest = max(longest, silent)
    moments = {moment for moment in moments if moment > begun}
    assert longest <= interval
    assert len(sessions) == 6
    assert 20 <= len(moments) <= 41  # two in each interval, those of all together


@pytest.mark.parametrize("seconds", [0.2, 1 / 3, 0.7, 1.0, 10.0])
def test_the_next_look_is_later_than_now(seconds: float) -> None:
    """On each multiple of the time between them, too, whatever its rounding."""
    liveness = World("a", peer_timeout=seconds)["a"].mesh.liveness
    now = 1e6
    for _ in range(1000):
        following = liveness.next_tick(now)
        assert now < following <= now + 1.001 * liveness.tick_seconds
        now = following


def test_what_is_no_first_greeting_says_nothing_of_the_window() -> None:
    """An estranged peer that stands still for minutes would leave it at two."""
    world, a, names = crowd(2)
    world.stall(names[0])
    routes = a.mesh.dialling.routes([world[names[0]].link.address], True)
    last = world[names[0]].incarnation
    for options in ({"returning": True}, {"probe": True}, {"at_once": True}):
        a.mesh.dialling.start(Dial(routes, incarnation=last, **options))
    world.advance(5 * ATTEMPT_SECONDS)
    assert a.mesh.dialling.window.room([], world.now) == FIRST_WINDOW
    a.mesh.dialling.start(
        Dial(
            a.mesh.dialling.routes([world[names[1]].link.address], True),
            incarnation=world[names[1]].incarnation,
            probe=True,
        )
    )
    world.settle()
    assert a.mesh.dialling.window.room([], world.now) == FIRST_WINDOW


def test_whose_lease_has_ended_is_dialled_beside_all_others() -> None:
    """They are most likely gone, and a joiner waits for each for some time."""
    world, a, names = crowd()
    for name in names:
        world.stall(name)
    dialling = a.mesh.dialling
    dials = [
        dialling.start(
            Dial(
                dialling.routes([world[name].link.address], True),
                incarnation=world[name].incarnation,
                at_once=True,
            )
        )
        for name in names
    ]
    assert all(dial.first_at == world.now for dial in dials)
    world.settle()
    assert not under_way(a)
    waiting = dial_all(world, a, names[:FIRST_WINDOW])
    assert all(dial.first_at == world.now for dial in waiting)
