"""The small socket beside each connection: greeting, goodbye, and the end of the peer.

TensorPipe must not meet a peer that it has nothing in common with, and its own port
must not meet a stranger at all: it aborts the process. So what a link advertises is a
plain socket of ours. Over it both ends tell what they are before either adds the other
to its agent; afterwards it carries signs of life (`_torchrpc_signs`) and one goodbye,
and its end is the end of the peer.

A note is 4 bytes of length, big-endian, and a JSON object.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, structs

from mq import addresses
from mq.sigpipe import QUIET

PROTOCOL: Final = 5
NOTE_BYTES: Final = 16 * 1024
_LENGTH: Final = struct.Struct(">I")
_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Handle: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{2,512}\Z")]


class BadNote(ValueError):
    """What came is no note, or not the one that must come now."""


class Misfit(BadNote):
    """The two ends do not fit, and will not as long as both live."""


class Greeting(msgspec.Struct, frozen=True):
    """What an end of a connection tells the other.

    Attributes:
        torch: The release of torch: TensorPipe's own protocol has no version.
        agent: Id of its agent.
        url: Where its agent is reached; "" for an agent of the application.
        worker: The agent's name in the application's RPC group, or "".
        channels: TensorPipe's channels, best first.
        token: What calls to this end of the connection must carry.
        link: The link that is dialled ("": whoever listens there).
        member: What device maps call this process.
        rank: What they may call it too: its rank, as its launcher has set it, or "".
        cuda_devices: How many CUDA devices it has.
        gpus: Those of them that take tensors, by index.
        outboxes: Memory of them that the peer may map: the index, the UUID, and the
            memory's handle and size.
    """

    torch: _Text
    agent: _Text
    url: _Text
    worker: _Text
    channels: tuple[str, ...]
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    link: _Text = ""
    member: _Text = ""
    rank: _Text = ""
    cuda_devices: Annotated[int, Meta(ge=0, lt=1024)] = 0
    gpus: tuple[int, ...] = ()
    outboxes: tuple[tuple[int, str, _Handle, int], ...] = ()
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        if not all(0 <= gpu < self.cuda_devices for gpu in self.gpus):
            raise ValueError(f"{self.gpus} of {self.cuda_devices} GPUs")

    def note(self) -> dict[str, Any]:
        """As it travels."""
        return {"greeting": structs.asdict(self)}


def greeting_of(note: dict[str, Any]) -> Greeting:
    """The greeting in a note.

    Raises:
        BadNote: There is none, or one of another form.
        Misfit: It is of another version.
    """
    fields = note.get("greeting")
    if not isinstance(fields, dict):
        raise BadNote("no greeting")
    if fields.get("protocol") != PROTOCOL:
        raise Misfit(
            f"it speaks version {fields.get('protocol')!r} of this link's protocol, "
            f"this member speaks {PROTOCOL}; install the same tensormq everywhere"
        )
    if set(fields) != set(Greeting.__struct_fields__):
        raise BadNote("a greeting with other fields")
    try:
        return msgspec.convert(fields, Greeting)
    except (msgspec.ValidationError, UnicodeError) as error:  # it quotes what it gets
        raise BadNote(f"a greeting of other types: {error}") from error


def compare(torch: str, worker: str, channels: tuple[str, ...], peer: Greeting) -> None:
    """Compare what the ends are.

    Args:
        torch, worker, channels: Those of this end, as in a `Greeting`.

    Raises:
        Misfit: TensorPipe cannot connect them.
    """
    if peer.torch != torch:
        raise Misfit(
            f"one end has torch {torch}, the other torch {peer.torch}; TensorPipe "
            "does not talk between releases, so install the same everywhere"
        )
    if bool(peer.worker) != bool(worker):
        raise Misfit(
            "one end uses an RPC agent that its application started, the other "
            "does not; such agents only reach members of their own RPC group"
        )
    if not set(peer.channels) & set(channels):
        raise Misfit(f"no TensorPipe channel in common: {channels} and {peer.channels}")


class Control:
    """A socket that carries notes; never waits.

    Attributes:
        address: The peer's, where that dialled, for people; else "".
        origin: Where that comes from, as `mq.addresses.origin` has it.
        ended: Why nothing more comes; "" while something may.
    """

    def __init__(self, sock: socket.socket, address: str = "") -> None:
        self.address = address
        self.origin = addresses.origin(address)
        self.ended = ""
        self.fd = sock.fileno()
        self._socket = sock
        self._unsent = bytearray()
        self._received = bytearray()
        sock.setblocking(False)
        # A note does not wait until the peer's kernel has acknowledged the one before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, host: str, port: int) -> None:
        """Begin to connect; what is sent meanwhile is kept.

        Raises:
            OSError: It cannot even begin.
        """
        code = self._socket.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, errno.errorcode.get(code, str(code)))

    @property
    def events(self) -> int:
        """What to ask epoll for."""
        return select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)

    def check_alive(self) -> None:
        """Refuse a peer that has ended without a goodbye.

        What it has listened on may be another program's by now.

        Raises:
            OSError: It has.
        """
        if self.ended and not self._received:
            raise OSError(f"the peer has ended since it greeted ({self.ended})")

    @property
    def is_within_host(self) -> bool:
        """Whether the peer is a process of this host.

        Raises:
            OSError: It is connected no more.
        """
        own, peer = self._socket.getsockname()[0], self._socket.getpeername()[0]
        return own == peer or addresses.is_loopback(peer)

    def send(self, note: dict[str, Any]) -> None:
        """Send a note, or keep what the kernel does not take at once."""
        text = json.dumps(note).encode()
        self._unsent += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self._socket.send(self._unsent, QUIET)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EINPROGRESS):
                self.ended = error.strerror or str(error)

    def take(self) -> dict[str, Any] | None:
        """The next note that is complete.

        Raises:
            BadNote: What came is none.
        """
        self._read()
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if not 0 < length <= NOTE_BYTES:
            raise BadNote(
                f"what it says is not the protocol of torchrpc: a note of {length} "
                "bytes; the address may be another program's, or another backend's"
            )
        stop = _LENGTH.size + length
        if len(self._received) < stop:
            return None
        text = bytes(self._received[_LENGTH.size : stop])
        del self._received[:stop]
        try:
            note = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadNote("a note that is no JSON") from error
        if not isinstance(note, dict):
            raise BadNote("a note that is no object")
        return note

    def _read(self) -> None:
        try:
            while not self.ended and len(self._received) <= NOTE_BYTES:
                piece = self._socket.recv(4096)
                self._received += piece
                if not piece:
                    self.ended = "the peer closed its socket"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.ended = error.strerror or str(error)

    def close(self) -> None:
        """Idempotent. What was sent still arrives."""
        self.ended = self.ended or "closed"
        self._socket.close()


def unconnected(host: str) -> Control:
    """A socket for a host of this address family."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return Control(socket.socket(family, socket.SOCK_STREAM))


def listen(host: str, port: int) -> socket.socket:
    """A listener that never waits."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def release(version: str) -> str:
    """Major and minor version: within a release TensorPipe's protocol is the same."""
    return ".".join(version.split(".")[:2])
