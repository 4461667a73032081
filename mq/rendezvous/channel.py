"""A client's connection to the rendezvous service."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import select
import socket
import threading
import time
from typing import Any, Final, NamedTuple

from mq import forks
from mq.errors import AuthenticationFailed, ConnectRefused, PeerLost
from mq.rendezvous import wire
from mq.rendezvous.service import configure, format_address
from mq.rendezvous.unread import SAME_VERSION
from mq.sigpipe import QUIET

SLICE_SECONDS: Final = 0.25
"""The longest single wait, so that Ctrl-C and `close` are noticed."""
PATIENCE_SECONDS: Final = 3.0
"""After so long without a sign of the service a connection is taken for dead: what TCP
repeats on it, as after an outage or a change of addresses, may take many times that."""


class Address(NamedTuple):
    """A resolved address of a service."""

    family: int
    sockaddr: tuple[Any, ...]

    def __str__(self) -> str:
        return format_address(*self.sockaddr[:2])

    def order(self) -> tuple[bool, bytes, tuple[Any, ...]]:
        """What addresses of one name are sorted by: IPv4 first, then by number."""
        number = ipaddress.ip_address(self.sockaddr[0].partition("%")[0])
        return self.family != socket.AF_INET, number.packed, self.sockaddr


class Channel:
    """Authenticated requests and answers, in turns, over one connection.

    Args:
        address: Where the service listens.
        secret: What both sides must know.
        deadline: For connecting and authenticating, by `time.monotonic`.
        stopped: Ends any wait when set.

    Raises:
        OSError: Nobody answers there: refused, unreachable, broken, or `TimeoutError`
            after the deadline, or `PATIENCE_SECONDS` of silence.
        AuthenticationFailed: The two sides do not know the same secret.
        ConnectRefused: The service speaks another version of the protocol.
        PeerLost: Another program listens there.
    """

    def __init__(
        self, address: Address, secret: bytes, deadline: float, stopped: threading.Event
    ) -> None:
        self._address = address
        self._stopped = stopped
        self._received = bytearray()
        self.sock = socket.socket(address.family, socket.SOCK_STREAM)
        forks.register(self)
        try:
            self.sock.setblocking(False)
            self._connect(deadline)
            self._frames = self._authenticate(secret, deadline)
        except BaseException:
            self.sock.close()
            raise

    def _connect(self, deadline: float) -> None:
        code = self.sock.connect_ex(self._address.sockaddr)
        if code == errno.EINPROGRESS:
            self._wait(select.POLLOUT, deadline)
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        # Where nobody listens, a port of the ephemeral range can connect to itself.
        if self.sock.getsockname() == self.sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
        configure(self.sock)

    def _authenticate(self, secret: bytes, deadline: float) -> wire.Frames:
        while len(self._received) < wire.SERVICE_HELLO_BYTES:
            self._receive(wire.SERVICE_HELLO_BYTES, deadline)
            if not wire.MAGIC.startswith(self._received[: len(wire.MAGIC)]):
                if version := wire.version_of(self._received):
                    with contextlib.suppress(OSError):  # for the service to learn of it
                        self._send(wire.MAGIC, deadline)
                    raise ConnectRefused(
                        f"the rendezvous service at {self._address} speaks version "
                        f"{version} of its protocol and this member version "
                        f"{wire.VERSION}; {SAME_VERSION}"
                    )
                raise PeerLost(
                    f"another program listens on {self._address}: it does not speak "
                    "the rendezvous protocol; choose another port",
                    str(self._address),
                )
        service_nonce = bytes(self._received[len(wire.MAGIC) :])
        self._received.clear()
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        own_proof = wire.proof(secret, b"client", service_nonce, nonce)
        self._send(wire.MAGIC + nonce + own_proof, deadline)
        while len(self._received) < wire.PROOF_BYTES:
            self._receive(wire.PROOF_BYTES, deadline)
        expected = wire.proof(secret, b"service", service_nonce, nonce)
        if not wire.is_proof(bytes(self._received), expected):
            raise AuthenticationFailed(
                f"the rendezvous service at {self._address} knows another secret; give "
                "all members the same secret= or MQ_SECRET (without one, members must "
                "be of one user on one host, with the same XDG_RUNTIME_DIR and TMPDIR)"
            )
        self._received.clear()
        return wire.Frames(secret, True, service_nonce, nonce)

    def call(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send one request and wait for its answer.

        After any error the channel is out of step and must be closed.

        Raises:
            OSError: The connection broke, or the answer is malformed; `TimeoutError`
                after the deadline, or `PATIENCE_SECONDS` of silence.
        """
        self._send(self._frames.seal(request), deadline)
        while True:
            answer = self._frames.open(self._received)
            if answer is not None:
                return answer
            self._receive(len(self._received) + 65536, deadline)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.sock.close()

    abandon = close

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[self.sock.send(view, QUIET) :]

    def _receive(self, until: int, deadline: float) -> None:
        """Receive something, but never beyond `until` bytes in all."""
        self._wait(select.POLLIN, deadline)
        try:
            data = self.sock.recv(until - len(self._received))
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self._received += data

    def _wait(self, events: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self.sock, events)
        deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
        while not self._stopped.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "it did not answer in time")
            if poller.poll(min(remaining, SLICE_SECONDS) * 1000):
                return
        raise ConnectionAbortedError(errno.ECONNABORTED, "closed meanwhile")
