"""torchrpc's link after an outage, in which TCP has learnt to wait."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from torchrpc_links import rpc_conn

from mq import addresses
from mq.stream import sockets
from mq.testing.link_world import World
from mq.transport import Conn, What
from transports import _torchrpc_stuck as stuck
from transports.torchrpc import TorchRpcLink

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of this")

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction, which lets nothing pass."""


def drop_all(sock: socket.socket) -> None:
    """Have the kernel throw away, before TCP, all that comes to a socket."""
    program = struct.pack("HP", 1, ctypes.addressof(NOTHING))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@contextlib.contextmanager
def connections_to(
    url: str,
) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """Copies of the sockets of connections of this process to an address of its own.

    Of the ends that connected, and of those that accepted.
    """
    port = (addresses.split_host_port(url.partition("://")[2]) or ("", 0))[1]
    with contextlib.ExitStack() as stack:
        found: tuple[list[socket.socket], list[socket.socket]] = [], []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(sockets.copy_of(int(name)))
                ends = [sock.getpeername()[1], sock.getsockname()[1]]
                if port in ends:
                    found[ends.index(port)].append(sock)
        yield found


def ended(sock: socket.socket) -> bool:
    """Whether this end was shut down, or has been told of the other's end."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def carries(world: World, conn: Conn, accepted: Conn) -> bool:
    """Whether a message arrives; or else the connection ends."""
    received = world.members[1].received.setdefault(accepted, [])
    ours = world.members[0]
    world.send(conn, b"again")
    world.until(
        lambda: bool(received) or conn in ours.conns(What.LOST),
        "the message, or the end of the connection",
    )
    return bool(received)


def repeats(sock: socket.socket) -> int:
    return sockets.repeats(sock.fileno(), sockets.inode(sock.fileno()))


def test_what_waits_for_tcp_is_ended_and_nothing_else() -> None:
    """At either end of a connection with an agent."""
    with contextlib.ExitStack() as stack:
        for other in socket.socketpair():
            stack.enter_context(other)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"uv://127.0.0.1:{listener.getsockname()[1]}"
        pairs = []
        for _ in range(3):
            near = stack.enter_context(socket.create_connection(listener.getsockname()))
            far = stack.enter_context(listener.accept()[0])
            pairs.append((near, far))
        (near, far), (answered, asked), _ = pairs
        drop_all(far)
        near.sendall(b"in vain")
        drop_all(answered)
        asked.sendall(b"in vain, too")
        assert not stuck.end_stuck("uv://127.0.0.1:1", "")
        while min(repeats(near), repeats(asked)) < stuck.REPEATS:
            near.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                near.recv(1)
        assert not stuck.end_stuck("uv://127.0.0.2:1", url)
        assert stuck.end_stuck(url, "")
        assert near.recv(1) == b""
        assert not stuck.end_stuck("uv://127.0.0.1:1", url)
        asked.settimeout(10.0)
        assert asked.recv(1) == b""
        assert not stuck.end_stuck(url, url)
        near, far = pairs[2]
        near.sendall(b"x")
        assert far.recv(1) == b"x"


@pytest.mark.parametrize("end", ["calls", "answers"])
def test_a_dial_after_an_outage_does_not_wait_for_tcp(end: str) -> None:
    """Which may be for longer than the outage took; TensorPipe would."""
    with World(TorchRpcLink) as world:
        first, accepted = world.connect()
        world.send(first, b"first")
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)
        # Now TensorPipe has all its connections for both ways, at both ends.
        world.send(accepted, b"answer")
        world.arrive(world.members[0].received.setdefault(first, []), 1)
        agent = rpc_conn(first)._agent
        with connections_to(agent.url) as (waiting, lost):
            assert len(waiting) == len(lost)
            if end == "answers":
                lost, waiting = waiting, lost
            for sock in lost:
                drop_all(sock)
            for number in range(3):
                first.try_send(b"%d" % number)
                accepted.try_send(b"%d" % number)
            world.nap = 0.05
            world.until(
                lambda: max(map(repeats, waiting)) >= stuck.REPEATS, "repetitions"
            )
            late = [sock for sock in waiting if repeats(sock) >= stuck.REPEATS]
            first.close()
            again, accepted = world.connect()
            assert all(map(ended, late))
            for sock in lost:
                sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        # The other end may learn only now that its connection was ended.
        while not carries(world, again, accepted):
            again, accepted = world.connect()
        world.send(accepted, b"answer")
        world.arrive(world.members[0].received.setdefault(again, []), 1)
