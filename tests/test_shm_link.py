"""What is special about `shm`: segments, who may have them, and hostile peers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import random
import resource
import select
import socket
import struct
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from link_fixtures import own_temporary_directory
from shared_memory import segment_of

import mq
from mq.borrowing import Unmapped, is_borrowed
from mq.buffers import Pool
from mq.lending import BLOCK_BYTES
from mq.mappings import map_descriptor
from mq.mesh.poller import Poller
from mq.segments import Block, seal
from mq.stream.framing import SIZES
from mq.testing.link_world import Member, World
from mq.transport import What
from transports.shm import ShmConn, ShmLink

__all__ = ["own_temporary_directory"]

MakeDescriptor = Callable[[], int]
SIZE = 1 << 16
NOTE = struct.Struct("<BIQ")
make = functools.partial(ShmLink, shm_bytes=8 * BLOCK_BYTES)
take = Pool(0).take


def pair(world: World) -> tuple[ShmConn, ShmConn]:
    """The two ends of a connection, which know each other."""
    ours, theirs = world.connect()
    assert isinstance(ours, ShmConn)
    assert isinstance(theirs, ShmConn)
    for end in (ours, theirs):
        end.guard(None)
    return ours, theirs


def lender_of(conn: ShmConn) -> ShmLink:
    assert isinstance(conn._link, ShmLink)
    return conn._link


def block_of(conn: ShmConn, content: bytes) -> Block:
    """A block of the owner of this end, with that content."""
    block = lender_of(conn).lender.take(BLOCK_BYTES)
    assert block is not None
    block.area[: len(content)] = content
    return block


def borrow(conn: ShmConn, block: Block, nbytes: int = 5) -> memoryview:
    return conn.borrow(block.segment.id, block.offset, nbytes, take)


# -- segments ----------


def test_a_lent_segment_is_read_where_it_is() -> None:
    """What follows a lend finds the segment mapped, whatever is sent between."""
    with World(make) as world:
        ours, theirs = pair(world)
        blocks = [block_of(ours, b"no. %d" % number) for number in range(3)]
        for number, block in enumerate(blocks):
            assert ours.lend(block.segment)
            world.send(ours, b"a reference")
            received = world.members[1].received.setdefault(theirs, [])
            world.arrive(received, number + 1)
            area = borrow(theirs, block)
            assert is_borrowed(area)
            assert bytes(area) == b"no. %d" % number
            block.area[:1] = b"N"
            assert bytes(area[:1]) == b"N"
            area[:2] = b"xx"
            assert bytes(block.area[:2]) == b"No"


def test_a_segment_is_announced_once_a_connection() -> None:
    """And again on the next one."""
    with World(make) as world:
        ours, theirs = pair(world)
        block = block_of(ours, b"first")
        for _ in range(3):
            assert ours.lend(block.segment)
        world.send(ours, b"a reference")
        world.arrive(world.members[1].received.setdefault(theirs, []), 1)
        assert len(theirs._mappings) == 1
        ours.close()
        world.lost(1, theirs)
        theirs.close()
        again, accepted = pair(world)
        assert again.lend(block.segment)
        world.send(again, b"a reference")
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)
        assert bytes(borrow(accepted, block)) == b"first"


def test_a_segment_that_is_given_back_is_unmapped_at_the_other_end() -> None:
    """Also where the connection had no room when that was to be said."""
    with World(make) as world:
        ours, theirs = pair(world)
        block: Block | None = block_of(ours, b"first")
        assert block is not None
        assert ours.lend(block.segment)
        world.send(ours, b"a reference")
        world.arrive(world.members[1].received.setdefault(theirs, []), 1)
        number = block.segment.id
        world.members[1].reading = False
        body = memoryview(bytes(1 << 20))
        while ours.try_send(b"full", body):
            pass
        ours.let_go()
        block = None
        lender_of(ours).lender.trim()
        world.members[0].pump()
        assert number in theirs._mappings
        world.members[1].reading = True
        world.until(
            lambda: number not in theirs._mappings, "the segment to be unmapped"
        )
        assert number not in ours._lent


def test_a_segment_that_is_retired_is_unmapped_after_the_last_message_in_it() -> None:
    """A late one comes when all ends were told already that its segment is gone."""
    with World(make) as world:
        ours, theirs = pair(world)
        block = block_of(ours, b"first")
        lender_of(ours).lender.retire(block.segment)
        world.members[0].pump()
        received = world.members[1].received.setdefault(theirs, [])
        for number in range(2):
            assert ours.lend(block.segment)
            assert ours.try_send(b"a reference")
            world.arrive(received, number + 1)
            world.until(lambda: not theirs._mappings, "the segment to be unmapped")
            assert not ours._lent


def test_a_view_outlives_its_segment_and_both_links() -> None:
    """Nobody's end takes memory from under a reader."""
    with World(make) as world:
        ours, theirs = pair(world)
        block: Block | None = block_of(ours, b"first")
        assert block is not None
        ours.lend(block.segment)
        world.send(ours, b"a reference")
        world.arrive(world.members[1].received.setdefault(theirs, []), 1)
        view = borrow(theirs, block)
        block = None
    gc.collect()
    assert bytes(view) == b"first"


def map_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mq.borrowing.map_descriptor", refuse)


def test_a_segment_that_cannot_be_mapped_is_copied_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning that names the limit; nothing is refused."""
    with World(make) as world:
        ours, theirs = pair(world)
        blocks = [block_of(ours, b"no. 0"), block_of(ours, b"no. 1")]
        map_nothing(monkeypatch)
        for block in blocks:
            ours.lend(block.segment)
        world.send(ours, b"a reference")
        world.arrive(world.members[1].received.setdefault(theirs, []), 1)
        for number, block in enumerate(blocks):
            area = borrow(theirs, block)
            assert not is_borrowed(area)
            assert bytes(area) == b"no. %d" % number
        assert any(isinstance(m, Unmapped) for m in theirs._mappings.values())
        (record,) = caplog.records
        assert "Cannot allocate memory" in record.getMessage()
        assert "shm_bytes" in record.getMessage()


# -- hostile peers ----------


def _swap_proofs(world: World, sock: socket.socket, copies: int = 1) -> bytes:
    """Connect and show memory of the test's own; the number in the member's."""
    sock.settimeout(20.0)
    sock.connect(world.members[0].addresses[0].removeprefix("shm://"))
    return _swap_proofs_on(world, sock, copies)


def _swap_proofs_on(world: World, sock: socket.socket, copies: int = 1) -> bytes:
    proof = memfd(16)
    seal(proof)
    socket.send_fds(sock, [b"M"], [proof] * copies)
    os.close(proof)
    world.until(lambda: bool(select.select([sock], [], [], 0)[0]), "its proof")
    _, (theirs,), _, _ = socket.recv_fds(sock, 1, 1)
    number = os.pread(theirs, 16, 0)
    os.close(theirs)
    return number


def dial_raw(world: World) -> socket.socket:
    """A connection of a known peer on which the test says what it likes."""
    sock = dial_unknown(world)
    accepted(world).guard(None)
    return sock


def dial_unknown(world: World) -> socket.socket:
    """The same, of one that has said no more than the hello."""
    member = world.members[0]
    known = len(member.conns(What.ACCEPTED))
    sock = socket.socket(socket.AF_UNIX)
    sock.sendall(_swap_proofs(world, sock) + ShmLink.hello)
    world.until(lambda: len(member.conns(What.ACCEPTED)) > known, "ACCEPTED")
    answer = sock.recv(16 + len(ShmLink.hello), socket.MSG_WAITALL)
    assert answer == bytes(16) + ShmLink.hello
    return sock


def test_who_tells_another_number_than_our_memory_has_is_no_connection() -> None:
    """It may pass descriptors and yet not read what they are of."""
    with World(make, 1) as world, socket.socket(socket.AF_UNIX) as sock:
        member = world.members[0]
        _swap_proofs(world, sock)
        sock.sendall(bytes(16) + ShmLink.hello)

        world.until(lambda: _has_ended(sock), "the end of the connection")

        assert not member.conns(What.ACCEPTED)


def test_who_shows_more_than_one_memory_is_no_connection() -> None:
    """None of what it passes stays open."""
    with World(make, 1) as world, socket.socket(socket.AF_UNIX) as sock:
        member = world.members[0]
        descriptors = len(os.listdir("/proc/self/fd"))
        _swap_proofs(world, sock, copies=2)

        world.until(lambda: _has_ended(sock), "the end of the connection")

        assert not member.conns(What.ACCEPTED)
        assert len(os.listdir("/proc/self/fd")) == descriptors


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def accepted(world: World) -> ShmConn:
    """The member's end of the newest connection."""
    conn = world.members[0].conns(What.ACCEPTED)[-1]
    assert isinstance(conn, ShmConn)
    return conn


def note(kind: int, number: int, nbytes: int) -> bytes:
    return SIZES.pack(0, NOTE.size) + NOTE.pack(kind, number, nbytes)


def memfd(nbytes: int = SIZE, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("test", flags)
    os.ftruncate(fd, nbytes)
    return fd


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def a_directory() -> int:
    return os.open("/", os.O_RDONLY)


def a_socket() -> int:
    return socket.socket().detach()


def grows_only() -> int:
    fd = memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def write_only() -> int:
    fd = memfd()
    seal(fd)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


def too_short() -> int:
    fd = memfd(SIZE - 1)
    seal(fd)
    return fd


def empty() -> int:
    fd = memfd(0)
    seal(fd)
    return fd


def of_huge_pages() -> int:
    """Sealed, and yet a SIGBUS for who reads it where no such page is free."""
    fd = os.memfd_create("fake", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, os.fstatvfs(fd).f_bsize)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def _has_huge_pages() -> bool:
    try:
        os.close(of_huge_pages())
    except OSError:  # the kernel was built without them
        return False
    return True


FAKES: list[MakeDescriptor] = [
    *([of_huge_pages] if _has_huge_pages() else []),
    a_pipe,
    a_file,
    a_directory,
    a_socket,
    memfd,
    functools.partial(memfd, flags=0),
    grows_only,
    write_only,
    too_short,
    empty,
]


def broken(world: World, conn: ShmConn) -> str:
    """Pump until the connection is lost for what its peer did; why it was."""
    assert world.lost(0, conn).malformed
    return conn.reason


def _say(sock: socket.socket, said: bytes, passed: int) -> None:
    """Send it, with so many descriptors of a segment."""
    segment = segment_of(SIZE, SIZE)
    rights = array("i", [segment.fd] * passed)
    extras = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if passed else []
    sock.sendmsg([said], extras)


of_strangers = pytest.mark.parametrize(
    ("said", "passed"),
    [
        (note(1, 7, SIZE), 1),
        (note(2, 7, 0), 0),
        (SIZES.pack(4, 0) + b"head", 1),
    ],
    ids=["segment", "forget", "descriptor"],
)


@of_strangers
def test_of_a_stranger_who_dials_nothing_is_borrowed(said: bytes, passed: int) -> None:
    """Nor anything kept that it passes: it may be anybody of the same user."""
    with World(make, 1) as world, dial_unknown(world) as sock:
        conn = accepted(world)
        _say(sock, said, passed)
        broken(world, conn)
        assert world.members[0].link.malformed == 1
        assert not conn._mappings
        assert not conn.descriptors


@of_strangers
def test_of_a_stranger_who_is_dialled_nothing_is_borrowed(
    said: bytes, passed: int, own_temporary_directory: str
) -> None:
    """As of one who dials."""
    path = f"{own_temporary_directory}/theirs.shm"
    with World(make, 1) as world, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        conn = world.members[0].link.dial(f"shm://{path}")
        assert isinstance(conn, ShmConn)
        sock, _ = listener.accept()
        with sock:
            sock.sendall(_swap_proofs_on(world, sock) + ShmLink.hello)
            world.until(lambda: bool(world.members[0].conns(What.OPENED)), "OPENED")
            _say(sock, said, passed)
            broken(world, conn)
        assert world.members[0].link.malformed == 1
        assert not conn._mappings
        assert not conn.descriptors


@pytest.mark.parametrize("make_fake", FAKES)
def test_what_is_no_sealed_memory_breaks_the_connection(
    make_fake: MakeDescriptor,
) -> None:
    """Another descriptor, unsealed, or shorter than announced; others go on."""
    with World(make, 1) as world:
        good = dial_raw(world)
        other = accepted(world)
        sock = dial_raw(world)
        conn = accepted(world)
        fd = make_fake()
        with sock, good:
            socket.send_fds(sock, [note(1, 7, SIZE)], [fd])
            os.close(fd)
            assert "no member does" in broken(world, conn)
            assert world.members[0].link.malformed == 1
            assert not conn._mappings
            assert not conn.descriptors
            good.sendall(SIZES.pack(4, 0) + b"head")
            world.arrive(world.members[0].received.setdefault(other, []), 1)


def test_segments_that_cannot_be_mapped_do_not_take_all_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer may say that they are larger than this process could have."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        map_nothing(monkeypatch)
        fd = memfd()
        seal(fd)
        for number in range(4):
            socket.send_fds(sock, [note(1, number, SIZE)], [fd])
        sock.sendall(SIZES.pack(4, 0) + b"head")
        received = world.members[0].received
        world.arrive(received.setdefault(conn, []), 1)
        assert conn.kept == 4
        socket.send_fds(sock, [note(1, 4, SIZE)], [fd])
        os.close(fd)
        lost = world.lost(0, conn)
        assert "no room to map or keep a segment" in lost.reason
        assert not lost.malformed  # it may be this process that has little room
        assert world.members[0].link.malformed == 1
        assert not conn.kept


@pytest.mark.parametrize(
    "sizes", [[2**63 - 1], [2**47], [2**43] * 3], ids=["any", "all", "three"]
)
def test_no_peer_takes_all_address_space(sizes: list[int]) -> None:
    """However large a memory it has made, which need not have one page."""
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        for number, size in enumerate(sizes):
            fd = memfd(size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            socket.send_fds(sock, [note(1, number, size)], [fd])
            os.close(fd)
        assert "no member does" in broken(world, conn)
        assert not conn.descriptors


def test_a_well_made_note_of_a_peer_is_taken() -> None:
    """The counterpart of the refusals: such a segment is mapped."""
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        segment = segment_of(SIZE, SIZE)
        segment.map[:5] = b"hello"
        socket.send_fds(sock, [note(1, 7, SIZE)], [segment.fd])
        world.until(lambda: 7 in conn._mappings, "the note")
        assert bytes(conn.borrow(7, 0, 5, take)) == b"hello"
        for offset, nbytes in ((SIZE, 1), (SIZE - 1, 2), (0, SIZE + 1), (0, 0)):
            with pytest.raises(ValueError, match="of a segment of"):
                conn.borrow(7, offset, nbytes, take)
        with pytest.raises(ValueError, match="never lent"):
            conn.borrow(8, 0, 1, take)


@pytest.mark.parametrize(
    "garbage",
    [
        note(1, 7, SIZE),
        note(0, 7, SIZE),
        note(3, 7, SIZE),
        note(255, 2**32 - 1, 2**64 - 1),
        SIZES.pack(0, 1) + b"\x01",
        SIZES.pack(0, NOTE.size - 1) + bytes(NOTE.size - 1),
        SIZES.pack(0, NOTE.size + 1) + bytes(NOTE.size + 1),
        SIZES.pack(0, 0),
    ],
    ids=["no descriptor", "kind 0", "kind 3", "255", "1 B", "short", "long", "nothing"],
)
def test_a_malformed_note_breaks_the_connection(garbage: bytes) -> None:
    """It never leaves the link as an exception."""
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        sock.sendall(garbage)
        assert "no member does" in broken(world, conn)


def test_to_forget_what_was_never_lent_is_harmless() -> None:
    """The peer's business; the connection goes on."""
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        sock.sendall(note(2, 12345, 0) + SIZES.pack(4, 0) + b"head")
        world.arrive(world.members[0].received.setdefault(conn, []), 1)


def test_no_peer_has_any_number_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes address space and a place in the kernel's list of mappings."""
    monkeypatch.setattr("transports.shm._MOST_BORROWED", 5)
    with World(make, 1) as world, dial_raw(world) as sock:
        conn = accepted(world)
        segment = segment_of(SIZE, SIZE)
        for number in range(6):
            socket.send_fds(sock, [note(1, number, SIZE)], [segment.fd])
        assert "more than 5 segments" in broken(world, conn)


def test_ten_thousand_random_notes_do_no_harm() -> None:
    """With and without descriptors of every kind: no exception, nothing left open."""
    rng = random.Random(1)
    segment = segment_of(SIZE, SIZE)
    fakes = [make_fake() for make_fake in FAKES]
    descriptors = len(os.listdir("/proc/self/fd"))
    with World(make, 1) as world:
        member = world.members[0]
        sent = 0
        while sent < 10_000:
            with dial_raw(world) as sock:
                conn = accepted(world)
                with contextlib.suppress(OSError):  # it has heard enough
                    for _ in range(rng.randrange(1, 400)):
                        sent += 1
                        _send_random_note(rng, sock, [segment.fd] * 30 + fakes)
                        member.pump()
            world.lost(0, conn)
            conn.close()
        assert member.link.malformed > 20
        again, theirs = dial_raw(world), accepted(world)
        with again:
            again.sendall(SIZES.pack(4, 0) + b"head")
            world.arrive(member.received.setdefault(theirs, []), 1)
    for fd in fakes:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def _send_random_note(
    rng: random.Random, sock: socket.socket, descriptors: list[int]
) -> None:
    kind = rng.choice((1,) * 40 + (2,) * 40 + (0, 3, 200))
    size = rng.choice((SIZE,) * 20 + (0, 1, SIZE + 1, 2**63, 2**64 - 1))
    raw = note(kind, rng.randrange(20), size)
    if rng.random() < 0.01:
        raw = SIZES.pack(0, rng.randrange(40)) + rng.randbytes(rng.randrange(40))
    count = rng.choice((1,) * 30 + (0, 2, 9)) if kind == 1 else 0
    rights = array("i", rng.choices(descriptors, k=count))
    extras = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
    sock.sendmsg([raw], extras)


# -- who may connect, and where ----------


def _as_nobody(action: Callable[[], str]) -> str:
    """What a function returns in a child process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            os.setgid(65534)
            os.setuid(65534)
            said = action()
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user"
)


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_another_user_is_refused_even_where_the_file_lets_him_in(
    own_temporary_directory: str,
) -> None:
    """By what the kernel says of the other end, on either side of a connection."""
    os.chmod(own_temporary_directory, 0o777)
    path = f"{own_temporary_directory}/open.shm"
    with World(make, 0) as world:
        member = _listening(world, f"shm://{path}")
        os.chmod(path, 0o777)

        def dial() -> str:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20.0)
                sock.connect(path)
                sock.sendall(ShmLink.hello)
                return f"heard {sock.recv(100)!r}"

        reader, writer = os.pipe()
        told = os.fork()
        if told == 0:
            os.close(reader)
            os.write(writer, _as_nobody(dial).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            os.set_blocking(reader, False)
            said = ""

            def answered() -> bool:
                nonlocal said
                with contextlib.suppress(TypeError, BlockingIOError):
                    said += file.read()
                return bool(said)

            world.nap = 0.01
            world.until(answered, "the other user to be refused")
        os.waitpid(told, 0)
        ends = ("heard b''", "ConnectionReset", "BrokenPipe")
        assert any(end in said for end in ends), said
        assert not member.conns(What.ACCEPTED)


def _listening(world: World, address: str) -> Member:
    class At(ShmLink):
        def open(
            self, poller: Poller, listen: Sequence[str], directory: str | None
        ) -> list[str]:
            return super().open(poller, [address], directory)

    member = Member(At, world.poller)
    world.members.append(member)
    return member


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_another_user_who_listens_is_not_talked_to(
    own_temporary_directory: str,
) -> None:
    """Whoever put a socket there, nothing is sent to him."""
    os.chmod(own_temporary_directory, 0o777)
    path = f"{own_temporary_directory}/theirs.shm"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            os.write(writer, b"1")
            conn, _ = listener.accept()
            conn.settimeout(20.0)
            os._exit(0 if conn.recv(100) == b"" else 1)
    os.read(reader, 1)
    with World(make, 1) as world:
        conn = world.members[0].link.dial(f"shm://{path}")
        world.lost(0, conn)
        assert "user 65534" in conn.reason  # type: ignore[attr-defined]
        assert os.waitpid(child, 0)[1] == 0
    for fd in (reader, writer):
        os.close(fd)


def test_the_socket_file_is_for_its_owner_only() -> None:
    """Whatever the umask was."""
    before = os.umask(0)
    try:
        with World(make, 1) as world:
            path = world.members[0].addresses[0].removeprefix("shm://")
            assert os.stat(path).st_mode & 0o777 == 0o600
        assert not Path(path).exists()
    finally:
        os.umask(before)


def test_a_stale_socket_file_is_swept_and_a_live_one_is_respected(
    own_temporary_directory: str,
) -> None:
    """A path on which somebody listens is an error that names it, and stays his."""
    address = f"shm://{own_temporary_directory}/path.shm"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("shm://"))
    with World(make, 0) as world:
        _listening(world, address)
        with pytest.raises(OSError, match="somebody listens on"):
            _listening(world, address)
        dialler = ShmLink()
        dialler.open(world.poller, [], None)
        conn = dialler.dial(address)

        def opened() -> bool:
            return any(e.conn is conn and e.what is What.OPENED for e in dialler.poll())

        world.until(opened, "the first one to be reached")
        dialler.close()


@pytest.mark.parametrize("wrong", [-1, 1.5, "1G", True])
def test_an_amount_of_memory_that_is_none_is_refused(wrong: object) -> None:
    """By the name of the option."""
    kind = ValueError if wrong == -1 else TypeError
    with pytest.raises(kind, match="shm_bytes is"):
        mq.connect("shm", group="g", shm_bytes=wrong)


def _is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_no_descriptor_of_a_segment() -> None:
    """So the memory goes when the parent gives it back."""
    with World(make) as world:
        ours, _ = pair(world)
        block = block_of(ours, b"first")
        inherited = block.segment.fd
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for member in world.members:
                    member.link.abandon()
                status = int(_is_open(inherited))
                for member in world.members:
                    member.link.close()
                files = os.listdir(tempfile.gettempdir())
                status |= 2 * (not files)  # the parent's socket files
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(block.area[:5]) == b"first"


def test_a_map_keeps_no_descriptor_and_refuses_what_cannot_be_mapped() -> None:
    """The helper under both sides."""
    fd = memfd()
    with os.fdopen(fd, "r+b") as file:
        shared = map_descriptor(file.fileno(), SIZE, private=False)
        private = map_descriptor(file.fileno(), SIZE, private=True)
    shared[:3] = b"abc"
    assert private[:3] == b"abc"
    private[:3] = b"xyz"
    assert shared[:3] == b"abc"
    reader = a_pipe()
    with pytest.raises(OSError, match="No such device"):
        map_descriptor(reader, SIZE, private=True)
    os.close(reader)
