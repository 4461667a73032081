"""A KeyboardInterrupt at every line, and between any two bytecodes, of the mesh."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from interrupter import Interrupter, Place, Point
from world import INLINE_BYTES, WHOLE_BYTES, Got, Member, World

from mq.errors import MessagesLost
from mq.lending import BLOCK_BYTES

EVERYWHERE = "MQ_INTERRUPT_EVERYWHERE" in os.environ
TURN_BYTES = 500  # two chunks: large messages take several turns


class Scenario:
    """Steps of an application, each repeated by its driver's rules if interrupted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.interrupter: Interrupter | None = None
        self.interrupted = 0

    def guard(self, member: Member, action: Callable[[], Any]) -> Any:
        """Run a call of the application as the driver does."""
        if self.interrupter is None:
            return action()
        try:
            with self.interrupter.armed():
                return action()
        except KeyboardInterrupt:
            self.interrupted += 1
            member.mesh.recover()
            return None

    def guard_polls(self, member: Member) -> None:
        """Interrupt the member's turns too, but for those in which nothing happens."""
        poll = member.poll

        def guarded() -> None:
            if member.link.has_news() or member.mesh.next_deadline() <= self.world.now:
                self.guard(member, poll)
            else:
                poll()

        member.poll = guarded  # type: ignore[method-assign]

    def subscribe(self, member: Member, topic: str, **options: int) -> None:
        """Subscribe, again if it was interrupted before it had an effect."""
        while topic not in member.mesh.subscriber.topics:
            self.guard(member, lambda: member.subscribe(topic, **options))


def large(seed: int, nbytes: int = 1536) -> bytes:
    return bytes((seed + i * 7) % 251 for i in range(nbytes))


AREAS = (768,)
"""The part of large messages that is on a device, where any is."""
RETAINED = large(2)
LARGEST = large(3, 1792)
assert len(RETAINED) <= WHOLE_BYTES < len(LARGEST)
PAYLOADS = [b"one", large(1), b"two", b"three", RETAINED, b"four", b"five", LARGEST]


def run(interrupter: Interrupter, lends: int = 0, devices: bool = False) -> None:
    """One scenario with an interrupt; afterwards the contract still holds.

    Member `a` publishes to `b` and `c`, which are keep-all with little depth, and to
    `d`, which keeps the last, as do `g`, which leaves, and `h`, which dies. All that
    `a` and `b` do in the mesh is interrupted. Where memory is lent, `b` and `c` follow
    another topic, too, while it is written, and `b` goes on without; where it is not
    and all are in host memory, all large messages but one travel as one body.

    Args:
        lends: Bytes of memory that each member but `d` lends to the others.
        devices: Whether a part of large messages is on a device, and stays there on
            its way to `b` and `d`.
    """
    world = World(
        "a",
        "b",
        "c",
        "g",
        "h",
        lends=dict.fromkeys("abceh", lends) if lends else None,
        carries=dict.fromkeys("abd" * devices, 1),
        wholes="" if lends or devices else "ab",
    )
    a, b, c = (world[name] for name in "abc")
    scenario = Scenario(world)
    topics = ("t", "f") if lends else ("t",)
    for topic in topics:
        c.subscribe(topic, depth=4, window_bytes=4000)
    for name in "gh":
        world[name].subscribe("t", keep=1)
    world.settle()
    for member in (a, b):
        scenario.guard_polls(member)
    scenario.interrupter = interrupter
    received: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for topic in topics:
        scenario.subscribe(b, topic, depth=3, window_bytes=4000)
    scenario.subscribe(b, "k", keep=2)
    world.settle()
    world.join("d").subscribe("t", keep=1)
    world.settle()
    committed: dict[str, list[bytes]] = {topic: [] for topic in topics}
    newest = [-1]

    def take(member: Member) -> bool:
        item = scenario.guard(member, member.recv)
        if item is None:
            return False
        assert not isinstance(item, MessagesLost), interrupter.where
        assert isinstance(item, Got)
        if item.topic == "k":
            assert item.sequence > newest[0], interrupter.where
            newest[0] = item.sequence
            return True
        assert item.sequence < len(committed[item.topic]), interrupter.where
        received[member.name, item.topic].append(item.payload)
        return True

    for number, (payload, topic) in enumerate(product(PAYLOADS, topics)):
        retain = topic == "t" and payload == RETAINED
        areas = AREAS if devices and len(payload) > INLINE_BYTES else ()
        for _ in range(50):
            before = a.newest(topic)
            scenario.guard(a, partial(a.publish, topic, payload, retain, areas))
            if a.newest(topic) > before:
                break
            world.settle()
            for member in (b, c):
                take(member)
            world.settle()
        else:
            raise AssertionError(f"publish is stuck after {interrupter.where}")
        committed[topic].append(payload)
        assert a.newest(topic) == len(committed[topic]) - 1
        if topic != topics[-1]:
            continue
        scenario.guard(a, partial(a.publish, "k", payload))
        if number // len(topics) % 3 == 0:
            world.settle()
    if lends:  # the last is lent already, and the next connection lends nothing
        assert a.session(b).lent
        world.net.shares = False
        world.cut("a", "b", 99, 99)
    world.ended.add(world.leave("g").pid)  # its farewell may be lost
    world.kill("h")
    scenario.subscribe(b, "u")
    world.advance(1.0)
    for member in (b, c, world["d"]):
        for _ in range(3):
            while take(member):
                world.settle()
    late = world.join("e")
    late.subscribe("t")
    world.settle()
    where = interrupter.where
    assert bool(where) == (interrupter.at is not None)  # each run is as the first
    assert scenario.interrupted <= 1
    assert bool(b.landed) == devices
    for topic in topics:
        assert received["b", topic] == committed[topic], where
        assert received["c", topic] == committed[topic], where
    assert received["d", "t"][-1] == committed["t"][-1], where
    assert late.payloads() == [RETAINED], where
    assert newest[0] == a.newest("k"), where
    check_all_works(world, scenario, where)


def check_all_works(world: World, scenario: Scenario, where: str) -> None:
    """Nothing is stuck or left over, and leaving works."""
    scenario.interrupter = None
    world.advance(1.0)
    a, b = world["a"], world["b"]
    assert b.mesh.subscriber.unconfirmed(b.mesh.subscriber.topics["u"]) == [], where
    for member in world.members.values():
        for subscription in member.mesh.subscriber.topics.values():
            assert subscription.keep or not subscription.fill_up(), where
    for number in range(4):
        assert a.publish("u", b"x"), where
        assert a.publish("t", b"%d" % number), where
        world.settle()
        assert b.payloads() == [b"x", b"%d" % number], where
        for name in "cde":
            assert world[name].payloads() == [b"%d" % number], where
        world.settle()
    b.unsubscribe("t")
    world.settle()
    assert a.publish("t", b"last"), where
    world.settle()
    assert b.payloads() == [], where
    for member in world.members.values():
        assert len(member.mesh.sessions) == len(world.members) - 1, where
        assert set(member.link.conns) == set(member.mesh.conns), where
        for session in member.mesh.sessions.values():
            assert not session.frames, where
            assert all(
                not f.queued() and not f.progress for f in session.feeds.values()
            )
    world.leave("b")
    world.advance(1.0)
    assert a.peers() == ["c", "d", "e"], where
    for topic in a.mesh.publisher.topics.values():
        topic.retained = None
    for session in a.mesh.sessions.values():
        assert not session.lent, where
    if a.link.lender is not None:
        assert not a.link.lender.stats().in_use_bytes, where
        assert not world["c"].mesh.subscriber.returns.endings, where


@pytest.fixture(autouse=True)
def _small_turns(small_messages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mq.mesh.publisher.cores", lambda: 8)
    for module in ("reader", "session"):
        monkeypatch.setattr(f"mq.mesh.{module}.BYTES_PER_TURN", TURN_BYTES)


def survey(
    *, opcodes: bool, lends: int = 0, devices: bool = False
) -> dict[Place, list[Point]]:
    """The places of the code that the scenario reaches, and each time it does."""
    for _ in range(2):  # Python 3.13 sees all bytecodes the second time
        found = Interrupter(None, opcodes=opcodes)
        run(found, lends, devices)
    return found.visited


def points(*, opcodes: bool, lends: int = 0, devices: bool = False) -> list[Point]:
    """Where to interrupt: each place of the code that the scenario reaches, once.

    With MQ_INTERRUPT_EVERYWHERE each time that it reaches it, which takes long.
    """
    places = list(survey(opcodes=opcodes, lends=lends, devices=devices).values())
    if EVERYWHERE:
        return sorted(point for place in places for point in place)
    # Not always the first time: the second place at its second, and so on.
    return [place[number % len(place)] for number, place in enumerate(places)]


def lines_of_its_own(lends: int = 0, devices: bool = False) -> list[Point]:
    """Each line that only this scenario reaches, and one of ten that all do."""
    found = points(opcodes=False, lends=lends, devices=devices)
    assert len(found) > 500
    if EVERYWHERE:
        return found
    usual = survey(opcodes=False)
    places = survey(opcodes=False, lends=lends, devices=devices)
    chosen = [
        at
        for number, (place, at) in enumerate(zip(places, found, strict=True))
        if place not in usual or number % 10 == 0
    ]
    assert len(chosen) > 200
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("devices", [False, True])
def test_an_interrupt_at_any_line_changes_nothing_of_the_contract(
    devices: bool,
) -> None:
    """Nothing lost, nothing doubled, all or nothing, no stuck credit.

    With tensors on devices most lines are the same.
    """
    found = lines_of_its_own(devices=True) if devices else points(opcodes=False)
    assert devices or len(found) > 500
    for at in found:
        run(Interrupter(at), devices=devices)


@pytest.mark.parametrize("devices", [False, True])
def test_an_interrupt_between_bytecodes_changes_nothing_either(devices: bool) -> None:
    """The same where a line does several things; a sample of the places."""
    found = points(opcodes=True, devices=devices)
    assert len(found) > 3000
    for at in found[:: 90 if devices else 30]:
        run(Interrupter(at, opcodes=True), devices=devices)


@pytest.mark.slow
def test_an_interrupt_loses_no_memory_that_is_lent() -> None:
    """The same where large messages are read in place; there are six blocks.

    Most lines are the same; and a sample of the bytecodes.
    """
    for at in lines_of_its_own(lends=6 * BLOCK_BYTES):
        run(Interrupter(at), 6 * BLOCK_BYTES)
    found = points(opcodes=True, lends=6 * BLOCK_BYTES)
    for at in found[::180]:
        run(Interrupter(at, opcodes=True), 6 * BLOCK_BYTES)
