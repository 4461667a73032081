"""Shared memory between processes of one host: large messages are read where they are.

Small messages travel over a unix stream socket. A large one lies in a sealed memfd of
its publisher (`mq.lending`), whose descriptor a peer gets once over that socket; from
then on a message is a reference of some bytes, whatever its size and the number of its
subscribers. Nothing has a name but the socket, so nothing is left behind by a SIGKILL,
and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

from mq import addresses
from mq.borrowing import Mapping, Unmapped
from mq.descriptors import most_open
from mq.lending import MOST_SEGMENTS, Lender
from mq.log import Log, WarnOnce
from mq.mesh.poller import Poller
from mq.options import whole
from mq.segments import Segment, seal
from mq.sigpipe import QUIET
from mq.stream.conn import StreamConn
from mq.stream.descriptors import DescriptorConn, rights
from mq.stream.files import SocketFiles
from mq.stream.link import StreamLink
from mq.stream.sockets import bound_unix, peer_process, peer_user
from mq.transport import LINGER_SECONDS, Capabilities, Event, What

logger = Log(__name__)

_SCHEME: Final = "shm://"
_ONE_USER: Final = "shared memory is for one user only; use auto or tcp in all members"
_BUFFER_BYTES: Final = 4 << 20
"""Of a socket: with the kernel's default, chunks take up to four times as long."""
_NOTE: Final = struct.Struct("<BIQ")
"""What it is, the number of a segment, and its size."""
_SEGMENT, _FORGET = 1, 2
_PROOF_BYTES: Final = 16
_MOST_BORROWED: Final = 4 * MOST_SEGMENTS
"""Segments of one peer, some of which it may be about to take back."""
_MOST_BORROWED_BYTES: Final = 1 << 44
"""In all of them: an eighth of the address space of most machines."""


class ShmConn(DescriptorConn):
    """A connection on which segments are lent."""

    lends = True
    max_note_bytes = _NOTE.size

    def __init__(self, link: StreamLink, address: str, news: What) -> None:
        super().__init__(link, address, news)
        self._lent: set[int] = set()
        self._mappings: dict[int, Mapping | Unmapped] = {}
        self._proof = secrets.token_bytes(_PROOF_BYTES)
        self._asked = False
        self._said = b""
        self._known = False  # the peer, which may lend then
        self.max_descriptors = 1  # that of the proof

    def _establish(self) -> bool:
        """See that both ends read each other's memory: each tells what is in it.

        A byte with the descriptor of a memory goes each way, then the number in the
        memory that the other end has sent.
        """
        if not self._asked:
            self._asked = True
            with _memory_of(self._proof) as fd:
                self._send_descriptor(fd)
        while not self.drained and len(self._said) < 1 + _PROOF_BYTES:
            # No more than belongs to the proof: what follows is the link's hello.
            left = 1 if not self._said else 1 + _PROOF_BYTES - len(self._said)
            piece = bytearray(left)
            count = self._take(memoryview(piece))
            if not count:
                break
            if not self._said:
                self._answer()
            self._said += piece[:count]
        if len(self._said) < 1 + _PROOF_BYTES:
            return False
        if not hmac.compare_digest(self._said[1:], self._proof):
            raise OSError("this process shares no memory with it")
        return True

    def _send_descriptor(self, fd: int) -> None:
        self._send((b"M",), rights([fd]), QUIET)

    def _answer(self) -> None:
        if not self.descriptors:
            raise OSError("it does not pass descriptors of memory")
        fd = self.descriptors.popleft()
        self.max_descriptors = 0
        try:
            mapping = Mapping(fd, _PROOF_BYTES)
            memory = mapping.borrow(0, _PROOF_BYTES, lambda n: memoryview(bytearray(n)))
        except ValueError as error:
            raise OSError(str(error)) from error
        finally:
            os.close(fd)
        self._send((memory.tobytes(),), (), QUIET)

    @property
    def shm(self) -> ShmLink:
        """The link."""
        assert isinstance(self._link, ShmLink)
        return self._link

    def guard(self, most_bytes: int | None) -> None:
        if most_bytes is None:
            self._known = True
            self.max_descriptors = DescriptorConn.max_descriptors

    def lend(self, segment: Segment) -> bool:
        if segment.id in self._lent:
            return True
        note = memoryview(_NOTE.pack(_SEGMENT, segment.id, segment.nbytes))
        if not self.try_send_with(b"", [segment.fd], note):
            return False
        self._lent.add(segment.id)
        if segment.id not in self.shm.lender.segments:
            self.shm.recall_from(self)  # those who had it were told before this message
        return True

    def recall(self, alive: dict[int, Segment]) -> bool:
        """Have the peer unmap segments that are gone, so that their memory is free.

        Returns:
            Whether it has been told of all.
        """
        gone = self._lent - alive.keys()
        for number in gone:
            if not self.try_send(b"", memoryview(_NOTE.pack(_FORGET, number, 0))):
                return False
            self._lent.discard(number)
        return True

    def borrow(
        self,
        segment: int,
        offset: int,
        nbytes: int,
        take: Callable[[int], memoryview],
    ) -> memoryview:
        mapping = self._mappings.get(segment)
        if mapping is None:
            raise ValueError(f"segment {segment} of shared memory was never lent")
        return mapping.borrow(offset, nbytes, take)

    def _noted(self, note: bytes) -> None:
        if len(note) != _NOTE.size:
            self.malformed(f"a note of {len(note)} bytes")
            return
        if not self._known:
            self.malformed("a note before it has proven who it is")
            return
        kind, number, nbytes = _NOTE.unpack(note)
        if kind == _FORGET:
            self._mappings.pop(number, None)
        elif kind == _SEGMENT and self.descriptors:
            self._map(self.descriptors.popleft(), number, nbytes)
        else:
            self.malformed(f"a note of kind {kind} without a descriptor")

    def _map(self, fd: int, number: int, nbytes: int) -> None:
        keep = False
        try:
            if len(self._mappings) >= _MOST_BORROWED:
                raise ValueError(f"more than {_MOST_BORROWED} segments")
            if nbytes + self._borrowed_bytes() > _MOST_BORROWED_BYTES:
                raise ValueError(f"segments of more than {_MOST_BORROWED_BYTES} bytes")
            try:
                self._mappings[number] = Mapping(fd, nbytes)
            except OSError as error:
                if not self.shm.may_keep_one_more():
                    self.shm.malformed += 1  # and yet it may be no fault of the peer's
                    self.stop_reading(f"no room to map or keep a segment ({error})")
                    return
                keep = True
                self._mappings[number] = Unmapped(fd, nbytes)
                self.shm.cannot_map(nbytes, error)
        except ValueError as error:
            self.malformed(str(error))
        finally:
            if not keep:
                os.close(fd)
            self.shm.keep_spare()

    def _borrowed_bytes(self) -> int:
        return sum(mapping.nbytes for mapping in self._mappings.values())

    @property
    def kept(self) -> int:
        """How many descriptors of segments it keeps, which cannot be mapped."""
        return sum(isinstance(m, Unmapped) for m in self._mappings.values())

    def _ran_out(self) -> None:
        self.shm.use_spare()

    def abandon(self) -> None:
        self._mappings.clear()
        super().abandon()


class ShmLink(StreamLink):
    """Unix sockets and sealed memory.

    Args:
        shm_bytes: How much memory the messages of this member may lie in at most;
            `publish` waits where subscribers hold all of it. None: a quarter of the
            machine's memory, or of the cgroup's limit.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reach="host", zero_copy=True)
    hello: ClassVar[bytes] = b"MQSHM\0\1\n"
    conn_class: ClassVar[type[StreamConn]] = ShmConn

    def __init__(self, *, shm_bytes: int | None = None) -> None:
        super().__init__()
        if shm_bytes is not None:
            shm_bytes = whole("shm_bytes", shm_bytes, 0)
        self.lender: Lender = Lender(shm_bytes)
        self._dropped = 0
        self._recalling: list[ShmConn] = []
        self._spare = -1
        self._warn = WarnOnce(logger)
        self._files = SocketFiles("shm")

    @classmethod
    def unusable(cls) -> str | None:
        try:
            os.close(os.memfd_create("mq", os.MFD_ALLOW_SEALING))
        except AttributeError:
            return "it needs sealed memory (memfd_create), which Linux has"
        except OSError as error:
            return f"this system refuses sealed memory (memfd_create): {error}"
        return None

    # -- descriptors ----------

    def keep_spare(self) -> None:
        """Have one descriptor that can be closed when there are no others."""
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def use_spare(self) -> None:
        """A segment could not be received; it comes again on the next connection."""
        self._close_spare()
        self._warn(
            "spare",
            "memory of a peer could not be received: this process has as many "
            "descriptors as it may. One is kept spare for that; raise `ulimit -n`",
        )

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    # -- sockets ----------

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        for address in listen:
            _path(address)
        self.keep_spare()
        return self.listen(poller, list(listen) or [""], directory)

    def bind(self, address: str, directory: str | None) -> tuple[socket.socket, str]:
        path = (
            _path(addresses.absolute(address))
            if address
            else self._files.new(directory)
        )
        with addresses.listening(_SCHEME + path):
            sock = bound_unix(path)
        self._files.add(path, 0o600)
        return sock, _SCHEME + path

    def targets(self, address: str) -> Sequence[tuple[int, Any]]:
        return [(socket.AF_UNIX, _path(address))]

    def name_peer(self, accepted: Any, peer: Any) -> str:
        return _SCHEME + peer_process(accepted)

    def tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def objection(self, sock: socket.socket) -> str:
        user = peer_user(sock)
        if user == os.geteuid():
            return ""
        return f"it belongs to user {user}, and {_ONE_USER}"

    def explain(self, code: int) -> str:
        why = super().explain(code)
        return f"{why}: {_ONE_USER}" if code == errno.EACCES else why

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        return addresses.rank(candidates, ("shm",), same_host)

    def is_routable(self, address: str) -> bool:
        return False

    def may_keep_one_more(self) -> bool:
        """Whether one more segment may take a descriptor, as it cannot be mapped.

        A peer chooses how large its segments are, and so whether they can be.
        """
        kept = sum(conn.kept for conn in self.conns if isinstance(conn, ShmConn))
        return kept < most_open(MOST_SEGMENTS)

    def cannot_map(self, nbytes: int, error: OSError) -> None:
        """Memory of a peer is copied from, and not read in place."""
        self._warn(
            "map",
            "cannot map %d bytes of a peer's shared memory: %s; such messages are "
            "copied. Raise the limit that the error names, or lower shm_bytes of the "
            "publisher",
            nbytes,
            str(error),  # a log that keeps it must not keep its traceback
        )

    # -- events ----------

    def recall_from(self, conn: ShmConn) -> None:
        """Have the next `poll` tell a peer which segments are gone."""
        if conn not in self._recalling:
            self._recalling.append(conn)

    def poll(self) -> Iterator[Event]:
        if self.lender.dropped != self._dropped:
            self._dropped = self.lender.dropped
            self._recalling = list(self.conns)  # type: ignore[arg-type]
        if self._recalling:
            alive = self.lender.segments
            self._recalling = [c for c in self._recalling if not c.recall(alive)]
        return super().poll()

    def abandon(self) -> None:
        super().abandon()
        self._close_spare()

    def close(self, linger: float = LINGER_SECONDS) -> None:
        super().close(linger)
        self.lender.close()
        self._recalling.clear()
        self._close_spare()
        self._files.remove()


@contextlib.contextmanager
def _memory_of(content: bytes) -> Iterator[int]:
    """The descriptor of sealed memory that holds these bytes."""
    fd = os.memfd_create("mq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        seal(fd)
        yield fd
    finally:
        os.close(fd)


def _path(address: str) -> str:
    path = address.removeprefix(_SCHEME)
    if path == address or not path:
        raise ValueError(f"{address!r} is not of the form shm:///path, which shm needs")
    return path
