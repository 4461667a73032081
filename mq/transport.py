"""The contract that a backend fills: `Link`, and what it declares, `Capabilities`.

A `Link` moves whole messages between this process and its peers, point to point. It
knows no topics, no payloads and no names; `mq.mesh` turns any link into the
publish/subscribe queue of the documentation. A backend is one such class; `mq.testing`
proves it.

**Messages.** A message on a link is a *head* (1 byte to `MAX_HEAD_BYTES`) and an
optional *body* (1 byte to the link's `chunk_bytes`, or to what a connection's
`whole_bytes` allows). The head is received as bytes; the body is received straight into
memory that the mesh chose, or kept in the memory in which the engine has it. On a link
that carries tensors a body may also be a `Piece`: bytes on a device, at most
`piece_bytes`, which arrive on a device of the peer's.

**Promises.** On one `Conn`, messages arrive whole, in order and unaltered until the
connection breaks. At a break any number of the last messages, in either direction, may
be lost. A new connection is a new `Conn`; nothing of an old one ever arrives on it.

**Threads.** The mesh calls a link under one lock, from whichever thread leads at the
moment. Only `Poller.wait` runs without that lock. A link starts no threads that run
Python code. Handlers of signals do not run in it: while the main thread has that lock
they wait, if `SIGNALS_WAIT`, and it is opened and closed in another thread.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from mq import speed
from mq.addresses import of_scheme

if TYPE_CHECKING:
    from mq.devices import Piece
    from mq.lending import Lender
    from mq.mesh.poller import Poller
    from mq.segments import Segment

SIGNALS_WAIT: Final = speed.COMPILED
"""Whether no handler of a signal runs while a link is called."""

MAX_HEAD_BYTES = 128 * 1024
"""The largest head of a message; a batch of small messages travels as one head."""

LINGER_SECONDS: Final = 0.4
"""For so long an engine goes on sending what it accepted when its link is closed: less
than the half second in which Ctrl-C must end any call."""

CHUNK_BYTES = 1024 * 1024
"""The default size of a body: measured best on ZeroMQ, NNG and plain sockets alike."""

PIECE_BYTES = 32 * 1024 * 1024
"""The default size of a tensor that is a body: with less, what a message costs in the
engine would show; with more, other topics' messages would wait for it."""


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, as data: for `mq transports`, tests and the bench.

    Attributes:
        reach: How far: between threads of one process, processes of one host, or hosts.
        devices: Kinds of memory it moves without staging: a subset of {"cpu", "cuda"}.
        survives_fork: Whether `connect` works in a forked child of a process that
            already used this transport.
        separate_processes: Whether members are processes; else they are one's threads.
        encrypted: Whether what travels is encrypted.
        zero_copy: Whether `subscribe(zero_copy=True)` gives views of the publisher's
            memory, and `loan` memory that is published without a copy.
        engine_stays: Whether threads and descriptors of the engine itself, a fixed few,
            stay after the last `Link.close` until the process ends.
    """

    reach: Literal["process", "host", "network"]
    devices: frozenset[str] = frozenset({"cpu"})
    survives_fork: bool = True
    separate_processes: bool = True
    encrypted: bool = False
    zero_copy: bool = False
    engine_stays: bool = False


class What(enum.Enum):
    """What happened to a connection."""

    ACCEPTED = "accepted"  # a peer dialled us: a new Conn
    OPENED = "opened"  # a Conn that we dialled can now carry messages
    READABLE = "readable"  # Conn.receive may return something
    WRITABLE = "writable"  # Conn.try_send, which was refused, may succeed
    LOST = "lost"  # the Conn is broken, or was never established


@dataclass(frozen=True)
class Event:
    """One thing that happened to a connection.

    Attributes:
        reason: Text for LOST.
        refused: For LOST, whether the two ends do not fit and never will, such as for
            their versions or options: a `connect` that dials ends by ConnectRefused.
        malformed: For LOST, whether the peer has sent what no member does.
    """

    what: What
    conn: Conn
    reason: str = ""
    refused: bool = False
    malformed: bool = False


class Conn(ABC):
    """One connection to one peer.

    Attributes:
        address: The peer's address as far as the link knows it, for people to read.
        keeps_body: Whether the link may go on reading a body for as long as it likes,
            which saves its copy: the mesh then gives it memory that nobody writes to
            while a view of it exists. Other links may read it until `let_go`.
        lends: Whether the peer can read this process's `Link.lender` in place: large
            messages then travel as a reference to where they are.
        devices: For each device whose tensors may be bodies, where at the peer they
            arrive, both as torch names them; the same for as long as both live.
        holds_piece: Whether the body that `receive` announced last is a `Piece`.
        lead: How many bytes the mesh puts before a body that is a whole message, for
            nothing but that what follows is aligned where the peer's engine has it. A
            link with such bytes answers `take_body` with every body.
        whole_bytes: How large a message may be that is one body, without harm to the
            connection's other messages and to the signs of life between them. Up to
            this size those that would be cut travel as one body, for which the sender
            copies them together, if all who get them have such a connection; larger
            ones are cut as coarsely as both this and `Link.chunk_bytes` allow. The link
            takes in such a body on any connection, as a session may go on over another
            one. 0: all are cut as the link says.
        descriptors_taken: How many a connection has open.
        most_unanswered: How many bytes of bodies the mesh hands over while the peer has
            not answered them, one body apart; None: the link bounds by itself what is
            ahead of the wire. Less on a slow wire, more on a long one: `mq.mesh.pace`.
    """

    address: str
    descriptors_taken: ClassVar[int] = 1
    keeps_body: ClassVar[bool] = False
    lends: ClassVar[bool] = False
    devices: Mapping[str, str] = MappingProxyType({})
    holds_piece: bool = False
    lead: int = 0
    whole_bytes: int = 0
    most_unanswered: int | None = None

    @abstractmethod
    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        """Hand a message to the engine, all of it or nothing; never wait.

        Returns:
            True: the message will be sent, and the caller may change `head` at once,
            and without `keeps_body` also `body` after the next `let_go`. False: not
            now; WRITABLE is reported when it is worth trying again. On a broken one
            True (it is lost, as messages are) and LOST, but no SIGPIPE (`mq.sigpipe`).
        """

    def try_send_piece(self, head: bytes, piece: Piece) -> bool:
        """`try_send` for a body on a device, one of `devices`; it stays as it is."""
        raise TypeError(f"{type(self).__name__} carries no tensors")

    def let_go(self) -> None:
        """Copy what is still to be read of bodies, for their owner takes them back."""
        return

    @abstractmethod
    def receive(self) -> tuple[bytes | memoryview, int] | None:
        """The next message's head and the size of its body in bytes (0: none).

        None where no message is complete enough. A body must be taken by
        `receive_body`, `take_body`, `take_piece` or `discard_body` before the next
        `receive`. The head belongs to the caller. A peer's message beyond
        `MAX_HEAD_BYTES` or the largest body breaks the connection (LOST) before memory
        for it is taken.
        """

    @abstractmethod
    def receive_body(self, into: memoryview) -> bool:
        """Copy the body into `into`, writable, of exactly the body's size.

        Returns:
            Whether all of it is there; else call again so after the next READABLE.
        """

    def take_body(self) -> memoryview | None:
        """The body in the memory in which the engine has it.

        Returns:
            Writable, contiguous, format 'B', of exactly the body's size; nobody else's,
            as long as a view of it exists. Where what follows `lead` is not aligned to
            16 bytes, which arrays need, the mesh copies it. None: take it otherwise, or
            the connection has turned out to be broken.
        """
        return None

    def take_piece(self) -> Piece:
        """The body, where it is a tensor: `holds_piece`."""
        raise TypeError(f"{type(self).__name__} carries no tensors")

    @abstractmethod
    def discard_body(self) -> None:
        """Throw away the body that the last `receive` announced."""

    def lend(self, segment: Segment) -> bool:
        """Let the peer map a segment of `Link.lender`, once; never wait.

        Returns as `try_send`: what is sent after True finds the segment mapped.
        """
        raise TypeError(f"{type(self).__name__} lends no memory")

    def borrow(
        self,
        segment: int,
        offset: int,
        nbytes: int,
        take: Callable[[int], memoryview],
    ) -> memoryview:
        """A part of a segment that the peer has lent, as by `mq.borrowing`.

        Args:
            take: Makes memory for a copy, where the segment cannot be mapped.

        Raises:
            ValueError: There is no such segment, or it has no such part.
        """
        raise ValueError(f"{self.address} lends no memory")

    def guard(self, most_bytes: int | None) -> None:
        """Break the connection if the peer sends more than that in all; None: do not.

        None says, at either end, that the peer has proven who it is, and may lend. What
        takes memory for no more than the largest message needs no guard but for that.
        """
        return

    def quiet_seconds(self) -> float | None:
        """For how long nothing of the peer has come to this host; None: not known.

        An engine that hands over whole messages says nothing of one that takes long on
        a slow wire, and its sender is not to be taken for dead.
        """
        return None

    def describe(self) -> Mapping[str, str]:
        """For `MQ.describe` and the log, such as a device map or a certificate's name.

        Asked under the mesh's lock, once messages travel.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Break the connection and free it; no LOST is reported. Idempotent."""


class Link(ABC):
    """One engine of one process: listens, dials, and reports what happens.

    A subclass takes its options as keyword-only arguments of `__init__`, which does no
    I/O, so that a misspelt option is a TypeError. `Listen` addresses are strings with a
    scheme, such as ``tcp://127.0.0.1:0``.

    Attributes:
        capabilities: What this transport can do.
        chunk_bytes: The largest body, in bytes, but for `Conn.whole_bytes`.
        least_chunk_bytes: The size of the chunks that a message travels in, as long as
            there are few of them; larger where a message costs the link more than the
            copying of a few MiB, which at both ends goes on beside the wire.
        max_ahead: How many bytes the mesh hands over ahead of the wire at most.
        mixes: Whether its connections take bodies of different sizes. A session may go
            on over another one, so that `Conn.whole_bytes` of one says nothing.
        malformed: How many messages and connections were dropped: no member sends
            such, but for dials that end before their hello, as another was faster.
        lender: Memory that peers on this host read in place, if any; set by `open`.
        devices: Of which tensors some connection may carry; set by `open`.
        piece_bytes: The largest body that is a tensor, in bytes.
        engine_threads: Without so many, `open` may abort; `connect` tries them before.
        insecure: Whether the user has said `insecure=True`; set before `open`. The
            mesh wants it or a secret if that is routable, a link if no secret helps.
        member_name: Of its member, where options name some; set before `open`.
        scheme: What its addresses over TCP begin with: users may say ``tcp`` anywhere.
    """

    capabilities: ClassVar[Capabilities]
    chunk_bytes: int = CHUNK_BYTES
    least_chunk_bytes: int = CHUNK_BYTES
    max_ahead: int = 4 * CHUNK_BYTES
    mixes: bool = False
    malformed: int = 0
    lender: Lender | None = None
    engine_threads: int = 0
    insecure: bool = False
    member_name: str = ""
    scheme: str = "tcp"
    devices: frozenset[str] = frozenset()
    piece_bytes: int = PIECE_BYTES

    @classmethod
    def unusable(cls) -> str | None:
        """Why this transport cannot work on this host, in words, or None."""
        return None

    def given(self, address: str) -> str:
        """One of `listen` or `attach_to` as the link has it, whoever listens there."""
        return of_scheme(address, self.scheme)

    @abstractmethod
    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        """Start the engine and listen.

        Args:
            poller: Where the link registers the file descriptors that become readable
                when `poll` has something to report.
            listen: Addresses to listen on; empty: a default that no other host reaches.
            directory: Of mode 0700, for socket files; None: the link must make one.

        Returns:
            The addresses under which peers reach this link, ports resolved, best first.

        Raises:
            ValueError: An address is malformed or of another scheme.
            OSError: An address cannot be listened on.
        """

    @abstractmethod
    def dial(self, address: str) -> Conn:
        """Begin to connect; OPENED or LOST is reported by `poll`. Never waits.

        Raises:
            ValueError: It is malformed or of another scheme; the text has its `repr`.
        """

    @abstractmethod
    def rank(self, addresses: Sequence[str], same_host: bool) -> list[str]:
        """Those of a peer's addresses that this link can dial, best first."""

    @abstractmethod
    def poll(self) -> Iterator[Event]:
        """What happened since the last call, without waiting.

        READABLE is reported as long as a message can be received from that connection,
        so the mesh may stop in the middle and come back. It calls `poll` after every
        use of the link before a thread sleeps, so that no descriptor need signal what
        such a use has taken in.

        A call ends, however much arrives meanwhile: a connection that was READABLE and
        was not emptied is reported again by the next call, after the others.
        """

    def connected(self) -> None:
        """`connect` has greeted everyone there; for what is worth a line in the log."""
        return

    def describe(self) -> Mapping[str, str]:
        """Of an open link: what was chosen, by default too; for `MQ.describe`, logs."""
        return {}

    @property
    def ended(self) -> str:
        """Why it never carries anything again, if so: its member's calls end then."""
        return ""

    def trim(self, idle_seconds: float) -> None:
        """Give back memory for messages that nobody has used for so long.

        Called now and then by a thread that holds no lock and may wait a little.
        """
        if self.lender is not None:
            self.lender.trim(idle_seconds)

    @abstractmethod
    def is_routable(self, address: str) -> bool:
        """Whether other hosts could reach a listener on this address."""

    @abstractmethod
    def close(self, linger: float = LINGER_SECONDS) -> None:
        """Close every connection and listener, remove socket files. Idempotent.

        What `try_send` accepted before may still be sent for `linger` seconds.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Let go of everything in a forked child, without harm to the parent.

        Must not touch the engine where that would crash or disturb the parent's
        connections; closing inherited descriptors of our own is what it is for. It may
        find the link in the middle of `open` or `close`, or never opened.
        """
