"""What the tests of torchrpc's link share."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from mq.testing.link_world import PATIENCE, World
from mq.transport import Conn, What
from transports import _torchrpc_net as net
from transports._torchrpc_conns import RpcConn
from transports.torchrpc import TorchRpcLink

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["mq.testing.preload"])


def endpoint(address: str) -> tuple[str, int]:
    """Where the socket behind an address listens."""
    host, port, _ = net.split(address)
    return host, port


def rpc_conn(conn: Conn) -> RpcConn:
    """The same object, for the type checker."""
    assert isinstance(conn, RpcConn)
    return conn


def _peer_main(pipe: Connection) -> None:
    """A process with a link: echoes what it gets until it is ended."""
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        pipe.send(member.addresses[0])
        while not pipe.poll(0):
            member.pump()
            for conn, messages in list(member.received.items()):
                while messages:
                    conn.try_send(messages.pop(0)[0])
            world.poller.wait(0.05)


@contextlib.contextmanager
def peer_process(
    main: Callable[[Connection], None] = _peer_main,
) -> Iterator[tuple[str, Any]]:
    """Another process and its address; killed at the end."""
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE)
        yield ours.recv(), process
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()


def dial(world: World, address: str) -> Conn:
    member = world.members[0]
    conn = member.link.dial(address)
    world.until(lambda: conn in member.conns(What.OPENED), "OPENED")
    return conn


def echoed(world: World, conn: Conn, head: bytes) -> None:
    received = world.members[0].received.setdefault(conn, [])
    known = len(received)
    world.send(conn, head)
    world.until(lambda: len(received) > known, "the echo")
    assert received[-1] == (head, b"")
