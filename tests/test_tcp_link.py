"""What plain stream sockets do with hostile peers, rests, interrupts, descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from refusals import unknown_host

from mq.mesh.poller import Poller
from mq.stream import passing
from mq.stream.conn import StreamConn
from mq.stream.descriptors import DescriptorConn
from mq.stream.link import StreamLink
from mq.stream.sockets import bound_unix, peer_user
from mq.testing.link_world import PATIENCE, World
from mq.transport import CHUNK_BYTES, MAX_HEAD_BYTES, Capabilities, Conn, What
from transports.tcp import TcpLink

HELLO = TcpLink.hello
SIZES = struct.Struct("<II")

MALFORMED = {
    "a head of no bytes": SIZES.pack(0, 0),
    "a body without a head": SIZES.pack(0, 5) + b"12345",
    "a head that is too large": SIZES.pack(MAX_HEAD_BYTES + 1, 0),
    "a body that is too large": SIZES.pack(4, CHUNK_BYTES + 1) + b"head",
    "sizes beyond all memory": b"\xff" * 8,
}


def framed(head: bytes, body: bytes = b"") -> bytes:
    return SIZES.pack(len(head), len(body)) + head + body


@contextmanager
def raw_peer(world: World, said: bytes = HELLO) -> Iterator[socket.socket]:
    """A plain socket, connected to the first member, that has said this."""
    host, _, port = world.members[0].addresses[0].partition("://")[2].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as peer:
        peer.sendall(said)
        yield peer


def accepted_of(world: World) -> Conn:
    member = world.members[0]
    world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
    return member.conns(What.ACCEPTED)[-1]


# -- hostile peers ----------


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_breaks_only_the_connection_it_came_on(
    message: bytes,
) -> None:
    """It is counted, its connection is LOST, and the others do not notice."""
    with World(TcpLink) as world:
        member = world.members[0]
        dialled, accepted = world.connect(1, 0)
        sent = HELLO + framed(b"well-formed") + message + framed(b"too late")
        with raw_peer(world, sent):
            world.until(lambda: len(member.conns(What.ACCEPTED)) == 2, "the raw peer")
            hostile = member.conns(What.ACCEPTED)[1]
            world.lost(0, hostile)
        assert member.received[hostile] == [(b"well-formed", b"")]
        assert member.link.malformed == 1
        world.send(dialled, b"undisturbed", b"body")
        world.until(lambda: accepted in member.received, "the others' message")
        assert member.conns(What.LOST) == [hostile]


def test_a_message_that_comes_byte_by_byte_arrives() -> None:
    """However the stream is cut, also within the hello and the sizes."""
    with World(TcpLink, 1) as world, raw_peer(world, b"") as peer:
        member = world.members[0]
        for byte in HELLO + framed(b"head", b"body") + framed(b"next"):
            peer.sendall(bytes([byte]))
            member.pump()
        world.until(
            lambda: len(member.received.get(accepted_of(world), [])) == 2, "two"
        )
        assert member.received[accepted_of(world)] == [
            (b"head", b"body"),
            (b"next", b""),
        ]


@pytest.mark.parametrize("end", [3, 10, 200_000])
def test_a_stream_that_ends_within_a_message_is_lost_without_it(end: int) -> None:
    """What was whole arrives; the torn message does not."""
    torn = framed(b"torn", bytes(500_000))[:end]
    with World(TcpLink, 1) as world:
        member = world.members[0]
        with raw_peer(world, HELLO + framed(b"whole", b"body") + torn):
            conn = accepted_of(world)
        world.lost(0, conn)
        assert member.received[conn] == [(b"whole", b"body")]


def test_large_bodies_and_small_messages_take_turns() -> None:
    """Whatever part of the next message comes with the end of one before."""
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        sent = []
        for index in range(60):
            size = (0, 3_000, 70_000, 4088, 900_000, 1)[index % 6]
            sent.append((b"%d" % index * (1 + 700 * (index % 5)), os.urandom(size)))
            world.send(dialled, *sent[-1])
        world.arrive(world.members[1].received.setdefault(accepted, []), 60)
        assert world.members[1].received[accepted] == sent


def test_a_discarded_body_is_passed_over_while_it_still_comes() -> None:
    """What follows it is read as if it had not been there."""
    with World(TcpLink, 1) as world, raw_peer(world) as peer:
        world.members[0].reading = False
        conn = accepted_of(world)
        heads: list[bytes] = []

        def take() -> bool:
            if (message := conn.receive()) is not None:
                heads.append(bytes(message[0]))
                conn.discard_body()
            return bool(heads)

        peer.sendall(SIZES.pack(3, 900_000) + b"one" + bytes(10_000))
        world.until(take, "the first head")
        for _ in range(89):
            peer.sendall(bytes(10_000))
            world.members[0].pump()
            assert conn.receive() is None
        peer.sendall(framed(b"two"))
        heads.clear()
        world.until(take, "the second head")
        assert heads == [b"two"]


def test_an_idle_connection_holds_little_memory() -> None:
    """Its buffer grows with what arrives at a time."""
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        assert isinstance(accepted, StreamConn)
        assert len(accepted._buffer) <= 16 * 1024
        for _ in range(20):
            world.send(dialled, bytes(60_000))
        world.arrive(world.members[1].received.setdefault(accepted, []), 20)
        assert len(accepted._buffer) <= 256 * 1024


# -- sending ----------


class _Taking:
    """Stands for a socket's `sendmsg` that takes so many bytes of each call."""

    def __init__(self, conn: Conn, takes: Sequence[int | BaseException]) -> None:
        self._takes = list(takes)
        self._send = conn._send  # type: ignore[attr-defined]

    def __call__(self, parts: Sequence[Any], *others: Any) -> int:
        if not self._takes:
            return int(self._send(parts, *others))
        take = self._takes.pop(0)
        if isinstance(take, BaseException):
            raise take
        return int(self._send((b"".join(parts)[:take],), *others))


@pytest.mark.parametrize("taken", [1, 8, 10, 12, 13, 40_000, 100_011])
def test_what_the_kernel_does_not_take_at_once_follows(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Before anything else, and unaltered, though head and body were changed."""
    body = os.urandom(100_000)
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        monkeypatch.setattr(dialled, "_send", _Taking(dialled, [taken, 1, 1]))
        head, memory = bytearray(b"head"), bytearray(body)
        assert dialled.try_send(head, memoryview(memory))
        assert not dialled.try_send(b"next")
        dialled.let_go()
        head[:] = memory[:] = b""
        world.until(lambda: dialled in world.members[0].conns(What.WRITABLE), "room")
        world.send(dialled, b"next")
        world.arrive(world.members[1].received.setdefault(accepted, []), 2)
        assert world.members[1].received[accepted] == [(b"head", body), (b"next", b"")]


def test_a_rest_is_delivered_by_a_connection_that_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And from memory of its own, for the caller has taken his back."""
    body = os.urandom(100_000)
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        monkeypatch.setattr(dialled, "_send", _Taking(dialled, [50_000, 1]))
        memory = bytearray(body)
        assert dialled.try_send(b"head", memoryview(memory))
        dialled.close()
        memory[:] = bytes(len(memory))
        world.lost(1, accepted)
        assert world.members[1].received[accepted] == [(b"head", body)]


def test_a_socket_that_cannot_send_is_lost_after_what_it_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the kernel's reason, even one that it would not report itself."""
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        world.send(accepted, b"sent before")
        lacking = OSError(105, os.strerror(105))
        monkeypatch.setattr(dialled, "_send", _Taking(dialled, [lacking]))
        assert dialled.try_send(b"head")
        world.lost(0, dialled)
        assert "buffer space" in world.members[0].events[-1].reason
        assert world.members[0].received[dialled] == [(b"sent before", b"")]


@pytest.mark.parametrize("call", ["_send", "_receive_into"])
def test_a_call_that_was_interrupted_breaks_its_connection(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nobody knows what the socket moved, so the stream never goes on with a gap."""
    with World(TcpLink) as world:
        dialled, accepted = world.connect()
        conn: Any = dialled if call == "_send" else accepted
        moves = getattr(conn, call)

        def interrupted(*arguments: Any) -> int:
            moves(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(conn, call, interrupted)
            with pytest.raises(KeyboardInterrupt):
                world.until(lambda: not dialled.try_send(b"one"), "the interrupt")
        conn.try_send(b"two")
        dialled.try_send(b"three")
        world.lost(0, dialled)
        world.lost(1, accepted)
        received = world.members[1].received.get(accepted, [])
        assert received in ([], [(b"one", b"")])


def test_one_that_talks_without_end_does_not_keep_others_from_their_turn() -> None:
    """Each poll reports every connection that has something."""
    with World(TcpLink, 3) as world:
        member = world.members[2]
        loud, _ = world.connect(0, 2)
        quiet, quiet_end = world.connect(1, 2)
        for _ in range(50):
            loud.try_send(b"again", memoryview(bytes(10_000)))
        quiet.try_send(b"a word")
        member.reading = False
        seen: set[Conn] = set()

        def both() -> bool:
            seen.update(e.conn for e in member.link.poll() if e.what is What.READABLE)
            return len(seen) == 2

        world.until(both, "both readable")
        assert quiet_end in seen


def test_a_name_with_several_addresses_is_dialled_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`localhost` may mean ::1 first, where nobody listens."""
    with World(TcpLink) as world:
        ours, theirs = world.members
        port = int(theirs.addresses[0].rpartition(":")[2])
        with socket.create_server(("127.0.0.1", 0)) as server:
            unused = server.getsockname()
        targets = [(socket.AF_INET, unused), (socket.AF_INET, ("127.0.0.1", port))]
        monkeypatch.setattr(ours.link, "targets", lambda address: targets)
        conn = ours.link.dial("tcp://many.example:1")
        world.until(lambda: conn in ours.conns(What.OPENED), "OPENED")


def test_an_unknown_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dial does not raise: LOST says what the resolver said."""
    with World(TcpLink, 1) as world:
        monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
        conn = world.members[0].link.dial("tcp://nobody.invalid:1")
        world.lost(0, conn)
        assert "nobody.invalid" in world.members[0].events[0].reason
        assert "not known" in world.members[0].events[0].reason


# -- descriptors ----------


class UnixLink(StreamLink):
    """A link over unix sockets whose messages may carry descriptors."""

    capabilities = Capabilities(reach="host")
    conn_class = DescriptorConn
    admitted = True

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        return self.listen(poller, ["unix"], directory)

    def bind(self, address: str, directory: str | None) -> tuple[socket.socket, str]:
        path = f"{self.directory}/{os.urandom(4).hex()}"
        return bound_unix(path), path

    def targets(self, address: str) -> list[tuple[int, str]]:
        return [(socket.AF_UNIX, address)]

    def objection(self, sock: socket.socket) -> str:
        return "" if self.admitted and peer_user(sock) == os.getuid() else "a stranger"

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        return list(candidates)

    def is_routable(self, address: str) -> bool:
        return False


UnixWorld = Callable[[], World]


@pytest.fixture
def unix(tmp_path_factory: pytest.TempPathFactory) -> UnixWorld:
    """Makes worlds of `UnixLink`."""
    directory = tmp_path_factory.mktemp("u")

    class Link(UnixLink):
        pass

    Link.directory = str(directory)  # type: ignore[attr-defined]
    return lambda: World(Link)


@contextmanager
def files(count: int) -> Iterator[list[int]]:
    """Descriptors of files that hold their own number."""
    made = []
    try:
        for index in range(count):
            made.append(os.memfd_create(f"file-{index}"))
            os.write(made[-1], b"%d" % index)
        yield made
    finally:
        for fd in made:
            os.close(fd)


def take_files(conn: DescriptorConn) -> list[bytes]:
    """The content of the descriptors that have arrived, which are closed."""
    found = []
    while conn.descriptors:
        fd = conn.descriptors.popleft()
        assert not os.get_inheritable(fd)
        found.append(os.pread(fd, 10, 0))
        os.close(fd)
    return found


def both_ends(world: World) -> tuple[DescriptorConn, DescriptorConn]:
    dialled, accepted = world.connect()
    assert isinstance(dialled, DescriptorConn)
    assert isinstance(accepted, DescriptorConn)
    return dialled, accepted


@pytest.mark.parametrize("flag", [True, False], ids=["MSG_CMSG_CLOEXEC", "without"])
def test_descriptors_arrive_with_their_message_and_in_order(
    flag: bool, unix: UnixWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `receive` returns a message, its descriptors are there; none is inherited.

    Also on systems where `recvmsg` cannot see to that.
    """
    if not flag:
        monkeypatch.setattr("mq.stream.passing._CLOEXEC", 0)
        in_python = "mq.stream.descriptors.receive_passing"
        monkeypatch.setattr(in_python, passing.receive_passing)
    with unix() as world, files(6) as made:
        dialled, accepted = both_ends(world)
        world.members[1].reading = False
        body = memoryview(os.urandom(150_000))
        sent = [b"plain", b"one", b"with a body", b"plain again", b"four"]
        assert dialled.try_send(sent[0])
        assert dialled.try_send_with(sent[1], made[:1])
        assert dialled.try_send_with(sent[2], made[1:2], body)
        world.until(lambda: dialled.try_send(sent[3]), "room")
        world.until(lambda: dialled.try_send_with(sent[4], made[2:]), "room")
        wanted = [b"0", b"1", b"2", b"3", b"4", b"5"]
        needed = [0, 1, 2, 2, 6]
        heads: list[bytes] = []
        contents: list[bytes] = []
        into = memoryview(bytearray(len(body)))

        def take() -> bool:
            while not heads or heads[-1] != b"with a body" or into == body:
                if (message := accepted.receive()) is None:
                    return len(heads) == 5
                heads.append(bytes(message[0]))
                contents.extend(take_files(accepted))
                assert len(contents) >= needed[len(heads) - 1]
                if message[1] and not accepted.receive_body(into):
                    return False
            accepted.receive_body(into)
            return False

        world.until(take, "all messages")
        assert heads == sent
        assert contents == wanted


def test_descriptors_of_a_refused_message_are_not_sent(unix: UnixWorld) -> None:
    """All of it or nothing."""
    with unix() as world, files(1) as made:
        dialled, accepted = both_ends(world)
        world.members[1].reading = False
        body = memoryview(bytes(100_000))
        while dialled.try_send(b"fill", body):
            pass
        assert not dialled.try_send_with(b"refused", made)
        world.members[1].reading = True
        world.until(lambda: dialled in world.members[0].conns(What.WRITABLE), "room")
        world.send(dialled, b"last")
        received = world.members[1].received.setdefault(accepted, [])
        world.until(lambda: bool(received) and received[-1][0] == b"last", "the last")
        assert not accepted.descriptors


def test_descriptors_that_nobody_takes_break_the_connection(unix: UnixWorld) -> None:
    """And are closed with it, as are those that wait when it is closed."""
    with unix() as world, files(10) as made:
        dialled, accepted = both_ends(world)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(DescriptorConn.max_descriptors // 10 + 1):
            world.until(lambda: dialled.try_send_with(b"more", made), "room")
        world.lost(1, accepted)
        assert world.members[1].link.malformed == 1
        world.lost(0, dialled)
        assert len(os.listdir("/proc/self/fd")) == before - 2
        dialled, accepted = both_ends(world)
        assert dialled.try_send_with(b"some", made)
        world.until(lambda: len(accepted.descriptors) == 10, "the descriptors")
        accepted.close()
        world.lost(0, dialled)
        assert len(os.listdir("/proc/self/fd")) == before - 2


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """In this block the process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def test_descriptors_that_find_no_room_here_break_the_connection(
    unix: UnixWorld,
) -> None:
    """The kernel drops them in silence: nobody may think that they arrived."""
    with unix() as world, files(5) as made:
        dialled, accepted = both_ends(world)
        assert dialled.try_send_with(b"head", made)
        with no_descriptors_left():
            world.members[1].pump()
        world.lost(1, accepted)
        reason = next(e.reason for e in world.members[1].events if e.reason)
        assert "ulimit -n" in reason
        assert accepted not in world.members[1].received


def test_a_peer_that_is_objected_to_is_never_a_connection(unix: UnixWorld) -> None:
    """Neither at the end that dialled nor at the other."""
    with unix() as world:
        ours, theirs = world.members
        theirs.link.admitted = False  # type: ignore[attr-defined]
        conn = ours.link.dial(theirs.addresses[0])
        world.lost(0, conn)
        assert not ours.conns(What.OPENED)
        assert not theirs.events
        again = theirs.link.dial(ours.addresses[0])
        world.lost(1, again)
        assert "a stranger" in theirs.events[0].reason
