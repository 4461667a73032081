"""Membership, and the edges of connect, subscribe and names."""

from __future__ import annotations

import contextlib
import os

import mq
from mq import registry
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import PEER_TIMEOUT, STEP

LARGE_BYTES = 2 << 20


@case("Membership")
def members_join_and_leave_at_any_time(group: Group) -> None:
    """Streams between others go on, complete, while members come and go."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    running = a.begin(programs.publish_range, "t", 0, 300)
    for turn in range(3):
        guest = group.member(f"guest{turn}")
        guest.subscribe("t")
        guest.publish("t", "hello")
        guest.call("close")
        guest.close()
    running.result()
    got = b.run(programs.receive, 303)
    assert [m.digest for m in got if m.sender == "a"] == list(range(300))
    assert [m.sender for m in got if m.sender != "a"] == ["guest0", "guest1", "guest2"]
    assert {m.name for m in a.call("members")} == {"a", "b"}


@case("Membership")
def connect_returns_when_this_member_is_reachable_by_all(group: Group) -> None:
    """All see the newcomer, who can subscribe and publish at once."""
    old = group.members("a", "b")
    for member in old:
        member.subscribe("t")
    new = group.member("new", labels=("gpu", "rank:1"))
    for member in (*old, new):
        names = {m.name for m in member.call("members")}
        assert names == {"a", "b", "new"}, f"{member.name} sees {names}"
    assert sorted(new.call("subscribers", "t")) == ["a", "b"]
    new.publish("t", "hello")
    assert [m.recv().payload for m in old] == ["hello", "hello"]
    seen = next(m for m in old[0].call("members") if m.name == "new")
    assert (seen.pid, tuple(seen.labels)) == (new.pid, ("gpu", "rank:1"))
    assert seen.host


@case("Membership")
def members_that_connect_at_once_all_see_each_other(group: Group) -> None:
    """Five joiners at the same time: a full mesh, without a seed among them."""
    members = group.members(*(f"m{n}" for n in range(5)))
    for member in members:
        member.call("wait_for_members", 5, timeout=STEP)
        member.subscribe("t")
    for member in members:
        member.publish("t", member.name)
    for member in members:
        heard = {m.sender for m in member.run(programs.receive, 4)}
        assert heard == {m.name for m in members} - {member.name}


@case("Membership")
def waiting_for_members_and_subscribers_ends_with_them(group: Group) -> None:
    """Or with an error that says how many there are."""
    a = group.member("a")
    with expect(mq.MembersTimeout, "2"):
        a.call("wait_for_members", 2, timeout=0.1)
    waiting = [
        a.start("wait_for_members", 2, timeout=STEP),
        a.start("wait_for_subscribers", "t", 1, timeout=STEP),
    ]
    b = group.member("b")
    waiting[0].result()
    with expect(mq.MembersTimeout, "'t'"):
        a.call("wait_for_subscribers", "t", 1, timeout=0.05)
    b.subscribe("t")
    waiting[1].result()


def _subscribe_waits_for_nobody(group: Group) -> None:
    """Where nobody can be stopped alone: it returns within its time-out."""
    a, b = group.members("a", "b")
    b.subscribe("t", timeout=STEP)
    a.publish("t", 1)
    assert b.recv().payload == 1


@case(
    "edge: subscribe", needs="separate_processes", otherwise=_subscribe_waits_for_nobody
)
def subscribe_timeout_names_the_silent_and_stays_in_force(group: Group) -> None:
    """A stopped member does not acknowledge; once it goes on, it delivers."""
    a, b = group.members("a", "b")
    a.stop()
    with expect(TimeoutError, "'t'", "a"):
        b.call("subscribe", "t", timeout=0.3)
    a.cont()
    a.call("wait_for_subscribers", "t", 1, timeout=STEP)
    a.publish("t", 1)
    assert b.recv().payload == 1


@case("edge: subscribe")
def subscribing_again_is_nothing_or_an_error(group: Group) -> None:
    """Nothing with the same options; with others the remedy is named."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=5)
    b.subscribe("t", depth=5)
    with expect(ValueError, "'t'", "unsubscribe"):
        b.subscribe("t", depth=6)
    a.publish("t", 1)
    assert b.recv().payload == 1
    assert b.run(programs.nothing_waits)


def _connect_needs_nobody_silent(group: Group) -> None:
    """Where no member can be stopped alone: `connect` finds all of them."""
    group.members("a", "b")
    c = group.member("c", connect_timeout=5.0)
    assert len(c.call("members")) == 3


@case(
    "edge: connect",
    needs="separate_processes",
    otherwise=_connect_needs_nobody_silent,
)
def connect_names_members_that_do_not_answer(group: Group) -> None:
    """Never a partial member: an error with each of them, and nothing is left."""
    a, b = group.members("a", "b")
    a.stop()
    c = group.unconnected("c")
    with expect(mq.ConnectTimeout, "a"):
        group.connecting(c, connect_timeout=0.7).result()
    a.cont()
    b.subscribe("t", timeout=5)  # the failed attempt has taken its leave
    group.connecting(c).result()
    c.publish("t", 1)
    assert b.recv().payload == 1


@case(
    "edge: connect",
    needs="separate_processes",
    otherwise=_connect_needs_nobody_silent,
)
def connect_is_not_held_up_by_records_of_killed_members(group: Group) -> None:
    """The end of a process on this host is proof; its records are swept."""
    members = group.members("a", "b", "c")
    for member in members[:2]:
        member.kill()
    d = group.member("d", connect_timeout=5.0)
    assert {m.name for m in d.call("members")} == {"c", "d"}


@case("edge: connect")
def group_of_another_backend_is_refused_by_name(group: Group) -> None:
    """Two transports cannot share a group; the error names both."""
    here = group.capabilities.separate_processes
    others = [
        name
        for name in registry.names()
        if name.partition(":")[0] != group.backend.partition(":")[0]
        and registry.check(name) is None
        and registry.capabilities(name).separate_processes == here
    ]
    group.member("a")
    b = group.unconnected("b")
    for other in others[:1]:
        with expect(mq.MQError, group.backend.partition(":")[0], other):
            b.ask(
                _connect_other, other, group.backend, group.options(name="b")
            ).result()
    group.connecting(b).result()
    assert len(b.call("members")) == 2


def _connect_other(
    worker: object, backend: str, own: str, options: dict[str, object]
) -> None:
    theirs = registry.option_names(own)  # of certificates, for example
    options = {k: v for k, v in options.items() if k not in theirs}
    options = {"connect_timeout": 5.0, **options}
    mq.connect(backend, **options).close()  # type: ignore[arg-type]


@case("edge: Names")
def name_of_a_live_member_is_refused_with_host_and_pid(group: Group) -> None:
    """The holder is not disturbed, and gives the name up when it closes."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    second = group.unconnected("a")
    with expect(mq.MQError, "'a'", str(a.pid), os.uname().nodename):
        group.connecting(second).result()
    a.publish("t", "holder")
    holder = b.recv()
    a.call("close")
    group.connecting(second).result()
    second.publish("t", "successor")
    successor = b.recv()
    assert (holder.payload, successor.payload) == ("holder", "successor")
    assert (holder.sequence, successor.sequence) == (0, 0)
    assert holder.incarnation != successor.incarnation


def _name_comes_free_by_close(group: Group) -> None:
    """Where members cannot be stopped or killed: only `close` frees a name."""
    a = group.member("a")
    a.call("close")
    again = group.unconnected("a")
    group.connecting(again).result()


@case("edge: Names", needs="separate_processes", otherwise=_name_comes_free_by_close)
def silent_holder_is_replaced_and_told(group: Group) -> None:
    """No answer to a probe: the new one gets the name, the old one is fenced off."""
    a, b = group.members("a", "b", peer_timeout=60)
    b.subscribe("t")
    a.stop()
    second = group.unconnected("a")
    group.connecting(second, peer_timeout=60).result()
    second.publish("t", "new")
    assert b.recv().payload == "new"
    waiting = a.start("recv", timeout=STEP)
    a.cont()
    with expect(mq.Closed, "replaced"):
        waiting.result()
    assert {m.name for m in b.call("members")} == {"a", "b"}


@case("edge: Names", needs="separate_processes", otherwise=_name_comes_free_by_close)
def name_of_a_killed_member_is_free_at_once(group: Group) -> None:
    """A process that ended needs no time-out, for the name and for its peers."""
    a, b = group.members("a", "b", peer_timeout=60)
    b.subscribe("t")
    a.publish("t", 1)
    first = b.recv()
    a.kill()
    again = group.unconnected("a")
    group.connecting(again, peer_timeout=60, connect_timeout=5.0).result()
    again.publish("t", 2)
    second = b.recv()
    assert (first.sequence, second.sequence) == (0, 0)
    assert first.incarnation != second.incarnation


def _two_queues(worker: object, backend: str, options: dict[str, object]) -> list[str]:
    heard = []
    with (
        mq.connect(backend, name="one", **options) as one,  # type: ignore[arg-type]
        mq.connect(backend, name="two", **options) as two,  # type: ignore[arg-type]
    ):
        for queue in (one, two):
            queue.subscribe("t")
        one.publish("t", "from one", timeout=STEP)
        heard.append(two.recv(timeout=STEP).payload)
        two.publish("t", "from two", timeout=STEP)
        heard.append(one.recv(timeout=STEP).payload)
    return heard


@case("edge: Names")
def two_queues_of_one_process_are_two_members(group: Group) -> None:
    """They hear each other, as any two members do."""
    host = group.unconnected("host")
    options = group.options()
    heard = host.ask(_two_queues, group.backend, options).result()
    assert heard == ["from one", "from two"]


def _closing_releases(group: Group) -> None:
    """Where members are threads, they end only by `close`."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t", depth=2)
    c.subscribe("t")
    filled = a.run(programs.fill, "t")
    waiting = a.start("publish", "t", "after", timeout=None)
    assert not waiting.done(0.1)
    b.call("close", linger=0)
    waiting.result()
    got = c.run(programs.receive, filled + 1)
    assert [m.sequence for m in got] == list(range(filled + 1))


@case("Death", needs="separate_processes", otherwise=_closing_releases)
def death_by_sigkill_releases_a_waiting_publisher(group: Group) -> None:
    """On proof, long before `peer_timeout`; the other subscriber loses nothing."""
    a, b, c = group.members("a", "b", "c", peer_timeout=60)
    b.subscribe("t", depth=2)
    c.subscribe("t")
    filled = a.run(programs.fill, "t")
    waiting = a.start("publish", "t", "after", timeout=None)
    assert not waiting.done(0.1)
    b.kill()
    waiting.result()
    got = c.run(programs.receive, filled + 1)
    assert [m.sequence for m in got] == list(range(filled + 1))
    assert {m.name for m in a.call("members")} == {"a", "c"}


@case("Death", needs="separate_processes", otherwise=_closing_releases)
def messages_of_a_killed_publisher_stay_readable(group: Group) -> None:
    """What had arrived is read; what it retained is gone with it."""
    a, b, c = group.members("a", "b", "c", peer_timeout=60)
    a.publish("retained", 1, retain=True)
    b.subscribe("t")
    a.run(programs.publish_range, "t", 0, 50)
    a.call("flush", timeout=STEP)
    a.kill()
    got = b.run(programs.receive, 50)
    assert [m.digest for m in got] == list(range(50))
    c.subscribe("retained")
    b.publish("retained", "end")
    assert c.recv().payload == "end"


def _receive_what_there_is(queue: mq.MQ) -> list[programs.Received]:
    found: list[programs.Received] = []
    with contextlib.suppress(mq.RecvTimeout):
        while True:
            found += programs.receive(queue, 1, timeout=0)
    return found


@case("Death", needs="separate_processes", otherwise=_closing_releases)
def large_messages_of_a_killed_publisher_are_whole(group: Group) -> None:
    """A prefix without a gap, and nothing of the message that it was writing."""
    b, c = group.members("b", "c", peer_timeout=60)
    b.subscribe("t", depth=8)
    got: list[programs.Received] = []
    names = [f"a{life}" for life in range(3)]
    for life, name in enumerate(names):
        a = group.member(name, peer_timeout=60)
        a.begin(programs.publish_patterns, "t", [LARGE_BYTES] * 1000)
        got += b.run(programs.receive, 3 + life)
        a.kill()
        got += b.run(_receive_what_there_is)
    c.publish("t", "end")
    got += b.run(programs.receive_until, "end")
    got += b.run(_receive_what_there_is)
    for name in names:
        heard = [m for m in got if m.sender == name]
        assert [m.sequence for m in heard] == list(range(len(heard)))
        for number, message in enumerate(heard):
            whole = programs.pattern(number, LARGE_BYTES)
            assert message.digest == programs.digest(whole)


@case("Death", needs="separate_processes", otherwise=_closing_releases)
def silent_member_is_forgotten_after_peer_timeout(group: Group) -> None:
    """Without proof the silence decides, by the larger of the two ends' values."""
    a, b, c = group.members("a", "b", "c", peer_timeout=PEER_TIMEOUT / 2)
    patient = group.member("patient", peer_timeout=60)
    for member in (b, patient):
        member.subscribe(member.name, depth=2)
        a.run(programs.fill, member.name)
    c.subscribe("others")
    for member in (b, patient):
        member.stop()
    blocked = a.start("publish", "patient", "kept", timeout=None)
    released = a.start("publish", "b", "lost", timeout=None)
    released.result()
    assert not blocked.done(), "the larger peer_timeout of two ends decides"
    a.publish("others", "undisturbed")
    assert c.recv().payload == "undisturbed"
    patient.cont()
    assert patient.run(programs.receive_until, "kept")[-1].digest == "kept"
    blocked.result()


@case("Death", needs="separate_processes", otherwise=_closing_releases)
def without_peer_timeout_only_proof_counts(group: Group) -> None:
    """`peer_timeout=None`: silence is borne, the end of the process is not."""
    a, b = group.members("a", "b", peer_timeout=None)
    b.subscribe("t", depth=2)
    a.run(programs.fill, "t")
    b.stop()
    waiting = a.start("publish", "t", 1, timeout=None)
    assert not waiting.done(0.7)
    b.kill()
    waiting.result()
