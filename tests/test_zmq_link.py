"""What ZeroMQ's link does with hostile peers, cut wires, interrupts and addresses."""

from __future__ import annotations

import errno
import functools
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from link_fixtures import own_temporary_directory
from zmq.utils import garbage

import transports._zmq_collector
import transports.zmq
from mq.addresses import split
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.stream.sockets import copy_of
from mq.testing.link_world import PATIENCE, World
from mq.transport import MAX_HEAD_BYTES, Conn, What
from transports._zmq_conns import LEAD_BYTES, WHOLE_BYTES, Dialled
from transports.zmq import ZmqLink

__all__ = ["own_temporary_directory"]

tcp = functools.partial(ZmqLink, wires=("tcp",))

MALFORMED = {
    "a head that is too large": [bytes(MAX_HEAD_BYTES + 1)],
    "a size that is no size": [b"head size", b"body"],
    "a size without a head": [b"\4\0\0\0", b"body"],
    "half a size": [b"\4\0", b"body"],
    "a body of no bytes": [b"head\0\0\0\0", b""],
    "a body that is too large": [
        b"head" + (WHOLE_BYTES + 1).to_bytes(4, "little"),
        bytes(WHOLE_BYTES + 1),
    ],
    "a body shorter than its size": [b"head\4\0\0\0", b"abc"],
    "a body longer than its size": [b"head\4\0\0\0", b"abcde"],
    "a part too many": [b"head\4\0\0\0", b"abcd", b"more"],
    "a large body shorter than its size": [b"head\0\1\1\0", bytes(0x100FF)],
    "a large body longer than its size": [b"head\0\1\1\0", bytes(0x10101)],
    "a part too many after a large body": [b"head\0\1\1\0", bytes(0x10100), b"more"],
    "hundreds of parts": [b"head"] * 500,
}


RawDealer = Callable[[str, bool], zmq.Socket[bytes]]


@pytest.fixture
def raw_dealer() -> Iterator[RawDealer]:
    """Makes DEALERs that are not ours, and that may introduce themselves or not."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealers: list[zmq.Socket[bytes]] = []

    def make(address: str, introduced: bool) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
        dealer.setsockopt(zmq.PROBE_ROUTER, int(introduced))
        dealer.connect(address)
        return dealer

    yield make
    context.destroy(linger=0)


def _limits(wire: str) -> set[tuple[int, int | None]]:
    """How large a message may be one body, and what may be under way, at both ends."""
    with World(functools.partial(ZmqLink, wires=(wire,))) as world:
        return {(conn.whole_bytes, conn.most_unanswered) for conn in world.connect()}


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
def test_large_messages_are_one_body(wire: str) -> None:
    """Whose peers are asked to answer before many of them are under way."""
    assert _limits(wire) == {(WHOLE_BYTES - LEAD_BYTES, 8 << 20)}


@pytest.mark.parametrize(
    ("wire", "whole"), [("ipc", WHOLE_BYTES - LEAD_BYTES), ("tcp", 0)]
)
def test_a_kernel_that_does_not_tell_of_a_part_of_a_body_gets_chunks(
    monkeypatch: pytest.MonkeyPatch, wire: str, whole: int
) -> None:
    """Over a slow wire a body of 12 MiB would pass for silence."""
    monkeypatch.setattr("transports._zmq_conns.quiet_seconds", lambda fd: None)
    assert _limits(wire) == {(whole, 8 << 20)}


@pytest.mark.parametrize(("wire", "most"), [("ipc", 8 << 20), ("tcp", 16 << 20)])
def test_more_is_under_way_to_another_host(
    monkeypatch: pytest.MonkeyPatch, wire: str, most: int
) -> None:
    """Its answers take longer, and the wire would be idle meanwhile."""
    monkeypatch.setattr("transports._zmq_conns.is_within_host", lambda fd: False)
    assert _limits(wire) == {(WHOLE_BYTES - LEAD_BYTES, most)}


@pytest.mark.parametrize(("wire", "is_raised"), [("ipc", True), ("tcp", False)])
def test_the_kernel_takes_much_of_a_body_ahead(wire: str, is_raised: bool) -> None:
    """Of a unix socket, once it is a member's; that of TCP grows by itself."""
    option = socket.SOL_SOCKET, socket.SO_SNDBUF
    with socket.socket(socket.AF_UNIX) as ours:
        usual = ours.getsockopt(*option)
        ours.setsockopt(*option, 1 << 20)
        most = max(usual, ours.getsockopt(*option))
    with World(functools.partial(ZmqLink, wires=(wire,))) as world:
        for conn in world.connect():
            conn.guard(None)
            with copy_of(conn.fd) as sock:
                held = sock.getsockopt(*option)
            assert (held == most) is is_raised


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
@pytest.mark.parametrize("nbytes", [33_000, 200_000, 1_250_000, WHOLE_BYTES])
def test_what_follows_the_lead_is_aligned(nbytes: int, wire: str) -> None:
    """Where ZeroMQ has it, at both ends: else the mesh would copy every body."""
    with World(functools.partial(ZmqLink, wires=(wire,))) as world:
        for sender in world.connect():
            for _ in range(4):
                world.send(sender, b"head", bytes(nbytes))
        members = world.members
        world.until(lambda: all(len(m.skews) == 2 for m in members), "every other body")

    assert not any(skew % 16 for member in members for skew in member.skews)


@pytest.mark.parametrize("parts", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_breaks_only_the_connection_it_came_on(
    raw_dealer: RawDealer, parts: list[bytes]
) -> None:
    """It is counted, its connection is LOST, and the others do not notice."""
    with World(tcp) as world:
        dialled, accepted = world.connect()
        member = world.members[1]
        dealer = raw_dealer(member.addresses[0], True)
        world.until(lambda: len(member.conns(What.ACCEPTED)) == 2, "the raw dealer")
        dealer.send(b"well-formed")
        dealer.send_multipart(parts)
        dealer.send(b"too late")
        hostile = member.conns(What.ACCEPTED)[1]
        assert world.lost(1, hostile).malformed
        assert member.received[hostile] == [(b"well-formed", b"")]
        assert isinstance(member.link, ZmqLink)
        assert member.link.malformed >= 1
        world.send(dialled, b"undisturbed", b"body")
        world.until(lambda: accepted in member.received, "the others' message")
        assert member.received[accepted] == [(b"undisturbed", b"body")]
        assert member.conns(What.LOST) == [hostile]


def test_a_peer_that_does_not_introduce_itself_is_never_a_connection(
    raw_dealer: RawDealer,
) -> None:
    """Messages of an unknown peer are counted and dropped."""
    with World(tcp, 1) as world:
        (member,) = world.members
        assert isinstance(member.link, ZmqLink)
        link = member.link
        dealer = raw_dealer(member.addresses[0], False)
        dealer.send_multipart([b"who", b"am", b"I"])
        world.until(lambda: link.malformed == 1, "the stray message")
        assert not member.events


class _Interrupting:
    """Sends parts for a socket; Ctrl-C comes after the first one of a message."""

    def __init__(self, send: Callable[[bytes, int], object]) -> None:
        self._send = send
        self._sent = 0

    def __call__(self, part: bytes, flags: int, copy: bool = True) -> None:
        if self._sent:
            raise KeyboardInterrupt
        self._sent += 1
        self._send(part, flags)


def _first_message(world: World, member: int, conn: Conn) -> tuple[bytes, bytes]:
    """The first message of a connection, with which no other came."""
    received = world.members[member].received.setdefault(conn, [])
    world.until(lambda: bool(received), "a message")
    (message,) = received
    return message


@pytest.mark.parametrize("from_dialler", [True, False])
def test_a_message_interrupted_while_it_is_sent_breaks_its_connection(
    monkeypatch: pytest.MonkeyPatch, from_dialler: bool
) -> None:
    """Its remains never become part of another message."""
    with World(tcp, 3) as world:
        first, accepted = world.connect(0, 2)
        other, accepted_other = world.connect(1, 2)
        conn = first if from_dialler else accepted
        port = conn.port  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(port, "send_part", _Interrupting(port.send_part))
            with pytest.raises(KeyboardInterrupt):
                conn.try_send(b"head", memoryview(b"body"))
        world.send(conn, b"next")
        world.send(accepted_other, b"to another", b"body")
        assert _first_message(world, 1, other) == (b"to another", b"body")
        peer, end = (2, accepted) if from_dialler else (0, first)
        if from_dialler:  # its head was sent, so that the message cannot be undone
            world.lost(peer, end)
            assert end not in world.members[peer].received
        else:  # only its envelope was
            assert _first_message(world, peer, end) == (b"next", b"")


@pytest.mark.parametrize("from_dialler", [True, False])
def test_a_message_that_fails_at_its_body_breaks_only_its_connection(
    monkeypatch: pytest.MonkeyPatch, from_dialler: bool
) -> None:
    """The engine may have no descriptors for what is to free the body later."""
    with World(tcp, 3) as world:
        first, accepted = world.connect(0, 2)
        other, accepted_other = world.connect(1, 2)
        conn = first if from_dialler else accepted
        port = conn.port  # type: ignore[attr-defined]
        send = port.send_part

        def send_part(part: bytes, flags: int, copy: bool = True) -> None:
            if not copy:
                raise zmq.ZMQError(errno.EMFILE)
            send(part, flags)

        with monkeypatch.context() as patch:
            patch.setattr(port, "send_part", send_part)
            assert conn.try_send(b"head", memoryview(b"body"))
        assert accepted_other.try_send(b"to another", memoryview(b"body"))
        assert _first_message(world, 1, other) == (b"to another", b"body")
        world.lost(0, first)
        world.lost(2, accepted)
        assert not world.members[0].received
        assert not world.members[2].received


def test_what_frees_bodies_is_there_from_the_first_link_to_the_last() -> None:
    """A process may have no descriptors for it when it first sends a large body."""
    assert not garbage.gc.is_alive()
    with World(tcp, 1):
        assert garbage.gc.is_alive()
        with World(tcp, 1):
            pass
        assert garbage.gc.is_alive()
    assert not garbage.gc.is_alive()


def test_a_link_may_open_while_the_last_one_closes() -> None:
    """As where a signal's handler leaves the closing of a queue to a thread."""

    def cycles() -> None:
        for _ in range(100):
            link = ZmqLink(wires=("tcp",))
            poller = Poller()
            link.open(poller, [], None)
            link.close(0.0)
            poller.close()

    with ThreadPoolExecutor(2, "mq-test") as executor:
        for done in [executor.submit(cycles) for _ in range(2)]:
            done.result(PATIENCE)
    assert not garbage.gc.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_link_closes_opens_its_own() -> None:
    """Whose last one ends that thread, whatever links the parent had."""
    with World(tcp, 1), transports._zmq_collector.collector._turn:
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            status = 1
            try:
                with World(tcp, 1):
                    assert garbage.gc.is_alive()
                status = int(garbage.gc.is_alive())
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("parts", [1, 2])
def test_what_an_interrupt_left_of_an_event_is_passed_over(parts: int) -> None:
    """Where signals do not wait, one may come between its parts."""
    with World(tcp, 2) as world:
        listener = world.members[1]
        host, port = split(listener.addresses[0])
        monitor = listener.link._monitor.socket  # type: ignore[attr-defined]
        with socket.create_connection((host, port)):  # of which it tells
            assert monitor.poll(PATIENCE * 1000)
            for _ in range(parts):
                monitor.recv(zmq.NOBLOCK)
            conn, accepted = world.connect(0, 1)
            world.send(conn, b"head", b"body")
            received = listener.received.setdefault(accepted, [])
            world.until(lambda: bool(received), "the message")
        assert received == [(b"head", b"body")]


def test_a_dial_without_descriptors_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no socket can be made, dial does not raise: LOST says why."""
    with World(tcp, 1) as world:
        (member,) = world.members

        def refuse(kind: int, name: bytes) -> zmq.Socket[bytes]:
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(member.link, "_socket", refuse)
        conn = member.link.dial(member.addresses[0])
        world.lost(0, conn)
        assert "open files" in member.events[0].reason
        assert conn.try_send(b"lost")


def test_threads_of_the_engine_need_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are too few the engine would end the process."""
    monkeypatch.setattr(
        transports.zmq, "free_descriptors", lambda _: (60, "60 are free")
    )
    poller = Poller()
    try:
        with pytest.raises(TransportUnavailable, match=r"60 are free.*io_threads=16"):
            ZmqLink(io_threads=16).open(poller, (), None)
        link = ZmqLink(wires=("tcp",), io_threads=15)
        monkeypatch.setattr(link, "_start", _fail)
        with pytest.raises(OSError, match=r"ZeroMQ cannot start: .*open files"):
            link.open(poller, (), None)
    finally:
        poller.close()


def _fail() -> None:
    raise zmq.ZMQError(errno.EMFILE)


def test_addresses_are_ranked_by_wire_and_reach() -> None:
    """ipc comes first on one host; from elsewhere only what is routable is left."""
    link = ZmqLink()
    candidates = ["tcp://10.0.0.1:5", "tcp://127.0.0.1:5", "ipc:///a/b", "nng://x"]
    here = ["ipc:///a/b", "tcp://10.0.0.1:5", "tcp://127.0.0.1:5"]
    assert link.rank(candidates, same_host=True) == here
    assert link.rank(candidates, same_host=False) == ["tcp://10.0.0.1:5"]
    assert tcp().rank(candidates, same_host=True) == here[1:]


def test_options_and_addresses_that_make_no_sense_are_refused() -> None:
    """A misspelt option is a TypeError, a foreign or malformed address a ValueError."""
    with pytest.raises(TypeError):
        ZmqLink(wire=("tcp",))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="wires"):
        ZmqLink(wires=("udp",))
    with pytest.raises(ValueError, match="hwm"):
        ZmqLink(hwm=0)
    poller = Poller()
    for address in ("ipc", "ipc:///a/b", "tcp://host", "tcp://host:99999", "udp://a:1"):
        with pytest.raises(ValueError, match="not of the form"):
            tcp().open(poller, [address], None)
    poller.close()


def test_an_address_of_a_link_keeps_its_zone() -> None:
    """Which is part of it: without one the system does not know the interface."""
    index = socket.if_nametoindex("lo")
    poller, link = Poller(), tcp()
    link.open(poller, (), None)
    try:
        zoned, plain = (
            link.dial(f"tcp://[{host}]:9") for host in ("fe80::1%lo", "::1")
        )
        assert isinstance(zoned, Dialled)
        assert isinstance(plain, Dialled)
        assert zoned.endpoint == f"tcp://[fe80::1%{index}]:9"
        assert plain.endpoint == "tcp://[::1]:9"
    finally:
        link.close(0.0)
        poller.close()


def test_a_member_does_not_hear_what_a_closed_connection_still_says(
    raw_dealer: RawDealer,
) -> None:
    """A peer that ignores the goodbye goes on talking to nobody."""
    with World(tcp, 1) as world:
        (member,) = world.members
        dealer = raw_dealer(member.addresses[0], True)
        world.until(lambda: bool(member.conns(What.ACCEPTED)), "the raw dealer")
        (conn,) = member.conns(What.ACCEPTED)
        conn.close()
        assert dealer.poll(int(PATIENCE * 1000))
        assert dealer.recv_multipart() == [b"", b"bye"]
        dealer.send(b"anybody there?")
        assert isinstance(member.link, ZmqLink)
        link = member.link
        world.until(lambda: link.malformed == 1, "the message is dropped")
        assert not member.received


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
def test_members_that_come_and_go_are_no_malformed_messages(wire: str) -> None:
    """The engine does not say on which descriptor a handshake succeeded."""
    with World(functools.partial(ZmqLink, wires=(wire,))) as world:
        for _ in range(3):
            dialled, accepted = world.connect()
            dialled.close()
            world.lost(1, accepted)
        assert world.members[1].link.malformed == 0
