"""NNG between processes and hosts: one Pair0 socket for each connection.

**One port.** A Pair0 socket has one peer, and NNG's listeners cannot hand connections
on. So the link listens, accepts and dials by itself, without waiting, and gives every
connected descriptor to a Pair0 of its own (``socket://``): one address for any number
of peers, no redial that would continue a stream with a gap, and a copy of the
descriptor tells of the break, where NNG would call Python from its own threads.

**On the wire** a message is the size of its head (4 bytes, little-endian), the head and
the body. A head of no bytes marks what the links say to each other: hello, the first
message of either end, and bye, the last of the end that closes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pynng import lib

from mq import addresses, options
from mq.mesh.poller import Poller
from mq.stream.files import SocketFiles, checked_wires
from mq.stream.listening import Listening
from mq.stream.names import Names
from mq.stream.sockets import bound_tcp, bound_unix, peer_process, unpace
from mq.stream.watching import EVENTS
from mq.transport import (
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    Capabilities,
    Conn,
    Event,
    What,
)
from transports._nng_conns import NngConn
from transports._nng_pair import PREFIX_BYTES, Channel, Pair, engine

_HEADROOM_BYTES = 64 * 1024
_SEND_BYTES = 4 << 20  # of a unix socket: up to a fifth faster than the default


class NngLink(Listening[NngConn]):
    """NNG's Pair0 over unix and TCP sockets.

    Host names are looked up by a thread, and each address of one is tried in turn.

    Args:
        wires: Kinds of address it listens on and dials, best first: ``ipc``, ``tcp``.
        depth: Messages that NNG queues per connection and direction.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reach="network", survives_fork=False, engine_stays=True
    )

    def __init__(
        self, *, wires: Sequence[str] = ("ipc", "tcp"), depth: int = 8
    ) -> None:
        depth = options.whole("depth", depth, 1, 8192)
        super().__init__()
        self.freeing: list[Channel] = []
        self._names = Names()
        self._wires = checked_wires(wires)
        self._depth = depth
        self._files = SocketFiles("nng")

    @classmethod
    def unusable(cls) -> str | None:
        if not hasattr(lib, "nng_listener_set_int") or lib.NNG_MINOR_VERSION < 7:
            return "it needs pynng 0.9 or newer: pip install --upgrade pynng"
        return None

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        self._files.check(listen, self._wires)
        engine.use()
        engine.links += 1
        self._is_open = True
        self._begin_watching(poller)
        try:
            wanted = self._files.wanted(listen, self._wires, directory)
            bound = [self._listen(address) for address in wanted]
        except BaseException:
            self.close()
            raise
        return self.rank(bound, same_host=True)

    def _listen(self, address: str) -> str:
        wire, _, rest = address.partition("://")
        with addresses.listening(address):
            sock = bound_unix(rest) if wire == "ipc" else bound_tcp(address)
        if wire == "ipc":
            self._files.add(rest)
        sock.setblocking(False)
        self._hear(sock)
        if wire == "ipc":
            return address
        host = addresses.split(address)[0]
        return f"{wire}://{addresses.reachable_host(host)}:{sock.getsockname()[1]}"

    def name_peer(self, accepted: Any, peer: Any) -> str:
        if isinstance(peer, tuple):
            return f"{self.scheme}://{addresses.bracketed(peer[0])}:{peer[1]}"
        return f"ipc://{peer_process(accepted)}"

    def _new(self, address: str, news: What) -> NngConn:
        conn = NngConn(self, address, news)
        self.conns[conn] = None
        return conn

    def dial(self, address: str) -> Conn:
        addresses.check(address, self._wires, "nng")
        conn = self._new(address, What.OPENED)
        try:
            family, target = self._target(address)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            conn.dial(sock, target)
        except OSError as error:  # no such host, or out of descriptors
            conn.fail(f"cannot dial {address}: {error}")
        return conn

    def _target(self, address: str) -> tuple[int, Any]:
        """Where to connect to.

        Raises:
            OSError: The host is unknown, or is still being looked up.
        """
        wire, _, rest = address.partition("://")
        if wire == "ipc":
            return socket.AF_UNIX, rest
        return self._names.targets(*addresses.split(address))[0]

    def channel(self, sock: Any) -> Channel:
        """Give a connected socket to NNG.

        Raises:
            OSError: NNG cannot take it; the socket is closed.
        """
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unpace(sock.fileno())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Pair(sock.detach(), self._depth, self.largest)

    @property
    def largest(self) -> int:
        """Bytes of the largest message that the engine accepts."""
        return PREFIX_BYTES + MAX_HEAD_BYTES + self.chunk_bytes + _HEADROOM_BYTES

    def forget(self, conn: NngConn) -> None:
        if conn.news is What.OPENED and isinstance(conn.target, tuple):
            host = addresses.split(conn.address)[0]
            standing = (c.target for c in self.conns if c.news is None)
            self._names.unanswered(host, conn.target, standing)
        super().forget(conn)

    # -- events ----------

    def poll(self) -> Iterator[Event]:
        if not self._is_open:
            return
        for fd, _ in self._epoll.poll(0, EVENTS):
            conn = self._readers.get(fd)
            if conn is not None:
                self.busy[conn] = True
            else:
                self._look()
        if self.closing or self.strangers or self._deaf:
            self._expire()
        if self.freeing:
            self._still_freeing()
        for conn in list(self.busy):
            if (readable := self.busy.pop(conn, None)) is not None:
                yield from conn.report(readable)

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        return addresses.rank(candidates, self._wires, same_host)

    def is_routable(self, address: str) -> bool:
        return addresses.is_routable(address, self._wires)

    def close(self, linger: float = LINGER_SECONDS) -> None:
        if not self._is_open:
            return
        try:
            self._stop_listening()
            for conn in list(self.conns):
                conn.close()
            deadline = time.monotonic() + linger
            while self.closing and (left := deadline - time.monotonic()) > 0:
                self._epoll.poll(left, EVENTS)
                for _ in self.poll():
                    pass
        finally:
            self._free()

    def _still_freeing(self) -> bool:
        self.freeing = [channel for channel in self.freeing if not channel.freed()]
        return bool(self.freeing)

    def _stop_listening(self) -> None:
        super()._stop_listening()
        self._files.remove()

    def _free(self) -> None:
        for conn in list(self.conns):
            conn.drop()
        deadline = time.monotonic() + LINGER_SECONDS
        while self._still_freeing() and time.monotonic() < deadline:
            time.sleep(0.0005)  # NNG closes descriptors in a thread that tells nobody
        self._is_open = False
        engine.links -= 1
        self._end_watching()


class NngIpcLink(NngLink):
    """`NngLink` over unix sockets alone, which reach no other host."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        reach="host", survives_fork=False, engine_stays=True
    )
