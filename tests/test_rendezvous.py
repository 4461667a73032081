"""What every kind of rendezvous promises."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from meeting import (
    DEADLINE,
    eventually,
    libuv,
    meet,
    names,
    process_of,
    record,
    runtime,
    spec,
    store_port,
)

import mq
from mq.process import ProcessWatch
from mq.rendezvous import Entry, Rendezvous

__all__ = ["libuv", "runtime", "spec", "store_port"]  # fixtures


@pytest.fixture
def pair(spec: str | None) -> Iterator[tuple[Rendezvous, Rendezvous]]:
    with contextlib.closing(meet(spec)) as one, contextlib.closing(meet(spec)) as two:
        yield one, two


Pair = tuple[Rendezvous, Rendezvous]


def test_a_name_has_one_holder(pair: Pair) -> None:
    """The first claim wins; the second one learns who holds the name."""
    one, two = pair
    won = one.claim(record("x", "a"))
    assert (won.holder, won.record.generation) == (None, 1)
    lost = two.claim(record("x", "b"))
    assert lost.holder is not None
    assert lost.holder.record == won.record
    assert not lost.holder.expired


def test_a_claim_may_be_repeated(pair: Pair) -> None:
    """A claim whose answer was lost is answered again as it was."""
    first = pair[0].claim(record("x"))
    assert pair[0].claim(record("x")) == first


def test_only_the_named_incarnation_is_displaced(pair: Pair) -> None:
    """`replaces` takes the name from that incarnation alone, one generation on."""
    one, two = pair
    one.claim(record("x", "a"))
    refused = two.claim(record("x", "c"), replaces="b" * 16)
    assert refused.holder is not None
    won = two.claim(record("x", "c"), replaces="a" * 16)
    assert (won.holder, won.record.generation) == (None, 2)
    again = one.claim(record("x", "d"), replaces="a" * 16)
    assert again.holder is not None
    assert again.holder.record.incarnation == "c" * 16


def test_a_name_given_back_is_free_with_a_higher_generation(pair: Pair) -> None:
    """`remove` is idempotent, for the holder only, and the past is not forgotten."""
    one, two = pair
    first = one.claim(record("x", "a")).record
    one._store.remove("x", "b" * 16)
    assert names(two) == ["x"]
    one._store.remove("x", "a" * 16)
    one._store.remove("x", "a" * 16)
    two._store.remove("never held", "a" * 16)
    assert names(two) == []
    second = two.claim(record("x", "b"))
    assert second.holder is None
    assert second.record.generation > first.generation


def test_everybody_sees_all_records_as_they_were_written(pair: Pair) -> None:
    """Every field survives; an infinite lease too."""
    written = [
        pair[0].claim(record(f"mémber {i}", lease=math.inf, labels=("ü", "b"))).record
        for i in range(5)
    ]
    for rendezvous in pair:
        found = sorted(rendezvous.records(), key=lambda entry: entry.record.name)
        assert [entry.record for entry in found] == written
        assert not any(entry.expired for entry in found)


def test_more_records_than_fit_one_answer_are_all_listed(pair: Pair) -> None:
    """A listing has no limit that a group of large records would meet."""
    large: dict[str, Any] = {"labels": ("y" * 250,) * 60}
    for i in range(40):
        pair[0].claim(record(f"m{i:02}", **large))
    assert sorted(names(pair[1])) == [f"m{i:02}" for i in range(40)]


def test_a_lease_ends_and_a_renewal_begins_it_anew(pair: Pair) -> None:
    """Whether a lease has ended is told by the store's clock."""
    one, two = pair
    mine = one.claim(record("x", lease=0.3)).record

    def expired() -> bool:
        return two.records()[0].expired

    eventually(expired)
    assert one.renew(mine)
    eventually(lambda: not expired())


def test_a_renewal_restores_a_record_that_is_gone(pair: Pair) -> None:
    """Whoever swept a member that lives is corrected by its next renewal."""
    one, two = pair
    mine = one.claim(record("x")).record
    two._store.remove("x", mine.incarnation)
    assert one.renew(mine)
    eventually(lambda: names(two) == ["x"])


def test_a_renewal_tells_who_was_displaced(pair: Pair) -> None:
    """A displaced holder learns so, and does not disturb the new one."""
    one, two = pair
    mine = one.claim(record("x", "a")).record
    two.claim(record("x", "b"), replaces="a" * 16)
    eventually(lambda: not one.renew(mine))
    assert [entry.record.incarnation for entry in two.records()] == ["b" * 16]


def test_recent_follows_the_members(pair: Pair) -> None:
    """A renewal notices members that were not there before."""
    one, two = pair
    mine = one.claim(record("x")).record
    two.claim(record("y"))

    def sees_both() -> bool:
        one.renew(mine)
        return {entry.record.name for entry in one.recent()} == {"x", "y"}

    eventually(sees_both)


def test_recent_tells_whose_lease_has_ended(pair: Pair) -> None:
    """Though no member comes or goes: the others would dial the dead for ever."""
    one, two = pair
    mine = one.claim(record("x", lease=0.3)).record
    two.claim(record("y", "b", lease=0.3))

    def has_ended() -> bool:
        one.renew(mine)
        return any(e.record.name == "y" and e.expired for e in one.recent())

    eventually(has_ended)


def test_recent_is_not_read_again_for_whom_all_have_met(pair: Pair) -> None:
    """Of many members each would read all others' records again and again."""
    one, two = pair
    mine = one.claim(record("x", lease=0.3)).record
    met = two.claim(record("y", "b", lease=0.3)).record
    one.present = lambda: [met]

    def sees_both() -> bool:
        one.renew(mine)
        return len(one.recent()) == 2

    eventually(sees_both)
    before = one.recent()
    eventually(lambda: two.records()[0].expired)
    one.renew(mine)
    assert one.recent() is before
    assert not one._may_have_ended(math.inf)


def test_close_gives_back_only_own_names(pair: Pair) -> None:
    """Members that close leave the records of the others."""
    one, two = pair
    one.claim(record("x"))
    two.claim(record("y"))
    two.close()
    two.close()
    eventually(lambda: one.renew(record("x")) and names(one) == ["x"])


def test_close_leaves_nothing(spec: str | None, runtime: Path) -> None:
    """No thread, descriptor or file stays behind the last member."""
    meet(spec).close()  # loads what is loaded only once

    def in_use() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = in_use()
    members = [meet(spec) for _ in range(3)]
    for i, member in enumerate(members):
        member.claim(record(f"m{i}"))
    for member in members:
        member.close()
    eventually(lambda: in_use() <= before)  # the store of env:// lives in this process
    assert list(runtime.iterdir()) == []


def test_groups_do_not_see_each_other(spec: str | None) -> None:
    """A group has its own names."""
    with contextlib.closing(meet(spec)) as one:
        with contextlib.closing(meet(spec, "another")) as two:
            one.claim(record("x"))
            assert two.claim(record("x", "b")).holder is None


def test_of_many_threads_one_displaces_the_holder(pair: Pair) -> None:
    """Exactly one of those that compared with the same holder takes its place."""
    pair[0].claim(record("x", "f"))
    barrier = threading.Barrier(6)
    winners: list[str] = []

    def displace(incarnation: str) -> None:
        barrier.wait(DEADLINE)
        rendezvous = pair[int(incarnation) % 2]
        claim = rendezvous.claim(record("x", incarnation), replaces="f" * 16)
        if claim.holder is None:
            winners.append(incarnation)

    threads = [threading.Thread(target=displace, args=(str(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(winners) == 1
    assert pair[0].records()[0].record.incarnation == winners[0] * 16


def _compete(spec: str | None, incarnation: str, pipe: Connection) -> None:
    """Claim each name that comes through the pipe; then wait to be ended."""
    with contextlib.closing(meet(spec)) as rendezvous:
        pipe.send("ready")
        for name in iter(pipe.recv, None):
            pipe.send(rendezvous.claim(record(name, incarnation)).holder is None)


def test_of_two_processes_exactly_one_gets_the_name(spec: str | None) -> None:
    """Two processes that claim one name at once cannot both hold it."""
    with process_of(_compete, spec, "a") as (_, one):
        with process_of(_compete, spec, "b") as (_, two):
            assert (one.recv(), two.recv()) == ("ready", "ready")
            for name in map(str, range(50)):
                one.send(name)
                two.send(name)
                assert sorted([one.recv(), two.recv()]) == [False, True]


def test_the_record_of_a_killed_process_can_be_swept(spec: str | None) -> None:
    """SIGKILL leaves a record that proves the death, and that others remove."""
    with contextlib.closing(meet(spec)) as rendezvous:
        mine = rendezvous.claim(record("survivor")).record
        with process_of(_compete, spec, "a") as (child, pipe):
            assert pipe.recv() == "ready"
            pipe.send("victim")
            assert pipe.recv() is True
            child.kill()
            child.join(DEADLINE)
            (victim,) = (
                entry.record
                for entry in rendezvous.records()
                if entry.record.name == "victim"
            )
            assert ProcessWatch(victim.process).ended() is True
        rendezvous.sweep("victim", victim.incarnation)
        rendezvous.renew(mine)
        eventually(lambda: names(rendezvous) == ["survivor"])


def test_who_is_silent_is_swept_unless_the_lease_is_fresh(spec: str | None) -> None:
    """Nobody can prove whether it is dead; who lives may be cut off from one peer."""
    with contextlib.closing(meet(spec)) as rendezvous:
        old = rendezvous.claim(record("old", lease=1e-6)).record
        fresh = rendezvous.claim(record("fresh", "b", lease=1e6)).record

        def swept() -> bool:
            for silent in (fresh, old):
                rendezvous.sweep(silent.name, silent.incarnation, proven=False)
            return names(rendezvous) == ["fresh"]

        eventually(swept)
        rendezvous.renew(old)  # it lives after all
        eventually(lambda: sorted(names(rendezvous)) == ["fresh", "old"])


@pytest.mark.parametrize("spec", ["shared", "tcp", "env"], indirect=True)
def test_all_of_many_silent_members_are_swept_and_the_lease_is_renewed(
    spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that goes takes many with it, and the store may be slow just then."""
    with contextlib.closing(meet(spec)) as rendezvous:
        old = [
            rendezvous.claim(record(f"m{number}", lease=1e-6)).record
            for number in range(100)
        ]
        first = rendezvous.claim(record("first", "b")).record
        mine = rendezvous.claim(record("mine", "c")).record
        rendezvous._store.remove(
            mine.name, mine.incarnation
        )  # its renewal shows by that
        goes_on, looks, store = threading.Event(), [0], rendezvous._store
        ask, list_all = store.version, store.records
        list_all()  # as the age of some is counted from when they are seen first

        def ask_late() -> str:
            assert goes_on.wait(DEADLINE)
            return ask()

        def count() -> list[Entry]:
            looks[0] += 1
            return list_all()

        monkeypatch.setattr(store, "version", ask_late)
        monkeypatch.setattr(store, "records", count)
        rendezvous.renew(first)
        rendezvous.renew(mine)
        for silent in old:
            rendezvous.sweep(silent.name, silent.incarnation, proven=False)
        goes_on.set()
        eventually(
            lambda: sorted(e.record.name for e in list_all()) == ["first", "mine"]
        )
        assert looks[0] <= 4


def test_members_meet_there_and_hear_each_other(spec: str | None) -> None:
    """What `mq.connect` makes of each kind."""
    options: dict[str, Any] = {"group": "met", "rendezvous": spec}
    with (
        mq.connect("tcp", name="a", connect_timeout=DEADLINE, **options) as a,
        mq.connect("tcp", name="b", connect_timeout=DEADLINE, **options) as b,
    ):
        for sender, receiver in ((a, b), (b, a)):
            receiver.subscribe("t", timeout=DEADLINE)
            sender.publish("t", [sender.name], timeout=DEADLINE)
            message = receiver.recv(DEADLINE)
            assert (message.sender, message.payload) == (sender.name, [sender.name])
            receiver.unsubscribe("t")
        met = {queue.describe()["rendezvous"] for queue in (a, b)}

    known = {None: "directory ", "env://": "torchrun's store at "}
    assert len(met) == 1
    assert (known.get(spec) or str(spec).partition("://")[2]) in met.pop()
