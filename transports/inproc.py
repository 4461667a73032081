"""Threads of one process: messages are copied once, into queues of bounded size."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

from mq.mesh.poller import Poller
from mq.transport import MAX_HEAD_BYTES, Capabilities, Conn, Event, Link, What

_SCHEME = "inproc://"

_lock = threading.Lock()
_listeners: dict[str, InprocLink] = {}


def _forget_listeners() -> None:
    # Their threads live in the parent only, and one of them may have held the lock.
    global _lock
    _lock = threading.Lock()
    _listeners.clear()


os.register_at_fork(after_in_child=_forget_listeners)


class _Pair:
    """What the two ends of a connection share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.broken = ""  # why no more is sent


class _End(Conn):
    """One end; its inbox is filled by the other end, in the other link's thread."""

    descriptors_taken: ClassVar[int] = 0

    def __init__(self, link: InprocLink, pair: _Pair, address: str) -> None:
        self.address = address
        self.peer: _End | None = None  # None: nobody listens there
        self._link = link
        self._pair = pair
        self._inbox: deque[tuple[bytes, memoryview | None]] = deque()
        self._nbytes = 0
        self._spare: list[bytearray] = []
        self._body: memoryview | None = None
        self._refused = False
        self._closed = False
        self._first: What | None = None

    def begin(self, first: What) -> None:
        """Report `first` before anything else."""
        self._first = first
        self._link.notice(self)

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        peer, nbytes = self.peer, 0 if body is None else body.nbytes
        if not 0 < len(head) <= MAX_HEAD_BYTES or nbytes > self._link.chunk_bytes:
            self._break(
                f"a message of {len(head)} + {nbytes} bytes is outside the limits"
            )
        with self._pair.lock:
            if self._pair.broken or peer is None:
                return True
            ahead = peer._nbytes + len(head) + nbytes
            if peer._inbox and ahead > self._link.max_ahead:
                self._refused = True
                return False
            peer._inbox.append((bytes(head), peer._keep(body)))
            peer._nbytes = ahead
        peer._link.notice(peer)
        return True

    def _keep(self, body: memoryview | None) -> memoryview | None:
        """A copy of the body, where it can be in memory that is in use already."""
        if body is None:
            return None
        if 2 * body.nbytes < self._link.chunk_bytes:
            return memoryview(bytes(body))
        memory = self._spare.pop() if self._spare else bytearray(self._link.chunk_bytes)
        copy = memoryview(memory)[: body.nbytes]
        copy[:] = body
        return copy

    def receive(self) -> tuple[bytes, int] | None:
        peer = self.peer
        with self._pair.lock:
            if self._closed or self._body is not None or not self._inbox:
                return None
            head, self._body = self._inbox.popleft()
            nbytes = 0 if self._body is None else self._body.nbytes
            self._nbytes -= len(head) + nbytes
            roomy = 2 * self._nbytes <= self._link.max_ahead
            resume = peer is not None and peer._refused and roomy
        if resume and peer is not None:
            peer._link.notice(peer)
        return head, nbytes

    def receive_body(self, into: memoryview) -> bool:
        if self._body is None:
            return False
        into[:] = self._body
        self.discard_body()
        return True

    def discard_body(self) -> None:
        body, self._body = self._body, None
        memory = None if body is None else body.obj
        if isinstance(memory, bytearray):
            with self._pair.lock:
                self._spare.append(memory)

    def _break(self, reason: str) -> None:
        with self._pair.lock:
            self._pair.broken = self._pair.broken or reason
        for end in (self, self.peer):
            if end is not None:
                end._link.notice(end)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._link.forget(self)
        self._break("the peer closed the connection")
        with self._pair.lock:
            self._inbox.clear()
            self._spare.clear()

    def report(self) -> Iterator[Event]:
        """What happened to this end; it stays noticed while something is left."""
        noticed = self._link.noticed
        if self._first is not None:
            first, self._first = self._first, None
            yield Event(first, self)
        while not self._closed:
            noticed.pop(self, None)  # before looking: others change what is seen
            if self._has_room():
                yield Event(What.WRITABLE, self)
            if not self._inbox or self._body is not None:
                break
            noticed[self] = None
            yield Event(What.READABLE, self)
            if self._inbox or self._body is not None:
                return  # the mesh comes back, after others had their turn
        if self._pair.broken and not self._closed:
            self.close()
            yield Event(What.LOST, self, self._pair.broken)

    def _has_room(self) -> bool:
        """Whether a refused message may be tried again; says so once."""
        with self._pair.lock:
            room = self.peer is None or 2 * self.peer._nbytes <= self._link.max_ahead
            resume = self._refused and room and not self._pair.broken
            self._refused &= not resume
        return resume


class InprocLink(Link):
    """Queues between threads of one process; addresses are ``inproc://<name>``."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        reach="process", separate_processes=False
    )

    def __init__(self) -> None:
        self.noticed: dict[_End, None] = {}
        self._addresses: list[str] = []
        self._ends: dict[_End, None] = {}
        self._poller: Poller | None = None

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        wanted = list(listen) or [_SCHEME + secrets.token_hex(8)]
        for address in wanted:
            _check(address)
        with _lock:
            taken = [address for address in wanted if address in _listeners]
            if taken or len(set(wanted)) < len(wanted):
                raise OSError(
                    errno.EADDRINUSE,
                    f"somebody listens on {(taken or wanted)[0]} already: "
                    "choose another name",
                )
            self._poller = poller
            self._addresses = wanted
            _listeners.update(dict.fromkeys(wanted, self))
        return list(wanted)

    def notice(self, end: _End) -> None:
        """Have `poll` look at an end; called from any thread."""
        if end in self._ends and self._poller is not None:
            self.noticed[end] = None
            self._poller.wake()

    def forget(self, end: _End) -> None:
        """Report nothing more of an end."""
        self._ends.pop(end, None)
        self.noticed.pop(end, None)

    def dial(self, address: str) -> Conn:
        _check(address)
        pair = _Pair()
        ours = _End(self, pair, address)
        self._ends[ours] = None
        with _lock:
            listener = _listeners.get(address)
            if listener is None:
                pair.broken = "nobody listens at this address in this process"
                self.notice(ours)
                return ours
            theirs = _End(listener, pair, ", ".join(self._addresses))
            ours.peer, theirs.peer = theirs, ours
            listener._ends[theirs] = None
            theirs.begin(What.ACCEPTED)
        ours.begin(What.OPENED)
        return ours

    def poll(self) -> Iterator[Event]:
        if not self.noticed:
            return
        try:
            for end in list(self.noticed):
                if self.noticed.pop(end, self) is None:
                    yield from end.report()
        finally:
            if self.noticed and self._poller is not None:
                self._poller.wake()

    def rank(self, addresses: Sequence[str], same_host: bool) -> list[str]:
        return [a for a in addresses if same_host and a.startswith(_SCHEME)]

    def is_routable(self, address: str) -> bool:
        return False

    def close(self, linger: float = 0.0) -> None:
        with _lock:
            for address in self._addresses:
                _listeners.pop(address, None)
            self._addresses = []
            ends = list(self._ends)
        for end in ends:
            end.close()
        self._poller = None

    def abandon(self) -> None:
        # The threads at the other ends were not forked with this one, and whoever held
        # a lock of theirs will never return it.
        self._addresses = []
        self._ends = {}
        self.noticed = {}
        self._poller = None


def _check(address: str) -> None:
    if not address.startswith(_SCHEME) or len(address) == len(_SCHEME):
        raise ValueError(f"{address!r} is not of the form inproc://name")
