"""What every link over TCP does with its addresses and sockets."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Sequence
from typing import Any, Final

from mq import addresses
from mq.mesh.poller import Poller
from mq.stream.conn import StreamConn
from mq.stream.link import StreamLink
from mq.stream.names import Names
from mq.stream.sockets import bound_tcp, unpace
from mq.transport import CHUNK_BYTES, What

_IDLE_SECONDS: Final = 10
_PROBE_SECONDS: Final = 5
_DEAD_SECONDS: Final = 30
_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_INT: Final = struct.Struct("@i")


class TcpStreamLink(StreamLink):
    """Connections over TCP, to and from addresses of one scheme.

    Host names are looked up by a thread, and each address of one is tried in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names = Names()

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        wanted = list(listen) or [f"{self.scheme}://127.0.0.1:0"]
        for address in wanted:
            addresses.check(address, (self.scheme,), self.scheme)
        return self.rank(self.listen(poller, wanted, directory), same_host=True)

    def bind(self, address: str, directory: str | None) -> tuple[socket.socket, str]:
        with addresses.listening(address):
            sock = bound_tcp(address)
        host = addresses.reachable_host(addresses.split(address)[0])
        return sock, f"{self.scheme}://{host}:{sock.getsockname()[1]}"

    def targets(self, address: str) -> Sequence[tuple[int, Any]]:
        addresses.check(address, (self.scheme,), self.scheme)
        return self._names.targets(*addresses.split(address))

    def forget(self, conn: StreamConn) -> None:
        if conn.news is What.OPENED and conn.target and conn in self.conns:
            host = addresses.split(conn.address)[0]
            standing = (c.target for c in self.conns if c.news is None)
            self._names.unanswered(host, conn.target, standing)
        super().forget(conn)

    def name_peer(self, accepted: Any, peer: Any) -> str:
        return f"{self.scheme}://{addresses.bracketed(peer[0])}:{peer[1]}"

    def tune(self, sock: socket.socket) -> None:
        # The sizes of its buffers are left to the kernel, which tunes them to the wire;
        # but of what it has not sent yet it takes only so much, or else what is urgent
        # would wait behind megabytes on a slow wire.
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
        sock.setsockopt(tcp, _NOTSENT_LOWAT, CHUNK_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)
        unpace(sock.fileno())

    def unsent(self, sock: socket.socket) -> bool:
        held = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _INT.pack(0))
        return any(_INT.unpack(held))

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        return addresses.rank(candidates, (self.scheme,), same_host)

    def is_routable(self, address: str) -> bool:
        return addresses.is_routable(address, (self.scheme,))
