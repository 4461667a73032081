"""What shows a rendezvous service and its clients that the other knows the secret."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mq.errors import AuthenticationFailed
from mq.rendezvous import service, tcp, wire
from mq.rendezvous.channel import Address, Channel

SECRET = b"the group's secret"
SERVICE_NONCE = bytes(range(wire.NONCE_BYTES))
CLIENT_NONCE = bytes(range(100, 100 + wire.NONCE_BYTES))
DEADLINE = 20.0


def test_a_proof_is_of_one_role_and_one_meeting() -> None:
    """None can be played back, nor be taken for that of the other side."""
    other = bytes(wire.NONCE_BYTES)
    proofs = {
        wire.proof(SECRET, b"client", SERVICE_NONCE, CLIENT_NONCE),
        wire.proof(SECRET, b"service", SERVICE_NONCE, CLIENT_NONCE),
        wire.proof(SECRET, b"session", SERVICE_NONCE, CLIENT_NONCE),
        wire.proof(SECRET, b"client", other, CLIENT_NONCE),
        wire.proof(SECRET, b"client", SERVICE_NONCE, other),
        wire.proof(b"another", b"client", SERVICE_NONCE, CLIENT_NONCE),
    }

    assert len(proofs) == 6


@contextlib.contextmanager
def _impostor() -> Iterator[socket.socket]:
    """Answers one client with the client's own proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.settimeout(DEADLINE)
                sock.sendall(wire.MAGIC + SERVICE_NONCE)
                hello = b""
                while len(hello) < wire.CLIENT_HELLO_BYTES:
                    hello += sock.recv(wire.CLIENT_HELLO_BYTES)
                sock.sendall(hello[-wire.PROOF_BYTES :])

        thread = threading.Thread(target=answer, name="mq-test-impostor")
        thread.start()
        yield listener
        thread.join(DEADLINE)


def test_a_clients_proof_sent_back_proves_nothing() -> None:
    """Who does not know the secret cannot stand in for the service."""
    with _impostor() as listener:
        address = Address(socket.AF_INET, listener.getsockname())
        with pytest.raises(AuthenticationFailed):
            Channel(address, SECRET, time.monotonic() + DEADLINE, threading.Event())


def _answer_to(running: service.Service, hello: bytes, nonce: bytes) -> bytes:
    """All that the service says after its own hello."""
    port = int(running.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as sock:
        greeting = b""
        while len(greeting) < wire.SERVICE_HELLO_BYTES:
            greeting += sock.recv(wire.SERVICE_HELLO_BYTES)
        sock.sendall(wire.MAGIC + nonce + hello)
        return b"".join(iter(lambda: sock.recv(4096), b""))


def test_the_service_proves_itself_to_nobody_who_has_not_done_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong proof is answered by zeros, and by the end of the connection."""
    with contextlib.closing(tcp.serve("127.0.0.1", 0, SECRET)) as running:
        answer = _answer_to(running, bytes(wire.PROOF_BYTES), CLIENT_NONCE)

        assert answer == wire.REFUSED
        assert caplog.text.count("it does not know the secret") == 1
