"""The rendezvous service behind ``tcp://``: one thread, records in memory.

Whatever connects is told nothing and remembered little until it has proved that it
knows the secret; it gets two seconds for that, and cannot hold up anybody else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from mq import forks
from mq.addresses import bracketed, origin
from mq.descriptors import pushed_out
from mq.log import Log, WarnOnce
from mq.rendezvous import wire
from mq.rendezvous.memory import MemoryStore
from mq.rendezvous.record import FORMAT, Claim, Record
from mq.sigpipe import QUIET

GREETING_SECONDS: Final = 2.0
HAND_OVER_SECONDS: Final = 1.0
"""For so long after it took the place of another, a service tells nobody who is there,
and gives no names away. Its predecessor's clients connect anew within a tenth of that,
and announce themselves: whoever joins meanwhile must neither miss one of them nor get
its name."""
MAX_CLIENTS: Final = 1024
MAX_STRANGERS: Final = 128
MAX_GROUPS: Final = 256

_TICK: Final = 0.25
_COMPLETE: Final = ("claim", "records")
"""Requests that need to know of everybody; "recent" are the records known so far."""
_log = Log(__name__)


class _Connection:
    """One connection to the service; `frames` is None until it is authenticated."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.origin = origin(address)
        self.since = time.monotonic()
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.frames: wire.Frames | None = None
        self.received = bytearray()
        self.held: dict[str, Any] | None = None  # a request, see `HAND_OVER_SECONDS`
        self.outgoing = bytearray(wire.MAGIC + self.nonce)
        self.is_refused = False


class Service:
    """Serves the records of any number of groups until it is closed.

    Args:
        listener: A socket that listens; the service owns it from now on.
        secret: What clients must know, at least one byte.
        succeeds: Whether clients of an earlier service may still have to come over.
        records: Of members that are known to be there, by group.
        on_close: Called once when the service is closed, or could not be started.

    Raises:
        OSError, RuntimeError: The system has no descriptor or no thread for it.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        succeeds: bool,
        records: Mapping[str, Sequence[Record]] = MappingProxyType({}),
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = format_address(*listener.getsockname()[:2])
        self._listener = listener
        self._secret = secret
        self._settled_at = time.monotonic() + (HAND_OVER_SECONDS if succeeds else 0.0)
        self._on_close = on_close
        self._groups: dict[str, MemoryStore] = {}
        for group, members in records.items():
            for record in members:
                with contextlib.suppress(ValueError):  # there is no room for it
                    self._group(group).renew(record)
        self._connections: set[_Connection] = set()
        self._warn = WarnOnce(_log)
        self._closing = False
        self._close_lock = threading.Lock()
        self._wake_reader = self._wake_writer = -1
        with contextlib.ExitStack() as undo:
            undo.callback(on_close)
            undo.callback(listener.close)
            self._selector = selectors.DefaultSelector()
            undo.callback(self.abandon)
            forks.register(self)
            self._wake_reader, self._wake_writer = os.pipe()
            listener.setblocking(False)
            self._selector.register(self._wake_reader, selectors.EVENT_READ)
            self._selector.register(listener, selectors.EVENT_READ)
            self._accepting = True
            self._thread = threading.Thread(
                target=self._run, name="mq-rendezvous", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    @property
    def is_serving(self) -> bool:
        """Whether clients are served; False after `close` or a failure."""
        return self._thread.is_alive() and not self._closing

    def close(self) -> None:
        """Stop serving, disconnect all clients and forget the records. Idempotent."""
        with self._close_lock:
            if self._closing:
                return
            self._closing = True
            os.write(self._wake_writer, b"\0")
            self._thread.join(5.0)  # the loop never waits for a client
            self.abandon()
        self._on_close()

    def abandon(self) -> None:
        """Close all descriptors in a forked child; there the thread does not exist."""
        self._closing = True
        self._selector.close()
        self._listener.close()
        for connection in self._connections:
            connection.sock.close()
        self._connections.clear()
        for fd in (self._wake_reader, self._wake_writer):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wake_reader = self._wake_writer = -1

    def _run(self) -> None:
        try:
            while not self._closing:
                self._serve(self._selector.select(self._patience()))
        except Exception:  # the thread's outermost frame: clients will take over
            _log.exception("the rendezvous service at %s failed", self.address)
            self._listener.close()
            for connection in self._connections:
                connection.sock.close()

    def _patience(self) -> float | None:
        patience = []
        if not self._accepting or any(c.frames is None for c in self._connections):
            patience.append(_TICK)
        if any(c.held for c in self._connections):
            patience.append(max(0.0, self._settled_at - time.monotonic()))
        return min(patience, default=None)

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection) and key.data in self._connections:
                self._advance(key.data, events)
        if self._is_settled():
            for connection in [c for c in self._connections if c.held]:
                self._advance(connection, 0)
        oldest = time.monotonic() - GREETING_SECONDS
        for connection in [c for c in self._connections if c.frames is None]:
            if connection.since < oldest:
                self._reject(connection, "it did not introduce itself in time")

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: try again a little later
            self._warn("accept", "%s cannot accept: %s", self.address, error)
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        sock.setblocking(False)
        configure(sock)
        connection = _Connection(sock, format_address(*peer[:2]))
        strangers = {c: c.origin for c in self._connections if c.frames is None}
        if len(strangers) >= MAX_STRANGERS:
            one = pushed_out(strangers)
            self._reject(one, "too many others had not introduced themselves")
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._advance(connection, 0)

    def _advance(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._receive(connection):
                self._drop(connection)
                return
            while True:
                self._digest(connection)
                if not connection.outgoing:
                    break
                sent = connection.sock.send(connection.outgoing, QUIET)
                del connection.outgoing[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except (wire.Malformed, ValueError) as error:
            self._reject(connection, str(error))
            return
        except OSError:
            self._drop(connection)
            return
        if connection.is_refused and not connection.outgoing:
            self._drop(connection)
            return
        # One answer at a time: who does not read gets nothing more to read.
        wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
        self._selector.modify(connection.sock, wanted, connection)

    def _receive(self, connection: _Connection) -> bool:
        limit = wire.CLIENT_HELLO_BYTES - len(connection.received)
        data = connection.sock.recv(65536 if connection.frames else limit)
        connection.received += data
        return bool(data)

    def _digest(self, connection: _Connection) -> None:
        if connection.outgoing or connection.is_refused:
            return
        if connection.frames is None:
            self._greet(connection)
            return
        request = connection.held or connection.frames.open(connection.received)
        connection.held = None
        if request and request.get("do") in _COMPLETE and not self._is_settled():
            connection.held = request
        elif request is not None:
            connection.outgoing += connection.frames.seal(self._answer(request))

    def _is_settled(self) -> bool:
        return time.monotonic() >= self._settled_at

    def _greet(self, connection: _Connection) -> None:
        hello = bytes(connection.received)
        if not wire.MAGIC.startswith(hello[: len(wire.MAGIC)]):
            version = wire.version_of(hello)
            what = f"version {version} of this" if version else "another"
            raise wire.Malformed(f"it speaks {what} protocol")
        if len(hello) < wire.CLIENT_HELLO_BYTES:
            return
        connection.received.clear()
        nonce = hello[len(wire.MAGIC) : -wire.PROOF_BYTES]
        expected = wire.proof(self._secret, b"client", connection.nonce, nonce)
        if not wire.is_proof(hello[-wire.PROOF_BYTES :], expected):
            self._note(connection, "it does not know the secret")
            connection.outgoing += wire.REFUSED
            connection.is_refused = True
            return
        if sum(c.frames is not None for c in self._connections) >= MAX_CLIENTS:
            raise wire.Malformed(f"there are {MAX_CLIENTS} clients already")
        connection.frames = wire.Frames(self._secret, False, connection.nonce, nonce)
        connection.outgoing += wire.proof(
            self._secret, b"service", connection.nonce, nonce
        )

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            store = self._group(_text(request, "group"))
            return self._perform(store, request) | {"version": store.version()}
        except ValueError as error:  # its sender's mistake, and its to report
            return {"error": str(error), "format": FORMAT}

    def _perform(self, store: MemoryStore, request: dict[str, Any]) -> dict[str, Any]:
        operation = _text(request, "do")
        if operation == "claim":
            record = Record.from_json(_text(request, "record"))
            replaces = _text(request, "replaces") if request.get("replaces") else None
            return _claim_json(store.claim(record, replaces=replaces))
        if operation == "renew":
            record = Record.from_json(_text(request, "record"))
            return {"kept": store.renew(record)}
        if operation == "remove":
            store.remove(_text(request, "name"), _text(request, "incarnation"))
            return {}
        if operation in ("records", "recent"):
            found, more = store.page(_text(request, "after"))
            return {"records": found, "more": more}
        if operation == "version":
            return {}
        raise ValueError(f"unknown request {operation!r}")

    def _group(self, name: str) -> MemoryStore:
        if name not in self._groups and len(self._groups) >= MAX_GROUPS:
            for other, store in list(self._groups.items()):
                if store.has_ended():
                    del self._groups[other]
            if len(self._groups) >= MAX_GROUPS:
                raise ValueError(f"the service has {MAX_GROUPS} groups already")
        return self._groups.setdefault(name, MemoryStore())

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._note(connection, reason)
        self._drop(connection)

    def _note(self, connection: _Connection, reason: str) -> None:
        self._warn(
            f"{connection.origin} {reason}",
            "the rendezvous service at %s dropped %s: %s",
            self.address,
            connection.address,
            reason,
        )

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()


def _text(request: dict[str, Any], field: str) -> str:
    value = request.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{field} is not a string")
    return value


def _claim_json(claim: Claim) -> dict[str, Any]:
    if claim.holder is None:
        return {"record": claim.record.to_json()}
    return {"holder": claim.holder.record.to_json(), "age": claim.holder.age}


def format_address(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets around an IPv6 host."""
    return f"tcp://{bracketed(host)}:{port}"


def configure(sock: socket.socket) -> None:
    """Send small frames at once, and notice a host that is gone for good."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def listen(family: int, address: tuple[Any, ...]) -> tuple[socket.socket, bool]:
    """A socket that listens on exactly this address.

    Returns:
        The socket, and whether the system still knows of connections to an earlier one
        there: for a minute after whoever listened there ended before its clients.

    Raises:
        OSError: Somebody else does (EADDRINUSE), or it is not this host's.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        succeeds = False
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            succeeds = True
        # Set in any case: whoever comes next needs it of the connections of this one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if succeeds:
            listener.bind(address)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener, succeeds
