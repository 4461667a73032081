"""What NNG's link does with hostile peers, cut wires, forks, descriptors and TLS."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import gc
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pynng
import pytest
from link_fixtures import own_temporary_directory
from nng_links import ipc, nng_runs, tcp, tls
from tls_files import tls_options

from mq.addresses import split
from mq.credentials import contexts, pem_files
from mq.errors import ForkedProcess
from mq.mesh.poller import Poller
from mq.stream.sockets import listening
from mq.testing.link_world import PATIENCE, World
from mq.testing.worker import resident_bytes
from mq.transport import CHUNK_BYTES, MAX_HEAD_BYTES, What
from transports._nng_conns import NngConn
from transports._nng_pair import unread
from transports._nng_tls import TlsChannel
from transports.nng import NngLink
from transports.nng_tls import NngTlsLink

__all__ = ["nng_runs", "own_temporary_directory"]

WIRES = {"ipc": ipc, "tcp": tcp, "tls": tls}
HELLO = bytes(4) + b"tensormq nng 1"


def framed(head: bytes, body: bytes = b"") -> bytes:
    return len(head).to_bytes(4, "little") + head + body


def sized(message: bytes) -> bytes:
    """As NNG frames it over TCP."""
    return len(message).to_bytes(8, "big") + message


MALFORMED = {
    "no size": b"abc",
    "nothing": b"",
    "a head beyond the message": (100).to_bytes(4, "little") + b"short",
    "a head that is too large": framed(bytes(MAX_HEAD_BYTES + 1)),
    "a body that is too large": framed(b"head", bytes(CHUNK_BYTES + 1)),
    "a message beyond NNG's limit": framed(b"head", bytes(4 * CHUNK_BYTES)),
    "a word that no link says": framed(b"", b"what?"),
}


RawPair = Callable[[str], Any]


@pytest.fixture
def raw_pair() -> Iterator[RawPair]:
    """Makes Pair0 sockets that are not ours, connected to an address."""
    made: list[Any] = []

    def make(address: str) -> Any:
        pair = pynng.Pair0(send_timeout=int(PATIENCE * 1000), send_buffer_size=4)
        made.append(pair)
        pair.dial(address, block=False)
        return pair

    yield make
    for pair in made:
        pair.close()


# -- hostile peers ----------


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_breaks_only_the_connection_it_came_on(
    raw_pair: RawPair, message: bytes
) -> None:
    """It is counted, its connection is LOST, and the others do not notice."""
    with World(tcp) as world:
        dialled, accepted = world.connect()
        member = world.members[1]
        pair = raw_pair(member.addresses[0])
        for said in (HELLO, framed(b"well-formed"), message):
            pair.send(said)
        world.until(lambda: len(member.conns(What.ACCEPTED)) == 2, "the raw socket")
        hostile = member.conns(What.ACCEPTED)[1]
        assert world.lost(1, hostile).malformed
        assert member.received[hostile] == [(b"well-formed", b"")]
        assert member.link.malformed >= 1
        world.send(dialled, b"undisturbed", b"body")
        world.until(lambda: accepted in member.received, "the others' message")
        assert member.conns(What.LOST) == [hostile]


def test_a_peer_that_does_not_say_hello_is_never_a_connection(
    raw_pair: RawPair, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that speaks NNG, but is no member, is counted, dropped and logged."""
    with World(tcp, 1) as world:
        (member,) = world.members
        raw_pair(member.addresses[0]).send(framed(b"good day"))
        world.until(lambda: member.link.malformed == 1, "the stranger")
        assert not member.events
    (line,) = caplog.messages
    assert "the peer sent something else before it said hello" in line


def test_silent_strangers_take_few_descriptors_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else need come for them to go."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (96, 96))
    with World(tcp, 1) as world, contextlib.ExitStack() as stack:
        (member,) = world.members
        assert isinstance(member.link, NngLink)
        link = member.link
        for count in range(1, 7):
            sock = socket.create_connection(split(member.addresses[0]))
            stack.enter_context(sock)
            world.until(
                functools.partial(lambda n: link.malformed >= n - 4, count), "the next"
            )
        world.until(lambda: len(link.strangers) == 4, "the last of them")
        monkeypatch.setattr("mq.stream.listening._GREETING_SECONDS", 0.2)
        world.until(lambda: not link.conns, "their end")
        assert link.malformed == 6


def test_a_stranger_to_tls_takes_little_memory() -> None:
    """Not that of the largest messages before it has shown a certificate."""
    with World(tls, 1) as world, contextlib.ExitStack() as stack:
        (member,) = world.members
        assert isinstance(member.link, NngLink)
        link = member.link
        before = resident_bytes()
        for _ in range(30):
            sock = socket.create_connection(split(member.addresses[0]))
            stack.enter_context(sock)
        world.until(lambda: len(link.strangers) == 30, "all of them")
        assert resident_bytes() - before < 30 << 20


# -- breaks ----------


@pytest.mark.parametrize("over", ["a unix socket", "TCP"])
def test_what_the_engine_left_is_seen_without_a_further_descriptor(
    over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be none; and no byte of it is taken."""
    with contextlib.ExitStack() as stack:
        if over == "TCP":
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            near = stack.enter_context(socket.create_connection(server.getsockname()))
            far = stack.enter_context(server.accept()[0])
        else:
            near, far = map(stack.enter_context, socket.socketpair())
        monkeypatch.setattr(os, "dup", mock.Mock(side_effect=OSError(errno.EMFILE)))
        assert not unread(near.fileno())
        far.sendall(b"left")
        far.close()
        for end in (4, 0):
            poller = select.poll()
            poller.register(near, select.POLLIN)
            assert poller.poll(PATIENCE * 1000)
            assert unread(near.fileno()) == bool(end)
            assert len(near.recv(10)) == end


def test_a_stream_of_which_nng_had_closed_its_descriptor_is_cut() -> None:
    """There is nothing to be asked then."""
    stream = TlsChannel.__new__(TlsChannel)
    stream._copy = -1
    assert stream._is_cut()


def test_a_connection_is_told_from_one_with_its_ports_on_another_host() -> None:
    """NNG hides its descriptor of a TLS stream: it is found by both full addresses."""
    with World(tls, 1) as world, contextlib.ExitStack() as stack:
        (member,) = world.members
        host, port = split(member.addresses[0])
        client = stack.enter_context(socket.socket())
        client.bind((host, 0))
        server = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        other = stack.enter_context(
            socket.create_connection(
                ("127.0.0.2", port),
                source_address=("127.0.0.2", client.getsockname()[1]),
            )
        )
        ended = stack.enter_context(server.accept()[0])
        client.connect((host, port))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        wrapped = pool.submit(_member_over_tls, client)
        world.until(wrapped.done, "the handshake")
        stream = stack.enter_context(wrapped.result())
        world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
        other.close()
        assert not ended.recv(1)
        stream.sendall(sized(framed(b"still here")))
        world.until(lambda: bool(member.received), "a message")
        assert not member.conns(What.LOST)
        stream.close()
        world.lost(0, member.conns(What.ACCEPTED)[0])


def _member_over_tls(sock: socket.socket) -> ssl.SSLSocket:
    """A connection of a member's that is no link's."""
    _, context = contexts("tls", pem_files("tls", **tls_options()))
    context.check_hostname = False
    stream = context.wrap_socket(sock)
    stream.sendall(sized(HELLO))
    return stream


@pytest.mark.parametrize("wire", WIRES)
def test_a_message_interrupted_while_it_is_taken_breaks_its_connection(
    monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """The stream never goes on with a gap."""
    with World(WIRES[wire]) as world:
        dialled, accepted = world.connect()
        assert isinstance(accepted, NngConn)
        channel = accepted._channel
        assert channel is not None
        take = channel.receive

        def interrupted() -> memoryview | None:
            if take() is not None:
                channel.release()
                raise KeyboardInterrupt
            return None

        monkeypatch.setattr(channel, "receive", interrupted)
        for index in range(3):
            dialled.try_send(b"%d" % index)
        with pytest.raises(KeyboardInterrupt):
            world.until(lambda: False, "the interrupt")
        monkeypatch.setattr(channel, "receive", take)
        world.lost(1, accepted)
        assert accepted not in world.members[1].received


# -- the process ----------


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_child_forked_after_use_gets_an_error_and_exits_as_usual() -> None:
    """In place of NNG's abort, and of the hang in its clean-up at exit."""
    ended = python(
        textwrap.dedent(
            """
            import os, sys, mq
            queue = mq.connect("nng", group=sys.argv[1], name="parent")
            child = os.fork()
            if child == 0:
                try:
                    mq.connect("nng", group=sys.argv[1], name="child")
                except mq.ForkedProcess as error:
                    assert "spawn" in str(error)
                    sys.exit(3)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status))
            queue.close()
            """
        ),
        f"fork-{os.getpid()}",
    )
    assert (ended.stdout, ended.returncode) == ("3\n", 0), ended.stderr


def test_a_child_forked_before_the_first_use_connects() -> None:
    """Importing NNG does not harm: its threads start with the first queue."""
    ended = python(
        textwrap.dedent(
            """
            import os, sys, mq, transports.nng
            child = os.fork()
            with mq.connect("nng", group=sys.argv[1], name=f"x{child}") as queue:
                if child:
                    queue.subscribe("t")
                    assert queue.recv(timeout=20).payload == "from the child"
                else:
                    queue.wait_for_subscribers("t", 1, timeout=20)
                    queue.publish("t", "from the child", timeout=20)
            if child:
                _, status = os.waitpid(child, 0)
                print(os.waitstatus_to_exitcode(status))
            """
        ),
        f"before-{os.getpid()}",
    )
    assert (ended.stdout, ended.returncode) == ("0\n", 0), ended.stderr


def test_exit_without_close_works_in_whatever_order_engines_were_loaded() -> None:
    """NNG's clean-up at exit waits until the queues are closed."""
    ended = python(
        textwrap.dedent(
            """
            import sys, mq
            first = mq.connect("zmq", group=sys.argv[1] + "z", name="first")
            a = mq.connect("nng", group=sys.argv[1], name="a")
            b = mq.connect("nng", group=sys.argv[1], name="b")
            b.subscribe("t")
            a.publish("t", 1)
            """
        ),
        f"exit-{os.getpid()}",
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


@contextlib.contextmanager
def only_free(count: int) -> Iterator[None]:
    """So many more descriptors can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 32, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        while count:
            os.close(held.pop())
            count -= 1
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)


@pytest.mark.parametrize("wire", ["tcp", "tls"])
@pytest.mark.parametrize("free", range(1, 9))
def test_a_connection_without_descriptors_is_closed_and_harms_no_other(
    free: int, wire: str
) -> None:
    """Whichever of its descriptors is the first that cannot be had."""
    with World(WIRES[wire]) as world:
        dialled, accepted = world.connect()
        before = descriptors()
        with socket.socket() as stranger:
            answered = select.poll()
            answered.register(stranger, select.POLLIN)
            with only_free(free):
                stranger.connect(split(world.members[1].addresses[0]))
                stranger.sendall(b"neither a member nor TLS")
                world.until(lambda: bool(answered.poll(0)), "an answer or the end")
        world.send(dialled, b"undisturbed", b"body")
        world.until(lambda: accepted in world.members[1].received, "the message")
        world.until(lambda: descriptors() <= before, "all of it to be closed")


@pytest.mark.parametrize("wire", ["tcp", "tls"])
def test_a_listener_without_descriptors_rests_for_a_while(
    wire: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And then takes whoever has come meanwhile."""
    monkeypatch.setattr("mq.stream.listening.DEAF_SECONDS", 1.0)
    with World(WIRES[wire], 1) as world, socket.socket() as stranger:
        (member,) = world.members
        world.until(lambda: True, "rest")
        world.nap = 0.01
        with only_free(0):
            stranger.connect(split(member.addresses[0]))
            world.until(lambda: "cannot accept" in caplog.text, "a warning")
            until = time.monotonic() + 0.2
            world.until(lambda: time.monotonic() > until, "what it may do again")
            assert caplog.text.count("cannot accept") == 1
        stranger.sendall(b"neither a member nor TLS")
        world.until(lambda: member.link.malformed == 1, "the stranger")


def test_sockets_of_the_application_live_on_when_the_last_link_closes() -> None:
    """The engine is the whole process's."""
    with pynng.Pair0(listen="inproc://own") as one, pynng.Pair0() as other:
        other.dial("inproc://own", block=True)
        with World(tcp) as world:
            world.connect()
        other.send(b"still here")
        one.recv_timeout = int(PATIENCE * 1000)
        assert one.recv() == b"still here"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("wire", WIRES)
def test_a_forked_child_lets_go_and_leaves_the_parent_alone(wire: str) -> None:
    """It cannot open a link, and the parent's goes on."""
    with World(WIRES[wire]) as world:
        dialled, accepted = world.connect()
        gc.collect()  # sockets of pynng's own, which abort a child that frees them
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for member in world.members:
                    member.link.abandon()
                poller = Poller()
                try:
                    WIRES[wire]().open(poller, [], None)
                except ForkedProcess:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        world.send(dialled, b"still here")
        received = world.members[1].received.setdefault(accepted, [])
        world.until(lambda: bool(received), "a message after the fork")
        assert received == [(b"still here", b"")]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_a_listener_that_is_not_the_links() -> None:
    """Though it has the same port, on another address; the link's is closed there."""
    with World(tls, 1) as world:
        _, port = split(world.members[0].addresses[0])
        with socket.create_server(("127.0.0.2", port)):
            child = os.fork()
            if child == 0:
                ours, theirs = (
                    listening((host, port)) for host in ("127.0.0.1", "127.0.0.2")
                )
                os._exit(not (ours < 0 <= theirs))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("wire", WIRES)
def test_a_forked_child_does_not_hide_the_death_of_its_parent(wire: str) -> None:
    """The child's copies of the connections are closed, so peers see the parent die."""
    with World(WIRES[wire], 1) as world:
        member = world.members[0]
        script = textwrap.dedent(
            """
            import os, signal, sys
            sys.path[:0] = sys.argv[1:2]
            from mq.testing.link_world import World
            from mq.transport import What
            from nng_links import ipc, tcp, tls
            with World({"ipc": ipc, "tcp": tcp, "tls": tls}[sys.argv[2]], 1) as world:
                member = world.members[0]
                conn = member.link.dial(sys.argv[3])
                world.until(lambda: conn in member.conns(What.OPENED), "OPENED")
                if os.fork() == 0:
                    member.link.abandon()
                    print(os.getpid(), flush=True)
                    signal.pause()
                signal.pause()
            """
        )
        arguments = [os.path.dirname(__file__), wire, member.addresses[0]]
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, *arguments],
            stdout=subprocess.PIPE,
        ) as parent:
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            parent.kill()
            try:
                world.lost(0, member.conns(What.ACCEPTED)[0])
            finally:
                os.kill(child, signal.SIGKILL)  # it was alive all the time


# -- addresses and options ----------


def test_addresses_are_ranked_by_wire_and_reach() -> None:
    """ipc comes first on one host; from elsewhere only what is routable is left."""
    link = NngLink()
    candidates = ["tcp://10.0.0.1:5", "tcp://127.0.0.1:5", "ipc:///a/b", "zmq://x"]
    here = ["ipc:///a/b", "tcp://10.0.0.1:5", "tcp://127.0.0.1:5"]
    assert link.rank(candidates, same_host=True) == here
    assert link.rank(candidates, same_host=False) == ["tcp://10.0.0.1:5"]
    assert tcp().rank(candidates, same_host=True) == here[1:]
    assert tls().rank(["tcp://a:1", "tls+tcp://a:1"], True) == ["tls+tcp://a:1"]


def test_a_socket_file_of_a_dead_process_is_replaced(
    own_temporary_directory: str,
) -> None:
    """A fixed path can be listened on again after a crash."""
    path = f"{own_temporary_directory}/stale"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    poller, link = Poller(), ipc()
    assert link.open(poller, [f"ipc://{path}"], None) == [f"ipc://{path}"]
    link.close()
    poller.close()


def test_options_and_addresses_that_make_no_sense_are_refused() -> None:
    """A misspelt option is a TypeError, a foreign or malformed address a ValueError."""
    with pytest.raises(TypeError):
        NngLink(wire=("tcp",))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="wires"):
        NngLink(wires=("udp",))
    with pytest.raises(ValueError, match="depth"):
        NngLink(depth=0)
    poller = Poller()
    for address in ("ipc", "ipc:///a/b", "tcp://host", "tcp://host:99999", "udp://a:1"):
        with pytest.raises(ValueError, match="not of the form"):
            tcp().open(poller, [address], None)
    poller.close()


# -- TLS ----------


def test_files_for_tls_that_are_not_given_are_named() -> None:
    """Before anything is opened."""
    with pytest.raises(ValueError, match=r"nng:tls needs certificate=.*missing: priv"):
        NngTlsLink(**{**tls_options(), "private_key": ""})
