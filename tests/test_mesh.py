"""Sessions: how they begin, break, go on and end."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from scripted import Parcel, ScriptedConn
from world import CHUNK_BYTES, INLINE_BYTES, Got, Member, World, incarnation

from mq.errors import MessagesLost
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.dial import ATTEMPT_SECONDS, MAX_GREETERS, Dial, Doubted
from mq.mesh.greeting import GREET_SECONDS
from mq.mesh.setbacks import REST_SECONDS, TRIES

pytestmark = pytest.mark.usefixtures("small_messages")


@dataclass
class Choice:
    """What could be delivered next, and what of that is tried now.

    Attributes:
        ends: Receivers, and numbers of the connections.
        asleep: Those of which the orders that begin with them were tried before.
    """

    ends: list[tuple[str, int]]
    asleep: set[tuple[str, int]]
    tried: int = 0


def interleavings(
    begin: Callable[[], World],
    after_step: Callable[[World, Member], bool],
    is_open: Callable[[World], bool],
) -> Iterator[World]:
    """Every order in which what is in flight can be delivered, one world each.

    Of orders that differ only in what two members do apart from each other most are
    left out: their first steps are put to sleep (P. Godefroid, Partial-Order Methods
    for the Verification of Concurrent Systems, 1996, chapter 5).

    Args:
        after_step: Called with the member that something was delivered to. Returns
            whether more was done than what that member does by itself: a dial, which
            the other one hears of at once.
        is_open: Whether the order still matters.
    """
    choices: list[Choice] = []
    while True:
        world = begin()
        asleep: set[tuple[str, int]] = set()
        depth = 0
        while steps := world.net.steps():
            by_end = {receiver(world, conn): conn for conn in steps}
            if depth == len(choices):
                ends = [end for end in by_end if end not in asleep]
                if not is_open(world):
                    ends = list(by_end)[:1]
                if not ends:
                    break
                choices.append(Choice(ends, asleep))
            choice = choices[depth]
            depth += 1
            name, number = choice.ends[choice.tried]
            tried = {*choice.asleep, *choice.ends[: choice.tried]}
            asleep = {end for end in tried if end[0] != name}
            world.net.deliver(by_end[name, number])
            world[name].poll()
            if after_step(world, world[name]):
                asleep = set()
        else:
            yield world
        while choices and choices[-1].tried + 1 == len(choices[-1].ends):
            choices.pop()
        if not choices:
            return
        choices[-1].tried += 1


def receiver(world: World, conn: ScriptedConn) -> tuple[str, int]:
    """Who gets what this end has sent, and the connection's number."""
    assert conn.other is not None
    (name,) = (n for n, m in world.members.items() if m.link is conn.other.link)
    return name, conn.number


def strangers(*names: str, **options: object) -> World:
    """Members that have not dialled anybody yet."""
    world = World(**options)
    for name in names:
        world.add(name)
    return world


def last_payload(item: Got | MessagesLost | None) -> bytes:
    assert isinstance(item, Got)
    return item.payload


def test_members_greet_and_know_each_other() -> None:
    """Each joiner greets all who are there, and all know all."""
    world = World("a", "b", "c", "d")
    for member in world.members.values():
        assert member.peers() == sorted(set("abcd") - {member.name})
        assert not member.mesh.dialling.dials
        assert set(member.link.conns) == set(member.mesh.conns)


def is_greeting(world: World) -> bool:
    """Whether some connection is not yet, or no more, that of a session."""
    members = world.members.values()
    return any(len(m.mesh.conns) < len(m.link.conns) for m in members)


def cross_dials(dials: dict[int, str], orders: int) -> None:
    """Have two members dial each other, in all orders of what follows.

    Args:
        dials: Who dials the other one, by the number of steps delivered before.
        orders: How many orders there are at least.
    """
    sent = {"a": 0, "b": 0}
    steps = 0

    def dial(world: World) -> bool:
        nonlocal steps
        names = dials.get(steps, "")
        for name in names:
            world[name].dial(world["b" if name == "a" else "a"])
            world[name].poll()
        steps += 1
        return bool(names)

    def begin() -> World:
        nonlocal steps
        steps = 0
        sent.update(a=0, b=0)
        world = strangers("a", "b")
        for name in "ab":
            world[name].subscribe("t")
        dial(world)
        return world

    def publish(member: Member) -> None:
        if member.mesh.publisher.subscribers("t") and sent[member.name] < 2:
            assert member.publish("t", b"%d" % sent[member.name])
            sent[member.name] += 1

    def after_step(world: World, member: Member) -> bool:
        dialled = dial(world)
        publish(member)
        return dialled

    seen = 0
    for world in interleavings(begin, after_step, is_greeting):
        seen += 1
        for member in world.members.values():
            publish(member)
        world.settle()
        for name, other in (("a", "b"), ("b", "a")):
            member = world[name]
            assert member.peers() == [other]
            assert set(member.link.conns) == set(member.mesh.conns)
            assert not member.mesh.dialling.dials
            assert member.mesh.stats.forgotten == 0
            assert member.mesh.stats.lost_connections == 0
            assert member.payloads() == [b"%d" % n for n in range(sent[other])]
    assert seen >= orders


def test_of_two_members_that_dial_at_once_one_session_is_left() -> None:
    """However the handshakes interleave, there is one session and nothing is lost."""
    cross_dials({0: "ab"}, 500)


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("steps", range(1, 7))
def test_of_two_dials_that_cross_one_session_is_left(first: str, steps: int) -> None:
    """The same where one dials while the other one's dial is under way."""
    cross_dials({0: first, steps: "b" if first == "a" else "a"}, 1)


def test_a_dial_to_an_unknown_member_asks_first() -> None:
    """An address is enough; the first route that answers is the one that is used."""
    world = strangers("a", "b")
    a, b = world["a"], world["b"]
    dialling = a.mesh.dialling
    routes = dialling.routes(["script://nobody", b.link.address], True)
    dial = dialling.start(Dial(routes))
    world.settle()
    assert dial.done
    assert dial.incarnation == b.incarnation
    assert a.session(b).dialled == b.link.address
    assert (a.peers(), b.peers()) == (["b"], ["a"])


def test_a_probe_asks_who_is_there_and_begins_nothing() -> None:
    """A probe is answered with the name and incarnation, and no session follows."""
    world = strangers("a", "b")
    a, b = world["a"], world["b"]
    routes = a.mesh.dialling.routes([b.link.address], True)
    dial = a.mesh.dialling.start(
        Dial(routes, incarnation=incarnation("b", 1), probe=True)
    )
    world.settle()
    assert dial.done
    assert dial.welcome is not None
    assert dial.welcome.name == "b"
    assert not a.mesh.sessions
    assert not b.link.conns


def test_a_member_that_dials_its_own_address_stops() -> None:
    """It is told so, and is not its own peer."""
    world = strangers("a")
    dial = world["a"].dial_blindly(world["a"].link.address)
    world.settle()
    assert dial.done
    assert not world["a"].mesh.sessions
    assert not world["a"].link.conns


@pytest.mark.parametrize("manner", ["hang", "fail", "error"])
def test_a_dial_goes_on_until_it_succeeds(manner: str) -> None:
    """Attempts that fail in any way are repeated."""
    world = strangers("a", "b")
    world.net.on_dial = lambda source, target: manner
    dial = world["a"].dial(world["b"])
    world.advance(1.5 * ATTEMPT_SECONDS)
    assert dial.error or dial.conn is not None
    assert not dial.done
    world.net.on_dial = lambda source, target: "open"
    world.advance(ATTEMPT_SECONDS)
    assert world["a"].peers() == ["b"]


def test_an_address_that_is_another_members_by_now_is_not_mistaken() -> None:
    """A dial to one member never begins or disturbs a session with another."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    a.subscribe("t")
    world.settle()
    session = a.session(b)
    routes = a.mesh.dialling.routes([b.link.address], True)
    dial = a.mesh.dialling.start(Dial(routes, incarnation=incarnation("gone", 1)))
    world.advance(1.0)
    assert not dial.done
    assert "not the member" in dial.error
    assert a.session(b) is session
    assert session.stats.connections == 1


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("secret", b"another", hs.SECRET),
        ("group", "h", hs.GROUP),
        ("backend", "other", hs.BACKEND),
        ("versions", {"codec": "99"}, hs.VERSION),
    ],
)
def test_who_does_not_belong_is_refused_by_name(
    option: str, value: object, code: str
) -> None:
    """Wrong secret, group, backend or codec: refused, with the reason, once."""
    world = World("a")
    other = world.add("x", **{option: value})
    dial = other.dial_blindly(world["a"].link.address)
    world.advance(1.0)
    assert dial.done
    assert dial.refusal == code
    assert dial.error
    assert not other.mesh.sessions
    assert not world["a"].mesh.sessions
    world.advance(2 * GREET_SECONDS)
    assert not world["a"].link.conns


def test_a_name_that_is_held_is_refused() -> None:
    """Equal generations: whoever holds the name keeps it."""
    world = World("a", "b")
    thief = world.add("x", name="b", generation=1)
    dial = thief.dial(world["a"])
    world.settle()
    assert dial.refusal == hs.NAME_TAKEN
    assert "pid" in dial.error
    assert world["a"].peers() == ["b"]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_name_whose_holder_is_silent_is_waited_for(is_cut: bool) -> None:
    """It may be dead where nobody can see that: its next life need not be refused."""
    world = World("a", "b")
    session = world["a"].session(world["b"])
    assert session.timeout is not None
    if is_cut:
        world.kill("b", visible=False)
    else:
        world.stall("b")
        world.advance(0.75 * session.timeout)
    dial = world.add("x", name="b", generation=1).dial(world["a"])
    world.advance(0.1)
    assert not dial.done
    assert "wait until 'a' gives it up" in dial.error
    assert session.alive
    world.advance(session.timeout + 1.0)
    assert not session.alive
    assert world["x"].peers() == ["a"]
    assert world["a"].session(world["x"]).alive
    assert not world["a"].mesh.stats.refused


def test_a_silent_holder_that_comes_back_keeps_its_name() -> None:
    """Whoever waited for it is refused, and nobody else is disturbed."""
    world = World("a", "b")
    session = world["a"].session(world["b"])
    world.stall("b")
    world.cut("a", "b")
    dial = world.add("x", name="b", generation=1).dial(world["a"])
    world.advance(0.5)
    assert not dial.done
    world.unstall("b")
    world.advance(2.0)
    assert dial.refusal == hs.NAME_TAKEN
    assert world["a"].session(world["b"]) is session
    assert not world["b"].mesh.replaced


def test_who_has_no_descriptors_to_spare_says_so_to_who_would_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on with all others, also over new connections; later it lets them in."""
    monkeypatch.setattr(ScriptedConn, "descriptors_taken", 6)
    world = World("a", "b")
    session = world["a"].session(world["b"])
    free = [8]
    monkeypatch.setattr(
        "mq.mesh.admission.free_descriptors", lambda _: (free[0], "a few are open")
    )
    world.cut("a", "b")
    world.settle()
    assert world["a"].session(world["b"]) is session
    assert session.stats.connections == 2
    dial = world.add("x").dial(world["a"])
    world.advance(1.0)
    assert not dial.done
    assert "a few are open" in dial.error
    assert "`ulimit -n`" in dial.error
    free[0] = 9
    world.advance(2.0)
    assert world["a"].peers() == ["b", "x"]


def test_who_has_no_descriptors_to_spare_begins_no_session_by_its_own_dial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds at the rendezvous whom it has turned away."""
    world = World("a", "b")
    a, x = world["a"], world.add("x")
    monkeypatch.setattr(
        "mq.mesh.greeting.crowded",
        lambda conn: "no room" if conn.link is a.link else "",
    )
    dial = a.dial(x)
    world.advance(1.0)
    assert not dial.done
    assert "no room" in dial.error
    assert a.peers() == ["b"]
    assert not x.mesh.sessions


def test_a_later_life_of_a_name_fences_the_earlier_one() -> None:
    """The new incarnation is the member; the old one is told and stops."""
    world = World("a", "b", "c")
    old = world.members.pop("b")
    world.members["old"] = old
    new = world.join("b")
    world.settle()
    assert "replaced" in old.mesh.replaced
    for name in "ac":
        assert world[name].session(new).introduced
        assert old.incarnation not in world[name].mesh.sessions
        assert not world[name].mesh.replaced


def test_a_fenced_member_that_was_cut_off_learns_it_on_its_return() -> None:
    """It is refused as replaced when it tries to resume."""
    world = World("a", "b")
    old = world.members.pop("b")
    world.members["old"] = old
    old.stalled = True
    world.cut("a", "old")
    world.join("b")
    world.settle()
    old.stalled = False
    world.advance(3.0)
    assert old.mesh.replaced
    assert world["a"].peers() == ["b"]


def test_bye_ends_a_session_at_once() -> None:
    """A member that leaves is forgotten without a wait, and what it sent is kept."""
    world = World("a", "b", "c")
    world["b"].subscribe("t")
    world.settle()
    assert world["a"].publish("t", b"last words")
    a = world["a"]
    a.mesh.leave("done")
    world.pump()
    assert a.mesh.has_left()
    assert world["b"].peers() == ["c"]
    a.mesh.close()
    del world.members["a"]
    world.settle()
    assert world["b"].payloads() == [b"last words"]
    assert world["b"].mesh.stats.forgotten == 0
    assert not world["b"].mesh.dialling.dials


def test_the_answer_to_bye_is_not_cut_off_by_a_close() -> None:
    """Whoever is told BYE lets the leaver close, so the leaver never waits."""
    world = World("a", "b")
    for member in world.members.values():
        member.link.abrupt = True
        member.subscribe("t")
    world.settle()
    assert world["a"].publish("t", b"x")
    world["a"].mesh.leave("done")
    world.pump()
    assert world["a"].mesh.has_left()
    assert world["a"].mesh.stats.lost_connections == 0
    world.advance(GREET_SECONDS + 1.0)
    assert not world["b"].link.conns


def test_a_member_that_leaves_begins_no_session() -> None:
    """It still resumes what it has, and refuses who is new."""
    world = World("a", "b")
    world["a"].mesh.leave("done")
    newcomer = world.add("c")
    dial = newcomer.dial(world["a"])
    world.settle()
    assert dial.done
    assert not newcomer.mesh.sessions


@pytest.mark.parametrize("abrupt", [False, True], ids=["gentle", "abrupt"])
@pytest.mark.parametrize("at_once", [False, True], ids=["soon", "at_once"])
@pytest.mark.parametrize("dials", ["a", "b", "ab"])
@pytest.mark.parametrize("steps", range(16))
def test_who_leaves_while_another_joins_is_a_member_for_nobody(
    steps: int, dials: str, at_once: bool, abrupt: bool
) -> None:
    """Whoever began the session is told; else it would wait for `peer_timeout`."""
    left = 0

    def begin() -> World:
        nonlocal left
        left = steps
        world = strangers("a", "b")
        for name in dials:
            world[name].dial(world["b" if name == "a" else "a"])
            world[name].poll()
        world["a"].link.abrupt = abrupt
        if not left:
            world["a"].mesh.leave("left")
        return world

    def after_step(world: World, member: Member) -> bool:
        nonlocal left
        left -= 1
        if not left:
            world["a"].mesh.leave("left")
        a = world["a"].mesh
        looks = at_once or (member.mesh is a and left < 0)
        if closes := left < 1 and looks and a.has_left():
            a.close()
        return closes or not left

    for world in interleavings(begin, after_step, is_greeting):
        assert left <= 0 or world["b"].peers() == ["a"]
        if left > 0:
            world["a"].mesh.leave("left")
        world.pump()
        assert world["a"].mesh.has_left()
        world["a"].mesh.close()
        world.settle()
        assert not world["b"].mesh.sessions
        assert world["b"].mesh.stats.forgotten == 0


def test_a_lost_answer_to_bye_does_not_hold_a_member_up() -> None:
    """Whatever is cut while it leaves, it has left soon after."""
    for lose in range(2):
        world = World("a", "b")
        world["a"].mesh.leave("done")
        world.cut("a", "b", lose_one=lose, lose_other=lose)
        world.advance(1.0)
        assert world["a"].mesh.has_left()
        assert not world["b"].mesh.sessions


@pytest.mark.parametrize("cut", [False, True], ids=["closed", "cut"])
def test_what_follows_bye_holds_no_member_up(cut: bool) -> None:
    """Its peer has done with it, and answers nothing of that."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    b.subscribe("t")
    b.poll()
    a.mesh.leave("done")
    a.poll()
    session = a.session(b)
    world.net.deliver_all()
    a.poll()
    assert [frame.kind for frame in session.frames][-1] == wire.SUBSCRIBED
    if cut:
        b.poll()
        world.net.deliver_all()
        a.poll()
        world.cut("a", "b")
    world.pump()
    assert a.mesh.has_left()
    assert not a.mesh.sessions or not cut


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_member_leaves_before_its_credit_is_answered(names: str) -> None:
    """Not even where the peer, which cannot be watched, is gone meanwhile."""
    world = World(*names)
    a, b = world["a"], world["b"]
    b.subscribe("t", depth=4)
    world.settle()
    while a.publish("t", b"x"):
        world.settle()
    assert len(b.payloads()) == 4
    world.pump()
    assert b.session(a).frames
    b.mesh.leave("left")
    world.kill("a", visible=False)
    world.pump()
    assert b.mesh.has_left()


def test_proof_of_death_releases_who_waits_at_once() -> None:
    """A dead process is forgotten without a time-out, and its last words are read."""
    world = World("a", "b", "c")
    for name in "bc":
        world[name].subscribe("t", depth=1)
    world["a"].subscribe("u")
    world.settle()
    a = world["a"]
    assert a.publish("t", b"1")
    world.settle()
    world["c"].payloads()
    world.settle()
    assert not a.publish("t", b"2")
    assert world["b"].publish("u", b"last words")
    world.kill("b")
    world.settle()
    assert a.peers() == ["c"]
    assert a.publish("t", b"2")
    assert a.payloads() == [b"last words"]
    assert a.mesh.stats.forgotten == 0


def test_a_death_nobody_can_see_is_a_matter_of_peer_timeout() -> None:
    """Without proof a silent peer is waited for until peer_timeout, no longer."""
    world = World("a", "b", peer_timeout=8.0)
    world["b"].subscribe("t", depth=1)
    world.settle()
    assert world["a"].publish("t", b"1")
    world.kill("b", visible=False)
    world.advance(7.0)
    assert not world["a"].publish("t", b"2")
    world.advance(1.5)
    assert world["a"].publish("t", b"2")
    assert world["a"].mesh.stats.forgotten == 1


def test_a_message_that_goes_on_arriving_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine hands it over whole, which on a slow wire takes long."""
    world = World("a", "b", peer_timeout=8.0)
    world["a"].subscribe("t")
    world.settle()
    (conn,) = world.net.between(world["a"].link, world["b"].link)
    ends = [end for end in (conn, conn.other) if end is not None]
    for end in ends:
        end.broken = True
        monkeypatch.setattr(end, "quiet_seconds", lambda: 0.5)
    world.advance(30.0)
    sessions = [next(iter(world[name].mesh.sessions.values())) for name in "ab"]
    assert [session.stats.connections for session in sessions] == [1, 1]
    for end in ends:
        monkeypatch.setattr(end, "quiet_seconds", lambda: 9.0)
    world.advance(9.0)
    assert [session.stats.connections for session in sessions] != [1, 1]


def test_peer_timeout_none_waits_for_proof() -> None:
    """A peer that is silent for an hour is still a peer, if either side says so."""
    world = World("a")
    world.join("b", peer_timeout=None)
    world.settle()
    world.stall("b")
    world.advance(3600.0)
    assert world["a"].peers() == ["b"]
    world.unstall("b")
    world.settle()
    assert world["b"].peers() == ["a"]


def test_an_idle_group_stays_together() -> None:
    """Heartbeats keep sessions that nobody uses, on their first connection."""
    world = World("a", "b", "c")
    world.advance(300.0)
    for member in world.members.values():
        assert len(member.peers()) == 2
        for session in member.mesh.sessions.values():
            assert session.stats.connections == 1


def test_a_half_open_connection_is_replaced() -> None:
    """One side's connection is dead and it is not told: the dialler dials again."""
    world = World("a", "b", peer_timeout=8.0)
    world["a"].subscribe("t")
    world.settle()
    (conn,) = world.net.between(world["a"].link, world["b"].link)
    world.net.cut(conn, hold=(True, True))
    assert world["b"].publish("t", b"x")
    world.advance(7.0)
    assert world["a"].payloads() == [b"x"]
    assert world["a"].mesh.stats.forgotten == world["b"].mesh.stats.forgotten == 0


def test_what_was_granted_to_a_forgotten_session_never_begins() -> None:
    """A redial under way when its session is given up does not resume it half."""
    world = World("a", "b", peer_timeout=4.0)
    a, b = world["a"], world["b"]
    session = b.session(a)
    for name in "ab":
        world[name].subscribe("t")
    world.settle()
    assert session.dialler
    world.stall("a")
    world.cut("a", "b")
    world.pump()  # b dials, a does not answer
    assert any(dial.session is session for dial in b.mesh.dialling.dials)
    b.mesh.forget(session, "given up")
    world.unstall("a")
    world.advance(2.0)
    for member, other in ((a, b), (b, a)):
        assert member.mesh.stats.malformed == 0
        assert member.publish("t", b"x")
        world.settle()
        assert other.payloads() == [b"x"]


def test_a_short_stall_is_no_reason_to_forget_anyone() -> None:
    """A member that slept takes its own sleep into account."""
    world = World("a", "b", "c", peer_timeout=8.0)
    for name in "bc":
        world.stall(name)
    world.advance(7.0)
    for name in "bc":
        world.unstall(name)
    world.advance(3.0)
    for member in world.members.values():
        assert len(member.peers()) == 2
        assert member.mesh.stats.forgotten == 0


def test_a_peer_hears_of_a_member_that_reads_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taking in much from others, as memory that is slow allows, is no silence."""
    monkeypatch.setattr("mq.mesh.reader.BYTES_PER_TURN", CHUNK_BYTES)
    senders = [f"sender{index}" for index in range(20)]
    world = World("a", "idle", *senders, peer_timeout=2.0)
    a, idle = world["a"], world["idle"]
    a.subscribe("t")
    world.settle()
    world.stall("a")
    for name in senders:
        assert world[name].publish("t", bytes(1 << 15))
    world.settle()
    world.unstall("a")
    heard = [world.now]
    receive_body, send = ScriptedConn.receive_body, ScriptedConn.try_send

    def receive_slowly(conn: ScriptedConn, into: memoryview) -> bool:
        world.now += 0.2
        return receive_body(conn, into)

    def listen(conn: ScriptedConn, head: bytes, body: memoryview | None = None) -> bool:
        assert conn.other is not None
        if conn.other.link is idle.link:
            heard.append(world.now)
        return send(conn, head, body)

    monkeypatch.setattr(ScriptedConn, "receive_body", receive_slowly)
    monkeypatch.setattr(ScriptedConn, "try_send", listen)
    a.poll()
    heard.append(world.now)
    assert heard[-1] - heard[0] > 2.0, "all was read in no time"
    assert max(after - before for before, after in pairwise(heard)) <= 1.0


def test_a_suspended_host_is_no_reason_either() -> None:
    """All members slept for longer than peer_timeout: nobody is given up."""
    world = World("a", "b", "c", peer_timeout=4.0)
    world["b"].subscribe("t")
    world.settle()
    for name in "abc":
        world.stall(name)
    world.advance(60.0)
    for name in "abc":
        world.unstall(name)
    world.advance(3.0)
    for member in world.members.values():
        assert member.mesh.stats.forgotten == 0
    assert world["a"].publish("t", b"x")
    world.settle()
    assert world["b"].payloads() == [b"x"]


def test_a_member_that_was_forgotten_comes_back_by_itself() -> None:
    """After a partition longer than peer_timeout all find each other again."""
    world = World("a", "b", "c", peer_timeout=4.0)
    world.partition("a", "b")
    world.advance(10.0)
    assert world["a"].peers() == ["c"]
    world.heal()
    world.advance(5.0)
    assert world["a"].peers() == ["b", "c"]


def spoil(world: World, target: Member, kind: int, times: int) -> list[ScriptedConn]:
    """Spoil a frame of a kind on each of the next connections of a member."""
    spoilt: list[ScriptedConn] = []

    def tamper(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        assert conn.other is not None
        head, body = parcel
        if (
            conn.other.link is target.link
            and head[0] == kind
            and len(spoilt) < times
            and conn not in spoilt
        ):
            spoilt.append(conn)
            return head[:3] + b"\xff" + head[4:-1], body
        return parcel

    world.net.tamper = tamper
    return spoilt


@pytest.mark.parametrize("kind", [wire.DATA, wire.CHUNK])
def test_a_malformed_frame_costs_a_connection_and_nothing_else(kind: int) -> None:
    """The session is resumed and the frame comes again."""
    world = World("a", "b", "c")
    world["b"].subscribe("t")
    world.settle()
    spoilt = spoil(world, world["b"], kind, TRIES - 1)
    small, large = b"small", bytes(range(200)) * 5
    for payload in (small, large):
        assert world["a"].publish("t", payload)
    world.advance(1.0)
    assert len(spoilt) == TRIES - 1
    assert world["b"].payloads() == [small, large]
    assert world["b"].mesh.stats.malformed == TRIES - 1
    assert world["b"].mesh.stats.forgotten == 0


def test_a_frame_that_stays_malformed_ends_the_session() -> None:
    """The peer is given up, the loss is told once, and the next session works."""
    world = World("a", "b")
    world["b"].subscribe("t")
    world.settle()
    spoil(world, world["b"], wire.DATA, TRIES)
    assert world["a"].publish("t", b"bad")
    world.advance(5.0)
    assert world["b"].mesh.stats.forgotten == 1
    assert world["a"].publish("t", b"good")
    world.settle()
    lost, got = world["b"].recv_all()
    assert isinstance(lost, MessagesLost)
    assert (lost.sender, lost.topics, lost.count) == ("a", ("t",), 1)
    assert last_payload(got) == b"good"


def starved(monkeypatch: pytest.MonkeyPatch, member: Member) -> list[int]:
    """How often a member has found no memory for a large message; it finds none."""
    found: list[int] = []

    def take(nbytes: int) -> memoryview:
        if nbytes > INLINE_BYTES:
            found.append(nbytes)
            raise MemoryError(f"no memory for {nbytes} bytes")
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(member.mesh.subscriber, "_take", take)
    return found


@pytest.mark.parametrize(("sender", "receiver"), [("a", "b"), ("b", "a")])
def test_a_message_for_which_there_is_no_memory_comes_once_there_is(
    monkeypatch: pytest.MonkeyPatch, sender: str, receiver: str
) -> None:
    """What others send arrives meanwhile, and nobody has done anything wrong."""
    world = World("a", "b", "c")
    world[receiver].subscribe("t")
    world[receiver].subscribe("u")
    world.settle()
    large = bytes(range(200)) * 5
    with monkeypatch.context() as patch:
        found = starved(patch, world[receiver])
        assert world[sender].publish("t", large)
        world.advance(1.0)
        assert world["c"].publish("u", b"of another")
        world.advance(1.0)
        assert world[receiver].payloads() == [b"of another"]
    assert 4 <= len(found) <= 2.0 / REST_SECONDS + 1
    world.advance(1.0)
    assert world[receiver].payloads() == [large]
    for name in (sender, receiver):
        stats = world[name].mesh.stats
        assert (stats.malformed, stats.forgotten) == (0, 0)
    assert world[receiver].session(world["c"]).stats.connections == 1


def test_a_message_for_which_there_is_never_memory_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After as long as a peer may be silent; the loss is told, with the reason."""
    world = World("a", "b")
    world["b"].subscribe("t")
    world.settle()
    with monkeypatch.context() as patch:
        starved(patch, world["b"])
        assert world["a"].publish("t", bytes(range(200)) * 5)
        timeout = world["b"].session(world["a"]).timeout
        assert timeout is not None
        world.advance(timeout - 0.5)
        assert world["b"].mesh.stats.forgotten == 0
        world.advance(2.0)
        assert world["b"].mesh.stats.forgotten == 1
        assert world["a"].publish("t", b"small")
        world.advance(5.0)
    lost, got = world["b"].recv_all()
    assert isinstance(lost, MessagesLost)
    assert lost.count == 1
    assert lost.reason == "no memory for 1000 bytes"
    assert last_payload(got) == b"small"


def test_connections_that_never_greet_are_closed() -> None:
    """They are bounded in number and in time, and hold nobody else up."""
    world = World("a", "b")
    stranger = world.add("x")
    del world.members["x"]
    for _ in range(MAX_GREETERS + 50):
        stranger.link.dial(world["a"].link.address)
    world["a"].poll()
    assert len(world["a"].link.conns) == MAX_GREETERS + 1
    world.join("c")
    world.settle()
    assert world["a"].peers() == ["b", "c"]
    world.advance(GREET_SECONDS + 0.5)
    assert len(world["a"].link.conns) == 2
    assert world["a"].mesh.stats.refused > MAX_GREETERS


def test_who_greets_slowly_is_not_pushed_out_by_a_flood_from_another_host() -> None:
    """However many come meanwhile: each host's strangers push out its own."""
    world = strangers("a", "x")
    address = world["a"].link.address
    conns = [world["x"].link.dial(address) for _ in range(MAX_GREETERS + 50)]
    for port, near in enumerate(conns):
        far = near.other
        far.address = f"tcp://10.0.0.{2 if port else 1}:{port}"
    world["a"].poll()
    assert len(world["a"].link.conns) == MAX_GREETERS
    assert conns[0].other in world["a"].link.conns


def test_strangers_get_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an engine that takes several for each connection they are fewer."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (240, 240))
    monkeypatch.setattr(ScriptedConn, "descriptors_taken", 6)
    world = strangers("a", "x")
    for _ in range(20):
        world["x"].link.dial(world["a"].link.address)
    world["a"].poll()

    assert len(world["a"].link.conns) == 10


def test_hoarders_of_connections_do_not_stop_this_members_own_dials() -> None:
    """A member whose greeters are full still dials and finishes what it dialled."""
    world = strangers("a", "b", "x")
    world["a"].dial(world["b"])
    for _ in range(MAX_GREETERS + 50):
        world["x"].link.dial(world["a"].link.address)
    world["a"].poll()
    del world.members["x"]
    world.settle()
    assert world["a"].peers() == ["b"]


@pytest.mark.parametrize("ages", [(0.0, 3.0, 4.9, 0.2), (2.0, 1.9)])
def test_a_refusal_is_believed_once_the_record_is_renewed(
    ages: tuple[float, ...],
) -> None:
    """Whenever that was renewed before the refusal, too."""
    dial = Dial([], incarnation="1" * 32, doubts=True)
    dial.saw_record(5.0)
    dial.saw_record(0.1)
    assert dial.doubts  # there was nothing to believe yet
    dial.doubted = Doubted("secret", "no", "tcp://10.0.0.1:1")
    for age in ages:
        assert dial.doubts
        dial.saw_record(age)
    assert not dial.doubts
