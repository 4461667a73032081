"""Who proves nothing to ZeroMQ's link takes neither its memory nor its files."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from mq.addresses import split
from mq.testing.link_world import World
from mq.transport import What
from transports import _zmq_strangers
from transports._zmq_strangers import SILENT_BYTES
from transports.zmq import ZmqLink

tcp = functools.partial(ZmqLink, wires=("tcp",))


@pytest.fixture
def raw_peer() -> Iterator[Callable[[str], socket.socket]]:
    """Makes connections that have shaken hands as ZeroMQ's DEALERs do."""
    with contextlib.ExitStack() as stack:

        def connect(address: str) -> socket.socket:
            host, port = split(address)
            sock = stack.enter_context(socket.create_connection((host, port)))
            kind, size = b"Socket-Type", struct.pack(">I", 6)
            ready = b"\5READY" + bytes([len(kind)]) + kind + size + b"DEALER"
            sock.sendall(b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48))
            sock.sendall(bytes([4, len(ready)]) + ready)
            answer = b""
            while b"ROUTER" not in answer:
                answer += sock.recv(4096)
            sock.setblocking(False)
            return sock

        yield connect


def _is_cut_off(
    sock: socket.socket, part: bytes = b"", rest: bytearray | None = None
) -> bool:
    """Whether the other end has hung up; else this one sends what finds room.

    Args:
        part: What is sent again and again, each time whole.
        rest: What the last call has not sent of it.
    """
    rest = bytearray() if rest is None else rest
    try:
        while part:
            if not rest:
                rest += part
            del rest[: sock.send(rest)]
    except BlockingIOError:
        pass
    except OSError:
        return True
    try:
        while sock.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("introduced", [False, True])
def test_a_stranger_cannot_send_a_message_without_end(
    raw_peer: Callable[[str], socket.socket], introduced: bool
) -> None:
    """ZeroMQ keeps all parts until the last one has come."""
    with World(tcp, 1) as world:
        (member,) = world.members
        assert isinstance(member.link, ZmqLink)
        link = member.link
        sock = raw_peer(member.addresses[0])
        if introduced:
            sock.send(b"\0\0")
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "the stranger")
            member.conns(What.ACCEPTED)[0].guard(SILENT_BYTES)
        part = b"\3" + struct.pack(">Q", 100_000) + bytes(100_000)
        rest = bytearray()
        world.until(lambda: _is_cut_off(sock, part, rest), "the end of the connection")
        world.until(lambda: link.malformed == 1, "the stranger is counted")


def test_who_has_proven_who_it_is_may_send_any_amount() -> None:
    """The mesh lifts what it has set for a stranger."""
    with World(tcp) as world:
        dialled, accepted = world.connect()
        accepted.guard(SILENT_BYTES)
        accepted.guard(None)
        for _ in range(4):
            world.send(dialled, b"head", bytes(SILENT_BYTES))
        received = world.members[1].received
        world.until(lambda: len(received.get(accepted, ())) == 4, "all messages")
        assert not world.members[1].conns(What.LOST)


@pytest.mark.parametrize("stays", ["silent", "deaf", "talking"])
def test_who_stays_without_a_purpose_is_hung_up_on(
    raw_peer: Callable[[str], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    stays: str,
) -> None:
    """From the beginning, or when it was told goodbye: it costs a descriptor."""
    monkeypatch.setattr(_zmq_strangers, "STRANGER_SECONDS", 0.2)
    with World(tcp, 1) as world:
        (member,) = world.members
        sock = raw_peer(member.addresses[0])
        if stays != "silent":
            sock.send(b"\0\0")
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "the stranger")
            member.conns(What.ACCEPTED)[0].close()
        if stays == "talking":
            sock.send(b"\0\1x")
            world.until(lambda: member.link.malformed == 1, "what it says is counted")
        world.until(lambda: _is_cut_off(sock), "the end of the connection")


def test_of_many_strangers_some_have_to_go(
    raw_peer: Callable[[str], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot take all descriptors of the process."""
    monkeypatch.setattr(_zmq_strangers, "MOST_STRANGERS", 2)
    with World(tcp, 1) as world:
        (member,) = world.members
        *older, newest = [raw_peer(member.addresses[0]) for _ in range(3)]
        world.until(lambda: any(map(_is_cut_off, older)), "the end of one")
        assert not all(map(_is_cut_off, older))
        assert not _is_cut_off(newest)
