"""ZeroMQ between processes and hosts: one ROUTER listens, one DEALER per dial.

**Readiness.** A ZeroMQ descriptor signals changes, once, and any call into the engine
may use the signal up. So every socket that was used is in `ZmqLink.busy`, where the
next `poll` looks for what it has to report; the descriptors tell of the rest.

**Breaks** are reported by monitors, all of which feed one socket. ZeroMQ must never
reconnect by itself, which would continue a stream with a gap; without a reconnect
interval, however, it drops what arrived before the break. Hence an interval of a day.
"""

from __future__ import annotations

import functools
import os
import secrets
import select
import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import zmq

from mq import addresses, options
from mq.descriptors import free_descriptors
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.stream.files import SocketFiles, checked_wires
from mq.stream.names import Names
from mq.stream.sockets import inode, let_send_ahead, unpace
from mq.transport import (
    CHUNK_BYTES,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    Capabilities,
    Conn,
    Event,
    Link,
)
from transports._zmq_collector import collector
from transports._zmq_conns import FAILURES, IN, NOW, WHOLE_BYTES, Dialled, Port
from transports._zmq_doors import Doors
from transports._zmq_router import LISTENER, Accepted, Router
from transports._zmq_strangers import SILENT_BYTES, Strangers

_HANDSHAKE_MS = 5000
_DAY_MS = 24 * 3600 * 1000
_HEADROOM_BYTES = 64 * 1024
_SEND_BYTES = 1 << 20
"""Of a unix socket: with the kernel's default 10 MB take a seventh longer."""
_OWN_DESCRIPTORS = 30
"""File descriptors that must be free to open a link; and for each of its threads 2."""
_OTHER_THREADS = 4
"""Of libzmq 4.3.5 beside `io_threads`: one that cleans up; and pyzmq's, which frees
what was sent without a copy, with a context of its own, which has two."""

_UP = (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED)
_DOWN = (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED)
_WATCHED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED) | sum({*_UP, *_DOWN, *FAILURES})

# A forked child must neither close these nor let them be collected (a warning).
_abandoned: list[object] = []


class ZmqLink(Link):
    """ZeroMQ sockets: a ROUTER that all dial, and a DEALER per dial.

    The ROUTER hands out its peers' messages in turn: as long as one of them is not
    received, those of the other accepted connections wait behind it.

    Args:
        wires: Kinds of address it listens on and dials, best first: ``ipc``, ``tcp``.
        hwm: Messages queued per connection and direction before `try_send` refuses.
        io_threads: Threads of the engine; for one connection a second is no gain.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reach="network")
    # A receiver whose other threads compute gets the interpreter lock once per switch
    # interval and call: the fewer chunks the better, and up to here no slower.
    chunk_bytes = 4 * CHUNK_BYTES

    def __init__(
        self,
        *,
        wires: Sequence[str] = ("ipc", "tcp"),
        hwm: int = 16,
        io_threads: int = 1,
    ) -> None:
        self.hwm = options.whole("hwm", hwm, 2, 1 << 20)
        self.malformed = 0
        self._silent: set[int] = set()
        self._strangers = Strangers()
        self.busy: dict[Port, None] = {}
        self.dialled: dict[bytes, Dialled] = {}
        self.descriptors: dict[tuple[bytes, int], int] = {}
        self._names = Names()
        self._wires = checked_wires(wires)
        self._io_threads = options.whole("io_threads", io_threads, 1, 64)
        self.engine_threads = self._io_threads + _OTHER_THREADS
        self._ports: dict[int, Port] = {}
        self._files = SocketFiles("zmq")
        self._open = False
        self._begun = False  # and it stays so: the engine takes its time to end

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        self._files.check(listen, self._wires)
        self._poller = poller
        self._check_descriptors()
        self._epoll = select.epoll()
        self._doors = Doors(poller)
        self._epoll.register(self._doors.fd, select.EPOLLIN)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._io_threads)
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._open = self._begun = True
        try:
            collector.use(self)
            self._start()
            wanted = self._files.wanted(listen, self._wires, directory)
            bound = [self._listen(address) for address in wanted]
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"ZeroMQ cannot start: {error}") from error
        except BaseException:
            self.close()
            raise
        return self.rank(bound, same_host=True)

    def _check_descriptors(self) -> None:
        """Raises: TransportUnavailable, if the engine's threads would find too few."""
        needed = _OWN_DESCRIPTORS + 2 * self._io_threads
        free, why = free_descriptors(needed)
        if free < needed:
            raise TransportUnavailable(
                f"{why}, but ZeroMQ needs {needed} for io_threads={self._io_threads}; "
                "raise it with `ulimit -n`"
            )

    def _start(self) -> None:
        collector = self._context.socket(zmq.ROUTER)
        collector.setsockopt(zmq.RCVHWM, 0)  # or else the engine's thread waits
        collector.setsockopt(zmq.LINGER, 0)
        self._monitor = Port(self, collector)
        router = self._socket(zmq.ROUTER, LISTENER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, 1024)
        self._router = Router(Port(self, router))
        for port in (self._monitor, self._router.port):
            self._remember(port)

    def _socket(self, kind: int, name: bytes) -> zmq.Socket[bytes]:
        """A socket whose monitor reports to the one collector, under `name`."""
        sock = self._context.socket(kind)
        largest = max(WHOLE_BYTES, MAX_HEAD_BYTES) + _HEADROOM_BYTES
        sock.setsockopt(zmq.MAXMSGSIZE, largest)
        sock.setsockopt(zmq.SNDHWM, self.hwm)
        sock.setsockopt(zmq.RCVHWM, self.hwm)
        sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        sock.setsockopt(zmq.LINGER, 0)
        monitor = f"inproc://monitor-{name.hex()}"
        sock.monitor(monitor, _WATCHED)
        collector = self._monitor.socket
        collector.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        collector.connect(monitor)
        # The new pipe signals only once it was found to be empty.
        self._monitor.signalled()
        return sock

    def _remember(self, port: Port) -> None:
        self._ports[port.fd] = port
        # An epoll inside the poller's epoll would do, but wakes several us later.
        self._epoll.register(port.fd, select.EPOLLIN)
        self._poller.register(port.fd)
        self.busy[port] = None

    def forget(self, port: Port) -> None:
        """Ask a port no more, before its socket is closed."""
        self.busy.pop(port, None)
        self._doors.withdraw(port)
        if self._ports.pop(port.fd, None) is not None:
            self._epoll.unregister(port.fd)
            self._poller.unregister(port.fd)

    def keep(self, port: Port) -> None:
        """Have the next `poll` look at a port that may not signal again."""
        if self._ports.get(port.fd) is port:
            self.busy[port] = None

    def _listen(self, address: str) -> str:
        sock = self._router.port.socket
        wire, _, rest = address.partition("://")
        with addresses.listening(address, zmq.ZMQError):
            if wire == "ipc":
                addresses.check_socket_path(rest)
            else:
                host, port = addresses.split(address)
                address = f"tcp://{addresses.numeric_host(host)}:{port or '*'}"
            sock.setsockopt(zmq.IPV6, int("[" in address))
            sock.bind(address)
        if wire == "ipc":
            self._files.add(rest)
        self.watch()  # the descriptor that listens, for a child that is forked now
        bound = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self._doors.open(bound)
        if wire == "ipc":
            return bound
        host, port = addresses.split(bound)
        return f"tcp://{addresses.reachable_host(host)}:{port}"

    def dial(self, address: str) -> Conn:
        addresses.check(address, self._wires, "zmq")
        name = secrets.token_bytes(16)
        try:
            target = self._target(address)
            sock = self._socket(zmq.DEALER, name)
        except (zmq.ZMQError, OSError) as error:  # no such host, or out of descriptors
            nobody = Accepted(self._router, name, address, -1)
            self._router.accepted[name] = nobody
            nobody.fail(f"cannot dial {address}: {error}", finished=True)
            return nobody
        conn = self.dialled[name] = Dialled(Port(self, sock), address, name, target)
        sock.setsockopt(zmq.ROUTING_ID, name)
        sock.setsockopt(zmq.PROBE_ROUTER, 1)
        sock.setsockopt(zmq.RECONNECT_IVL, _DAY_MS)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
        sock.setsockopt(zmq.IPV6, int("[" in conn.endpoint))
        self._remember(conn.port)
        go_on = functools.partial(self._connect, conn)
        try:
            asked = self._doors.ask(conn.port, conn.endpoint, go_on)
        except OSError as error:
            conn.fail(f"cannot dial {address}: {error}", finished=True)
        else:
            if not asked:
                go_on(True)
        return conn

    def _connect(self, conn: Dialled, may: bool) -> None:
        """Make a connection, if it may be made."""
        if not may:
            why = "it has no file descriptors left; raise its `ulimit -n`"
            conn.fail(f"{conn.address} lets nobody in: {why}", finished=True)
            return
        try:
            conn.port.socket.connect(conn.endpoint)
        except zmq.ZMQError as error:
            conn.fail(f"cannot dial {conn.address}: {error}", finished=True)

    def _target(self, address: str) -> Any:
        """The socket address to dial; None: the path of a file.

        Raises:
            OSError: The host is unknown, or is still being looked up.
        """
        if address.startswith("ipc"):
            return None
        return self._names.targets(*addresses.split(address))[0][1]

    def unanswered(self, conn: Dialled) -> None:
        """A dial has ended without a connection."""
        if conn.target is not None:
            host = addresses.split(conn.address)[0]
            standing = (c.target for c in self.dialled.values() if c.opened)
            self._names.unanswered(host, conn.target, standing)

    def watch(self) -> None:
        """Hand on what the monitors of all sockets reported until now."""
        self._monitor.stale()
        while self._monitor.events() & IN:
            self._monitor.stale()
            parts = self._monitor.socket.recv_multipart(NOW)
            if len(parts) != 3:
                # The rest of what an interrupt was in the middle of, where signals do
                # not wait; the mesh has dropped all connections then.
                continue
            name, event, _ = parts
            code, fd = struct.unpack("=HI", event)
            if code in _UP:
                self.descriptors[name, fd] = inode(fd)
                if name != LISTENER:  # who is accepted has to prove who it is first
                    self._hasten(fd)
            elif code in _DOWN:
                self.descriptors.pop((name, fd), None)
            if name == LISTENER:
                self._saw_listener(code, fd)
                self._router.saw(code, fd)
            elif name in self.dialled:
                self.dialled[name].saw(code, fd)
        self.busy.pop(self._monitor, None)

    def _hasten(self, fd: int) -> None:
        unpace(fd)
        let_send_ahead(fd, _SEND_BYTES)

    def spoke(self, fd: int, introduced: bool) -> None:
        """The connection on this descriptor has sent a message, good or bad."""
        self._silent.discard(fd)
        if introduced:  # else who was sent away would only have to go on talking
            self._strangers.forget(fd)

    def guard(self, fd: int, most_bytes: int | None) -> None:
        """As `Conn.guard`, for the accepted connection on a descriptor."""
        if most_bytes is None:
            self._strangers.forget(fd)
            self._hasten(fd)
        elif known := self.descriptors.get((LISTENER, fd)):
            self._strangers.add(fd, known, most_bytes)

    def sent_away(self, fd: int) -> None:
        """The peer on a descriptor was told to go; see that it does."""
        if known := self.descriptors.get((LISTENER, fd)):
            self._strangers.add(fd, known, None)

    def _saw_listener(self, code: int, fd: int) -> None:
        """Count the connections that end without a message: they speak no ZeroMQ."""
        if code == zmq.EVENT_ACCEPTED:
            self._doors.came()
            self._silent.add(fd)
            self._strangers.add(fd, self.descriptors[LISTENER, fd], SILENT_BYTES)
        elif code in FAILURES or code in _DOWN:
            self._strangers.forget(fd)
            if code in FAILURES and fd in self._silent:
                self._silent.discard(fd)
                self.malformed += 1

    def poll(self) -> Iterator[Event]:
        if self._strangers.known and self._open:
            self._silent.update(self._strangers.look())  # as good as no message
        signalled = self._epoll.poll(0, 64) if self._open else []
        if not signalled and not self.busy:
            return
        for fd, _ in signalled:
            if (port := self._ports.get(fd)) is not None:
                port.signalled()
            else:
                self._doors.look()
        if self._monitor in self.busy:
            self.watch()
        for port in list(self.busy):
            if port in self.busy:
                yield from port.report()

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        return addresses.rank(candidates, self._wires, same_host)

    def is_routable(self, address: str) -> bool:
        return addresses.is_routable(address, self._wires)

    def close(self, linger: float = LINGER_SECONDS) -> None:
        if not self._open:
            return
        self._open = False
        for conn in list(self.dialled.values()):
            conn.close(linger)
        for port in list(self._ports.values()):
            if port is not self._monitor:
                port.close(linger)
        for port in list(self._ports.values()):
            self.forget(port)
        self._context.destroy()
        collector.leave(self)
        self._doors.close()
        self._epoll.close()
        self._files.remove()

    def abandon(self) -> None:
        if not self._begun:
            return
        self._open = False
        self._epoll.close()
        _abandoned.append((self._context, dict(self._ports)))
        for (_, fd), known in self.descriptors.items():
            if known and inode(fd) == known:
                os.close(fd)


class ZmqIpcLink(ZmqLink):
    """`ZmqLink` over unix sockets alone, which reach no other host."""

    capabilities: ClassVar[Capabilities] = Capabilities(reach="host")
