"""Host names are looked up where nobody waits, and all their addresses are tried."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import nng_links
import pytest
from link_fixtures import own_temporary_directory
from nng_links import nng_runs
from tls_files import tls_options

from mq.mesh.poller import Poller
from mq.stream import names
from mq.stream.names import Names
from mq.testing.link_world import PATIENCE, MakeLink, Member, World
from mq.testing.waiting import wait_until
from mq.transport import What
from transports import _torchrpc_control as control
from transports._torchrpc_sockets import Sockets
from transports.tcp import TcpLink
from transports.tls import TlsLink
from transports.torchrpc import TorchRpcLink
from transports.zmq import ZmqLink

__all__ = ["nng_runs", "own_temporary_directory"]

T = TypeVar("T")

NAME = "member.example"
LINKS: dict[str, MakeLink] = {
    "nng": nng_links.tcp,
    "nng:tls": functools.partial(nng_links.tls, server_name="localhost"),
    "tcp": TcpLink,
    "tls": functools.partial(TlsLink, server_name="localhost", **tls_options()),
    "torchrpc": TorchRpcLink,
    "zmq": functools.partial(ZmqLink, wires=("tcp",)),
}

USUAL_PATIENCE = names.PATIENCE_SECONDS
real_getaddrinfo = socket.getaddrinfo


class Resolver:
    """In place of the system's, for `NAME` alone.

    Attributes:
        hosts: The addresses that it finds; none: it knows no such name.
        answers: Whether it answers.
        asked: How often it was asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        # However late the thread that looks up gets a core.
        monkeypatch.setattr(names, "PATIENCE_SECONDS", PATIENCE)
        self.hosts: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def fall_silent(self) -> None:
        """Answer nobody, who then waits no longer than usual."""
        self.answers.clear()
        self._monkeypatch.setattr(names, "PATIENCE_SECONDS", USUAL_PATIENCE)

    def look_up(self, host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != NAME or more.get("flags", 0) & socket.AI_NUMERICHOST:
            return real_getaddrinfo(host, port, *args, **more)
        self.asked += 1
        self.answers.wait(PATIENCE)
        if not self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [
            found
            for number in self.hosts
            for found in real_getaddrinfo(number, port, *args, **more)
        ]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    """The resolver, which answers when the test has ended."""
    found = Resolver(monkeypatch)
    monkeypatch.setattr(socket, "getaddrinfo", found.look_up)
    monkeypatch.setattr(names, "FRESH_SECONDS", 0.0)
    yield found
    found.answers.set()


def named(address: str) -> str:
    """The address of a member, with a name in place of its number."""
    return address.replace("127.0.0.1", NAME)


@contextlib.contextmanager
def silence(port: int) -> Iterator[None]:
    """Who connects to this port of 127.0.0.2 gets no answer."""
    with (
        socket.create_server(("127.0.0.2", port), backlog=0),
        socket.create_connection(("127.0.0.2", port)),  # takes the only place
    ):
        yield


@contextlib.contextmanager
def beside_silence(
    make: Callable[[], AbstractContextManager[T]], port_of: Callable[[T], int]
) -> Iterator[T]:
    """Something whose port gives no answer at 127.0.0.2, where others may have it."""
    for again in range(9, -1, -1):
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(make())
            try:
                stack.enter_context(silence(port_of(made)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not again:
                    raise
                continue
            yield made
            return


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.3", 0))


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def port_of_second(world: World) -> int:
    return int(world.members[1].addresses[0].rpartition(":")[2])


@contextlib.contextmanager
def hidden(name: str, resolver: Resolver) -> Iterator[tuple[World, Member, str]]:
    """A member, and the name of another that is at the second of two addresses.

    At the first one nobody answers.
    """
    resolver.hosts = ["127.0.0.2", "127.0.0.1"]
    make = functools.partial(World, LINKS[name])
    with beside_silence(make, port_of_second) as world:
        dialler, listener = world.members
        yield world, dialler, named(listener.addresses[0])


@pytest.mark.parametrize("name", LINKS)
def test_a_dial_does_not_wait_for_the_resolver(name: str, resolver: Resolver) -> None:
    """It ends at once and says why; once there is an answer, a later one connects."""
    resolver.hosts = ["127.0.0.1"]
    resolver.fall_silent()
    with World(LINKS[name]) as world:
        dialler, listener = world.members
        address = named(listener.addresses[0])
        world.lost(0, dialler.link.dial(address))
        reason = next(e.reason for e in dialler.events if e.what is What.LOST)
        assert f"the host {NAME!r} is still being looked up" in reason

        resolver.answers.set()
        if name == "torchrpc":  # it has one agent in a process, which finds itself
            return

        def opens() -> bool:
            if dialler.conns(What.OPENED):
                return True
            if len(dialler.conns(What.LOST)) == len(dialled):
                dialled.append(dialler.link.dial(address))
            return False

        dialled = dialler.conns(What.LOST)
        world.nap = 0.02
        world.until(opens, "OPENED")


@pytest.mark.parametrize("name", ["nng", "nng:tls", "tcp", "tls", "zmq"])
def test_an_address_that_is_silent_does_not_hide_the_next(
    name: str, resolver: Resolver
) -> None:
    """A dial that its caller gives up is followed by one to another address."""
    with hidden(name, resolver) as (world, dialler, address):
        dialler.link.dial(address).close()
        conn = dialler.link.dial(address)
        world.until(lambda: conn in dialler.conns(What.OPENED), "OPENED")
        again = dialler.link.dial(address)  # the one that answers is first
        world.until(lambda: again in dialler.conns(What.OPENED), "OPENED again")


@pytest.mark.parametrize("name", ["nng", "nng:tls", "tcp", "tls", "zmq"])
def test_dials_of_one_name_that_fail_together_begin_elsewhere(
    name: str, resolver: Resolver
) -> None:
    """Two members of one host: both attempts end at once, again and again."""
    with hidden(name, resolver) as (world, dialler, address):
        together = [dialler.link.dial(address) for _ in range(2)]
        for conn in together:
            conn.close()
        conn = dialler.link.dial(address)
        world.until(lambda: conn in dialler.conns(What.OPENED), "OPENED")


@pytest.mark.parametrize("name", ["nng", "nng:tls", "tcp", "tls", "zmq"])
def test_an_attempt_that_another_made_needless_says_nothing_of_its_address(
    name: str, resolver: Resolver
) -> None:
    """Of those that a mesh makes side by side, all but one are given up."""
    with hidden(name, resolver) as (world, dialler, address):
        dialler.link.dial(address).close()
        conn = dialler.link.dial(address)
        world.until(lambda: conn in dialler.conns(What.OPENED), "OPENED")
        dialler.link.dial(address).close()
        again = dialler.link.dial(address)
        world.until(lambda: again in dialler.conns(What.OPENED), "OPENED again")


def test_torchrpc_dials_the_address_after_one_that_is_silent(
    resolver: Resolver,
) -> None:
    """As the others do; its greeting needs an agent of another process."""
    resolver.hosts = ["127.0.0.2", "127.0.0.3"]
    with (
        World(LINKS["torchrpc"], 1) as world,
        beside_silence(listening, port_of) as listener,
    ):
        listener.settimeout(PATIENCE)
        (dialler,) = world.members
        port = port_of(listener)
        dialler.link.dial(f"torchrpc://{NAME}:{port}").close()
        conn = dialler.link.dial(f"torchrpc://{NAME}:{port}")
        listener.accept()[0].close()
        world.lost(0, conn)


def test_torchrpc_dials_the_next_address_whoever_else_is_at_the_first(
    resolver: Resolver,
) -> None:
    """A member at another port answers for that port alone."""
    resolver.hosts = ["127.0.0.2", "127.0.0.3"]
    link: Any = None  # nobody says anything
    conn: Any = None
    with (
        socket.create_server(("127.0.0.2", 0)) as other,
        beside_silence(listening, port_of) as listener,
        contextlib.closing(Sockets(link, PATIENCE)) as sockets,
    ):
        met, silent, last = (control.unconnected(NAME) for _ in range(3))
        sockets.dial(met, conn, NAME, port_of(other))
        sockets.know(met, conn)
        listener.settimeout(PATIENCE)
        port = port_of(listener)
        sockets.dial(silent, conn, NAME, port)
        sockets.forget(silent)
        sockets.dial(last, conn, NAME, port)
        listener.accept()[0].close()


def test_zmq_dials_whichever_address_is_listened_on(resolver: Resolver) -> None:
    """The engine is given one number at a time, so a later dial gets another."""
    resolver.hosts = ["127.0.0.1", "127.0.0.3"]
    with World(LINKS["zmq"], 1) as world, contextlib.ExitStack() as ends:
        (dialler,) = world.members
        listener, poller = ZmqLink(wires=("tcp",)), Poller()
        ends.callback(poller.close)
        ends.callback(listener.close)
        (at,) = listener.open(poller, ["tcp://127.0.0.3:0"], None)
        address = at.replace("127.0.0.3", NAME)
        world.lost(0, dialler.link.dial(address))
        conn = dialler.link.dial(address)
        world.nap = 0.01  # it does not wake for the listener

        def opened() -> bool:
            collections.deque(listener.poll(), maxlen=0)
            return conn in dialler.conns(What.OPENED)

        world.until(opened, "OPENED")


def test_what_was_found_last_is_used_while_the_resolver_is_silent(
    resolver: Resolver,
) -> None:
    """A connection can be resumed without the resolver."""
    resolver.hosts = ["127.0.0.7"]
    known = Names()
    assert known.targets(NAME, 5)[0][1] == ("127.0.0.7", 5)
    resolver.fall_silent()
    assert known.targets(NAME, 6)[0][1] == ("127.0.0.7", 6)
    assert known.targets(NAME, 7)[0][1] == ("127.0.0.7", 7)
    assert resolver.asked == 2, "one look-up at a time"


def test_a_name_that_is_unknown_is_asked_for_again(resolver: Resolver) -> None:
    """Its error says so; names may become known later."""
    known = Names()
    lengths = []
    for _ in range(2):
        with pytest.raises(OSError, match=f"{NAME!r} cannot be looked up") as caught:
            known.targets(NAME, 5)
        lengths.append(len(caught.traceback))
        resolver.fall_silent()  # the second time it tells what was found the first
    assert lengths[0] == lengths[1], "an error that is raised again grows"
    resolver.answers.set()
    resolver.hosts = ["127.0.0.7"]
    wait_until(lambda: _knows(known), "the look-up")
    assert known.targets(NAME, 5)[0][1] == ("127.0.0.7", 5)


def test_numbers_need_no_look_up(resolver: Resolver) -> None:
    """IPv6 addresses may stand in brackets."""
    assert Names().targets("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert Names().targets("[::1]", 5) == [(socket.AF_INET6, ("::1", 5, 0, 0))]
    assert not resolver.asked


def test_where_no_thread_is_to_be_had_the_next_dial_looks_it_up(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have as many as it is allowed, for the moment."""
    found = Names()
    resolver.hosts = ["127.0.0.1"]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match=NAME):
            found.targets(NAME, 1)
    wait_until(lambda: _knows(found), "the look-up")


def _knows(found: Names) -> bool:
    with contextlib.suppress(OSError):
        return bool(found.targets(NAME, 1))
    return False
