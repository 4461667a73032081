"""TensorPipe's listener, which somebody's connection that says nothing closes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from torchrpc_links import context, dial, echoed, peer_process

import mq
from mq.stream.sockets import listening
from mq.testing.link_world import PATIENCE, World
from mq.testing.waiting import wait_until
from transports import _torchrpc_shared as shared
from transports._torchrpc_agent import Agent
from transports._torchrpc_calls import rpc
from transports._torchrpc_listener import Listener
from transports._torchrpc_net import remote_of
from transports.torchrpc import TorchRpcLink

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of this")

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which `close` cuts a connection off (RST) and ends none (FIN)."""


def visit(url: str, sent: bytes, how: str) -> None:
    """Connect to an agent, and leave at once."""
    remote = remote_of(url)
    assert remote is not None
    with socket.create_connection(remote, PATIENCE) as stranger:
        stranger.sendall(sent)
        if how == "RST":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def is_open(url: str) -> bool:
    remote = remote_of(url)
    return remote is not None and listening(remote) >= 0


def deafened(world: World) -> tuple[TorchRpcLink, Agent]:
    """Have a world's agent listen no more."""
    link = world.members[0].link
    assert isinstance(link, TorchRpcLink)
    agent = link.agent
    visit(agent.url, b"", "FIN")
    world.until(lambda: not is_open(agent.url), "the end of the listener")
    return link, agent


@pytest.mark.parametrize("sent", [b"", b"\0\0"], ids=["nothing", "a part"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_a_newcomer_meets_a_process_whose_agent_was_looked_at(
    how: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever left before the first message was there; the log tells of it once."""
    caplog.set_level(logging.WARNING)
    with (
        peer_process() as (first, _),
        peer_process() as (second, _),
        World(TorchRpcLink, 1) as world,
    ):
        link = world.members[0].link
        assert isinstance(link, TorchRpcLink)
        known, agent = dial(world, first), link.agent
        echoed(world, known, b"hello")
        visit(agent.url, sent, how)
        if sent or how == "FIN":
            world.until(lambda: not is_open(agent.url), "the end of the listener")
        for _ in range(2):
            echoed(world, dial(world, second), b"hello")
        told = [r.message for r in caplog.records if agent.url in r.message]
        if sent or how == "FIN":
            assert link.agent is not agent
            world.lost(0, known)
            assert len(told) == 1
        else:  # the kernel has kept who said nothing to itself
            assert link.agent is agent
            assert not told
        echoed(world, dial(world, first), b"hello again")


def test_a_process_whose_agent_was_looked_at_is_met_by_a_newcomer() -> None:
    """It learns of it when it is dialled."""

    def is_refused(url: str) -> bool:
        try:
            visit(url, b"", "FIN")
        except OSError:
            return True
        return False

    with peer_process() as (address, _):
        for _ in range(3):
            with World(TorchRpcLink, 1) as world:
                conn = dial(world, address)
                echoed(world, conn, b"hello")
                url = conn.describe()["agent"]
            # Who comes as it closes is lost, and tries again, which no link does.
            wait_until(functools.partial(is_refused, url), "the end of the listener")


def test_an_agent_that_the_application_is_ending_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its listener is closed first; to end it twice at once would raise in one."""
    begun, goes_on = threading.Event(), threading.Event()

    def finalize() -> None:
        begun.set()
        goes_on.wait(PATIENCE)

    with peer_process() as (address, _), World(TorchRpcLink, 1) as world:
        link, agent = deafened(world)
        monkeypatch.setattr(rpc.api, "_finalize_shutdown", finalize)
        ending = threading.Thread(target=rpc.shutdown, args=(False,))
        ending.start()
        try:
            assert begun.wait(PATIENCE)
            link.dial(address).close()
            assert link.agent is agent
        finally:
            goes_on.set()
            ending.join()
        monkeypatch.undo()
        assert not caplog.messages
        link.dial(address).close()
        assert link.agent is not agent


def test_other_options_do_not_end_the_agent_of_others() -> None:
    """They are refused though it listens no more, and its queues get another."""
    with peer_process() as (address, _), World(TorchRpcLink, 1) as world:
        link, agent = deafened(world)
        options = {"group": f"other-{os.getpid()}", "channels": ("basic",)}
        with pytest.raises(ValueError, match="give all queues the same options"):
            mq.connect("torchrpc", name="a", **options)
        assert agent.alive
        echoed(world, dial(world, address), b"hello")
        assert link.agent is not agent


def _member_main(pipe: Connection) -> None:
    """A member that sends back the payloads that it gets, until told to leave."""
    with mq.connect("torchrpc", group=pipe.recv(), name=f"m{os.getpid()}") as queue:
        queue.subscribe("there")
        pipe.send(None)
        while not pipe.poll(0):
            with contextlib.suppress(mq.RecvTimeout):
                queue.publish("back", queue.recv(timeout=0.05).payload)


@contextlib.contextmanager
def member(group: str) -> Iterator[None]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_member_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.send(group)
        assert ours.poll(PATIENCE)
        yield
        ours.send(None)
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()


def test_queues_lose_nothing_as_another_agent_takes_the_place_of_a_deaf_one() -> None:
    """Two of one process, which share it; messages go on in both directions."""
    group = f"deaf-{os.getpid()}"
    with (
        mq.connect("torchrpc", group=group, name="a", connect_timeout=PATIENCE) as a,
        mq.connect("torchrpc", group=group, name="b", connect_timeout=PATIENCE) as b,
        member(group),
    ):
        first = shared._current
        assert first is not None
        b.subscribe("back", timeout=PATIENCE)
        a.wait_for_subscribers("there", 1, timeout=PATIENCE)
        for number in range(200):
            a.publish("there", (number, bytes(100_000)), timeout=PATIENCE)
        visit(first.url, b"", "FIN")
        with member(group):
            assert shared._current not in (None, first)
            a.wait_for_subscribers("there", 2, timeout=PATIENCE)
            for number in range(200, 400):
                a.publish("there", (number, b""), timeout=PATIENCE)
            found = [b.recv(timeout=PATIENCE).payload[0] for _ in range(600)]
            assert sorted(found) == sorted([*range(400), *range(200, 400)])


def test_nothing_is_known_of_what_is_no_listener_of_this_process() -> None:
    for url in ("", "uv://127.0.0.1:1"):
        assert not Listener(url).is_closed
