"""Whoever would cost ZeroMQ its last descriptor is asked to stay outside."""

from __future__ import annotations

import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from link_fixtures import own_temporary_directory

from mq.addresses import split
from mq.mesh.poller import Poller
from mq.testing.link_world import World
from mq.transport import What
from transports import _zmq_doors
from transports.zmq import ZmqLink

__all__ = ["own_temporary_directory"]

WIRES = ["ipc", "tcp"]
_LENGTH = Path("/proc/sys/net/unix/max_dgram_qlen")
QUESTIONS = 1 + int(_LENGTH.read_text())
"""How many a door can be asked before it answers."""


def on(wire: str) -> Callable[[], ZmqLink]:
    return functools.partial(ZmqLink, wires=(wire,))


def limit(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(_zmq_doors, "free_descriptors", lambda _: (free, ""))


@pytest.mark.parametrize("wire", WIRES)
def test_who_finds_no_room_is_told_why(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is let in once there is some."""
    with World(on(wire)) as world:
        ours, theirs = world.members
        limit(monkeypatch, _zmq_doors.SPARE)
        conn = ours.link.dial(theirs.addresses[0])
        world.lost(0, conn)
        assert (
            "no file descriptors left; raise its `ulimit -n`" in ours.events[-1].reason
        )
        limit(monkeypatch, _zmq_doors.SPARE + 1)
        world.connect()


@pytest.mark.parametrize("wire", WIRES)
def test_who_was_let_in_counts_until_there(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several at once only as many are let in as there is room for."""
    with World(on(wire)) as world:
        ours, theirs = world.members
        limit(monkeypatch, _zmq_doors.SPARE + 2)
        conns = [ours.link.dial(theirs.addresses[0]) for _ in range(5)]
        theirs.link._doors.look()  # before the engine accepts anybody
        world.until(
            lambda: {*ours.conns(What.LOST), *ours.conns(What.OPENED)} == {*conns},
            "all five to end well or badly",
        )
        assert len(ours.conns(What.OPENED)) == 2


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_only_who_is_of_a_trusted_user_counts_until_there(
    wire: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others could ask without end, and never come."""
    users = (os.geteuid() + (not known),)
    monkeypatch.setattr(_zmq_doors, "_trusted", lambda: users)
    with (
        World(on(wire), 1) as world,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking,
    ):
        (member,) = world.members
        limit(monkeypatch, _zmq_doors.SPARE + 1)
        asking.settimeout(20.0)
        asking.bind("")
        asking.connect(_zmq_doors._names_of(member.addresses[0])[0])
        answers = []
        for _ in range(3):
            asking.send(b"?")
            member.link._doors.look()
            answers.append(asking.recv(1))
    assert answers == [b"\1", *[b"\0" if known else b"\1"] * 2]


@pytest.mark.parametrize("wire", WIRES)
def test_a_crowd_that_dials_at_once_is_let_in(wire: str) -> None:
    """The kernel keeps eleven questions for a door: the others wait for room."""
    with World(on(wire)) as world:
        ours, theirs = world.members
        conns = [ours.link.dial(theirs.addresses[0]) for _ in range(QUESTIONS + 30)]
        world.until(lambda: {*ours.conns(What.OPENED)} == {*conns}, "all to be let in")
        assert not ours.conns(What.LOST)
        assert not ours.link._doors._asked


@pytest.mark.parametrize("wire", WIRES)
def test_who_waits_for_a_door_that_is_closed_goes_on_unasked(wire: str) -> None:
    """Only those had better wait whose question is in there, and is answered late."""
    with World(on(wire)) as world:
        ours, theirs = world.members
        conns = [ours.link.dial(theirs.addresses[0]) for _ in range(QUESTIONS + 30)]
        (door,) = theirs.link._doors._doors.values()
        theirs.link._doors._doors.clear()
        door.close()
        world.until(lambda: len(ours.conns(What.OPENED)) == 30, "30 to be let in")
        assert {*ours.conns(What.OPENED)} == {*conns[QUESTIONS:]}


@pytest.mark.parametrize("wire", WIRES)
def test_a_dial_that_is_closed_leaves_no_question(wire: str) -> None:
    """As where the one who is asked is stopped, and never answers."""
    with World(on(wire)) as world:
        ours, theirs = world.members
        for _ in range(3):
            ours.link.dial(theirs.addresses[0]).close()
        assert not ours.link._doors._asked
        world.connect()


def test_where_there_is_no_door_it_goes_unasked() -> None:
    """A path that another program forwards, or a ROUTER that is not ours."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with World(on("ipc"), 1) as world, context.socket(zmq.ROUTER) as router:
        (member,) = world.members
        path = os.path.join(tempfile.gettempdir(), "router")
        router.bind(f"ipc://{path}")
        conn = member.link.dial(f"ipc://{path}")
        world.until(lambda: conn in member.conns(What.OPENED), "OPENED")
        gone = member.link.dial(f"ipc://{path}.gone")
        world.lost(0, gone)
        assert "No such file" in member.events[-1].reason
    context.destroy(linger=0)


@pytest.mark.parametrize("listened", ["0.0.0.0", "127.0.0.2"])
def test_a_door_is_that_of_the_address_that_is_dialled(
    listened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every one where all are listened on, but of none beside it otherwise."""
    limit(monkeypatch, 0)
    with World(on("tcp"), 1) as world:
        (ours,) = world.members
        poller = Poller()
        theirs = ZmqLink(wires=("tcp",))
        theirs.insecure = True
        try:
            (at,) = theirs.open(poller, [f"tcp://{listened}:0"], None)
            conn = ours.link.dial(f"tcp://127.0.0.1:{split(at)[1]}")
            theirs._doors.look()
            world.lost(0, conn)
            full = "no file descriptors left" in ours.events[-1].reason
            assert full == (listened == "0.0.0.0")
        finally:
            theirs.close()
            poller.close()


def test_a_name_that_somebody_else_has_taken_is_no_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other users could say no in place of the member: what they say does not count."""
    with (
        World(on("ipc"), 1) as world,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken,
    ):
        (member,) = world.members
        endpoint = member.addresses[0]
        member.link._doors.close()
        taken.bind(_zmq_doors._names_of(endpoint)[0])
        doors = _zmq_doors.Doors(world.poller)
        answers: list[bool] = []
        for uid in (os.geteuid(), 65534):
            monkeypatch.setattr(_zmq_doors, "_trusted", lambda uid=uid: (uid,))
            assert doors.ask(member.link._router.port, endpoint, answers.append)
            _, asker = taken.recvfrom(1)
            taken.sendto(b"\0", asker)
            doors.look()
        doors.close()
    assert answers == [False, True]


def test_the_door_of_a_file_that_is_gone_is_not_that_of_the_next(
    own_temporary_directory: str,
) -> None:
    """It may be open still, and unanswered, as a link closes; the inode is free."""
    path = os.path.join(own_temporary_directory, "file")
    names = []
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            inode = os.stat(path).st_ino
            names.append((inode, _zmq_doors._names_of(f"ipc://{path}")[0]))
            os.unlink(path)
        time.sleep(0.005)  # a tick of the clock by which old kernels date files
    if len({inode for inode, _ in names}) == len(names):
        pytest.skip("this file system gives no inode a second time")
    assert len(set(names)) == len(names)


def test_whoever_does_not_answer_is_dialled_unasked_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others that have taken the name keep nobody out by silence, either."""
    monkeypatch.setattr(_zmq_doors, "_SILENT_SECONDS", 0.0)
    with World(on("tcp"), 1) as world:
        (ours,) = world.members
        theirs, poller = ZmqLink(wires=("tcp",)), Poller()
        try:
            (address,) = theirs.open(poller, ["tcp://127.0.0.1:0"], None)
            ours.link.dial(address).close()
            conn = ours.link.dial(address)
            world.until(lambda: conn in ours.conns(What.OPENED), "OPENED")
        finally:
            theirs.close()
            poller.close()


def test_no_door_waits_where_the_class_of_sockets_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gevent's heeds what it is told later, but not a flag of the socket's type."""

    class Replaced(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            super().__init__(family, kind & ~socket.SOCK_NONBLOCK)

    monkeypatch.setattr(socket, "socket", Replaced)
    with _zmq_doors._datagrams() as sock:
        assert sock.gettimeout() == 0.0
