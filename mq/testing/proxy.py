"""A proxy for stream sockets that cuts, stalls, slows and corrupts what passes it."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_PIECE = 64 * 1024
_DESCRIPTORS = 64
_AHEAD = 256 * 1024
T = TypeVar("T")


def _parse(address: str) -> tuple[str, str, int]:
    """Scheme, host and port; or scheme, path and 0.

    Raises:
        ValueError: The address is neither.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if host and port.isdecimal():
        return scheme, host.strip("[]"), int(port)
    if not rest.startswith("/"):
        raise ValueError(f"{address!r} is not the address of a stream socket")
    return scheme, rest, 0


def another(address: str, path: str) -> str | None:
    """A free address of the same form to listen on, or None for other forms.

    Args:
        address: As members advertise it; somebody listens there.
        path: A free one, for addresses of socket files.
    """
    try:
        scheme, host, port = _parse(address)
    except ValueError:
        return None
    if port:
        return f"{scheme}://127.0.0.1:0"
    # A name with slashes, of whatever kind, is not yet that of a socket file.
    return f"{scheme}://{path}" if Path(host).is_socket() else None


class _Side:
    """One socket of a pair, and what the other side read for it."""

    def __init__(self, sock: socket.socket, passes_descriptors: bool) -> None:
        self.sock = sock
        self._takes_descriptors = passes_descriptors and sock.family == socket.AF_UNIX
        self.other: _Side = self
        self.waiting = bytearray()
        self.connecting = False
        self.ended = False
        self.descriptors: list[int] = []

    def receive(self) -> bytearray:
        """What has arrived, for the other side, which gets its descriptors too."""
        if not self._takes_descriptors:  # the kernel then drops what there are
            return bytearray(self.sock.recv(_PIECE))
        piece, descriptors, _, _ = socket.recv_fds(self.sock, _PIECE, _DESCRIPTORS)
        self.other.descriptors += descriptors
        return bytearray(piece)

    def send(self) -> int:
        """Send what waits; how many bytes went."""
        if not self.descriptors:
            return self.sock.send(self.waiting)
        count = socket.send_fds(self.sock, [self.waiting], self.descriptors)
        self.close_descriptors()
        return count

    def close_descriptors(self) -> None:
        """Close what was not passed on, or was."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class Proxy:
    """Listens in front of one address; all its work is done by one thread.

    Attributes:
        address: What to dial in place of the address behind it.
        within_host: Whether its sockets cannot reach another host.
        breaks: Whether it has cut, stalled or corrupted a connection.
    """

    def __init__(
        self, behind: str, path: str, *, passes_descriptors: bool = True
    ) -> None:
        """Start.

        Args:
            behind: Address to pass on to: ``scheme://host:port`` or ``scheme:///path``.
            path: Where to make a socket file, for the second form.
            passes_descriptors: Whether those of files come through, or bytes only, as
                over a relay to another machine.
        """
        self._passes_descriptors = passes_descriptors
        scheme, host, port = _parse(behind)
        if port:
            self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._target: tuple[str, int] | str = (host, port)
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._family = socket.AF_UNIX
            self._target = host
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen()
            self.address = f"{scheme}://{path}"
        self.within_host = self._family == socket.AF_UNIX
        self._sides: set[_Side] = set()
        self._stalled = False
        self._bytes_per_second = 0.0
        self._corrupt = 0
        self._random = random.Random(0)
        self._commands: list[Callable[[], None]] = []
        self._reader, self._writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._closed = False
        self.breaks = False
        self._thread = threading.Thread(
            target=self._loop, name="mq-test-proxy", daemon=True
        )
        self._thread.start()

    # -- commands -----------------------------------------------------------------

    def cut(self) -> int:
        """Break every connection at once; new ones are let through.

        Returns:
            How many connections there were.
        """
        self.breaks = True
        return self._do(self._cut)

    def stall(self) -> None:
        """Let nothing pass from now on, without breaking anything."""
        self.breaks = True
        self._do(lambda: self._set_stalled(True))

    def resume(self) -> None:
        """End `stall`."""
        self._do(lambda: self._set_stalled(False))

    def slow(self, bytes_per_second: float) -> None:
        """Let no more pass from now on, in both directions and all connections."""
        self._do(lambda: setattr(self, "_bytes_per_second", bytes_per_second))

    def corrupt(self, pieces: int) -> None:
        """Flip bits in each of the next `pieces` pieces of up to 64 KiB that pass."""
        self.breaks = True
        self._do(lambda: setattr(self, "_corrupt", pieces))

    def corrupted(self) -> bool:
        """Whether all that `corrupt` asked for has passed."""
        return self._corrupt == 0

    def close(self) -> None:
        """Break everything and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._do(lambda: setattr(self, "_closed", True))
            self._thread.join(5.0)

    def _do(self, action: Callable[[], T]) -> T:
        done = threading.Event()
        result: list[T] = []

        def command() -> None:
            result.append(action())
            done.set()

        self._commands.append(command)
        self._writer.send(b"\0")
        if not done.wait(10.0):
            raise AssertionError("the proxy's thread does not answer")
        return result[0]

    # -- the thread ---------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closed:
                for key, events in self._selector.select():
                    if key.fileobj is self._reader:
                        self._run_commands()
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._sides:
                        self._transfer(key.data, events)
        finally:
            self._cut()
            self._selector.close()
            for sock in (self._listener, self._reader, self._writer):
                sock.close()

    def _run_commands(self) -> None:
        self._reader.recv(4096)
        while self._commands:
            self._commands.pop(0)()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(self._family, socket.SOCK_STREAM)
        passes = self._passes_descriptors
        ends = _Side(client, passes), _Side(server, passes)
        ends[0].other, ends[1].other = ends[1], ends[0]
        ends[1].connecting = True
        for side in ends:
            side.sock.setblocking(False)
            self._sides.add(side)
        try:
            server.connect(self._target)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(ends[0])
            return
        for side in ends:
            self._watch(side)

    def _watch(self, side: _Side) -> None:
        events = 0
        if not self._stalled:
            if side.waiting or side.connecting:
                events |= selectors.EVENT_WRITE
            if not side.ended and len(side.other.waiting) < _AHEAD:
                events |= selectors.EVENT_READ
        known = side.sock in self._selector.get_map()
        if events and known:
            self._selector.modify(side.sock, events, side)
        elif events:
            self._selector.register(side.sock, events, side)
        elif known:
            self._selector.unregister(side.sock)

    def _transfer(self, side: _Side, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                side.connecting = False
                if side.waiting:
                    count = side.send()
                    del side.waiting[:count]
                    if self._bytes_per_second:  # it is what a slow wire takes for them
                        time.sleep(count / self._bytes_per_second)
            if events & selectors.EVENT_READ:
                piece = side.receive()
                side.ended = not piece
                self._spoil(piece)
                side.other.waiting += piece
            for end in (side, side.other):
                if end.other.ended and not end.waiting:
                    end.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(side)
            return
        if side.ended and side.other.ended and not side.waiting + side.other.waiting:
            self._drop(side)
            return
        self._watch(side)
        self._watch(side.other)

    def _spoil(self, piece: bytearray) -> None:
        if self._corrupt and piece:
            self._corrupt -= 1
            for _ in range(1 + len(piece) // 256):
                piece[self._random.randrange(len(piece))] ^= (
                    1 << self._random.randrange(8)
                )

    def _drop(self, side: _Side) -> None:
        for end in (side, side.other):
            if end in self._sides:
                self._sides.discard(end)
                end.close_descriptors()
                with contextlib.suppress(KeyError):
                    self._selector.unregister(end.sock)
                end.sock.close()

    def _cut(self) -> int:
        connections = len(self._sides) // 2
        for side in list(self._sides):
            self._drop(side)
        return connections

    def _set_stalled(self, stalled: bool) -> None:
        self._stalled = stalled
        for side in list(self._sides):
            self._watch(side)
