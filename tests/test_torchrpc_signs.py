"""A call that takes long on torchrpc's wire is no silence of its sender."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_python import ROOT
from namespaces import inside, slow_wire
from test_tcp_link import no_descriptors_left
from torchrpc_links import rpc_conn

from mq.devices import Piece
from mq.testing.link_world import World
from mq.transport import What
from transports import _torchrpc_calls as calls
from transports._torchrpc_signs import SIGN, SIGN_SECONDS, Signs, acked_by_remote
from transports._torchrpc_under_way import UnderWay
from transports.torchrpc import TorchRpcLink


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket, str]]:
    """Both ends of a connection as to an agent, and the URL of that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near:
            far, _ = listener.accept()
            with far:
                yield near, far, f"uv://127.0.0.1:{port}"


def passed(near: socket.socket, far: socket.socket) -> None:
    """More has come to the far end; reading it makes its kernel say so."""
    near.sendall(bytes(1000))
    assert len(far.recv(1000, socket.MSG_WAITALL)) == 1000


def are_due(signs: Signs) -> bool:
    """As its link asks."""
    return signs.are_awaited() and signs.are_due(acked_by_remote())


def until_due(signs: Signs) -> None:
    """The kernel hears of it in its own time."""
    deadline = time.monotonic() + 10.0
    while not are_due(signs):
        assert time.monotonic() < deadline, "no sign"


def until_still(signs: Signs) -> None:
    """Nothing moves any more: it has been seen, all of it."""
    deadline = time.monotonic() + 10.0
    while are_due(signs):
        assert time.monotonic() < deadline, "signs of nothing"


def test_a_sign_is_due_while_what_one_call_sends_moves(
    wire: tuple[socket.socket, socket.socket, str],
) -> None:
    """Not for nothing under way, nor for a wire on which nothing moves."""
    near, far, url = wire
    under_way = UnderWay(lambda _: None)
    signs = Signs(under_way)
    signs.url = url
    passed(near, far)
    assert not are_due(signs)
    future = calls.Future[Any]()
    under_way.add(future, 1000)
    assert not are_due(signs)  # it may be quick
    until_due(signs)
    until_still(signs)
    for _ in range(3):
        assert not are_due(signs)
        passed(near, far)
        until_due(signs)
        until_still(signs)
    passed(near, far)
    future.set_result(True)
    assert not are_due(signs)


class Event:
    """What a GPU has still to reach."""

    def __init__(self, *, failed: bool = False) -> None:
        self.reached = False
        self._failed = failed

    def query(self) -> bool:
        if self._failed:
            raise RuntimeError("CUDA error: an assert")
        return self.reached


def test_a_sign_is_due_while_a_gpu_has_yet_to_fill_what_is_sent() -> None:
    """Its tensor holds up all behind it, however small, and nothing moves on a wire."""
    under_way = UnderWay(lambda _: None)
    signs = Signs(under_way)
    signs.url = "uv://127.0.0.1:1"
    tensor = torch.zeros(256, dtype=torch.uint8)
    first, second, broken = Event(), Event(), Event(failed=True)
    future = calls.Future[Any]()
    under_way.add(future, 100, [Piece(tensor), Piece(tensor, first)])
    later = calls.Future[Any]()
    under_way.add(later, 100, [Piece(tensor, second), Piece(tensor, broken)])
    assert not are_due(signs)  # it may be quick
    for event in (first, second):
        assert are_due(signs)
        assert are_due(signs)
        event.reached = True
    assert not are_due(signs)
    second.reached = False
    later.set_result(True)  # what is answered is not under way
    assert not are_due(signs)


@pytest.mark.parametrize("url", ["", "uv://127.0.0.1:1", "shm://name", "uv://[::1]:1"])
def test_where_nothing_is_known_of_the_wire_no_sign_is_due(
    url: str, wire: tuple[socket.socket, socket.socket, str]
) -> None:
    """What goes to others does not count."""
    near, far, _ = wire
    under_way = UnderWay(lambda _: None)
    signs = Signs(under_way)
    signs.url = url
    under_way.add(calls.Future[Any](), 1000)
    for _ in range(3):
        passed(near, far)
        assert not are_due(signs)


def test_what_idle_ends_owe_each_other_is_not_looked_at() -> None:
    """To look at all descriptors, of which each peer takes ten, is dear."""
    under_way = UnderWay(lambda _: None)
    signs = Signs(under_way)
    under_way.add(calls.Future[Any](), 100)
    for _ in range(3):
        assert not signs.are_awaited()
    under_way.add(calls.Future[Any](), 1000)
    assert not signs.are_awaited()
    assert signs.are_awaited()


def test_a_process_without_descriptors_sends_no_signs_and_goes_on() -> None:
    """Its connections stay, though there is none to look at the others with."""
    with World(TorchRpcLink, 2) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"there", bytes(1000))
        world.send(accepted, b"back", bytes(1000))
        for member in world.members:  # TensorPipe needs no descriptors any more
            world.until(lambda member=member: bool(member.received), "a message")
        link = world.members[0].link
        assert isinstance(link, TorchRpcLink)
        future = calls.Future[Any]()
        rpc_conn(dialled)._calls.add(future, 1000)
        world.nap = SIGN_SECONDS
        looks = set()

        def has_looked() -> bool:
            looks.add(link._told_at)
            return len(looks) > 3

        with no_descriptors_left():
            world.until(has_looked, "looks at what is under way")
        future.set_result(True)
        assert not world.members[0].conns(What.LOST)


def test_a_sign_ends_the_silence_of_its_connection_alone() -> None:
    """At the end that gets it."""
    with World(TorchRpcLink, 3) as world:
        first, accepted = world.connect(0, 2)
        _, other = world.connect(1, 2)
        assert accepted.quiet_seconds() is None
        link = world.members[0].link
        assert isinstance(link, TorchRpcLink)
        link._sockets.send(rpc_conn(first).control, SIGN)
        world.until(lambda: accepted.quiet_seconds() is not None, "the sign")
        before = accepted.quiet_seconds()
        assert before is not None
        world.until(lambda: (accepted.quiet_seconds() or 0.0) > before, "silence")
        assert other.quiet_seconds() is None
        assert not world.members[2].conns(What.LOST)


MEMBER = """
import sys
import mq

role, address, meeting = sys.argv[1:]
queue = mq.connect(
    "torchrpc:cpu", group="g", name=role, rendezvous=meeting,
    listen=f"torchrpc://{address}:0",
    insecure=True, peer_timeout=2.0, channels=("basic",),
)
with queue:
    if role == "subscriber":
        queue.subscribe("t")
        payload = queue.recv(timeout=60).payload
        print(len(payload), set(payload))
    else:
        queue.wait_for_subscribers("t", 1, timeout=60)
        queue.publish("t", bytes([7]) * 9_000_000)
        queue.flush(timeout=60)
"""


@pytest.mark.slow
def test_a_slow_wire_does_not_pass_for_silence(tmp_path: Path) -> None:
    """A tensor that takes longer than `peer_timeout` arrives, at the first try."""
    with slow_wire("20mbit") as names:
        members = []
        for number, name in enumerate(names, 1):
            role = ("publisher", "subscriber")[number - 1]
            where = [role, f"10.77.0.{number}", f"file://{tmp_path}"]
            members.append(
                subprocess.Popen(
                    [*inside(name), sys.executable, "-c", MEMBER, *where],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
        try:
            (_, complaint), (printed, complaints) = [
                member.communicate(timeout=120) for member in members
            ]
        finally:
            for member in members:
                member.kill()
                member.wait()
    assert [member.returncode for member in members] == [0, 0], complaint + complaints
    assert printed == "9000000 {7}\n"
    assert "lost" not in complaint + complaints
