"""What every link over sockets does with strangers, cut wires, and bad addresses."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import nng_links
import pytest
from link_fixtures import own_temporary_directory
from nng_links import nng_runs
from refusals import no_descriptor
from tls_files import tls_options

from mq.mesh.poller import Poller
from mq.stream import sockets
from mq.stream.conn import StreamConn
from mq.stream.link import StreamLink
from mq.testing.link_world import PATIENCE, MakeLink, World
from mq.testing.proxy import Proxy
from mq.testing.waiting import wait_until
from mq.transport import Conn, What
from transports.shm import ShmLink
from transports.tcp import TcpLink
from transports.tls import TlsLink
from transports.zmq import ZmqLink

__all__ = ["nng_runs", "own_temporary_directory"]

LINKS: dict[str, MakeLink] = {
    "nng-ipc": nng_links.ipc,
    "nng-tcp": nng_links.tcp,
    "nng-tls": nng_links.tls,
    "tcp": TcpLink,
    "tls": functools.partial(TlsLink, **tls_options()),
    "zmq-ipc": functools.partial(ZmqLink, wires=("ipc",)),
    "zmq-tcp": functools.partial(ZmqLink, wires=("tcp",)),
}


def links(*names: str) -> pytest.MarkDecorator:
    """Run a test on these links, given as `name`."""
    return pytest.mark.parametrize("name", names)


every_link = links(*LINKS)
over_tcp = links("nng-tcp", "nng-tls", "tcp", "tls", "zmq-tcp")
over_unix = links("nng-ipc", "zmq-ipc")


def connected(address: str) -> socket.socket:
    """A plain socket, connected to the listener of a link."""
    rest = address.partition("://")[2]
    if rest.startswith("/"):
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(rest)
        return plain
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def conns_of(link: Any) -> int:
    """How many connections a link has, greeted or not."""
    return len(link.conns)


# -- within a host ----------


def _controls() -> list[bytes]:
    """How the congestion of each connection of this process is controlled."""
    found = []
    for known in sockets.connected():
        with sockets.copy_of(known.fd) as sock:
            option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
            found.append(sock.getsockopt(*option, 16).rstrip(b"\0"))
    return found


@over_tcp
def test_no_connection_within_a_host_is_paced(name: str) -> None:
    """Neither end's, where the system would have them all so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            if b"bbr" not in _controls():
                pytest.skip("by default connections of this system are not paced")
    with World(LINKS[name]) as world:
        _, accepted = world.connect()
        accepted.guard(None)  # it has proven who it is
        assert set(_controls()) == {b"reno"}


# -- strangers ----------


@pytest.mark.parametrize("name", [*LINKS, "shm"])
def test_who_was_accepted_is_named(name: str) -> None:
    """By host and port, or where a socket has none by the process and its user."""
    makes: dict[str, MakeLink] = {**LINKS, "shm": ShmLink}
    with World(makes[name]) as world:
        _, accepted = world.connect()
        scheme, _, who = accepted.address.partition("://")
        listened = world.members[1].addresses[0]
        assert scheme == listened.partition("://")[0]
        if name.endswith(("ipc", "shm")):
            assert who == f"(pid {os.getpid()} of user {os.geteuid()})"
        else:
            assert re.fullmatch(r"127\.0\.0\.1:[0-9]+", who)
            assert accepted.address != listened


@every_link
def test_bytes_of_a_stranger_do_no_harm(name: str) -> None:
    """Garbage in place of a greeting is counted, and the next member is welcome."""
    with World(LINKS[name]) as world:
        member = world.members[1]
        for size in (0, 1, 8, 64, 5000):
            with connected(member.addresses[0]) as plain:
                plain.sendall(os.urandom(size))
        dialled, accepted = world.connect()
        world.send(dialled, b"fine")
        world.until(lambda: accepted in member.received, "a message")
        assert member.conns(What.ACCEPTED) == [accepted]
        if not name.startswith("zmq"):
            world.until(lambda: member.link.malformed == 5, "five strangers")


@pytest.mark.parametrize(
    "make", [ShmLink, LINKS["tcp"], LINKS["tls"]], ids=["shm", "tcp", "tls"]
)
def test_another_version_of_the_stream_is_named_by_both_ends(
    make: MakeLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And who dials is told that it will never be otherwise."""
    with World(make) as world, caplog.at_level(logging.WARNING):
        newer, older = (member.link for member in world.members)
        assert isinstance(newer, StreamLink)
        monkeypatch.setattr(newer, "hello", newer.hello[:-2] + b"\2\n", raising=False)
        for _ in range(2):
            conn = newer.dial(world.members[1].addresses[0])
            world.lost(0, conn)
            (lost,) = (e for e in world.members[0].events if e.conn is conn)
            told = "it speaks version {} of the stream format and this member version "
            assert lost.refused
            assert lost.reason.startswith(told.format(1) + "2; install the same")
        world.until(lambda: older.malformed == 2, "two strangers")
        told = told.format(2) + "1; install the same version"
        # Of one process, which has two ports.
        assert caplog.text.count(told) == (1 if make is ShmLink else 2)


_NNG_HELLO = b"tensormq nng 2"
_STRAYS = {
    "nng-tcp": (
        struct.pack(">4sHHQI", b"\0SP\0", 16, 0, 4 + len(_NNG_HELLO), 0) + _NNG_HELLO,
        "tcp://127.0.0.1:{}: the peer sent b'tensormq nng 2', which no member",
    ),
    "tcp": (
        b"\x16\3\1\2\0\1\0\1\xfc\3\3",  # as a client of TLS begins
        "tcp://127.0.0.1:{}: the peer sent b'\\x16",
    ),
    "tls": (TcpLink.hello, "tls://127.0.0.1:{}: no connection with tls://127.0.0.1"),
}


@links(*_STRAYS)
def test_a_peer_of_another_link_is_logged_by_who_is_dialled(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, as it tries again, from another port.

    But not who only looks whether somebody listens, as those that balance loads do.
    """
    hello, told = _STRAYS[name]
    with World(LINKS[name], 1) as world:
        (member,) = world.members

        def come(said: bytes, count: int) -> int:
            with connected(member.addresses[0]) as plain:
                plain.sendall(said)
                plain.shutdown(socket.SHUT_WR)
                world.until(lambda: member.link.malformed == count, "a stranger")
                return int(plain.getsockname()[1])

        ports = [come(said, count) for count, said in enumerate((b"", hello, hello), 1)]
        # NNG's links tell each other their version, so that who hears of another ends.
        tells = ports[1:] if name.startswith("nng") else ports[1:2]
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == len(tells)
        for text, port in zip(texts, tells, strict=True):
            assert text.startswith(f"refused {told.format(port)}")


@links("nng-ipc", "nng-tcp", "tcp", "tls")
def test_strangers_that_say_nothing_are_bounded(name: str) -> None:
    """Of many silent connections some are dropped for the newest."""
    with World(LINKS[name]) as world:
        member = world.members[1]
        silent = [connected(member.addresses[0]) for _ in range(150)]
        world.until(
            lambda: member.link.malformed + conns_of(member.link) >= 150, "all of them"
        )
        assert conns_of(member.link) < 140
        world.connect()
        for plain in silent:
            plain.close()


@links("nng-ipc", "nng-tcp", "tcp", "tls")
def test_strangers_beyond_the_bound_are_let_in_one_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine frees the descriptors of the one before only in a while."""
    monkeypatch.setattr("mq.stream.listening._STRANGERS", 4)
    with World(LINKS[name]) as world, contextlib.ExitStack() as ends:
        link = world.members[1].link
        for _ in range(12):
            ends.enter_context(connected(world.members[1].addresses[0]))
        most = 0

        def look() -> bool:
            nonlocal most
            before = link.malformed
            assert not list(link.poll())
            most = max(most, link.malformed - before)
            return link.malformed == 8

        wait_until(look, "all but four to be turned away")
        assert most == 1


@over_tcp
def test_a_peer_that_answers_nonsense_is_lost(name: str) -> None:
    """A dialled address where something else listens is LOST with a reason."""
    with (
        World(LINKS[name], 1) as world,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        (member,) = world.members
        scheme = member.addresses[0].partition("://")[0]
        conn = member.link.dial(f"{scheme}://127.0.0.1:{server.getsockname()[1]}")
        server.settimeout(PATIENCE)
        world.until(lambda: True, "the dial to begin")
        other, _ = server.accept()
        with other:
            other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
            world.lost(0, conn)


# -- breaks ----------


@every_link
def test_a_cut_wire_is_lost_at_both_ends_and_what_arrived_is_in_order(
    name: str, own_temporary_directory: str
) -> None:
    """After a cut both ends report LOST; what was received is a prefix."""
    with World(LINKS[name]) as world:
        ours, theirs = world.members
        proxy = Proxy(theirs.addresses[0], f"{own_temporary_directory}/proxy")
        dialled = ours.link.dial(proxy.address)
        world.until(lambda: bool(theirs.conns(What.ACCEPTED)), "ACCEPTED")
        (accepted,) = theirs.conns(What.ACCEPTED)
        world.until(lambda: dialled in ours.conns(What.OPENED), "OPENED")
        for index in range(50):
            world.send(dialled, b"%d" % index, bytes(100_000))
            world.send(accepted, b"%d" % index, bytes(100_000))
        world.until(lambda: bool(theirs.received), "the first message")
        proxy.cut()
        world.lost(0, dialled)
        world.lost(1, accepted)
        for member, conn in ((ours, dialled), (theirs, accepted)):
            heads = [head for head, _ in member.received.get(conn, [])]
            assert heads == [b"%d" % index for index in range(len(heads))]
        proxy.close()
        again, accepted_again = world.connect()
        world.send(again, b"new")
        world.until(lambda: accepted_again in theirs.received, "the new message")
        assert theirs.received[accepted_again] == [(b"new", b"")]


@links("nng-ipc", "nng-tcp", "nng-tls", "tcp", "tls")
def test_connections_that_are_closed_at_once_leave_nothing(name: str) -> None:
    """Also where they are still being negotiated."""
    with World(LINKS[name]) as world:
        first, second = world.members
        world.connect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(150):
            first.link.dial(second.addresses[0]).close()
            conn = first.link.dial(second.addresses[0])
            first.pump()
            conn.close()
        world.until(lambda: conns_of(second.link) == 1, "the last stranger's end")
        world.until(
            lambda: len(os.listdir("/proc/self/fd")) <= before, "free descriptors"
        )


@links("tcp", "tls")
def test_a_peer_that_resets_at_once_is_lost(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever the system says then: other connections go on."""
    with World(LINKS[name]) as world:
        first, second = world.members
        gone = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        monkeypatch.setattr(socket.socket, "getpeername", mock.Mock(side_effect=gone))
        conn = first.link.dial(second.addresses[0])
        world.lost(0, conn)
        monkeypatch.undo()
        assert "not connected" in first.events[0].reason


@links("tcp", "tls")
def test_a_dial_of_which_nothing_is_left_forgets_its_descriptor(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another connection has it soon."""
    closed = socket.create_server(("127.0.0.1", 0))
    target = closed.getsockname()
    closed.close()
    with World(LINKS[name], 1) as world:
        (member,) = world.members
        conn: Any = StreamConn(member.link, "tcp://here", What.OPENED)
        conn.dial([(socket.AF_INET, target), (10_000, target)])
        world.until(lambda: bool(conn.reason), "the refusal of both")
        assert "family not supported" in conn.reason
        assert conn.fd == -1


@links("nng-ipc", "nng-tcp", "tcp", "tls")
def test_a_dial_without_descriptors_is_lost(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where no socket can be made, dial does not raise: LOST says why."""
    with World(LINKS[name], 1) as world:
        (member,) = world.members
        monkeypatch.setattr(socket, "socket", no_descriptor)
        conn = member.link.dial(member.addresses[0])
        monkeypatch.undo()
        world.lost(0, conn)
        assert "open files" in member.events[0].reason
        assert conn.try_send(b"lost")


@links("nng-ipc", "nng-tcp", "tcp", "tls")
@pytest.mark.parametrize(("silent_seconds", "said"), [(60.0, 1), (0.0, 3)])
def test_accepting_goes_on_after_descriptors_ran_out(
    name: str,
    silent_seconds: float,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The listener rests for a while, and for no longer; it says so now and then."""
    monkeypatch.setattr("mq.stream.listening.DEAF_SECONDS", 0.01)
    monkeypatch.setattr("mq.stream.listening.SILENT_SECONDS", silent_seconds)
    with World(LINKS[name]) as world:
        world.nap = 0.1
        link: Any = world.members[1].link
        (listener,) = link._listeners
        refusals = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 3)

        class Exhausted:
            fileno, listen, close = listener.fileno, listener.listen, listener.close

            def accept(self) -> Any:
                for error in refusals:
                    raise error
                return listener.accept()

        link.unwatch(listener.fileno())
        link._hear(Exhausted())
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.until(lambda: bool(link._deaf), "the listener rests")
        world.until(lambda: conn in world.members[0].conns(What.OPENED), "OPENED")
    assert caplog.text.count("cannot accept") == said
    assert caplog.text.count("raise `ulimit -n`") == said


# -- addresses ----------


@every_link
def test_an_address_that_is_taken_is_an_os_error(name: str) -> None:
    """It names the address, and nothing stays open."""
    poller, link = Poller(), LINKS[name]()
    with World(LINKS[name], 1) as world:
        (taken,) = world.members[0].addresses
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=taken.partition("://")[2][:20]) as caught:
            link.open(poller, [taken], None)
        assert caught.value.errno == errno.EADDRINUSE
        assert len(os.listdir("/proc/self/fd")) == len(before)
    poller.close()


@over_unix
def test_a_path_that_is_too_long_is_an_os_error(name: str) -> None:
    """It says how long a path may be, and nothing stays open."""
    poller, link = Poller(), LINKS[name]()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="at most 107 bytes"):
        link.open(poller, ["ipc:///" + "x" * 110], None)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    poller.close()


@over_unix
def test_a_file_that_is_no_socket_is_left_where_it_is(
    name: str, own_temporary_directory: str
) -> None:
    """ZeroMQ would remove whatever is there, and so did the link when it closed."""
    path = Path(own_temporary_directory) / "notes"
    path.write_text("worth keeping")
    link = LINKS[name]()
    with contextlib.closing(Poller()) as poller:
        with pytest.raises(OSError, match="notes is there already, and is no socket"):
            link.open(poller, [f"ipc://{path}"], None)
    assert path.read_text() == "worth keeping"


over_files = pytest.mark.parametrize(
    ("make", "scheme"),
    [(LINKS["nng-ipc"], "ipc"), (LINKS["zmq-ipc"], "ipc"), (ShmLink, "shm")],
    ids=["nng-ipc", "zmq-ipc", "shm"],
)


@over_files
def test_a_relative_path_is_told_to_others_in_full(
    make: MakeLink,
    scheme: str,
    own_temporary_directory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They look for it from elsewhere, and close may be called from elsewhere."""
    here = Path(own_temporary_directory)
    (here / "there").mkdir()
    monkeypatch.chdir(here)
    link = make()
    with contextlib.closing(Poller()) as poller:
        addresses = link.open(poller, [f"{scheme}://my.sock"], None)
        monkeypatch.chdir(here / "there")
        link.close()
    assert addresses == [f"{scheme}://{here}/my.sock"]
    assert os.listdir(here) == ["there"]


@over_files
@pytest.mark.parametrize("path", ["/tmp/mq\0here", "*", "@mq"])
def test_what_is_no_path_of_a_file_is_refused_by_name(
    make: MakeLink, scheme: str, path: str
) -> None:
    """Before anything is there that could not be removed."""
    address = f"{scheme}://{path}"
    before = os.listdir("/proc/self/fd")
    with contextlib.closing(Poller()) as poller:
        with pytest.raises(ValueError, match="is no path of a file") as caught:
            make().open(poller, [address], None)
    assert repr(address) in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@over_unix
def test_a_socket_file_is_in_the_directory_that_is_given(name: str) -> None:
    """It is there while the link is open, and gone afterwards."""
    poller, link = Poller(), LINKS[name]()
    with tempfile.TemporaryDirectory() as directory:
        (address,) = link.open(poller, ["ipc"], directory)
        assert os.listdir(directory) == [os.path.basename(address)]
        link.close()
        assert os.listdir(directory) == []
    poller.close()


@over_tcp
def test_a_wildcard_host_is_returned_as_one_that_can_be_dialled(name: str) -> None:
    """Peers get an address, not 0.0.0.0."""
    scheme = SCHEMES[name]
    poller, link = Poller(), LINKS[name]()
    try:
        (address,) = link.open(poller, [f"{scheme}://0.0.0.0:*"], None)
        host, _, port = address.partition("://")[2].rpartition(":")
        assert address.startswith(scheme)
        assert host != "0.0.0.0"
        assert int(port) > 0
    finally:
        link.close()
        poller.close()


SCHEMES = {name: "tcp" for name in LINKS} | {"tls": "tls", "nng-tls": "tls+tcp"}


@over_tcp
@pytest.mark.parametrize(
    ("place", "routable"),
    [
        ("127.0.0.5:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("0.0.0.0:1", True),
        ("*:1", True),
        ("[::]:1", True),
        ("host.example:1", True),
    ],
)
def test_an_address_is_routable_unless_it_is_of_this_host(
    name: str, place: str, routable: bool
) -> None:
    """Loopback is not reachable from other hosts."""
    assert LINKS[name]().is_routable(f"{SCHEMES[name]}://{place}") is routable


@over_unix
def test_a_unix_socket_is_never_routable(name: str) -> None:
    """Only processes of this host reach it."""
    assert not LINKS[name]().is_routable("ipc:///a/b")


@over_tcp
def test_members_meet_over_ipv6(name: str) -> None:
    """Where the host has it."""
    if not socket.has_ipv6 or not _has_ipv6_loopback():
        pytest.skip("no IPv6 on this host")
    with World(LINKS[name], 1) as world:
        (dialler,) = world.members
        listener = LINKS[name]()
        (address,) = listener.open(world.poller, [f"{SCHEMES[name]}://[::1]:0"], None)
        assert "[::1]" in address
        conn = dialler.link.dial(address)
        peers: list[str] = []

        def opened() -> bool:
            peers.extend(event.conn.address for event in listener.poll())
            return conn in dialler.conns(What.OPENED)

        world.until(opened, "OPENED")
        world.until(lambda: opened() and bool(peers), "ACCEPTED")
        listener.close()
        # Not every engine tells of a port.
        assert "://" not in peers[0] or "://[::1]:" in peers[0]


def _has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@links("nng-tcp", "zmq-tcp")
def test_the_socket_tells_for_how_long_it_has_been_quiet(name: str) -> None:
    """At either end: the engine hands over whole messages, which may take long."""
    with World(LINKS[name]) as world:
        world.nap = 0.05
        ends = world.connect()

        def quiet_of(conn: Conn) -> float:
            seconds = conn.quiet_seconds()
            assert seconds is not None
            return seconds

        for sender, receiver in (ends, ends[::-1]):
            world.until(lambda conn=receiver: quiet_of(conn) > 0.5, "silence")
            begin = time.monotonic() - 0.1  # the kernel counts in ticks of its own
            world.send(sender, b"head")
            world.until(
                lambda conn=receiver, begin=begin: (
                    quiet_of(conn) < time.monotonic() - begin
                ),
                "its end",
            )
