"""The links keep the promises of `mq.transport`."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import select
import signal
import socket
import weakref
from collections.abc import Callable, Iterator

import nng_links
import pytest
from link_fixtures import own_temporary_directory
from nng_links import nng_runs
from tls_files import tls_options

from mq.errors import ForkedProcess
from mq.stream.sockets import connected, copy_of
from mq.testing import links
from mq.testing.link_world import MakeLink, World
from mq.transport import Conn, What
from transports import _zmq_doors
from transports.inproc import InprocLink
from transports.shm import ShmLink
from transports.tcp import TcpLink
from transports.tls import TlsLink
from transports.torchrpc import TorchRpcLink
from transports.zmq import ZmqLink

__all__ = ["nng_runs", "own_temporary_directory"]

ipc = functools.partial(ZmqLink, wires=("ipc",))
tcp = functools.partial(ZmqLink, wires=("tcp",))
tls = functools.partial(TlsLink, **tls_options())
threads = functools.partial(TorchRpcLink, threads=4)
LINKS: dict[str, MakeLink] = {
    "inproc": InprocLink,
    "shm": ShmLink,
    "tcp": TcpLink,
    "tls": tls,
    "torchrpc": TorchRpcLink,
    "torchrpc-threads": threads,
    "zmq": ZmqLink,
    "zmq-ipc": ipc,
    "zmq-tcp": tcp,
    "nng-ipc": nng_links.ipc,
    "nng-tcp": nng_links.tcp,
    "nng-tls": nng_links.tls,
}
FORKS = {name: make for name, make in LINKS.items() if "nng" not in name}


@pytest.mark.parametrize("promise", links.PROMISES.values(), ids=links.PROMISES)
@pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
def test_a_link_keeps_its_promises(
    make: MakeLink, promise: Callable[[MakeLink], None]
) -> None:
    """Each promise of the link contract holds on each link."""
    promise(make)


class _OneAtATime(InprocLink):
    """Takes no message before the one ahead of it is received, as a link may."""

    max_ahead = 1


@pytest.mark.parametrize("promise", links.PROMISES.values(), ids=links.PROMISES)
def test_no_promise_wants_room_for_more_than_a_message(
    promise: Callable[[MakeLink], None],
) -> None:
    """`try_send` may answer that there is none now, however little is on its way."""
    promise(_OneAtATime)


@pytest.mark.parametrize(
    "name", ["tcp", "tls", "zmq-tcp", "nng-tcp", "nng-tls", "torchrpc"]
)
def test_what_is_sent_waits_for_no_answer(name: str) -> None:
    """Else a kernel holds back a small message until the last one is acknowledged.

    And one that is silent is asked for a sign of life, but not by all engines.
    """
    with World(LINKS[name]) as world:
        world.connect()
        found = 0
        for connection in connected():
            with copy_of(connection.fd) as sock:
                found += 1
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert alive or name in ("zmq-tcp", "torchrpc")
    assert found >= 2


def test_room_made_while_an_inproc_end_reports_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other end's thread may receive at any moment of a poll."""
    with World(InprocLink) as world:
        sender = world.members[0]
        dialled, accepted = world.connect()
        body = memoryview(bytes(1 << 20))
        while dialled.try_send(b"head", body):
            pass
        look = dialled._has_room  # type: ignore[attr-defined]

        def look_and_receive() -> bool:
            found: bool = look()
            while accepted.receive() is not None:
                accepted.discard_body()
            return found

        monkeypatch.setattr(dialled, "_has_room", look_and_receive)
        sender.link.noticed[dialled] = None  # type: ignore[attr-defined]
        for _ in range(3):
            sender.pump()
        assert dialled in sender.conns(What.WRITABLE)


def _knock(address: str, source: str = "") -> socket.socket:
    """A connection on which nobody says anything."""
    kind, _, rest = address.partition("://")
    if kind in ("ipc", "shm"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(rest)
    else:
        host, port = rest.partition("/")[0].split(":")
        at = (source, 0) if source else None
        sock = socket.create_connection((host, int(port)), source_address=at)
    sock.setblocking(False)
    return sock


def _has_ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("name", sorted({*LINKS} - {"inproc", "torchrpc-threads"}))
def test_strangers_get_a_part_of_the_descriptors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some make room, so that members still get in."""
    with World(LINKS[name]) as world, contextlib.ExitStack() as ends:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 120))
        # The strangers' own ends are in this process, too, and would leave no room.
        monkeypatch.setattr(_zmq_doors, "free_descriptors", lambda _: (120, ""))
        address = world.members[1].addresses[0]
        knocking = []
        for _ in range(40):
            knocking.append(ends.enter_context(_knock(address)))
            world.until(lambda: True, "a pump")
        world.until(lambda: sum(map(_has_ended, knocking)) >= 10, "room")
        assert not all(map(_has_ended, knocking))
        if name != "torchrpc":  # it has one agent in a process, which finds itself
            world.connect()


@pytest.mark.parametrize(
    "name", ["nng-tcp", "nng-tls", "tcp", "tls", "torchrpc", "zmq-tcp"]
)
def test_a_host_that_floods_pushes_out_nobody_of_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose handshake takes long, as over a wire with latency."""
    with World(LINKS[name]) as world, contextlib.ExitStack() as ends:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (240, 240))
        monkeypatch.setattr(_zmq_doors, "free_descriptors", lambda _: (240, ""))
        address = world.members[1].addresses[0]
        slow = ends.enter_context(_knock(address))
        world.until(lambda: True, "a pump")
        flood = []
        for _ in range(90):
            flood.append(ends.enter_context(_knock(address, "127.0.0.2")))
            world.until(lambda: True, "a pump")
        world.until(lambda: sum(map(_has_ended, flood)) >= 30, "room")
        assert not _has_ended(slow)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", ["nng-ipc", "nng-tcp", "nng-tls", "shm", "tcp", "tls"])
def test_a_connection_that_is_over_is_freed_without_a_search_for_cycles(
    name: str,
) -> None:
    """A stranger's, too: they come faster than Python looks."""
    with World(LINKS[name]) as world:
        conns = weakref.WeakSet[Conn]()
        links = [member.link for member in world.members]

        def known() -> list[Conn]:
            return [conn for link in links for conn in link.conns]  # type: ignore[attr-defined]

        dialled, accepted = world.connect()
        with _knock(world.members[1].addresses[0]):
            world.until(lambda: len(known()) == 3, "the stranger")
            conns.update(known())
        dialled.close()
        world.lost(1, accepted)
        world.until(lambda: not known(), "their end")
        del dialled, accepted
        for member in world.members:
            member.events.clear()
        assert not list(conns)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", FORKS.values(), ids=FORKS)
def test_a_forked_child_opens_links_and_leaves_the_parent_alone(
    make: MakeLink,
) -> None:
    """After abandon a new link works in the child, or is refused as declared.

    The parent's goes on.
    """
    with World(make) as world:
        dialled, accepted = world.connect()
        world.until(lambda: True, "rest")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for member in world.members:
                    member.link.abandon()
                if world.members[0].link.capabilities.survives_fork:
                    links.reports_accepted_before_readable(make)
                else:
                    with pytest.raises(ForkedProcess, match="spawn"):
                        World(make)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        world.send(dialled, b"still here")
        received = world.members[1].received.setdefault(accepted, [])
        world.until(lambda: bool(received), "a message after the fork")
        assert received == [(b"still here", b"")]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["tcp", "tls", "zmq-ipc", "zmq-tcp"])
def test_a_forked_child_does_not_hide_the_death_of_its_parent(name: str) -> None:
    """The child's copies of the connections are closed, so peers see the parent die."""
    make = LINKS[name]
    with World(make, 1) as world:
        member = world.members[0]
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            _connect_and_die(make, member.addresses[0], writer)
        os.close(writer)
        world.nap = 0.01
        world.until(lambda: bool(select.select([reader], [], [], 0)[0]), "the child")
        child = int(os.read(reader, 20))
        os.close(reader)
        try:
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
            world.lost(0, member.conns(What.ACCEPTED)[0])
        finally:
            os.kill(child, signal.SIGKILL)  # it was alive all the time
        assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL


def _connect_and_die(make: MakeLink, address: str, writer: int) -> None:
    """Connect, fork a child that stays, and be killed."""
    with World(make, 1) as world:
        member = world.members[0]
        conn = member.link.dial(address)
        world.until(lambda: conn in member.conns(What.OPENED), "OPENED")
        if os.fork() == 0:
            member.link.abandon()
            os.write(writer, b"%d" % os.getpid())
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_status(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
